"""One store on several drives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gdsstore import ArgumentError, Store, StoreError
from gdsstore.catalog.records import SegmentState
from tests.store.helpers import WAIT_S, check, forget_catalog, make_keys, opaque, save, segments, small_store


def test_pages_are_striped_over_volumes_and_found_again(tmp_path: Path) -> None:
    volumes = [tmp_path / "a", tmp_path / "b"]
    with small_store(volumes) as store:
        for turn in range(6):
            assert save(opaque(store), make_keys(100, turn)).all_ok
    assert all(segments(volume) for volume in volumes)
    for paths in (volumes, volumes[:1], volumes[0]):
        forget_catalog(volumes[0])
        with small_store(paths) as store:
            assert all(check(opaque(store), make_keys(100, turn)).all_ok for turn in range(6))


def test_a_volume_that_is_not_mounted_is_an_error_and_nothing_is_written_there(tmp_path: Path) -> None:
    volumes = [tmp_path / "a", tmp_path / "b"]
    small_store(volumes).close()
    volumes[1].rename(tmp_path / "away")
    for capacity in ("64MiB", None):
        (volumes[0] / "state.json").unlink(missing_ok=True)
        with pytest.raises(StoreError, match="mounted"):
            small_store(volumes[0], capacity=capacity)
        assert not volumes[1].exists()
    volumes[1].mkdir()
    (volumes[1] / "volume.json").write_text('{"uuid": "00", "volume": 1}')
    with pytest.raises(StoreError, match="another store"):
        small_store(volumes[0])
    assert sorted(path.name for path in volumes[1].iterdir()) == ["volume.json"]


def test_volumes_in_another_order_are_refused(tmp_path: Path) -> None:
    volumes = [tmp_path / name for name in "abc"]
    small_store(volumes).close()
    with pytest.raises(ArgumentError, match="in this order"):
        small_store([volumes[0], volumes[2], volumes[1]])
    with pytest.raises(ArgumentError, match="in this order"):
        small_store(volumes[:2])


@pytest.mark.parametrize("capacity", ["64MiB", "16MiB"], ids=["it grows", "it reclaims"])
def test_segments_made_ahead_do_not_spoil_the_striping(tmp_path: Path, capacity: str) -> None:
    """One that is ready on the other drive is no reason to leave a half-filled one behind, or a drive unused."""
    volumes = [tmp_path / "a", tmp_path / "b"]
    with small_store(volumes, capacity=capacity, free_segments=1, maintain_interval_s=0.01) as store:
        for turn in range(80):
            assert save(opaque(store), make_keys(30, turn)).all_ok
            until_some_are_free(store)
        with store.catalog.read() as txn:
            rows = [row for row in store.catalog.segments(txn) if row.filled]
        assert sum(row.state is SegmentState.OPEN for row in rows) <= 2
        used = [sum(row.filled for row in rows if row.volume == volume) for volume in (0, 1)]
        assert min(used) > max(used) / 3


def until_some_are_free(store: Store) -> None:
    end = time.monotonic() + WAIT_S
    while store.stats()["segments"]["free"] == 0:
        assert time.monotonic() < end, "the maintainer makes none ready"
        time.sleep(0.001)
