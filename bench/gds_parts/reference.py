"""fio and gdsio on the same file, with the same record size and queue depth: what others' programs see of this drive."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gds_parts.sizes import Cell
from gds_parts.target import Target
from gds_parts.turns import HOST, NOT_COUNTED, LatencyOf, Memory, Turn
from gdsstore.engines.base import Op
from gdsstore.errors import DeadlineError, EngineError

DEADLINE_S = 120.0
# They take a while to start, so not in all of the rounds.
TURNS = 3
CPU_IS_KNOWN_S = 0.1  # fio tells the CPU time of shorter runs as none
GDSIO = Path("/usr/local/cuda/gds/tools/gdsio")
FIO, GDSIO_DIRECT, GDSIO_BOUNCE = "fio", "gdsio direct", "gdsio bounce"
_XFER = {GDSIO_DIRECT: "0", GDSIO_BOUNCE: "2"}  # -x: GPUD, CPU_GPU
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_THROUGHPUT = re.compile(r"Throughput: ([\d.]+) (KiB|MiB|GiB|TiB)/sec", re.IGNORECASE)


class Program:
    """A program that is run once a turn. `command`: its command line for a cell; `read`: its output as a turn."""

    memory: Memory = "reference"
    latency_of: LatencyOf = "record"
    turns: int | None = TURNS

    def __init__(
        self, name: str, command: Callable[[Cell], list[str]], read: Callable[[Cell, str], Turn]
    ) -> None:
        self.name = name
        self._command, self._read = command, read

    def prove(self, cell: Cell) -> None:
        """Nothing: its bytes are its own business."""

    def turn(self, cell: Cell) -> Turn:
        command = self._command(cell)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{self.name} did not end within {DEADLINE_S} s") from error
        except OSError as error:
            raise EngineError(f"{self.name} does not start: {error.strerror}") from error
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise EngineError(f"{self.name} ended with {done.returncode}: {said[-1] if said else 'no word'}")
        return self._read(cell, done.stdout)

    def close(self) -> None:
        """Nothing is left of it."""


def fio(target: Target) -> Program:
    """Host memory, io_uring, O_DIRECT. Raises EngineError where it is not installed."""
    found = shutil.which("fio")
    if found is None:
        raise EngineError("fio is not installed (not in PATH)")

    def command(cell: Cell) -> list[str]:
        return [
            *(found, "--name=reference", f"--filename={target.path}", "--allow_file_create=0", "--thread"),
            *("--ioengine=io_uring", "--direct=1", "--output-format=json"),
            *(f"--rw=rand{cell.op.value}", f"--bs={cell.record_bytes}", f"--iodepth={cell.submitters}"),
            *(f"--size={target.size_bytes}", f"--io_size={cell.nbytes}"),
        ]

    return Program(FIO, command, read_fio)


def gdsio(target: Target, name: str) -> Program:
    """Device memory, by NVIDIA's own program. Raises EngineError where it is not installed."""
    found = shutil.which("gdsio") or (str(GDSIO) if GDSIO.exists() else None)
    if found is None:
        raise EngineError(f"gdsio is not installed (neither in PATH nor {GDSIO})")

    def command(cell: Cell) -> list[str]:
        return [
            *(found, "-f", str(target.path), "-d", "0", "-w", str(cell.submitters)),
            *("-s", str(cell.nbytes), "-i", str(cell.record_bytes)),
            *("-x", _XFER[name], "-I", "2" if cell.op is Op.READ else "3"),
        ]

    return Program(name, command, read_gdsio)


def read_fio(cell: Cell, output: str) -> Turn:
    """fio's JSON as a turn. Raises EngineError for anything else."""
    try:
        job: dict[str, Any] = json.loads(output[output.index("{") :])["jobs"][0]
        side = job[cell.op.value]
        gbps = float(side["bw_bytes"]) / 1e9
        job_s = float(job["job_runtime"]) / 1e3
        cpu_s = (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100 * job_s
        at = side["clat_ns"]["percentile"]
        percentiles = (float(at["50.000000"]) / 1e3, float(at["99.000000"]) / 1e3)
        nbytes = int(side["io_bytes"])
    except (ValueError, KeyError, IndexError) as error:
        raise EngineError(f"fio's output cannot be read: {error}") from error
    if nbytes != cell.nbytes:
        raise EngineError(f"fio moved {nbytes} of {cell.nbytes} bytes")
    cpu_s_per_gb = cpu_s / (nbytes / 1e9) if job_s >= CPU_IS_KNOWN_S else None
    return Turn(gbps, cpu_s_per_gb, {HOST: nbytes}, percentiles_us=percentiles)


def read_gdsio(cell: Cell, output: str) -> Turn:
    """gdsio's line as a turn; it tells the mean latency only, which is no percentile. Raises EngineError for anything else."""
    throughput = _THROUGHPUT.search(output)
    if throughput is None:
        raise EngineError(f"gdsio's output cannot be read: {output.strip()[-200:]}")
    unit = next(size for name, size in _UNITS.items() if name.lower() == throughput[2].lower())
    return Turn(float(throughput[1]) * unit / 1e9, None, {NOT_COUNTED: cell.nbytes})
