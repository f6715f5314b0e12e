"""Pages are taken from and brought into every kind of memory, at every size, and nothing beside them changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gdsstore import PageStatus, Pieces
from tests.store.helpers import WAIT_S, check, make_keys, opaque, save, small_store, truth

PAGE = 8192
PAGES = 40


def aligned(nbytes: int, shift: int = 0) -> np.ndarray:
    """uint8 of `nbytes` bytes, `shift` bytes behind a multiple of 4096."""
    raw = np.full(nbytes + 8192, 0xEE, np.uint8)
    start = -raw.ctypes.data % 4096 + shift
    return raw[start : start + nbytes]


def pieces_of(memory: np.ndarray, k: int, shuffle: bool) -> Pieces:
    """Pages in k equal pieces each, in address order or scattered over the memory."""
    count, page = memory.shape
    length = page // k
    order = np.random.default_rng(3).permutation(count * k) if shuffle else np.arange(count * k)
    address = memory.ctypes.data + order.reshape(count, k) * length
    return Pieces(address.astype(np.uint64), length, memory)


def read_pieces(memory: np.ndarray, pieces: Pieces) -> np.ndarray:
    start = (np.asarray(pieces.address).astype(np.int64) - memory.ctypes.data)[..., None]
    flat = memory.reshape(-1)
    return flat[start + np.arange(int(pieces.length))].reshape(len(memory), -1)  # type: ignore[arg-type]


Form = tuple[
    Callable[[], Any], Callable[[Any], np.ndarray]
]  # makes memory, and reads the pages back out of it


def forms() -> dict[str, Form]:
    def scattered(k: int, shift: int, shuffle: bool) -> Form:
        def make() -> tuple[np.ndarray, Pieces]:
            memory = aligned(PAGES * PAGE, shift).reshape(PAGES, PAGE)
            return memory, pieces_of(memory, k, shuffle)

        return make, lambda made: read_pieces(*made)

    every_other = np.s_[::2]
    return {
        "aligned array": (lambda: aligned(PAGES * PAGE).reshape(PAGES, PAGE), lambda m: m),
        "unaligned array": (lambda: aligned(PAGES * PAGE, 13).reshape(PAGES, PAGE), lambda m: m),
        "512-aligned array": (lambda: aligned(PAGES * PAGE, 512).reshape(PAGES, PAGE), lambda m: m),
        "array of words, four dimensions": (
            lambda: aligned(PAGES * PAGE).view(np.float16).reshape(PAGES, 4, 8, 128),
            lambda m: m.reshape(PAGES, -1).view(np.uint8),
        ),
        "every other page": (
            lambda: aligned(2 * PAGES * PAGE).reshape(2 * PAGES, PAGE)[every_other],
            np.ascontiguousarray,
        ),
        "backwards": (lambda: aligned(PAGES * PAGE).reshape(PAGES, PAGE)[::-1], np.ascontiguousarray),
        "tensor": (
            lambda: torch.zeros(PAGES, PAGE // 2, dtype=torch.bfloat16),
            lambda m: m.view(torch.uint8).numpy(),
        ),
        "tensor, every other page": (
            lambda: torch.zeros(2 * PAGES, PAGE, dtype=torch.uint8)[::2],
            lambda m: m.contiguous().numpy(),
        ),
        "list of arrays": (
            lambda: [np.zeros(PAGE // 4, np.int32) for _ in range(PAGES)],
            lambda m: np.stack(m).view(np.uint8),
        ),
        "list of tensors": (
            lambda: [torch.zeros(PAGE // 2, dtype=torch.float16) for _ in range(PAGES)],
            lambda m: torch.stack(m).view(torch.uint8).numpy(),
        ),
        "1 piece": scattered(1, 0, False),
        "2 pieces, each a block, scattered": scattered(2, 0, True),
        "2 pieces, unaligned": scattered(2, 7, True),
        "8 pieces smaller than a block": scattered(8, 0, True),
        "8 pieces in a row": scattered(8, 0, False),
    }


def as_pages(made: Any) -> Any:
    return made[1] if isinstance(made, tuple) else made


def fill(made: Any, read: Callable[[Any], np.ndarray], content: np.ndarray) -> None:
    """Write pages into a form through its own reader's geometry."""
    if isinstance(made, tuple):
        memory, pieces = made
        start = (np.asarray(pieces.address).astype(np.int64) - memory.ctypes.data)[..., None]
        memory.reshape(-1)[start + np.arange(int(pieces.length))] = content.reshape(*start.shape[:2], -1)
    elif isinstance(made, list):
        for page, row in zip(made, content, strict=True):
            raw = page.view(torch.uint8).numpy() if isinstance(page, torch.Tensor) else page.view(np.uint8)
            raw[:] = row
    elif isinstance(made, torch.Tensor):
        made.view(torch.uint8).numpy()[:] = content
    else:
        made[:] = content.view(made.dtype).reshape(made.shape)
    assert np.array_equal(read(made), content)


@pytest.mark.parametrize("zero_copy", [True, False], ids=["zero copy", "staged"])
@pytest.mark.parametrize("form", forms())
def test_pages_of_every_form_come_back(tmp_path: Path, form: str, zero_copy: bool) -> None:
    make, read = forms()[form]
    keys = make_keys(PAGES)
    content = truth(keys, PAGE)
    with small_store(tmp_path / "s", zero_copy=zero_copy) as store:
        namespace = opaque(store, PAGE)
        source, target = make(), make()
        fill(source, read, content)
        assert namespace.save(keys, as_pages(source)).result(WAIT_S).count(PageStatus.SAVED) == PAGES
        assert np.array_equal(read(source), content)
        assert namespace.load(keys, as_pages(target)).result(WAIT_S).count(PageStatus.LOADED) == PAGES
        assert np.array_equal(read(target), content)
        check(namespace, keys, PAGE)  # what one form saved, another one loads


@pytest.mark.parametrize("nbytes", [1, 511, 512, 4095, 4096, 4097, 50_001, 65_536, (1 << 20) + 1, 8 << 20])
def test_pages_of_every_size_come_back_and_nothing_beside_them_changes(tmp_path: Path, nbytes: int) -> None:
    settings = {"segment_bytes": "16MiB", "staging_bytes": "16MiB", "chunk_bytes": "64KiB"}
    keys = make_keys(3)
    with small_store(tmp_path / "s", **settings) as store:
        namespace = opaque(store, nbytes)
        assert save(namespace, keys, nbytes).count(PageStatus.SAVED) == 3
        for shift in (0, 1):
            memory = aligned(3 * nbytes + 200, shift)
            pages = memory[100:-100].reshape(3, nbytes)
            assert namespace.load(keys, pages).result(WAIT_S).all_ok
            assert np.array_equal(pages, truth(keys, nbytes))
            assert (memory[:100] == 0xEE).all()
            assert (memory[-100:] == 0xEE).all()


def test_pieces_of_unequal_length(tmp_path: Path) -> None:
    """K and V of unequal head sizes: one length a piece, or one a piece and page."""
    with small_store(tmp_path / "s") as store:
        namespace = opaque(store, 6000)
        keys = make_keys(4)
        memory = truth(keys, 6000)
        starts = memory.ctypes.data + np.arange(4) * 6000
        address = np.stack([starts, starts + 2000], 1)
        assert namespace.save(keys[:2], Pieces(address[:2], [2000, 4000])).result(WAIT_S).all_ok
        lengths = np.tile([2000, 4000], (2, 1))
        assert namespace.save(keys[2:], Pieces(address[2:], lengths)).result(WAIT_S).all_ok
        check(namespace, keys, 6000)
