"""What a page must hold: its key is a chained hash of block ids, and its bytes derive from its key alone.

So a replay can check every loaded byte without a copy of what it saved, in another process, after a restart.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numba
import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError
from gdsstore.replay.requests import I64

KEY_BYTES = 32
_SCRATCH_BYTES = 4 << 20

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

_M1 = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment and multipliers (Steele, Lea, Flood 2014)
_M2 = np.uint64(0xBF58476D1CE4E5B9)
_M3 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
_ONE = np.uint64(1)


class PageKeys:
    """Keys of requests, chained as SGLang's: `key_i = sha256(key_{i-1} + block id as 8 bytes, low first)`.

    Remembers the last request of up to `sessions` sessions, so that a long conversation hashes only what was
    added. Not thread-safe.
    """

    def __init__(self, sessions: int = 64) -> None:
        self._limit = sessions
        self._last: OrderedDict[int, tuple[I64, U8]] = OrderedDict()

    def of(self, blocks: I64, session: int) -> U8:
        """uint8[n, 32] for int64[n] block ids. Read-only: it is shared with the session's later requests."""
        before_blocks, before_keys = self._last.pop(
            session, (blocks[:0], np.empty((0, KEY_BYTES), dtype=np.uint8))
        )
        overlap = min(len(blocks), len(before_blocks))
        differs = np.flatnonzero(blocks[:overlap] != before_blocks[:overlap])
        common = int(differs[0]) if len(differs) else overlap
        key = before_keys[common - 1].tobytes() if common else b""
        fresh = bytearray()
        ids = memoryview(np.ascontiguousarray(blocks, dtype="<i8").tobytes())
        for at in range(common * 8, len(ids), 8):
            key = hashlib.sha256(key + ids[at : at + 8]).digest()
            fresh += key
        added = np.frombuffer(bytes(fresh), dtype=np.uint8).reshape(-1, KEY_BYTES)
        keys = np.concatenate([before_keys[:common], added])
        keys.flags.writeable = False
        self._last[session] = (blocks, keys)
        if len(self._last) > self._limit:
            self._last.popitem(last=False)
        return keys


def fill_pages(keys: U8, out: U8) -> None:
    """Write the bytes of the pages of uint8[n, 32] keys into uint8[n, page_bytes].

    Raises ArgumentError for other shapes.
    """
    seeds, page_bytes = _check(keys, out)
    if _in_words(out):
        _fill(seeds, out.view(np.uint64))
        return
    for rows, scratch in _scratch(len(out), page_bytes):
        _fill(seeds[rows], scratch)
        out[rows] = scratch.view(np.uint8)[:, :page_bytes]


def count_wrong(keys: U8, pages: U8) -> npt.NDArray[np.intp]:
    """Indices of the pages of uint8[n, page_bytes] whose bytes are not their key's; the length is the count.

    Raises ArgumentError for other shapes.
    """
    seeds, page_bytes = _check(keys, pages)
    wrong = np.zeros(len(pages), dtype=np.bool_)
    if _in_words(pages):
        _differ(seeds, pages.view(np.uint64), wrong)
    else:
        for rows, scratch in _scratch(len(pages), page_bytes):
            _fill(seeds[rows], scratch)
            wrong[rows] = (pages[rows] != scratch.view(np.uint8)[:, :page_bytes]).any(axis=1)
    return np.flatnonzero(wrong)


def spoil(pages: U8) -> None:
    """Change some bytes of each 4 KiB of uint8[n, page_bytes], and the last of each page.

    Pages of a common prefix land in the same rows request after request: what an earlier load or save left there must not pass for
    the result of this one.
    """
    pages[:, ::4096] ^= 0xFF
    if pages.shape[1] % 4096 != 1:  # else the last byte was changed just now
        pages[:, -1] ^= 0xFF


def _check(keys: U8, pages: U8) -> tuple[U64, int]:
    if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        raise ArgumentError("keys must be uint8[n, 32]", dtype=keys.dtype, shape=keys.shape)
    if pages.dtype != np.uint8 or pages.ndim != 2 or len(pages) != len(keys):
        raise ArgumentError(
            "pages must be uint8[n, page_bytes], one row a key",
            dtype=pages.dtype,
            shape=pages.shape,
            keys=len(keys),
        )
    return np.frombuffer(keys.tobytes(), dtype=np.uint64).reshape(-1, 4), pages.shape[1]


def _in_words(pages: U8) -> bool:
    return pages.shape[1] % 8 == 0 and pages.flags.c_contiguous and pages.ctypes.data % 8 == 0


def _scratch(n: int, page_bytes: int) -> list[tuple[slice, U64]]:
    """Slices of the n pages, each with room for it in whole words: for pages of odd sizes or places."""
    words = -(-page_bytes // 8)
    rows = max(1, min(n, _SCRATCH_BYTES // max(1, words * 8)))
    room = np.empty((rows, words), dtype=np.uint64)
    return [(slice(at, min(at + rows, n)), room[: min(rows, n - at)]) for at in range(0, n, rows)]


@numba.njit(inline="always")
def _mixed(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> _S30)) * _M2
    x = (x ^ (x >> _S27)) * _M3
    return x ^ (x >> _S31)


@numba.njit(inline="always")
def _stream(seed: U64) -> tuple[np.uint64, np.uint64]:
    """A page's start and odd step, each from all 32 bytes of its key."""
    start = np.uint64(0)
    for i in range(4):
        start = _mixed(start + seed[i] + _M1)
    return start, _mixed(start + _M1) | _ONE


# Word j is start + j * step with its upper half folded onto the lower. The fold is a bijection, so two pages
# agree in a word only where their sums do; it keeps the low bytes from repeating. No branches, for SIMD.
@numba.njit(nogil=True, cache=True)
def _fill(seeds: U64, out: U64) -> None:
    for i in range(out.shape[0]):
        start, step = _stream(seeds[i])
        for j in range(out.shape[1]):
            word = start + np.uint64(j) * step
            out[i, j] = word ^ (word >> _S32)


@numba.njit(nogil=True, cache=True)
def _differ(seeds: U64, pages: U64, wrong: npt.NDArray[np.bool_]) -> None:
    for i in range(pages.shape[0]):
        start, step = _stream(seeds[i])
        difference = np.uint64(0)
        for j in range(pages.shape[1]):
            word = start + np.uint64(j) * step
            difference |= pages[i, j] ^ word ^ (word >> _S32)
        wrong[i] = difference != 0
