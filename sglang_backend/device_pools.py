"""SGLang's device pools as gdsstore sees them: where the bytes of a page lie, and what makes two pages interchangeable.

A pool is a set of buffers, each a matrix of rows; a page is the same few rows of every buffer. Which buffers there are and what
a row is depends on the kind of pool (device_pools_kinds.py); from there on all is the same arithmetic, done with numpy for all
pages of a call at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gdsstore import ArgumentError, DevicePieces, PageLayout, Pieces

U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Buffers:
    """k buffers in the order in which a page is stored. `base`: addresses, `stride`: bytes from a row to the next, `row_bytes`:
    bytes of a row, each of shape (k,); `rows`: how many rows all of them have."""

    base: U64
    stride: I64
    row_bytes: I64
    rows: int
    device: int | None  # ordinal of the GPU; None: host memory
    owner: object  # what keeps the memory alive


@dataclass(frozen=True, slots=True)
class DevicePool:
    """One pool whose pages the linker stores.

    `source`: the SGLang pool ("kv", "swa", "mamba") whose keys and indices a page of this one has. `page_tokens`: indices of a
    page. `page_rows`: rows of a page in every buffer, 1 where a row is a whole page. `needed_at`: for each layer of `layout` the
    layer of the forward, counted from this rank's first, before which it must have come.
    """

    name: str
    source: str
    kind: str  # class of SGLang's pool
    buffers: Buffers
    page_tokens: int
    page_rows: int
    layout: PageLayout
    needed_at: tuple[int, ...]
    replicated: bool  # whether every tensor-parallel rank holds the same bytes
    facts: tuple[tuple[str, str], ...]
    draft: bool = False  # whether it holds bytes of a draft model

    def pages(self, indices: I64, streams: Sequence[int] = ()) -> Pieces | DevicePieces:
        """The memory of the pages at `indices`: int64, `page_tokens` a page, on the host. `streams`: CUDA streams whose work, as
        far as it is queued now, comes before anything is done to that memory.

        Raises ArgumentError where these are not whole pages of this pool.
        """
        if indices.ndim != 1 or len(indices) % self.page_tokens:
            raise ArgumentError(
                f"pool {self.name}: {indices.size} indices are not pages of {self.page_tokens}"
            )
        slots = indices.reshape(-1, self.page_tokens)
        rows, together = self._rows(slots)
        if (rows < 0).any() or (rows >= self.buffers.rows).any():
            raise ArgumentError(
                f"pool {self.name}: an index lies outside the pool",
                rows=self.buffers.rows,
                highest=rows.max(),
            )
        buffers = self.buffers
        if together:
            address = _addresses(buffers, rows[:, :1])[:, :, 0]
            length = buffers.row_bytes * self.page_rows
        else:
            # [page][buffer][row]: the bytes come in the same order as when the rows lie together.
            address = _addresses(buffers, rows).reshape(len(rows), -1)
            length = np.repeat(buffers.row_bytes, rows.shape[1])
        if buffers.device is None:
            return Pieces(address, length, owner=buffers.owner)
        return DevicePieces(address, length, buffers.device, owner=buffers.owner, streams=tuple(streams))

    def _rows(self, slots: I64) -> tuple[I64, bool]:
        """Rows of each page, and whether those of every page follow each other in memory."""
        steps = np.arange(self.page_tokens)
        follow = bool((slots == slots[:, :1] + steps).all())
        if self.page_rows == self.page_tokens:
            return slots, follow and bool((self.buffers.stride == self.buffers.row_bytes).all())
        page, within = np.divmod(slots[:, :1], self.page_tokens)
        if not follow or within.any():
            raise ArgumentError(f"pool {self.name}: a row is a whole page, and an index is not at its start")
        return page, True


def _addresses(buffers: Buffers, rows: I64) -> U64:
    """Shape (pages, buffers, rows of a page)."""
    offset = rows[:, None, :] * buffers.stride[:, None]
    return np.asarray(buffers.base[:, None] + offset.astype(np.uint64), np.uint64)


def host_indices(indices: Sequence[Any]) -> I64:
    """Tensors of indices, one after the other, as one int64 array on the host. Waits for a device's copy; for a worker's thread."""
    import torch

    if len(indices) == 0:
        return np.zeros(0, np.int64)
    joined = (
        indices[0].reshape(-1) if len(indices) == 1 else torch.cat([each.reshape(-1) for each in indices])
    )
    return np.ascontiguousarray(joined.to(device="cpu", dtype=torch.int64).numpy())
