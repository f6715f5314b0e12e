"""Makes the engines for one device that the settings allow and this machine has."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gdsstore.choices import GpuEngineName
from gdsstore.engines.base import Engine
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.nixl_gds import NixlGdsEngine
from gdsstore.engines.paths import Path
from gdsstore.engines.routes import NOT_TRIED, PathSetting, Side, choose, needs_bounce, needs_cufile
from gdsstore.errors import EngineError, GdsStoreError, MissingExtraError

log = logging.getLogger("gdsstore.engines")

CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the config says of device memory, and `host_engine`, which makes the engine that the bounce path drives."""

    path: PathSetting
    strict: bool
    engine: GpuEngineName
    in_flight: int
    bounce_bytes: int
    host_engine: Callable[[], Engine]


def find_ways(device: int, wanted: Wanted) -> dict[Path, DeviceEngine]:
    """The engines to use for the memory of a device, by the path that each takes; the preferred one first.

    Raises ConfigError for settings that contradict each other, EngineError where nothing that they allow is there.
    """
    with contextlib.ExitStack() as undo:
        made: dict[Path, DeviceEngine] = {}
        cufile = bounce = NOT_TRIED
        if needs_cufile(wanted.path):
            cufile = _made(made, lambda: _cufile_engine(device, wanted), undo)
        if needs_bounce(wanted.path, wanted.strict, cufile):
            bounce = _made(made, lambda: _bounce_engine(device, wanted), undo)
        choice = choose(wanted.path, wanted.strict, cufile, bounce)
        undo.pop_all()
    for path in made.keys() - set(choice.paths):
        made[path].close(CLOSE_S)
    log.info("memory of GPU %d: path %s (%s)", device, " or ".join(choice.paths), choice.why)
    return {path: made[path] for path in choice.paths}


def _made(
    made: dict[Path, DeviceEngine], make: Callable[[], DeviceEngine], undo: contextlib.ExitStack
) -> Side:
    try:
        engine = make()
    except GdsStoreError as error:
        return Side.missing(error)
    undo.callback(engine.close, CLOSE_S)
    made[engine.path] = engine
    return Side(engine.path, _why_not_direct(engine))


def _why_not_direct(engine: DeviceEngine) -> str:
    state = getattr(engine, "cufile", None)
    if engine.path is not Path.COMPAT:
        return ""
    return "its driver did not open" if state is None else str(state)


def _cufile_engine(device: int, wanted: Wanted) -> DeviceEngine:
    if wanted.engine is GpuEngineName.NIXL:
        return NixlGdsEngine(wanted.in_flight, device=device)
    try:
        return KvikioEngine(wanted.in_flight, device=device)
    except (MissingExtraError, EngineError) as error:
        if wanted.engine is GpuEngineName.KVIKIO:
            raise
        try:
            engine = NixlGdsEngine(wanted.in_flight, device=device)
        except GdsStoreError as second:
            raise EngineError(f"{error}; {second}") from second
        log.info("engine %s instead of kvikio: %s", engine.name, error)
        return engine


def _bounce_engine(device: int, wanted: Wanted) -> DeviceEngine:
    inner = wanted.host_engine()
    try:
        return BounceEngine(inner, device=device, arena_bytes=wanted.bounce_bytes)
    except BaseException:
        inner.close(CLOSE_S)
        raise
