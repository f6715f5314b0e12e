"""Verifying small stores, online and offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdsstore.config import Config
from gdsstore.directory import StoreDirectory
from gdsstore.engines.base import Engine
from gdsstore.engines.posix import PosixEngine
from gdsstore.store import Store
from gdsstore.verify.offline import read_only_volumes, verify_offline
from gdsstore.verify.online import verify_online
from gdsstore.verify.payloads import PayloadReader
from gdsstore.verify.result import Damage, Verification
from tests.store.helpers import small_config

PAGE_BYTES = 65536  # 15 pages fill a segment of 1 MiB
SLOTS = 15
DATA_OFFSET = 8192


def online(
    store: Store,
    *,
    repair: bool = False,
    engine: Engine | None = None,
    config: Config | None = None,
    before_reading: Callable[[], object] | None = None,
) -> Verification:
    """`before_reading` is called ahead of every segment's payloads: where other processes do their worst."""

    class Reader(PayloadReader):
        def check(self, *arguments: Any) -> Any:
            if before_reading is not None:
                before_reading()
            return super().check(*arguments)

    config = config or small_config()
    with Reader(engine or PosixEngine(2), store.volumes, store.segment_bytes, config) as reader:
        return verify_online(store, reader, repair=repair)


def offline(path: Path) -> Verification:
    directory = StoreDirectory(path)
    volumes = read_only_volumes(directory, [path])
    with PayloadReader(PosixEngine(2), volumes, directory.read().segment_bytes, small_config()) as reader:
        return verify_offline(directory, volumes, reader)


def brief(damaged: list[Damage]) -> list[tuple[int, int | None, str]]:
    return [(each.segment, each.slot, each.kind.value) for each in damaged]
