"""Bytes of GPU memory are counted by the path that they took, and by what they moved for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from gdsstore import Store
from tests.store.device_helpers import COUNT, LAYOUTS, WAIT_S, Cache, bind
from tests.store.helpers import make_keys, truth

pytestmark = pytest.mark.own_process(
    CUDASIM_POISON=0xEE, CUDASIM_HOST_VISIBLE=1, TRITON_INTERPRET=1, KVIKIO_COMPAT_MODE="OFF"
)


@pytest.mark.parametrize(("path", "engine"), [("direct", "kvikio"), ("bounce", "bounce")])
def test_bytes_of_a_gpu_are_counted_by_path_and_class(
    device_store: Callable[..., Store], gpu: ModuleType, path: str, engine: str
) -> None:
    layout = LAYOUTS["mha"]
    store = device_store(path=path)
    pages, keys, slots = bind(store, layout), make_keys(COUNT), np.arange(COUNT)
    cache = Cache(gpu, layout, COUNT)
    cache.put(slots, truth(keys, layout.page_bytes))
    assert pages.save(keys, cache.pages(slots)).result(WAIT_S).all_ok
    assert pages.load(keys, cache.pages(slots)).result(WAIT_S).all_ok
    assert pages.load(keys[:3], cache.pages(slots[:3])).result(WAIT_S).all_ok
    rows = store.io_report()
    assert {(row.direction, row.cls, row.path, row.engine): row.nbytes for row in rows} == {
        ("write", "offload", path, engine): COUNT * layout.record_bytes,
        ("read", "load", path, engine): (COUNT + 3) * layout.record_bytes,
    }
    assert all(0 < row.operations <= row.nbytes // 4096 for row in rows)
    by_path: Counter[tuple[str, str]] = Counter()
    for row in rows:
        by_path[row.path, row.direction] += row.nbytes
    assert by_path == {(row.path, row.direction): row.nbytes for row in store.path_report()}
