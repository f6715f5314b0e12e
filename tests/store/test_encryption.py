"""An encrypted store does what every store does, and its files hold no page in the clear."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore import PageLayout, PageStatus, Pieces, Store
from gdsstore.engines.faults import parse_faults
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.transfer.pipeline import LayersComputed
from tests.store.helpers import (
    WAIT_S,
    check,
    forget_catalog,
    make_keys,
    memory_directory,
    opaque,
    save,
    small_store,
    truth,
)
from tests.store.sealed_helpers import files_holding, sealed_store

KEYS = make_keys(60)
LAYERS = PageLayout.mha(layers=4, kv_heads=2, head_dim=64, page_tokens=8, dtype="bfloat16")


@pytest.fixture
def memory_path() -> Iterator[Path]:
    with memory_directory() as directory:
        yield directory


@pytest.mark.parametrize("cache", [0, "8MiB"], ids=["drive only", "host cache"])
@pytest.mark.parametrize("nbytes", [1, 4052, 4053, 5000, 8192])
def test_pages_come_back_through_every_call(memory_path: Path, nbytes: int, cache: Any) -> None:
    with sealed_store(memory_path / "s", host_cache=cache) as store:
        pages = opaque(store, nbytes)
        assert save(pages, KEYS, nbytes).count(PageStatus.SAVED) == 60
        assert save(pages, KEYS, nbytes).count(PageStatus.ALREADY_THERE) == 60
        assert pages.lookup(KEYS) == 60
        assert check(pages, KEYS, nbytes).all_ok
        assert pages.delete(KEYS[50:]).all()
        assert pages.lookup(KEYS) == 50
    with sealed_store(memory_path / "s", host_cache=cache) as store:
        pages = opaque(store, nbytes)
        assert pages.lookup(KEYS) == 50
        assert check(pages, KEYS, nbytes).prefix == 50
    forget_catalog(memory_path / "s")
    with sealed_store(memory_path / "s", host_cache=cache) as store:
        pages = opaque(store, nbytes)
        assert check(pages, KEYS, nbytes).prefix == 50
        assert pages.clear() == 50
        assert pages.lookup(KEYS) == 0


@settings(max_examples=25, deadline=None)
@given(nbytes=st.integers(1, 20_000), pieces=st.integers(1, 5), shift=st.integers(0, 9), warm=st.booleans())
def test_pages_of_every_size_and_place_come_back(nbytes: int, pieces: int, shift: int, warm: bool) -> None:
    keys, cuts = make_keys(3), np.linspace(0, nbytes, min(pieces, nbytes) + 1).astype(np.int64)
    clear = truth(keys, nbytes)

    def place(memory: np.ndarray) -> Pieces:
        """Each page cut into pieces that lie apart, none of them aligned."""
        start = (
            np.arange(3)[:, None] * (nbytes + 64 * pieces) + cuts[None, :-1] + 7 * np.arange(len(cuts) - 1)
        )
        return Pieces(memory.ctypes.data + shift + start, np.diff(cuts), owner=memory)

    def fill(memory: np.ndarray, pages: np.ndarray | None) -> np.ndarray:
        """Write the pages into their pieces, or read them from there."""
        found = np.zeros((3, nbytes), np.uint8) if pages is None else pages
        for row, address in enumerate(np.asarray(place(memory).address) - memory.ctypes.data):
            for at, first, last in zip(address, cuts[:-1], cuts[1:], strict=True):
                if pages is None:
                    found[row, first:last] = memory[at : at + last - first]
                else:
                    memory[at : at + last - first] = pages[row, first:last]
        return found

    size = 3 * (nbytes + 64 * pieces) + 64
    with memory_directory() as path, sealed_store(path / "s", host_cache="2MiB" if warm else 0) as store:
        bound = opaque(store, nbytes)
        source = np.zeros(size, np.uint8)
        fill(source, clear)
        assert bound.save(keys, place(source)).result(WAIT_S).all_ok
        for _ in range(2):  # the second time from the cache, where there is one
            memory = np.full(size, 0xEE, np.uint8)
            assert bound.load(keys, place(memory)).result(WAIT_S).all_ok
            assert np.array_equal(fill(memory, None), clear)
            untouched = memory.copy()
            fill(untouched, np.full_like(clear, 0xEE))
            assert (untouched == 0xEE).all(), "something was written beside the pages"


@pytest.mark.parametrize("policy", ["never", "write_through", "write_back"])
def test_no_file_of_the_store_holds_a_page_in_the_clear(memory_path: Path, policy: str) -> None:
    clear = truth(KEYS, 8192)
    with sealed_store(memory_path / "s", host_cache="8MiB", write_policy=policy) as store:
        assert save(opaque(store), KEYS).all_ok
        store.sync()
        assert files_holding(memory_path / "s", clear) == set()
    assert files_holding(memory_path / "s", clear) == set()
    with small_store(memory_path / "plain") as store:
        assert save(opaque(store), KEYS).all_ok
    assert len(files_holding(memory_path / "plain", clear)) > 0, "the search does not find what is there"


def test_the_same_page_is_never_sealed_to_the_same_bytes_twice(memory_path: Path) -> None:
    clear = np.zeros((60, 4096), np.uint8)
    with sealed_store(memory_path / "s", capacity="8MiB") as store:
        for _ in range(2):
            assert opaque(store, 4096).save(KEYS, clear).result(WAIT_S).all_ok
            assert opaque(store, 4096).delete(KEYS).all()
    blocks = [
        content[at : at + 4096]
        for file in (memory_path / "s" / "segments").iterdir()
        for content in [file.read_bytes()[8192:]]
        for at in range(0, len(content), 4096)
    ]
    written = [block for block in blocks if any(block)]
    assert len(set(written)) == len(written) >= 60


def test_sealed_and_plain_pages_of_one_namespace_do_not_meet(memory_path: Path) -> None:
    with small_store(memory_path / "s") as store:
        assert save(opaque(store), KEYS[:30]).all_ok
    with sealed_store(memory_path / "s") as store:
        assert opaque(store).lookup(KEYS) == 0
        assert save(opaque(store), KEYS).count(PageStatus.SAVED) == 60
        described = store.directory.namespaces()[opaque(store).digest]
        assert described["sealed"]["cipher"] == "AES-256-GCM"
    with small_store(memory_path / "s") as store:
        assert opaque(store).lookup(KEYS) == 30
        assert check(opaque(store), KEYS).prefix == 30


def test_what_a_prefetch_brings_and_a_load_keeps_is_opened(memory_path: Path) -> None:
    with sealed_store(memory_path / "s") as store:
        assert save(opaque(store, 5000), KEYS, 5000).all_ok
    with sealed_store(memory_path / "s", host_cache="8MiB") as store:
        pages = opaque(store, 5000)
        handle = pages.prefetch(KEYS[:40])
        assert handle.wait(WAIT_S)
        assert handle.progress.warm == 40
        assert check(pages, KEYS, 5000).all_ok
        read = store.stats()["drive_bytes_read"]
        assert check(pages, KEYS, 5000).all_ok
        assert store.stats()["drive_bytes_read"] == read > 0


def layered(store: Store) -> tuple[Any, np.ndarray]:
    pages = store.namespace(model="test", layout=LAYERS)
    clear = truth(KEYS, LAYERS.page_bytes)
    assert pages.save(KEYS, clear).result(WAIT_S).all_ok
    return pages, clear


@pytest.mark.parametrize("cache", [0, "8MiB"], ids=["drive only", "host cache"])
def test_layers_are_told_of_once_the_pages_are_verified(memory_path: Path, cache: Any) -> None:
    with sealed_store(memory_path / "s") as store:
        clear = layered(store)[1]
    with sealed_store(memory_path / "s", host_cache=cache) as store:
        pages = store.namespace(model="test", layout=LAYERS)
        warm = np.zeros((20, LAYERS.page_bytes), np.uint8)
        assert pages.load(KEYS[:20], warm).result(WAIT_S).all_ok
        memory = np.zeros_like(clear)
        keys = np.concatenate([KEYS[:59], make_keys(1, "absent")])
        told: list[tuple[int, int]] = []

        def on_layers(first: int, last: int, ok: np.ndarray) -> None:
            told.append((first, last))
            assert ok[:59].all()
            assert not ok[59]
            assert np.array_equal(memory[:59], clear[:59]), "told of before they are there"

        result = pages.load_layers(keys, memory, on_layers).result(WAIT_S)
        assert result.prefix == 59
        assert told[0][0] == 0
        assert told[-1][1] == 4


def test_a_layer_wise_save_is_written_when_the_forward_has_ended(memory_path: Path) -> None:
    with sealed_store(memory_path / "s") as store:
        pages = store.namespace(model="test", layout=LAYERS)
        clear, computed = np.zeros((60, LAYERS.page_bytes), np.uint8), LayersComputed()
        future = pages.save_layers(KEYS, clear, computed)
        computed.computed(2)
        clear[:] = truth(KEYS, LAYERS.page_bytes)
        computed.computed(4)
        assert future.result(WAIT_S).count(PageStatus.SAVED) == 60
        assert check(pages, KEYS, LAYERS.page_bytes).all_ok
        late = pages.save_layers(make_keys(3, "late"), clear[:3], LayersComputed(), deadline_s=0.2)
        assert late.result(WAIT_S).count(PageStatus.FAILED_DEADLINE) == 3


def test_the_drive_never_sees_the_callers_memory(memory_path: Path) -> None:
    with small_store(memory_path / "plain") as store, store.arena(8192 * 4) as arena:
        memory = arena.array.reshape(4, 8192)
        assert opaque(store).in_place(memory, 4).all()
        del memory
    with sealed_store(memory_path / "s") as store, store.arena(8192 * 4) as arena:
        memory = arena.array.reshape(4, 8192)
        assert not opaque(store).in_place(memory, 4).any()
        del memory


@pytest.mark.parametrize("verify", [True, False])
def test_under_faults_no_wrong_bytes_are_served(memory_path: Path, verify: bool) -> None:
    """Without checksums too: the tag is one."""
    faults = parse_faults("errno:0.02,short:0.02,corrupt:0.05,misdirect:0.05")
    engine = FaultyEngine(PosixEngine(2), faults, seed=5)
    keys = make_keys(300)
    with sealed_store(memory_path / "s", own_engine=engine, chunk_bytes="64KiB", verify=verify) as store:
        for _ in range(3):
            save(opaque(store), keys)
            loaded = check(opaque(store), keys).loaded
            assert 0 < loaded < 300


def test_many_threads_seal_and_open_at_once(memory_path: Path) -> None:
    with sealed_store(memory_path / "s", workers=4) as store:
        failed: list[int] = []

        def work(number: int) -> None:
            keys = make_keys(40, number)
            for _ in range(3):
                if not (save(opaque(store), keys).all_ok and check(opaque(store), keys).all_ok):
                    failed.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert failed == []
