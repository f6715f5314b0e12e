"""One NIXL agent with one plugin: starts and polls single transfers. Knows nothing of deadlines or blame."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import logging
import os
import re
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import numpy as np

from gdsstore.engines.base import Op, RangePlan
from gdsstore.errors import EngineError, MissingExtraError

log = logging.getLogger("gdsstore.engines")

LOG_LEVEL = "NIXL_LOG_LEVEL"
# Before it, short writes were reported as done, and errors while other requests still used the memory.
OLDEST = (1, 5, 1)
# More than any user address space (57 bits on x86-64, 52 on Arm) but for its first page. The POSIX plugin keeps no state for
# memory (io_uring takes plain addresses), so that registering everything once costs nothing, and any caller's buffer can be
# used without registering it. What a caller gets wrong about an address is EFAULT, from the kernel.
USER_MEMORY = (4096, (1 << 57) - 8192)


@dataclass(frozen=True, slots=True)
class Plugin:
    """A NIXL plugin that moves bytes between files and one kind of memory."""

    name: str
    memory: Literal["DRAM", "VRAM"]
    parameters: tuple[tuple[str, str], ...] = ()


POSIX = Plugin("POSIX", "DRAM", (("use_uring", "true"),))

_numbers = itertools.count()


class Progress(Enum):
    RUNNING = "running"
    MOVED = "moved"  # every byte of every range
    FAILED = "failed"  # nothing is under way any more; which ranges moved is not known
    LOST = "lost"  # it may be under way for ever


class Request:
    """A transfer that NIXL knows. While it is under way its handle must not be released: NIXL would write into freed memory
    when a request ends, and the kernel goes on moving bytes in any case."""

    __slots__ = ("handle", "lists", "progress")

    def __init__(self, handle: Any, lists: tuple[Any, ...]) -> None:
        self.handle, self.lists = handle, lists
        self.progress = Progress.RUNNING


class NixlRing:
    """Not thread-safe but for `attach` and `detach`: its user lets one thread at a time start and poll."""

    def __init__(self, plugin: Plugin = POSIX, device: int = 0) -> None:
        """`device`: the ordinal of the GPU whose memory it is, for plugins that move that.

        Raises MissingExtraError where NIXL is not installed, EngineError where it does not work here.
        """
        nixl = _import()
        self._plugin, self._device = plugin, device
        self._backends = [plugin.name]
        self._name = f"gdsstore-{next(_numbers)}"
        # READ_WRITE locks: without them NIXL crashed when files were attached while another thread polled.
        config = nixl.nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        )
        try:
            self._agent: Any = nixl.nixl_agent(self._name, config)
            self._agent.create_backend(plugin.name, dict(plugin.parameters))
        except Exception as error:  # NIXL's errors have no base class of their own
            how = " with io_uring" if plugin is POSIX else ""
            raise EngineError(f"NIXL's {plugin.name} plugin could not be started{how}: {error}") from error
        self._lock = threading.Lock()
        self._files: dict[int, Any] = {}
        self._memory: dict[int, Any] = {}
        if plugin.memory == "DRAM":
            self.register(*USER_MEMORY)

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known; ranges outside of what is known are refused. Raises EngineError."""
        try:
            memory = self._agent.register_memory(
                [(address, nbytes, self._device, "")], self._plugin.memory, backends=self._backends
            )
        except Exception as error:
            raise EngineError(f"NIXL refused memory: {error}", address=hex(address), nbytes=nbytes) from error
        with self._lock:
            self._memory[address] = memory

    def deregister(self, address: int) -> None:
        """Unknown addresses are ignored."""
        with self._lock:
            memory = self._memory.pop(address, None)
        if memory is not None:
            self._agent.deregister_memory(memory, backends=self._backends)

    def attach(self, fd: int, size: int) -> None:
        try:
            file = self._agent.register_memory([(0, size, fd, "")], "FILE", backends=self._backends)
        except Exception as error:
            raise EngineError(f"NIXL refused a file: {error}", fd=fd, size=size) from error
        with self._lock:
            self._files[fd] = file

    def detach(self, fd: int) -> None:
        with self._lock:
            file = self._files.pop(fd, None)
        if file is not None:
            self._agent.deregister_memory(file, backends=self._backends)

    def start(self, op: Op, plan: RangePlan) -> Request:
        """Raises EngineError if nothing was started."""
        n = len(plan)
        local, remote = np.empty((n, 3), np.uint64), np.empty((n, 3), np.uint64)
        local[:, 0], local[:, 1], local[:, 2] = plan.address, plan.length, self._device
        remote[:, 0], remote[:, 1], remote[:, 2] = plan.file_offset, plan.length, plan.fd
        index = np.arange(n, dtype=np.int32)
        agent = self._agent
        try:
            mine = agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", local, self._plugin.memory, backends=self._backends
            )
            theirs = agent.prep_xfer_dlist(self._name, remote, "FILE", backends=self._backends)
            # Merged requests of more than 2 GiB fail, and merging is the planner's business.
            handle = agent.make_prepped_xfer(
                op.name, mine, index, theirs, index, backends=self._backends, skip_desc_merge=True
            )
        except Exception as error:
            raise EngineError(f"NIXL refused a plan: {error}") from error
        request = Request(handle, (mine, theirs))
        try:
            state = agent.transfer(handle)
        except Exception as error:
            log.error("NIXL failed while it started a transfer, and may still carry it out: %s", str(error))
            request.progress = Progress.LOST
        else:
            self._follow(request, state)
        return request

    def poll(self, request: Request) -> Progress:
        """Also drives and reaps what belongs to other requests: NIXL has one queue."""
        if request.progress is Progress.RUNNING:
            try:
                state = self._agent.check_xfer_state(request.handle)
            except Exception:  # that is how it says ERR
                state = "ERR"
            self._follow(request, state)
        return request.progress

    def _follow(self, request: Request, state: str) -> None:
        if state == "PROC":
            return
        request.progress = Progress.MOVED if state == "DONE" else Progress.FAILED
        self._agent.release_xfer_handle(request.handle)
        for prepared in request.lists:
            self._agent.release_dlist_handle(prepared)

    def close(self) -> None:
        """Only when no request is under way."""
        with self._lock:
            files, self._files = self._files, {}
        for file in files.values():
            self._agent.deregister_memory(file, backends=self._backends)
        for address in list(self._memory):
            self.deregister(address)
        self._agent = None


def _import() -> Any:
    # Unless told otherwise while it is imported, NIXL prints to standard output, and an error for each range that fails: those
    # are results here.
    quiet = LOG_LEVEL not in os.environ
    if quiet:
        os.environ[LOG_LEVEL] = "FATAL"
    try:
        nixl = importlib.import_module("nixl")
    except ImportError as error:
        raise MissingExtraError("nixl", "nixl", "the nixl engine") from error
    finally:
        if quiet:
            del os.environ[LOG_LEVEL]
    package = nixl.nixl_agent.__module__.partition(".")[0]  # nixl_cu12 or nixl_cu13
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return nixl  # built by hand
    if tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise EngineError(f'NIXL {version} loses errors; {wanted} does not: pip install -U "gdsstore[nixl]"')
    return nixl
