"""Who takes part: each way between the drive and device or host memory, made for a number of records in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gds_parts.contender import EngineContender
from gds_parts.dram import DramTraffic
from gds_parts.places import CLOSE_S, DevicePlace, HostPlace, Place
from gds_parts.target import Target
from gds_parts.turns import Memory
from gdsstore.engines.base import Engine
from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.nixl import NixlEngine
from gdsstore.engines.nixl_gds import NixlGdsEngine
from gdsstore.engines.posix import PosixEngine

# Of engines for device memory. "direct" is what they are asked for; what they did is in each row's paths.
KVIKIO_DIRECT, NIXL_GDS_MT, KVIKIO_COMPAT = "kvikio direct", "nixl-gds-mt", "kvikio compat"
ASKED_TO_BE_DIRECT = (KVIKIO_DIRECT, NIXL_GDS_MT)
BOUNCE_NIXL, BOUNCE_POSIX = "bounce (nixl)", "bounce (posix)"
NIXL, POSIX = "nixl", "posix"


@dataclass(frozen=True, slots=True)
class Maker:
    """`make`: an engine that has at most so many records in flight. Raises GdsStoreError where it cannot be had."""

    name: str
    memory: Memory
    make: Callable[[int], Engine]

    def open(
        self, submitters: int, memory_bytes: int, target: Target, dram: DramTraffic | None
    ) -> EngineContender:
        """Raises GdsStoreError."""
        engine = self.make(submitters)
        place: Place | None = None
        try:
            place = (
                DevicePlace(memory_bytes, engine)
                if isinstance(engine, DeviceEngine)
                else HostPlace(memory_bytes)
            )
            return EngineContender(self.name, self.memory, engine, place, target, dram)
        except BaseException:
            engine.close(CLOSE_S)
            if place is not None:
                place.close()
            raise


def _bounce(inner: Engine) -> Engine:
    try:
        from gdsstore.engines.bounce import BounceEngine

        return BounceEngine(inner)
    except BaseException:
        inner.close(CLOSE_S)
        raise


LINEUP = (
    Maker(KVIKIO_DIRECT, "device", KvikioEngine),
    Maker(NIXL_GDS_MT, "device", lambda submitters: NixlGdsEngine(submitters, threads=submitters)),
    Maker(BOUNCE_NIXL, "device", lambda submitters: _bounce(NixlEngine(submitters))),
    Maker(BOUNCE_POSIX, "device", lambda submitters: _bounce(PosixEngine(submitters))),
    Maker(KVIKIO_COMPAT, "device", lambda submitters: KvikioEngine(submitters, compat=True)),
    Maker(NIXL, "host", NixlEngine),
    Maker(POSIX, "host", PosixEngine),
)
