"""A store beside a daemon: its loads come from the shared memory, and from the drives when the daemon is gone."""

from __future__ import annotations

from pathlib import Path

from gdsstore.bound import BoundNamespace
from gdsstore.store import Store
from tests.service.daemons import filled, serving, until
from tests.store.helpers import U8, check, make_keys, opaque, small_store


def from_shared(store: Store) -> int:
    return int(store.stats().get("pages_loaded_from_shared", 0))


def loads_from_shared(store: Store, namespace: BoundNamespace, keys: U8) -> bool:
    before = from_shared(store)
    assert check(namespace, keys).all_ok  # every byte is compared, wherever it comes from
    return from_shared(store) == before + len(keys)


def prefetched_loads_from_shared(store: Store, namespace: BoundNamespace, keys: U8) -> bool:
    namespace.prefetch(keys, deadline_s=60).wait(60)
    return loads_from_shared(store, namespace, keys)


def test_loads_go_on_when_the_daemon_is_killed_and_use_the_next_one(tmp_path: Path) -> None:
    filled(tmp_path / "s")[0].close()
    with small_store(tmp_path / "s") as store:
        namespace = opaque(store)
        keys = make_keys(64)
        assert not loads_from_shared(store, namespace, keys)
        for _ in range(2):
            with serving(tmp_path / "s") as daemon:
                until(lambda: store.node is not None)
                until(lambda: prefetched_loads_from_shared(store, namespace, keys))
                daemon.kill()
                assert check(namespace, keys).all_ok
