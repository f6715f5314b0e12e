"""A real process shares its host cache with this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gdsstore import PageStatus, Store
from tests.store.helpers import WAIT_S, check, load, make_keys, opaque, save, small_store, truth
from tests.store.shared_tiers import ProcessTier, daemon, link

KEYS = make_keys(60)
PAGE = 8192
CACHE_PAGES = (8 << 20) // PAGE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "s") as opened:
        assert save(opaque(opened), KEYS).all_ok
        yield opened


@pytest.fixture
def node(store: Store) -> Iterator[ProcessTier]:
    with daemon(store.directory.root) as tier:
        link(store, tier)
        yield tier


def from_shared(store: Store) -> int:
    return int(store.stats().get("pages_loaded_from_shared", 0))


def test_what_the_daemon_prefetched_is_loaded_from_its_memory(store: Store, node: ProcessTier) -> None:
    pages = opaque(store)
    assert pages.prefetch(KEYS[:50]).wait(WAIT_S)
    assert check(pages, KEYS).all_ok
    assert from_shared(store) == 50
    assert store.stats()["drive_bytes_read"] == 10 * PAGE
    assert node.leases == 0
    stats = node.ask("stats")
    assert (stats["lent"], stats["lent_bytes"], stats["pins"]) == (50, 0, 0)


def test_lent_pages_stay_while_the_daemon_brings_others(store: Store, node: ProcessTier) -> None:
    pages, others = opaque(store), make_keys(2 * CACHE_PAGES, "others")
    for part in np.array_split(others, 8):
        assert save(pages, part).all_ok
    assert node.prefetch(pages.digest, KEYS, 5.0)
    lease = node.lease(pages.digest, KEYS, None)  # type: ignore[arg-type]
    assert lease is not None
    assert lease.found.all()
    for part in np.array_split(others, 8):
        assert node.prefetch(pages.digest, part, 5.0)
    offset = (lease.address - np.uint64(node.view.address)).astype(np.int64)
    got = node.view.array[offset[:, None] + np.arange(PAGE)]
    assert (got == truth(KEYS, PAGE)).all()
    lease.close()
    for part in np.array_split(others, 8):
        assert node.prefetch(pages.digest, part, 5.0)
    assert check(pages, KEYS).all_ok
    assert from_shared(store) < 60, "what was given back makes room"


def test_a_client_cannot_pin_the_whole_cache(store: Store, node: ProcessTier) -> None:
    pages, many = opaque(store), make_keys(CACHE_PAGES - 100, "many")
    for part in np.array_split(many, 8):
        assert save(pages, part).all_ok
        assert node.prefetch(pages.digest, part, 5.0)
    lease = node.lease(pages.digest, many, None)  # type: ignore[arg-type]
    assert lease is not None
    held = int(lease.found.sum())
    assert 0 < held <= CACHE_PAGES // 2
    assert lease.found[:held].all(), "the head of the prefix is the part that is of use"
    second = node.lease(pages.digest, many[:10], None)  # type: ignore[arg-type]
    assert second is not None
    assert not second.found.any()
    lease.close()
    third = node.lease(pages.digest, many[:10], None)  # type: ignore[arg-type]
    assert third is not None
    assert third.found.all()


def test_pages_that_were_saved_anew_leave_the_daemons_cache(store: Store, node: ProcessTier) -> None:
    pages, other = opaque(store), truth(make_keys(60, "other bytes"), PAGE)
    assert pages.prefetch(KEYS).wait(WAIT_S)
    assert pages.delete(KEYS).all()
    assert load(pages, KEYS)[0].count(PageStatus.MISS_ABSENT) == 60
    gone = node.lease(pages.digest, KEYS, None)  # type: ignore[arg-type]
    assert gone is not None
    assert not gone.found.any(), "nobody can check what the catalog does not have"
    stats = node.ask("stats")
    assert (stats["lent_bytes"], stats["lent"], stats["hits"], stats["misses"]) == (0, 0, 0, 60)
    assert pages.save(KEYS, other).result(WAIT_S).all_ok
    result, got = load(pages, KEYS)
    assert result.all_ok
    assert (got == other).all()
    assert from_shared(store) == 0
    assert pages.prefetch(KEYS).wait(WAIT_S)
    result, got = load(pages, KEYS)
    assert (got == other).all()
    assert from_shared(store) == 60


def test_a_daemon_that_is_killed_leaves_its_memory_and_loads_go_on(store: Store, node: ProcessTier) -> None:
    pages = opaque(store)
    assert pages.prefetch(KEYS).wait(WAIT_S)
    lease = node.lease(pages.digest, KEYS, None)  # type: ignore[arg-type]
    assert lease is not None
    assert lease.found.all()
    node.process.send_signal(signal.SIGKILL)
    node.process.wait(WAIT_S)
    offset = (lease.address - np.uint64(node.view.address)).astype(np.int64)
    assert (node.view.array[offset[:, None] + np.arange(PAGE)] == truth(KEYS, PAGE)).all()
    lease.close()
    for _ in range(3):
        assert check(pages, KEYS).all_ok
    assert store.stats()["drive_bytes_read"] == 3 * 60 * PAGE
    assert pages.prefetch(KEYS).wait(WAIT_S)


def test_a_daemon_that_dies_between_a_lease_and_its_copy_costs_nothing(
    store: Store, node: ProcessTier
) -> None:
    pages = opaque(store)
    assert pages.prefetch(KEYS).wait(WAIT_S)
    lease = node.lease

    def last(*given: object) -> object:
        found = lease(*given)  # type: ignore[arg-type]
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait(WAIT_S)
        return found

    node.lease = last  # type: ignore[assignment]
    assert check(pages, KEYS).all_ok
    assert from_shared(store) == 60
