"""Stores with everything in them that a store can hold, for the tests of who may touch what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdsstore import BoundNamespace, Store
from gdsstore.engines import measured
from gdsstore.engines.base import Op
from gdsstore.engines.paths import Path as IoPath
from gdsstore.engines.select import Measurement
from tests.store.helpers import U8, make_keys, opaque, save, small_store

PAGE_BYTES = 8192
KEYS: U8 = make_keys(20, "security")
MEASURED = (Measurement(Op.READ, 4096, 1, IoPath.BOUNCE, 1e9),)


def fill(store: Store) -> BoundNamespace:
    """Pages, a namespace that was cleared, and a measurement."""
    opaque(store, PAGE_BYTES, pool="cleared").clear()
    measured.save(store.directory.root, "gpu", 0, {}, MEASURED)
    pages = opaque(store, PAGE_BYTES)
    assert save(pages, KEYS, PAGE_BYTES).all_ok
    return pages


def filled(path: Path | list[Path], **settings: Any) -> None:
    """Make such a store, and close it."""
    with small_store(path, **settings) as store:
        fill(store)
