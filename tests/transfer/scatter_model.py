"""What gather, scatter and sums must do, in plain numpy, and pages in all kinds of places to do it with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from gdsstore.checksum.definition import reference_raw
from gdsstore.layout import PageLayout
from gdsstore.memory.cuda import CudaDevice
from gdsstore.transfer.scatter import PageKernels, Records

BLOCK = 4096
BYTES = 4 << 20  # of the memory that a test uses
SOON_S = 60.0

Image = npt.NDArray[np.uint8]


class Memory(Protocol):
    """BYTES bytes on a device, from a multiple of 4096."""

    device: CudaDevice
    address: int

    def put(self, image: Image) -> None: ...
    def get(self) -> Image: ...


@dataclass(frozen=True)
class Case:
    """Offsets of records and pieces in a memory, and lengths: shapes (n,), (n, k) and (n, k)."""

    record: npt.NDArray[np.int64]
    record_bytes: int
    piece: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]

    def at(self, memory: Memory) -> Records:
        base = np.uint64(memory.address)
        return Records(
            base + self.record.astype(np.uint64),
            self.record_bytes,
            base + self.piece.astype(np.uint64),
            self.length,
        )

    def gathered(self, image: Image) -> Image:
        out = image.copy()
        for record, pieces, lengths in zip(self.record, self.piece, self.length, strict=True):
            page = [image[at : at + n] for at, n in zip(pieces, lengths, strict=True)]
            whole = np.zeros(self.record_bytes, np.uint8)
            whole[: lengths.sum()] = np.concatenate(page)
            out[record : record + self.record_bytes] = whole
        return out

    def scattered(self, image: Image, only: npt.NDArray[np.bool_] | None = None) -> Image:
        out = image.copy()
        for i in range(len(self.record)) if only is None else np.flatnonzero(only):
            start = self.record[i]
            for at, n in zip(self.piece[i], self.length[i], strict=True):
                out[at : at + n] = image[start : start + n]
                start += n
        return out

    def sums(self, image: Image) -> list[int]:
        return [reference_raw(image[at : at + self.record_bytes].tobytes()) for at in self.record]


def noise(seed: int, nbytes: int = BYTES) -> Image:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def place(length: npt.ArrayLike, *, seed: int = 0, align: int = 16, skew: int = 0, spare: int = 0) -> Case:
    """Records and pieces of the given lengths (n, k), in slots in any order, as pools have them: all pages' first pieces
    near each other, then all second ones, with gaps here and there. Pieces begin `skew` after multiples of `align`.
    `spare`: whole blocks of padding more than needed."""
    lengths = np.array(length, np.int64)
    n, k = lengths.shape
    rng = np.random.default_rng(seed)
    record_bytes = (-(-int(lengths.sum(axis=1).max(initial=1)) // BLOCK) + spare) * BLOCK
    record = rng.permutation(n + 2)[:n] * record_bytes
    piece = np.zeros((n, k), np.int64)
    at = (n + 2) * record_bytes
    for column in range(k):
        for row in rng.permutation(n):
            at += int(rng.integers(0, 3)) * align
            piece[row, column] = at + skew
            at = -(-(at + skew + int(lengths[row, column])) // align) * align
    assert at + align <= BYTES
    return Case(record, record_bytes, piece, lengths)


def by_layers(layout: PageLayout, n: int) -> npt.NDArray[np.int64]:
    """The lengths of the pieces of n pages in an engine's pools: one for each layer, or one each for its K and its V."""
    if layout.value_head_dim == 0:
        row = [layout.layer_bytes] * layout.layers
    else:
        unit = layout.layer_bytes // (layout.head_dim + layout.value_head_dim)
        pair = (unit * layout.head_dim, unit * layout.value_head_dim)
        together = layout.order == "layer_kv_token"
        row = [*pair] * layout.layers if together else [pair[0]] * layout.layers + [pair[1]] * layout.layers
    return np.tile(np.array(row, np.int64), (n, 1))


