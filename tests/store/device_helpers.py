"""KV caches on the simulated GPU, and stores for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gdsstore import BoundNamespace, DevicePieces, PageLayout, Store
from gdsstore.transfer.results import CallResult
from tests.store.helpers import small_store

U8 = npt.NDArray[np.uint8]
WAIT_S = 120.0
COUNT = 12

LAYOUTS = {
    "mha": PageLayout.mha(layers=3, kv_heads=2, head_dim=64, page_tokens=16, dtype="bfloat16"),
    "mha-kv-first": PageLayout.mha(
        layers=2,
        kv_heads=1,
        head_dim=64,
        value_head_dim=32,
        page_tokens=16,
        dtype="float16",
        order="kv_layer_token",
    ),
    "mla": PageLayout.mla(layers=3, latent_dim=72, page_tokens=16, dtype="fp8_e4m3"),
    "opaque": PageLayout.opaque(5000),
}


def pieces_of(layout: PageLayout) -> list[int]:
    """Bytes of a page's pieces, in record order, as a KV cache has them: K and V of each layer apart."""
    if layout.value_head_dim == 0:
        return [layout.layer_bytes] * layout.layers
    k = layout.layer_bytes * layout.head_dim // (layout.head_dim + layout.value_head_dim)
    each = (k, layout.layer_bytes - k)
    if layout.order == "layer_kv_token":
        return [*each] * layout.layers
    return [each[0]] * layout.layers + [each[1]] * layout.layers


class Cache:
    """A KV cache on the simulated GPU: a buffer a piece, of `slots` slots each."""

    def __init__(self, simgpu: ModuleType, layout: PageLayout, slots: int) -> None:
        self.lengths = pieces_of(layout)
        self.buffers = [simgpu.DeviceBuffer(slots * length) for length in self.lengths]

    def pages(self, slots: npt.ArrayLike, **options: Any) -> DevicePieces:
        at = np.asarray(slots)
        columns = [
            buffer.ptr + at * length for buffer, length in zip(self.buffers, self.lengths, strict=True)
        ]
        return DevicePieces(
            np.stack(columns, axis=1).astype(np.uint64), self.lengths, 0, owner=self, **options
        )

    def put(self, slots: npt.ArrayLike, pages: U8) -> None:
        for slot, page in zip(np.asarray(slots).tolist(), pages, strict=True):
            start = 0
            for buffer, length in zip(self.buffers, self.lengths, strict=True):
                buffer.put(page[start : start + length].tobytes(), slot * length)
                start += length

    def get(self, slots: npt.ArrayLike) -> U8:
        rows = [
            b"".join(
                buffer.get(slot * length, length)
                for buffer, length in zip(self.buffers, self.lengths, strict=True)
            )
            for slot in np.asarray(slots).tolist()
        ]
        return np.stack([np.frombuffer(row, np.uint8) for row in rows])


@pytest.fixture
def device_store(gpu: ModuleType, kvikio: ModuleType, tmp_path: Path) -> Iterator[Callable[..., Store]]:
    opened: list[Store] = []

    def make(name: str = "s", **settings: Any) -> Store:
        opened.append(
            small_store(
                tmp_path / name,
                **{"measure_s": 0, "gpu_staging_bytes": "4MiB", "bounce_bytes": "4MiB", **settings},
            )
        )
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def bind(store: Store, layout: PageLayout) -> BoundNamespace:
    return store.namespace(model="test", layout=layout)


def report(store: Store) -> dict[tuple[str, str, str], int]:
    return {(row.path, row.engine, row.direction): row.nbytes for row in store.path_report()}


def let_go(result: CallResult) -> bool:
    """Wait until nothing uses the memory of a call any more; whether it is so."""
    end = time.monotonic() + WAIT_S
    while result.memory_in_use and time.monotonic() < end:
        time.sleep(0.01)
    return not result.memory_in_use
