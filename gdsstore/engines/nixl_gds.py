"""NIXL's GDS plugins for device memory: cuFile below NIXL, with a result for each range.

GDS_MT calls cuFile from threads of its own, and says where something failed or was short; the detour then finds out which range
it was. GDS uses cuFile's batches, and says that all is well whatever happened: its results are worth nothing without checksums.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Engine, Op, RangePlan
from gdsstore.engines.cufile import CufileState, cufile_state
from gdsstore.engines.detour import DetourEngine
from gdsstore.engines.device import DeviceEngine, Registered, aligned, touches
from gdsstore.engines.nixl import BLAME_THREADS, NixlEngine
from gdsstore.engines.nixl_ring import NixlRing, Plugin
from gdsstore.engines.paths import Path, PathCounters
from gdsstore.errors import ConfigError, EngineError
from gdsstore.memory.cuda import CudaDevice

MAX_IN_FLIGHT = 128  # cuFile hung with about 256 requests in flight


class NixlGdsEngine(NixlEngine, DeviceEngine):
    """Hands NIXL at most `in_flight_ranges` at a time, of which `threads` are in flight (GDS_MT; with GDS all of them).

    `results_are_checked`: the caller verifies checksums of everything, in both directions, and takes no result's word for it.
    Plugin "GDS" is refused without.

    `path` says what cuFile says of itself. NIXL does not tell whether cuFile took a buffer or a file the direct way, and
    passes it addresses within buffers rather than base and offset.

    Initialises CUDA on `device`. Raises ConfigError for settings that make no sense, MissingExtraError where NIXL is not
    installed, DeviceError where there is no such device, EngineError where the plugin does not start.
    """

    def __init__(
        self,
        in_flight_ranges: int,
        *,
        threads: int = 16,
        device: int = 0,
        plugin: Literal["GDS_MT", "GDS"] = "GDS_MT",
        results_are_checked: bool = False,
        cuda_driver: Any | None = None,
    ) -> None:
        if not (1 <= in_flight_ranges <= MAX_IN_FLIGHT and 1 <= threads <= MAX_IN_FLIGHT):
            raise ConfigError(
                f"NIXL's GDS plugins take 1 to {MAX_IN_FLIGHT} ranges and threads",
                in_flight_ranges=in_flight_ranges,
                threads=threads,
            )
        if plugin not in ("GDS_MT", "GDS"):
            raise ConfigError("unknown NIXL plugin: use GDS_MT or GDS", plugin=plugin)
        if plugin == "GDS" and not results_are_checked:
            raise ConfigError(
                "NIXL's GDS plugin reports failed and short ranges as moved: use GDS_MT", plugin=plugin
            )
        self.name = {"GDS_MT": "nixl-gds-mt", "GDS": "nixl-gds"}[plugin]
        parameters = (("thread_count", str(threads)),) if plugin == "GDS_MT" else ()
        self._wanted = Plugin(plugin, "VRAM", parameters)
        self.device = device
        self.moved = PathCounters()
        self.registered = Registered()
        self._cuda = CudaDevice(device, cuda_driver)
        try:
            super().__init__(in_flight_ranges)
        except BaseException:
            self._cuda.close()
            raise
        self.cufile: CufileState | None = cufile_state()
        self.path = Path.DIRECT if self.cufile is not None and self.cufile.available else Path.COMPAT

    def _start_up(self) -> tuple[NixlRing, Engine]:
        with self._cuda.entered():
            ring = NixlRing(self._wanted, self.device)
        return ring, DetourEngine(BLAME_THREADS, self._cuda, self.moved)

    def register(self, address: int, nbytes: int) -> None:
        self.registered.add(address, nbytes)
        try:
            if not self._cuda.holds(address, nbytes):  # a refusal by cuFile NIXL only warns of
                raise EngineError(
                    "not memory of this device", address=hex(address), nbytes=nbytes, device=self.device
                )
            with self._cuda.entered():
                self._ring.register(address, nbytes)
        except BaseException:
            self.registered.discard(address)
            raise

    def deregister(self, address: int) -> None:
        if self.left_behind or (not self._closed and self._in_use(address)):
            raise EngineError("a transfer that hangs may still use the memory", address=hex(address))
        if self.registered.discard(address) and not self._closed:
            with self._cuda.entered():
                self._ring.deregister(address)

    def _in_use(self, address: int) -> bool:
        self.advance()  # nothing else may be there to notice what has ended
        _, _, size = self.registered.find(np.array([address], np.uint64), np.ones(1, np.int64))
        with self._counting:
            queued = [part for part in self._queue if not part.owner.cancelled]
        return any(touches(part.plan, address, int(size[0])) for part in (*self._active, *queued))

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        if not self.left_behind:
            self._cuda.close()

    def _refused(self, plan: RangePlan) -> npt.NDArray[np.bool_]:
        return super()._refused(plan) | ~self.registered.find(plan.address, plan.length)[0]

    def _moved_by_nixl(self, op: Op, plan: RangePlan) -> None:
        direct = aligned(plan) if self.path is Path.DIRECT else np.zeros(len(plan), np.bool_)
        for fd in np.unique(plan.fd).tolist():
            for path, taken in ((Path.DIRECT, direct), (Path.COMPAT, ~direct)):
                length = plan.length[(plan.fd == fd) & taken]
                self.moved.add(op, path, int(length.sum()), fd, operations=len(length), label=plan.label)
