"""The parts of a store that move pages of one device's memory: staging there, and a mover for each path that may be taken.

Made by the first call with memory of that device.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gdsstore.engines.base import Engine, Op
from gdsstore.engines.device import DeviceEngine, Registered
from gdsstore.engines.device_ways import CLOSE_S, Wanted, find_ways
from gdsstore.engines.paths import Path
from gdsstore.engines.select import Selection
from gdsstore.errors import ArgumentError, ConfigError, EngineError, GdsStoreError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_arena import DeviceArena
from gdsstore.memory.device_views import DevicePages
from gdsstore.memory.streams import AllOf, Event, Stream
from gdsstore.memory.views import PageMemory
from gdsstore.moving import Parts, Route
from gdsstore.path_measuring import PathMeasuring
from gdsstore.transfer.device_side import DeviceSide
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.save import Saver
from gdsstore.transfer.scatter import make_kernels
from gdsstore.volume.files import SegmentFiles

log = logging.getLogger("gdsstore.store")


@dataclass(frozen=True, slots=True)
class _Way:
    """What moves pages by one path."""

    engine: DeviceEngine
    files: SegmentFiles
    mover: Mover
    saver: Saver

    def harvest(self, parts: Parts, fd: int, volume: int) -> None:
        for (op, path, cls), moved in self.engine.moved.take_labelled(fd).items():
            parts.paths.add(
                path, self.engine.name, volume, op, moved.nbytes, cls=cls, operations=moved.operations
            )


class Registration:
    """A buffer that the drive reaches directly, kept alive. Use as a context manager, or `close` it before it is freed.

    `direct`: whether that is so; where there is no direct path, a registration means nothing.
    """

    def __init__(self, engine: DeviceEngine | None, address: int, owner: object) -> None:
        self._engine, self._address, self._owner = engine, address, owner
        self.direct = engine is not None

    def close(self) -> None:
        """Idempotent. Raises EngineError where a transfer that hangs may still use the buffer: it must not be freed then."""
        if self._engine is not None:
            self._engine.deregister(self._address)
        self._engine = self._owner = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DeviceMoving:
    """Moves pages between the memory of one device and one store. Thread-safe."""

    def __init__(self, device: int, parts: Parts, engines: Mapping[Path, DeviceEngine]) -> None:
        """`engines`: by path, the preferred one first; closed with this. Raises DeviceError, EngineError."""
        self.device = device
        self._parts, self._engines = parts, dict(engines)
        self._chunk_bytes = min(parts.config.chunk_bytes, parts.config.gpu_staging_bytes // 2)
        with contextlib.ExitStack() as undo:
            self._cuda = CudaDevice(device)
            undo.callback(self._cuda.close)
            self._queueing = threading.Lock()
            self._uploads = Stream(self._cuda)
            undo.callback(self._uploads.close)
            self._kernels = make_kernels(self._cuda)
            undo.callback(self._kernels.close)
            size = parts.config.gpu_staging_bytes
            self.arena = DeviceArena(size, device=device, registrars=list(self._engines.values()))
            undo.callback(self.arena.close, CLOSE_S)
            self._ways = {path: self._way(engine) for path, engine in self._engines.items()}
            self._measuring = PathMeasuring(parts.root, parts.volumes, self._cuda, self._engines, self.arena)
            kept = self._measuring.kept() if len(self._ways) > 1 else []
            undo.pop_all()
        self.selection = Selection(list(self._ways), kept or ())
        self._thread: threading.Thread | None = None
        if kept is None and parts.config.measure_s:
            # Beside the calls: the first ones take the preferred path, and none waits.
            thread = threading.Thread(target=self._measure_first, name="gdsstore-measure", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:
                log.warning("the paths of GPU %d were not measured: %s", device, error)

    def _way(self, engine: DeviceEngine) -> _Way:
        parts = self._parts
        way: list[_Way] = []
        files = SegmentFiles(
            engine,
            parts.volumes,
            parts.segment_bytes,
            parts.config.max_open_files,
            lambda fd, volume: way[0].harvest(parts, fd, volume),
            parts.unverified_owner,
        )
        registered = getattr(engine, "registered", Registered())
        side = DeviceSide(
            self._uploads, self._queueing, lambda: self.arena, lambda: self._kernels, registered
        )
        mover = parts.mover(engine, files, side)
        way.append(_Way(engine, files, mover, parts.saver(mover, self._chunk_bytes)))
        return way[0]

    def measure(self, budget_s: float) -> None:
        """Measure the paths against each other now, keep the result, and choose by it. Raises as `PathMeasuring.measure`."""
        if len(self._ways) > 1:
            self.selection = Selection(*self._measuring.measure(budget_s))

    def _measure_first(self) -> None:
        try:
            self.measure(self._parts.config.measure_s)
        except GdsStoreError as error:
            log.warning("the paths of GPU %d were not measured: %s", self.device, error)

    def check_page(self, record_bytes: int) -> None:
        """Raises ConfigError for pages that the staging memory does not hold."""
        if record_bytes > self._parts.config.gpu_staging_bytes:
            raise ConfigError(
                "a page does not fit into the staging memory on the GPU; raise gpu_staging_bytes",
                page_bytes=record_bytes,
                gpu_staging_bytes=self._parts.config.gpu_staging_bytes,
            )

    def memory_of(self, pages: DevicePages) -> PageMemory:
        """The memory of a call's pages, ready once what is on their streams now has ended.

        Raises ArgumentError where the first page is not in this device's memory (the others are trusted), DeviceError.
        """
        first = pages.memory
        if len(first) and not self._cuda.holds(int(first.address[0, 0]), int(first.length[0, 0])):
            raise ArgumentError(
                "the pages are not in the memory of that GPU",
                address=hex(int(first.address[0, 0])),
                device=self.device,
            )
        events = [Event(self._cuda, stream) for stream in pages.streams]
        return replace(pages.memory, ready=AllOf(events)) if events else pages.memory

    def route(self, op: Op, record_bytes: int, pages: int) -> Route:
        """The way that `pages` pages of `record_bytes` bytes take now. Raises EngineError where `strict` forbids to go on."""
        if self._parts.config.strict:
            self._check_strict()
        at_once = min(pages, self._parts.config.gpu_in_flight)
        path = self.selection.pick(op, record_bytes, at_once)
        way = self._ways[path]

        def report(moved: int, seconds: float, failed: bool) -> None:
            if failed:
                self.selection.failed(op, path)
            else:
                self.selection.moved(op, record_bytes, at_once, path, moved * record_bytes, seconds)

        return Route(way.mover, way.saver, self._chunk_bytes, report)

    def _check_strict(self) -> None:
        for engine in self._engines.values():
            others = {path: n for (_, path), n in engine.moved.bytes_by().items() if path is not Path.DIRECT}
            if others:
                took = ", ".join(f"{n} bytes {path}" for path, n in others.items())
                raise EngineError(
                    f"strict = true, but {engine.name} took another path for {took}; "
                    "`gdsstore doctor PATH` says what stands in the way of the direct path",
                    device=self.device,
                )

    def register(self, memory: PageMemory) -> Registration:
        """See `Store.register`. `memory`: one page of one piece."""
        address, nbytes = int(memory.address[0, 0]), int(memory.length[0, 0])
        engine = self._engines.get(Path.DIRECT)
        if engine is not None:
            engine.register(address, nbytes)
        return Registration(engine, address, memory.owner)

    def count_paths(self) -> None:
        """Bring the store's path totals up to date."""
        for way in self._ways.values():
            for fd, volume in way.files.open_files():
                way.harvest(self._parts, fd, volume)

    def _close_kernels(self, timeout_s: float) -> None:
        self._uploads.close()
        if self._kernels.close(timeout_s):
            self._cuda.close()  # else work is still under way in its context

    def sweep(self) -> None:
        for way in self._ways.values():
            way.mover.sweep()

    def close(self, timeout_s: float) -> None:
        """Wait for what is under way, then let go; whatever one step raises, the others happen."""
        with contextlib.ExitStack() as steps:
            steps.callback(self._close_kernels, timeout_s)
            for way in self._ways.values():
                steps.callback(way.files.close)
                steps.callback(way.mover.sweep)
            steps.callback(self.arena.close, timeout_s)  # deregisters: before its engines forget how
            for way in self._ways.values():
                steps.callback(way.engine.close, timeout_s)
            if self._thread is not None:
                steps.callback(self._thread.join, timeout_s)


def open_device(
    device: int, parts: Parts, own: DeviceEngine | None, host_engine: Callable[[], Engine]
) -> DeviceMoving:
    """The parts for a device, with the engines that the config allows and this machine has, or with an engine of the user's.
    `host_engine` makes what the bounce path drives.

    Raises ConfigError, DeviceError, EngineError, MissingExtraError.
    """
    config = parts.config
    CudaDevice(device).close()  # one error for what no path could do without
    if config.strict and not all(volume.direct.direct for volume in parts.volumes):
        raise EngineError(
            "strict = true, but the filesystem does no direct I/O: use ext4 or xfs on an NVMe drive"
        )
    if own is not None and own.device == device:
        return DeviceMoving(device, parts, {own.path: own})
    wanted = Wanted(
        config.path,
        config.strict,
        config.gpu_engine,
        config.gpu_in_flight,
        config.bounce_bytes,
        host_engine,
    )
    engines = find_ways(device, wanted)
    try:
        return DeviceMoving(device, parts, engines)
    except BaseException:
        for engine in engines.values():
            engine.close(CLOSE_S)
        raise
