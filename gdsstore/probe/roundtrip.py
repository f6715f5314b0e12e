"""Bytes written, read back and compared, through each engine that this version has for host memory. A glimpse, no benchmark."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Engine, Op, RangePlan
from gdsstore.engines.choose import make_engine
from gdsstore.errors import EngineError, GdsStoreError, MissingExtraError, from_os_error
from gdsstore.memory.arena import Arena
from gdsstore.sizes import MiB

ENGINES = ("posix", "nixl")
RANGE_BYTES = MiB
TOTAL_BYTES = 64 * MiB
DEADLINE_S = 30.0
CLOSE_S = 5.0

_left_behind: list[
    object
] = []  # memory and files that an engine had not let go of: the kernel may still write there


class Outcome(StrEnum):
    WORKS = "works"
    FAILED = "failed"
    NOT_INSTALLED = "not installed"


@dataclass(frozen=True, slots=True)
class Trip:
    """`direct`: with O_DIRECT; else the page cache was measured. Speeds in GB/s (10^9 bytes)."""

    engine: str
    outcome: Outcome
    detail: str | None = None
    nbytes: int = 0
    direct: bool = False
    write_gbps: float | None = None
    read_gbps: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def round_trip(engine: str, directory: Path, *, direct: bool, total_bytes: int = TOTAL_BYTES) -> Trip:
    """One engine's round trip over a file without a name in `directory`. Never raises what the library raises on purpose.

    Ends after at most about a minute and a half: each of the two transfers has DEADLINE_S.
    """
    try:
        with make_engine(engine, posix_threads=4, in_flight_ranges=64) as made:
            return _trip(made, directory, direct, total_bytes)
    except MissingExtraError as error:
        return Trip(engine, Outcome.NOT_INSTALLED, str(error))
    except GdsStoreError as error:
        return Trip(engine, Outcome.FAILED, str(error))
    except OSError as error:
        return Trip(engine, Outcome.FAILED, str(from_os_error(error, "it failed")))


def _trip(engine: Engine, directory: Path, direct: bool, total_bytes: int) -> Trip:
    arena = Arena(2 * total_bytes, pin="off")
    payload, back = arena.array[:total_bytes], arena.array[total_bytes:]
    payload[:] = np.random.default_rng().integers(0, 256, total_bytes, np.uint8)
    back[:] = 0
    fd = _file(directory, direct)
    at_rest = True
    try:
        os.posix_fallocate(fd, 0, total_bytes)
        engine.attach(fd, total_bytes)
        at_rest = False
        write_s = _move(engine, Op.WRITE, fd, payload)
        read_s = _move(engine, Op.READ, fd, back)
        at_rest = True
        engine.detach(fd)
        if not np.array_equal(payload, back):
            raise EngineError("what was read back is not what was written", engine=engine.name)
    except _FailedError:
        at_rest = True  # ended, in an error
        raise
    finally:
        if at_rest:
            os.close(fd)
            del payload, back
            arena.close(CLOSE_S)
        else:
            _left_behind.extend((arena, fd))
    return Trip(
        engine.name,
        Outcome.WORKS,
        nbytes=total_bytes,
        direct=direct,
        write_gbps=total_bytes / write_s / 1e9,
        read_gbps=total_bytes / read_s / 1e9,
    )


class _FailedError(EngineError):
    """A transfer ended and did not move everything: nothing is under way any more."""


def _file(directory: Path, direct: bool) -> int:
    """A file that has lost its name already, so that nothing is left whatever happens."""
    fd, name = tempfile.mkstemp(prefix=".gdsstore-doctor-", dir=directory)
    try:
        if direct:
            again = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.close(fd)
            fd = again
    except BaseException:
        os.close(fd)
        raise
    finally:
        os.unlink(name)
    return fd


def _move(engine: Engine, op: Op, fd: int, memory: npt.NDArray[np.uint8]) -> float:
    """Seconds to move all of `memory`, in ranges of RANGE_BYTES."""
    offset = np.arange(0, len(memory), RANGE_BYTES, dtype=np.int64)
    length = np.minimum(RANGE_BYTES, len(memory) - offset)
    address = np.uint64(memory.ctypes.data) + offset.astype(np.uint64)
    plan = RangePlan(np.full(len(offset), fd, np.int32), offset, address, length)
    start = time.perf_counter()
    transfer = engine.submit(op, plan)
    results = transfer.wait(DEADLINE_S)
    seconds = time.perf_counter() - start
    bad = np.flatnonzero(~results.complete(plan))
    if len(bad):
        code = int(results.errno[bad[0]])
        kind = _FailedError if transfer.done else EngineError
        raise kind(
            f"{len(bad)} of {len(plan)} ranges failed to {op.value}: {os.strerror(code) if code else 'short'}",
            engine=engine.name,
        )
    return seconds
