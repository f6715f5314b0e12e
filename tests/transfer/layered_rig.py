"""Pages of many layers, memory for them in pieces, and a forward that looks at each layer when it is told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from gdsstore import BoundNamespace, LoadResult, PageLayout, Pieces, Store
from gdsstore.transfer.groups import LayerGroup
from tests.store.helpers import WAIT_S, make_keys, truth

U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
FILL = 0xEE

# Layers of 3 KiB, 6 KiB (K and V apart, V smaller), 9 KiB and 16 KiB: blocks are shared by two layers, by three, and by none.
LAYOUTS = {
    "small": PageLayout.mha(layers=7, kv_heads=1, head_dim=48, page_tokens=16, dtype="bfloat16"),
    "kv-first": PageLayout.mha(
        layers=5,
        kv_heads=2,
        head_dim=64,
        value_head_dim=32,
        page_tokens=16,
        dtype="bfloat16",
        order="kv_layer_token",
    ),
    "mla": PageLayout.mla(layers=6, latent_dim=576, page_tokens=16, dtype="fp8_e4m3"),
    "blocks": PageLayout.mha(layers=4, kv_heads=4, head_dim=64, page_tokens=16, dtype="bfloat16"),
}

LAYOUT = LAYOUTS["mla"]
COUNT = 12
KEYS = make_keys(COUNT)
EVERYONE = list(range(COUNT))


def groups_of(sizes: Sequence[int]) -> list[LayerGroup]:
    ends = np.cumsum(sizes).tolist()
    return [LayerGroup(end - size, end) for end, size in zip(ends, sizes, strict=True)]


GROUPS = groups_of([1, 2, 3])


class PieceMemory:
    """Memory for pages in pieces that end at `cuts` (offsets in the page), each `gap` bytes after the one before."""

    def __init__(self, count: int, page_bytes: int, cuts: Sequence[int] = (), gap: int = 0) -> None:
        edges = np.unique([0, *(cut for cut in cuts if 0 < cut < page_bytes), page_bytes])
        self.length = np.diff(edges)
        self._start = edges[:-1] + np.arange(len(self.length)) * gap
        stride = -(-(page_bytes + len(self.length) * gap) // 4096) * 4096
        raw = np.full((count + 1) * stride, FILL, np.uint8)
        skip = -raw.ctypes.data % 4096
        self.raw = raw[skip : skip + count * stride].reshape(count, stride)

    def pieces(self) -> Pieces:
        address = self.raw.ctypes.data + np.arange(len(self.raw))[:, None] * self.raw.shape[1] + self._start
        return Pieces(address.astype(np.uint64), self.length, self.raw)

    def pages(self) -> U8:
        """What lies in the pieces, in page order: a copy."""
        return np.concatenate(
            [
                self.raw[:, at : at + n]
                for at, n in zip(self._start.tolist(), self.length.tolist(), strict=True)
            ],
            axis=1,
        )


class Forward:
    """Its `on_layers` compares the bytes of each layer, at the time when it is told of it, with what the keys say."""

    def __init__(self, layout: PageLayout, keys: U8, pages: Callable[[], U8]) -> None:
        self._layout, self._pages = layout, pages
        self._truth = truth(keys, layout.page_bytes)
        self.told: list[tuple[int, int, list[int]]] = []
        self.wrong: set[int] = set()  # pages that were told to be good, and were not

    def on_layers(self, first: int, last: int, ok: Mask) -> None:
        self.told.append((first, last, np.flatnonzero(ok).tolist()))
        now = self._pages()
        for offset, length in self._layout.slices(first, last):
            part = slice(offset, offset + length)
            self.wrong |= set(
                np.flatnonzero(ok & (now[:, part] != self._truth[:, part]).any(axis=1)).tolist()
            )

    def check(self, groups: Sequence[LayerGroup], good: Sequence[int]) -> None:
        """Told of every group once, in order, and each time of the same pages."""
        assert self.told == [(first, last, list(good)) for first, last in groups]


def bind(store: Store, layout: PageLayout = LAYOUT) -> BoundNamespace:
    return store.namespace(model="test", layout=layout)


def load_layers(
    store: Store,
    keys: U8 = KEYS,
    layout: PageLayout = LAYOUT,
    groups: list[LayerGroup] | None = GROUPS,
    memory: PieceMemory | None = None,
    deadline_s: float | None = None,
) -> tuple[LoadResult, Forward, PieceMemory]:
    memory = memory or PieceMemory(len(keys), layout.page_bytes)
    forward = Forward(layout, keys, memory.pages)
    future = bind(store, layout).load_layers(
        keys, memory.pieces(), forward.on_layers, groups=groups, deadline_s=deadline_s
    )
    return future.result(WAIT_S), forward, memory


def assert_loaded_is_true(result: LoadResult, keys: U8, layout: PageLayout, memory: PieceMemory) -> None:
    right = (memory.pages() == truth(keys, layout.page_bytes)).all(axis=1)
    assert right[result.ok].all(), "wrong bytes were served"


@st.composite
def cuts_of(draw: st.DrawFn, layers: int) -> list[int]:
    ends = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
    return np.diff([0, *ends, layers]).tolist()
