"""Which engine moves host memory, by name or, for "auto", by what works on this machine."""

from __future__ import annotations

import logging

from gdsstore.engines.base import Engine
from gdsstore.engines.nixl import NixlEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import ConfigError, EngineError, MissingExtraError

log = logging.getLogger("gdsstore.engines")


def make_engine(name: str, *, posix_threads: int, in_flight_ranges: int) -> Engine:
    """The engine called `name`: "posix", "nixl", or "auto", which is nixl where it passes its self-test and else posix.

    Raises MissingExtraError or EngineError where nixl was asked for and is not installed or does not work; ConfigError for
    an unknown name.
    """
    match name:
        case "posix":
            return PosixEngine(posix_threads)
        case "nixl":
            return NixlEngine(in_flight_ranges)
        case "auto":
            try:
                return NixlEngine(in_flight_ranges)
            except (MissingExtraError, EngineError) as error:
                log.info("engine posix instead of nixl: %s", str(error))
                return PosixEngine(posix_threads)
    raise ConfigError("unknown engine: use auto, nixl or posix", engine=name)
