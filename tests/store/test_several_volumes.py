"""One store on several drives."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdsstore import ArgumentError, StoreError
from tests.store.helpers import check, forget_catalog, make_keys, opaque, save, segments, small_store


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
