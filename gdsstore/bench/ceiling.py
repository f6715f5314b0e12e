"""The ceiling: raw NIXL io_uring on preallocated files, with prepped descriptors and nothing around it. And fio, if installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, MissingExtraError
from gdsstore.waiting import Deadline, pause

FILE_BYTES = 256 << 20
AGENT = "ceiling"
POLL_S = 0.0002
DEADLINE_S = 120.0


class Memory(Protocol):
    """Where the blocks lie: an Arena, or what looks like one."""

    address: int
    size_bytes: int

    @property
    def array(self) -> npt.NDArray[np.uint8]: ...


class RawNixl:
    """Moves blocks between a memory and files of its own. `files_bytes` are made, and removed, in `directory`."""

    def __init__(self, directory: Path, memory: Memory, files_bytes: int) -> None:
        try:
            import nixl
        except ImportError as error:
            raise MissingExtraError("nixl", "bench", "the raw ceiling") from error
        self._directory = directory
        self._memory = memory
        directory.mkdir(parents=True)
        sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync)
        self._agent: Any = nixl.nixl_agent(AGENT, config)
        self._agent.create_backend("POSIX", {"use_uring": "true"})
        self._agent.register_memory([(memory.address, memory.size_bytes, 0, "")], "DRAM", backends=["POSIX"])
        self._fds = [self._file(number) for number in range(max(1, files_bytes // FILE_BYTES))]

    def _file(self, number: int) -> int:
        path = self._directory / f"raw{number}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        step = min(4 << 20, self._memory.size_bytes)
        for offset in range(0, FILE_BYTES, step):
            os.pwrite(fd, self._memory.array[:step].data, offset)
        self._agent.register_memory([(0, FILE_BYTES, fd, "")], "FILE", backends=["POSIX"])
        return fd

    def run(self, op: Op, block_bytes: int, count: int, rng: np.random.Generator) -> float:
        """Seconds to move `count` blocks at random places, the descriptors' preparation not counted."""
        per_file = FILE_BYTES // block_bytes
        chosen = rng.permutation(per_file * len(self._fds))[:count]
        size = np.full(count, block_bytes, np.uint64)
        at = np.uint64(self._memory.address) + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        offset = (chosen % per_file * block_bytes).astype(np.uint64)
        fds = np.array(self._fds, np.uint64)[chosen // per_file]
        local = np.stack([at, size, np.zeros(count, np.uint64)], 1)
        remote = np.stack([offset, size, fds], 1)
        order = np.arange(count, dtype=np.int32)
        mine = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM", backends=["POSIX"])
        theirs = self._agent.prep_xfer_dlist(AGENT, remote, "FILE", backends=["POSIX"])
        direction = "READ" if op is Op.READ else "WRITE"
        handle = self._agent.make_prepped_xfer(
            direction, mine, order, theirs, order, backends=["POSIX"], skip_desc_merge=True
        )
        deadline = Deadline(DEADLINE_S)
        start = time.perf_counter()
        status = self._agent.transfer(handle)
        while status == "PROC":
            if deadline.passed:
                raise DeadlineError("the drive did not answer for two minutes")
            pause(POLL_S)
            status = self._agent.check_xfer_state(handle)
        seconds = time.perf_counter() - start
        self._agent.release_xfer_handle(handle)
        self._agent.release_dlist_handle(mine)
        self._agent.release_dlist_handle(theirs)
        return seconds

    def fio(self, op: Op, block_bytes: int, seconds: float = 2.0) -> float | None:
        """GB/s that fio sees on the same files; None where it is not installed."""
        if shutil.which("fio") is None:
            return None
        names = ":".join(str(self._directory / f"raw{number}") for number in range(len(self._fds)))
        command = [
            "fio",
            "--name=ceiling",
            f"--filename={names}",
            "--direct=1",
            "--ioengine=io_uring",
            "--iodepth=32",
        ]
        command += [
            f"--bs={block_bytes}",
            f"--rw={'randread' if op is Op.READ else 'randwrite'}",
            "--time_based",
        ]
        command += [f"--runtime={seconds}", "--output-format=json", f"--size={FILE_BYTES * len(self._fds)}"]
        done = subprocess.run(command, capture_output=True, timeout=60 + seconds, check=False)
        if done.returncode != 0:
            return None
        job = json.loads(done.stdout)["jobs"][0]["read" if op is Op.READ else "write"]
        return float(job["bw_bytes"]) / 1e9

    def __enter__(self) -> RawNixl:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._fds:
            os.close(fd)
        shutil.rmtree(self._directory, ignore_errors=True)