@st.composite
def layouts(draw: st.DrawFn) -> PageLayout:
    kind = draw(st.sampled_from(["mha", "mla", "opaque"]))
    layers, tokens = draw(st.integers(1, 20)), draw(st.sampled_from([1, 3, 16]))
    if kind == "opaque":
        return PageLayout.opaque(draw(st.integers(1, 40_000)))
    if kind == "mla":
        dim, dtype = draw(st.sampled_from([(576, "bfloat16"), (656, "uint8"), (64, "bfloat16")]))
        return PageLayout.mla(layers=layers, latent_dim=dim, page_tokens=tokens, dtype=dtype)
    return PageLayout.mha(
        layers=layers,
        kv_heads=draw(st.sampled_from([1, 2])),
        head_dim=draw(st.sampled_from([64, 128])),
        value_head_dim=draw(st.sampled_from([64, 80, 128])),
        page_tokens=tokens,
        dtype=draw(st.sampled_from(["bfloat16", "fp8_e4m3"])),
        order=draw(st.sampled_from(["layer_kv_token", "kv_layer_token"])),
    )


@st.composite
def pool_cases(draw: st.DrawFn) -> Case:
    """Pages as engines lay them out: every page alike."""
    lengths = by_layers(draw(layouts()), draw(st.integers(1, 3)))
    return place(lengths, seed=draw(seeds), align=draw(st.sampled_from([16, 256, 4096])), spare=draw(spares))


@st.composite
def odd_cases(draw: st.DrawFn) -> Case:
    """Any lengths, none of them alike, at addresses of any alignment."""
    grain = draw(st.sampled_from([1, 2, 4, 8, 16, 4096]))
    n, k = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    counts = st.lists(st.integers(0, 3 if grain == 4096 else 300), min_size=k, max_size=k)
    lengths = np.array(draw(st.lists(counts, min_size=n, max_size=n))) * grain
    align = draw(st.sampled_from([1, 2, 4, 8, 16]))
    return place(lengths, seed=draw(seeds), align=align, spare=draw(spares))


seeds = st.integers(0, 1 << 30)
spares = st.integers(0, 2)


def check_gather(kernels: PageKernels, memory: Memory, case: Case, image: Image) -> None:
    """Records, padding and everything around them are as they should be, and so are the sums."""
    memory.put(image)
    pending = kernels.gather(case.at(memory))
    assert pending.wait(SOON_S)
    expected = case.gathered(image)
    assert same(memory.get(), expected)
    assert pending.sums.tolist() == case.sums(expected)


def check_scatter(
    kernels: PageKernels,
    memory: Memory,
    case: Case,
    image: Image,
    only: npt.NDArray[np.bool_] | None = None,
) -> None:
    memory.put(image)
    pending = kernels.scatter(case.at(memory), only=only)
    assert pending.wait(SOON_S)
    assert same(memory.get(), case.scattered(image, only))
    sums = case.sums(image)
    chosen = np.ones(len(sums), np.bool_) if only is None else only
    assert pending.sums.tolist() == [value if there else 0 for value, there in zip(sums, chosen, strict=True)]


def check_sums(kernels: PageKernels, memory: Memory, image: Image, seed: int) -> None:
    """Pages in place, cut into pieces of whole blocks in any order."""
    memory.put(image)
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    blocks = rng.integers(0, 7, (n, k))
    offset = rng.integers(0, (BYTES - 8 * BLOCK) // 16, (n, k)) * 16
    first = np.cumsum(blocks, axis=1) - blocks
    pending = kernels.sums(np.uint64(memory.address) + offset.astype(np.uint64), blocks * BLOCK, first)
    assert pending.wait(SOON_S)
    expected = [
        sum(
            reference_raw(image[at : at + count * BLOCK].tobytes(), block)
            for at, count, block in zip(*row, strict=True)
        )
        % 2**64
        for row in zip(offset.tolist(), blocks.tolist(), first.tolist(), strict=True)
    ]
    assert pending.sums.tolist() == expected
    assert same(memory.get(), image)


def same(found: Image, expected: Image) -> bool:
    """Compared by digest: a failing assertion does not print megabytes."""
    return hashlib.sha256(found).digest() == hashlib.sha256(expected).digest()
