"""What moves pages for one store: the parts for host memory, and those for each GPU, made when they are first needed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from gdsstore.engines.base import Engine
from gdsstore.engines.by_drive import ByDriveEngine
from gdsstore.engines.choose import make_engine
from gdsstore.engines.device import DeviceEngine
from gdsstore.errors import StoreClosedError
from gdsstore.moving import Moving, Parts
from gdsstore.observe.paths import IoRow, PathRow, PathTotals
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.device_moving import DeviceMoving


class Movers:
    """Thread-safe. `engine`: an engine of the user's own, for host memory or that of one GPU; closed with this."""

    def __init__(self, parts: Parts, engine: Engine | None) -> None:
        self._parts = parts
        self._device_engine = engine if isinstance(engine, DeviceEngine) else None
        self._engine = None if isinstance(engine, DeviceEngine) else engine
        # Two: a GPU takes seconds to be made ready, and host memory does not wait for that.
        self._host_lock, self._device_lock = threading.Lock(), threading.Lock()
        self._host: Moving | None = None
        self._devices: dict[int, DeviceMoving] = {}
        self._closed = False

    def host(self) -> Moving:
        """Raises EngineError, MissingExtraError, VolumeError."""
        with self._host_lock:
            if self._host is None:
                self._check_open()
                self._host = Moving(self._engine or self._new_engine(), self._parts)
            return self._host

    def device(self, device: int) -> DeviceMoving:
        """See `Store.device_moving`."""
        from gdsstore.device_moving import open_device  # torch, Triton and kvikio come with it
        from gdsstore.engines.device_ways import CLOSE_S

        moving = self._devices.get(device)  # one that is there does not wait for another to be made ready
        if moving is not None:
            return moving
        with self._device_lock:
            moving = self._devices.get(device)
            if moving is None:
                self._check_open()
                moving = open_device(device, self._parts, self._device_engine, self._new_engine)
                if self._closed:  # meanwhile, and it did not wait for so long
                    moving.close(CLOSE_S)
                self._check_open()
                self._devices[device] = moving
            return moving

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed", path=str(self._parts.root))

    def _new_engine(self) -> Engine:
        config = self._parts.config
        make = partial(
            make_engine,
            config.engine,
            posix_threads=config.posix_threads,
            in_flight_ranges=config.in_flight_ranges,
        )
        return make() if len(self._parts.volumes) == 1 else ByDriveEngine(make)

    @property
    def engine_name(self) -> str | None:
        """Of the engine for host memory; None where none was needed yet."""
        return self._host.engine.name if self._host else None

    def path_report(self) -> list[PathRow]:
        """See `Store.path_report`."""
        return self._counted().rows([str(volume.path) for volume in self._parts.volumes])

    def io_report(self) -> list[IoRow]:
        """The same by class too, with the requests that moved the bytes."""
        return self._counted().io_rows([str(volume.path) for volume in self._parts.volumes])

    def _counted(self) -> PathTotals:
        for moving in list(self._devices.values()):
            moving.count_paths()
        return self._parts.paths

    def sweep(self) -> None:
        """Let go of what belonged to I/O that was stuck and has ended."""
        if self._host is not None:
            self._host.mover.sweep()
        for moving in list(self._devices.values()):
            moving.sweep()

    def close(self, timeout_s: float) -> None:
        """Wait for what is under way, then let go; whatever one step raises, the others happen."""
        deadline = Deadline(timeout_s)
        self._closed = True
        if self._device_lock.acquire(timeout=deadline.left_s):  # else whoever makes one ready closes it, too
            self._device_lock.release()
        closers: list[Callable[[float], object]] = [each.close for each in self._devices.values()]
        closers += [
            each.close for each in (self._device_engine, self._host or self._engine) if each is not None
        ]
        with contextlib.ExitStack() as steps:
            for close in closers:
                steps.callback(close, timeout_s)
