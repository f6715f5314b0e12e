"""The round trip of one engine for device memory. Run as a process of its own: cuFile may hang, or crash, and is killed then.

It prints a line of JSON for each stage that it enters, and at the end one with the result.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gdsstore.engines.base import Op
from gdsstore.engines.choose import make_engine
from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.paths import Path
from gdsstore.errors import EngineError, GdsStoreError, MissingExtraError, from_os_error
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_arena import DeviceArena
from gdsstore.probe.moving import NOT_SAME, RANGE_BYTES, HungError, move
from gdsstore.probe.trips import IoPath, Outcome, PathBytes, Trip

IN_FLIGHT = 32  # as a store by default
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """`file`: of `nbytes` bytes, all written. `deadline_s`: for each of the two transfers."""

    engine: str
    device: int
    file: str
    nbytes: int
    o_direct: bool
    deadline_s: float


def make_device_engine(name: str, device: int) -> DeviceEngine:
    """The engine called `name`, imported now: none of the others' packages needs to be there. Raises as its class does."""
    match name:
        case "kvikio":
            from gdsstore.engines.kvikio import KvikioEngine

            return KvikioEngine(IN_FLIGHT, device=device)
        case "nixl-gds-mt":
            from gdsstore.engines.nixl_gds import NixlGdsEngine

            return NixlGdsEngine(IN_FLIGHT, threads=IN_FLIGHT, device=device)
        case "bounce":
            from gdsstore.engines.bounce import BounceEngine

            return BounceEngine(
                make_engine("auto", posix_threads=4, in_flight_ranges=IN_FLIGHT), device=device
            )
    raise EngineError("no engine for device memory", engine=name)


def device_trip(job: Job) -> Trip:
    """Raises GdsStoreError and OSError. Where it raises, memory and files are left to the end of the process."""
    _say(stage="the start of the engine")
    engine = make_device_engine(job.engine, job.device)
    arena = DeviceArena(2 * job.nbytes, device=job.device, registrars=[engine])
    cuda = CudaDevice(job.device)
    lease = arena.lease(2 * job.nbytes, 0)
    payload = np.random.default_rng().integers(0, 256, job.nbytes, np.uint8)
    back = np.zeros(job.nbytes, np.uint8)
    cuda.copy(lease.address, payload.ctypes.data, job.nbytes)
    cuda.copy(lease.address + job.nbytes, back.ctypes.data, job.nbytes)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if job.o_direct else 0)
    fd = os.open(job.file, flags)
    engine.attach(fd, job.nbytes)
    _say(stage="the write")
    write_s = move(engine, Op.WRITE, fd, lease.address, job.nbytes, job.deadline_s)
    _say(stage="the read")
    read_s = move(engine, Op.READ, fd, lease.address + job.nbytes, job.nbytes, job.deadline_s)
    cuda.copy(back.ctypes.data, lease.address + job.nbytes, job.nbytes)
    if not np.array_equal(payload, back):
        raise EngineError(NOT_SAME, engine=engine.name)
    _say(stage="the end of the engine")
    engine.detach(fd)
    os.close(fd)
    lease.release()
    arena.close(CLOSE_S)
    engine.close(CLOSE_S)
    cuda.close()
    again = engine.moved_again
    written, read = _counted(engine, Op.WRITE), _counted(engine, Op.READ)
    return Trip(
        engine.name,
        Outcome.FAILED if again else Outcome.WORKS,
        f"{again} of {2 * (-(-job.nbytes // RANGE_BYTES))} ranges failed, and went through host memory then"
        if again
        else None,
        device=job.device,
        path=_path(written, read),
        nbytes=job.nbytes,
        o_direct=job.o_direct,
        written=written,
        read=read,
        write_gbps=job.nbytes / write_s / 1e9,
        read_gbps=job.nbytes / read_s / 1e9,
    )


def _counted(engine: DeviceEngine, op: Op) -> PathBytes:
    moved = engine.moved.bytes_by()
    return PathBytes(*(moved.get((op, path), 0) for path in (Path.DIRECT, Path.COMPAT, Path.BOUNCE)))


def _path(*counted: PathBytes) -> IoPath:
    """The farthest from direct that any byte took."""
    if any(each.bounce for each in counted):
        return IoPath.BOUNCE
    return IoPath.COMPAT if any(each.compat for each in counted) else IoPath.DIRECT


def _say(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    hung = False
    try:
        trip = device_trip(job)
    except MissingExtraError as error:
        trip = Trip(job.engine, Outcome.NOT_INSTALLED, str(error), device=job.device)
    except GdsStoreError as error:
        hung = isinstance(error, HungError)
        trip = Trip(job.engine, Outcome.FAILED, str(error), device=job.device)
    except OSError as error:
        trip = Trip(job.engine, Outcome.FAILED, str(from_os_error(error, "it failed")), device=job.device)
    _say(trip=asdict(trip), hung=hung)
    # What hangs, or a library's own end, must not keep the process; the kernel takes everything back.
    os._exit(0)


if __name__ == "__main__":
    main()
