"""Pages of real host pools, in every layout, go to the store and come back byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cpu_fixtures import MHA
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from sglang_backend.pools import describe_pool
from tests.sglang_backend.backends import KV, LAYOUTS, FilledPool, make_keys, saved
from tests.sglang_backend.conftest import Attach

IDS = [f"{kind}-{layout}" for kind, layout in LAYOUTS]
PAGES = 8
ORDER = [5, 0, 7, 2, 1, 6, 4, 3]


@pytest.fixture(params=LAYOUTS, ids=IDS)
def filled(request: pytest.FixtureRequest) -> FilledPool:
    return FilledPool(*request.param)


def test_pages_come_back_into_other_host_pages_in_any_order(filled: FilledPool, attach: Attach) -> None:
    backend = attach(filled)
    saved(backend, filled)
    keys = [filled.keys[page] for page in ORDER]
    assert backend.batch_get_v1(keys, filled.indices(ORDER, beside=1)) == [True] * PAGES
    assert filled.holds_truth(beside=1) == [True] * PAGES
    assert all((page == 0xEE).all() for page in filled.pages()), "pages that nobody asked for were touched"


def test_a_page_that_is_not_stored_misses_and_the_others_load(filled: FilledPool, attach: Attach) -> None:
    backend = attach(filled)
    saved(backend, filled)
    keys = [*filled.keys[:3], *make_keys(1), *filled.keys[4:]]
    assert backend.batch_exists(keys) == 3
    assert backend.batch_get_v1(keys, filled.indices()) == [page != 3 for page in range(PAGES)]
    assert filled.holds_truth() == [page != 3 for page in range(PAGES)]


def test_pages_stored_again_keep_their_bytes(filled: FilledPool, attach: Attach) -> None:
    backend = attach(filled)
    saved(backend, filled)
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [True] * PAGES  # wiped: not what was stored
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [True] * PAGES
    assert filled.holds_truth() == [True] * PAGES


def test_v2_moves_pages_of_several_pools_in_one_call(filled: FilledPool, attach: Attach) -> None:
    beside = FilledPool(MHA, "page_first", 3)
    backend = attach(filled, ("swa", beside))
    transfers = [filled.transfer(KV), beside.transfer("swa")]
    expected = {KV: [True] * PAGES, "swa": [True] * 3}
    assert backend.batch_set_v2(transfers) == expected
    filled.wipe()
    beside.wipe()
    assert backend.batch_get_v2(transfers) == expected
    assert all(filled.holds_truth())
    assert all(beside.holds_truth())


def test_computed_addresses_are_those_that_the_pool_gives(filled: FilledPool) -> None:
    pool = describe_pool(filled.pool, KV)
    assert pool.pages == filled.pool.page_num
    everything = torch.arange(pool.pages * pool.page_tokens)
    addresses, sizes = filled.pool.get_page_buffer_meta(everything)
    pieces = pool.pieces(everything, pool.pages)
    address = np.asarray(pieces.address)
    assert address.ravel().tolist() == addresses
    assert np.broadcast_to(np.asarray(pieces.length), address.shape).ravel().tolist() == sizes


class TwoPieces:
    """A pool of states: 5 pages of one slot, whose pieces differ in size and in distance."""

    size, page_size, layout = 5, 1, "page_first"

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        slots = indices.tolist()
        return [at for slot in slots for at in (4096 + 100 * slot, 65536 + 64 * slot)], [96, 64] * len(slots)


def test_pieces_may_differ_in_size_and_distance() -> None:
    pool = TwoPieces()
    slots = torch.tensor([4, 0, 2])
    pieces = describe_pool(pool, "mamba").pieces(slots, 3)
    addresses, sizes = pool.get_page_buffer_meta(slots)
    assert np.asarray(pieces.address).ravel().tolist() == addresses
    assert np.asarray(pieces.length).tolist() == sizes[:2]


def no_page_starts(indices: torch.Tensor) -> torch.Tensor:
    return indices + 1


def outside(indices: torch.Tensor) -> torch.Tensor:
    return indices + (1 << 20) * 16


def before_the_pool(indices: torch.Tensor) -> torch.Tensor:
    return indices - 16


def too_few(indices: torch.Tensor) -> torch.Tensor:
    return indices[:-16]


@pytest.mark.parametrize("change", [no_page_starts, outside, before_the_pool, too_few])
def test_indices_that_are_no_pages_of_the_pool_are_misses(
    change: Callable[[torch.Tensor], torch.Tensor], filled: FilledPool, attach: Attach
) -> None:
    backend = attach(filled)
    wrong = change(filled.indices())
    fresh = make_keys(PAGES)
    assert backend.batch_set_v1(fresh, wrong) == [False] * PAGES
    assert backend.batch_exists(fresh) == 0
    saved(backend, filled)
    before = filled.pool.kv_buffer.clone()
    assert backend.batch_get_v1(filled.keys, wrong) == [False] * PAGES
    assert backend.batch_get_v1(filled.keys, None) == [False] * PAGES
    assert torch.equal(filled.pool.kv_buffer.view(torch.uint8), before.view(torch.uint8))


def test_keys_that_are_not_sglangs_are_misses(attach: Attach) -> None:
    filled = FilledPool(MHA, "page_first")
    backend = attach(filled)
    for odd in (["x" * 64] * PAGES, ["ab"] * PAGES, [key[:-2] for key in filled.keys]):
        assert backend.batch_set_v1(odd, filled.indices()) == [False] * PAGES
        assert backend.batch_get_v1(odd, filled.indices()) == [False] * PAGES
        assert backend.batch_exists(odd) == 0
        assert backend.exists(odd[0]) is False


def test_a_call_without_pages_moves_nothing(attach: Attach) -> None:
    backend = attach(FilledPool(MHA, "page_first"))
    nothing = torch.zeros(0, dtype=torch.int64)
    assert backend.batch_get_v1([], nothing) == []
    assert backend.batch_set_v1([], nothing) == []
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v2([]) == backend.batch_set_v2([]) == {}
    empty = PoolTransfer(name=PoolName.SWA, host_indices=nothing, keys=[])
    assert backend.batch_get_v2([empty]) == backend.batch_set_v2([empty]) == {"swa": []}
    assert backend.batch_get([], []) == []
    assert backend.batch_set([], []) is True
