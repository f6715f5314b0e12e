"""Which prefixes several pools can restore together, against their definition written down plainly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cpu_fixtures import MHA, MLA
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from sglang_backend import hits
from tests.sglang_backend.backends import KV, FilledPool, make_backend, make_keys

PAGES = 8
Presence = list[bool]
presences = st.lists(st.booleans(), max_size=24)


def mask(present: Presence) -> hits.Mask:
    return np.array(present, np.bool_)


def all_there(present: Presence, length: int) -> bool:
    return all(present[page] for page in range(length))


def last_there(present: Presence, length: int, window: int) -> bool:
    return all(present[page] for page in range(max(0, length - max(1, window)), length))


@given(presences)
def test_leading_counts_up_to_the_first_gap(present: Presence) -> None:
    expected = max(length for length in range(len(present) + 1) if all_there(present, length))
    assert hits.leading(mask(present)) == expected


@given(presences)
def test_all_pages_needs_every_page_of_a_prefix(present: Presence) -> None:
    lengths = range(1, len(present) + 1)
    assert hits.all_pages(mask(present)).tolist() == [all_there(present, n) for n in lengths]


@given(presences, st.integers(0, 30))
def test_trailing_pages_needs_the_last_ones_of_a_prefix(present: Presence, window: int) -> None:
    lengths = range(1, len(present) + 1)
    assert hits.trailing_pages(mask(present), window).tolist() == [
        last_there(present, n, window) for n in lengths
    ]


@given(
    st.integers(0, 24).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1)
    )
)
def test_together_is_what_every_pool_can_restore(pools: list[Presence]) -> None:
    lengths = range(1, len(pools[0]) + 1)
    assert hits.together(map(mask, pools)) == [n for n in lengths if all(pool[n - 1] for pool in pools)]
    assert hits.longest(mask(pools[0])) == max((n for n in lengths if pools[0][n - 1]), default=0)


class Server:
    """A backend with a KV pool and two others, into which single pages are saved."""

    def __init__(self, folder: Path) -> None:
        self.pools = {
            KV: FilledPool(MHA, "page_first", PAGES),
            "swa": FilledPool(MHA, "page_first_direct", PAGES),
            "mamba": FilledPool(MLA, "page_first", PAGES),
        }
        kv, *others = self.pools.items()
        self.backend = make_backend(folder, [kv[1], *others], {}, {})

    def save(self, name: str, keys: list[str], present: Presence) -> None:
        pages = [page for page, there in enumerate(present) if there]
        given = PoolTransfer(
            name=PoolName(name),
            host_indices=self.pools[name].indices(pages),
            keys=[keys[page] for page in pages],
        )
        assert self.backend.batch_set_v2([given]) == {name: [True] * len(pages)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("hits") / "store")
    yield server
    server.backend.close()


mostly = st.sampled_from([True, True, True, False])
pages_there = st.lists(mostly, min_size=PAGES, max_size=PAGES)
few = st.integers(0, 3)


@dataclass(frozen=True)
class Sidecar:
    """A pool's policy, the pages it has, and of its transfer the number of keys and the geometry of its blocks."""

    policy: PoolHitPolicy
    present: Presence
    keys: int
    block_pages: int
    group_pages: int

    def lengths(self, limit: int) -> list[int]:
        """Which prefixes of up to `limit` pages the pool alone can restore."""
        if self.policy == PoolHitPolicy.TRAILING_PAGES:
            return [n for n in range(1, limit + 1) if last_there(self.present, n, self.keys)]
        if self.policy == PoolHitPolicy.ALL_PAGES:
            return [n for n in range(1, limit + 1) if all_there(self.present, n)]
        groups = 0
        while self.group_pages and (groups + 1) * self.group_pages <= min(self.keys, PAGES):
            if not all_there(self.present, (groups + 1) * self.group_pages):
                break
            groups += 1
        return list(range(1, min(groups * self.block_pages, limit) + 1))


a_sidecar = st.builds(Sidecar, st.sampled_from(PoolHitPolicy), pages_there, st.integers(0, PAGES), few, few)
sidecars = st.fixed_dictionaries({}, optional={"swa": a_sidecar, "mamba": a_sidecar})


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kv=pages_there, beside=sidecars)
def test_a_query_of_all_pools_says_what_the_stored_pages_allow(
    server: Server, kv: Presence, beside: dict[str, Sidecar]
) -> None:
    keys = make_keys(PAGES)
    server.save(KV, keys, kv)
    for name, pool in beside.items():
        server.save(name, keys, pool.present)
    transfers = [
        PoolTransfer(
            name=PoolName(name),
            keys=keys[: pool.keys],
            hit_policy=pool.policy,
            block_pages=pool.block_pages,
            group_pages=pool.group_pages,
        )
        for name, pool in beside.items()
    ]

    leading = max(n for n in range(PAGES + 1) if all_there(kv, n))
    alone = {name: pool.lengths(leading) for name, pool in beside.items()}
    limiting = [alone[name] for name, pool in beside.items() if pool.policy != PoolHitPolicy.BLOCK_GROUPS]
    together = sorted(set(range(1, leading + 1)).intersection(*limiting))
    expected = {
        name: max(lengths) for name, lengths in (alone | {KV: range(1, leading + 1)}).items() if lengths
    }

    result = server.backend.batch_exists_v2(keys, transfers)
    assert result.restorable_prefix_pages == together
    assert result.kv_hit_pages == max(together, default=0)
    assert result.extra_pool_hit_pages == expected
    assert server.backend.batch_exists(keys) == leading


@pytest.mark.parametrize(
    ("block_pages", "group_pages", "covered"), [(4, 2, 8), (0, 2, 0), (4, 0, 0), (2, 3, 2)]
)
def test_block_groups_count_only_whole_groups(block_pages: int, group_pages: int, covered: int) -> None:
    present = mask([True] * 5 + [False] + [True] * 2)
    assert hits.block_groups(present, block_pages, group_pages) == covered
    assert hits.block_groups(mask([]), block_pages, group_pages) == 0


def test_a_query_without_keys_finds_nothing(server: Server) -> None:
    result = server.backend.batch_exists_v2([], [PoolTransfer(name=PoolName.SWA, keys=[])])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (0, {})
