"""SGLang's own fixtures, full attention, sliding window and Mamba, with this backend behind them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kits import StorageUnderTest, storage_test_cases
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.test.kits.unified_radix_cache.config import CONFIGS

from sglang_backend import stores
from tests.sglang_backend.backends import SETTINGS


@pytest.fixture(autouse=True)
def close_stores() -> Iterator[None]:
    """The kits leave their caches attached."""
    yield
    for shared in stores._open.values():
        shared.store.close()
    stores._open.clear()


def config(folder: Path) -> dict[str, Any]:
    return {**SETTINGS, "path": str(folder), "segment_bytes": "4MiB"}  # Mamba's states are large


PAGE_FIRST = StorageUnderTest("sglang_backend.storage", "GdsStoreHiCache", extra_config=config)
DIRECT = StorageUnderTest(
    "sglang_backend.storage",
    "GdsStoreHiCache",
    extra_config=config,
    layout="page_first_direct",
    io_backend="direct",
)
FULL_ATTENTION = [cfg for cfg in CONFIGS if cfg.components == (ComponentType.FULL,)]

globals().update(storage_test_cases(PAGE_FIRST, name="PageFirst"))
globals().update(storage_test_cases(DIRECT, name="PageFirstDirect", configs=FULL_ATTENTION))
