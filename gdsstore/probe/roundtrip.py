"""Bytes written, read back and compared, through each engine that this version has for host memory. A glimpse, no benchmark."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from gdsstore.engines.base import Engine, Op
from gdsstore.engines.choose import make_engine
from gdsstore.errors import EngineError, GdsStoreError, MissingExtraError, from_os_error
from gdsstore.memory.arena import Arena
from gdsstore.probe.moving import NOT_SAME, EndedError, move
from gdsstore.probe.trips import IoPath, Outcome, Trip
from gdsstore.sizes import MiB

ENGINES = ("posix", "nixl")
TOTAL_BYTES = 64 * MiB
DEADLINE_S = 30.0
CLOSE_S = 5.0

# Memory and files that an engine had not let go of: the kernel may still write there.
_left_behind: list[object] = []


def round_trip(engine: str, directory: Path, *, o_direct: bool, total_bytes: int = TOTAL_BYTES) -> Trip:
    """One engine's round trip over a file without a name in `directory`. Never raises what the library raises on purpose.

    Ends after at most about a minute and a half: each of the two transfers has DEADLINE_S.
    """
    try:
        with make_engine(engine, posix_threads=4, in_flight_ranges=64) as made:
            return _trip(made, directory, o_direct, total_bytes)
    except MissingExtraError as error:
        return Trip(engine, Outcome.NOT_INSTALLED, str(error))
    except GdsStoreError as error:
        return Trip(engine, Outcome.FAILED, str(error))
    except OSError as error:
        return Trip(engine, Outcome.FAILED, str(from_os_error(error, "it failed")))


def _trip(engine: Engine, directory: Path, o_direct: bool, total_bytes: int) -> Trip:
    arena = Arena(2 * total_bytes, pin="off")
    payload, back = arena.array[:total_bytes], arena.array[total_bytes:]
    payload[:] = np.random.default_rng().integers(0, 256, total_bytes, np.uint8)
    back[:] = 0
    fd = _file(directory, o_direct)
    at_rest = True
    try:
        os.posix_fallocate(fd, 0, total_bytes)
        engine.attach(fd, total_bytes)
        at_rest = False
        write_s = move(engine, Op.WRITE, fd, payload.ctypes.data, total_bytes, DEADLINE_S)
        read_s = move(engine, Op.READ, fd, back.ctypes.data, total_bytes, DEADLINE_S)
        at_rest = True
        engine.detach(fd)
        if not np.array_equal(payload, back):
            raise EngineError(NOT_SAME, engine=engine.name)
    except EndedError:
        at_rest = True
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
        path=IoPath.HOST,
        nbytes=total_bytes,
        o_direct=o_direct,
        write_gbps=total_bytes / write_s / 1e9,
        read_gbps=total_bytes / read_s / 1e9,
    )


def _file(directory: Path, o_direct: bool) -> int:
    """A file that has lost its name already, so that nothing is left whatever happens."""
    fd, name = tempfile.mkstemp(prefix=".gdsstore-doctor-", dir=directory)
    try:
        if o_direct:
            again = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.close(fd)
            fd = again
    except BaseException:
        os.close(fd)
        raise
    finally:
        os.unlink(name)
    return fd
