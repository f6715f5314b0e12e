"""10,000 single bits flipped on the drive: each is a miss, or harmless, or an error that names the file. Never wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gdsstore import PageStatus
from gdsstore.volume.format import ENTRY_BYTES, SUPERBLOCK_BYTES, TABLE_OFFSET
from tests.store.helpers import (
    check,
    flip,
    forget_catalog,
    locate,
    logged,
    make_keys,
    memory_directory,
    opaque,
    save,
    segments,
    small_store,
    statuses,
)

PAYLOAD_FLIPS, TABLE_FLIPS, SUPERBLOCK_FLIPS = 6000, 3000, 1000
RNG_SEED = 7


@pytest.fixture
def memory_path() -> Iterator[Path]:
    with memory_directory() as directory:
        yield directory


@pytest.mark.parametrize("nbytes", [8192, 5000], ids=["whole blocks", "padded"])
def test_a_flipped_bit_of_a_payload_is_a_miss(
    tmp_path: Path, nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(RNG_SEED)
    path, group = tmp_path / "s", 300
    record = 8192
    with small_store(path, capacity="40MiB") as store:
        namespace = opaque(store, nbytes)
        kept = make_keys(20, "kept")
        assert save(namespace, kept, nbytes).all_ok
        for turn in range(PAYLOAD_FLIPS // 2 // group):
            keys = make_keys(group, turn % 2)
            save(namespace, keys, nbytes)
            segment, offset = locate(namespace, keys)
            bits = rng.integers(0, record * 8, group)
            for number, start, bit in zip(segment.tolist(), offset.tolist(), bits.tolist(), strict=True):
                flip(path / "segments" / f"{number:08d}.seg", start * 8 + bit)
            caplog.clear()
            assert check(namespace, keys, nbytes).reasons() == {"MISS_CHECKSUM": group}
            assert all(f"{number:08d}.seg" in caplog.text for number in np.unique(segment))
            # And it is gone for good: not found again, not there after a restart, free to be saved anew.
            assert not namespace.contains(keys).any()
            assert check(namespace, keys, nbytes).reasons() == {"MISS_ABSENT": group}
            assert check(namespace, kept, nbytes).all_ok
        assert store.stats()["damaged_pages"] == PAYLOAD_FLIPS // 2
    forget_catalog(path)
    with small_store(path) as store:
        assert not opaque(store, nbytes).contains(keys).any()
        assert check(opaque(store, nbytes), kept, nbytes).all_ok


def test_a_flipped_bit_of_a_record_table_costs_that_page_at_most(memory_path: Path) -> None:
    rng = np.random.default_rng(RNG_SEED)
    path, group = memory_path / "s", 150
    keys = make_keys(300)
    deleted = make_keys(10, "deleted")
    with small_store(path) as store:
        assert save(opaque(store), np.concatenate([keys, deleted])).all_ok
        assert opaque(store).delete(deleted).all()
        segment, offset = locate(opaque(store), keys)
        geometry = opaque(store)._drive.geometry
    slot = (offset - geometry.data_offset) // geometry.slot_bytes
    everything = len(segments(path)) * geometry.slot_count
    for _ in range(TABLE_FLIPS // group):
        entries = rng.choice(everything, group, replace=False)
        bits = rng.integers(0, ENTRY_BYTES * 8, group)
        places = [
            (
                path / "segments" / f"{entry // geometry.slot_count:08d}.seg",
                entry % geometry.slot_count * ENTRY_BYTES * 8 + bit,
            )
            for entry, bit in zip(entries.tolist(), bits.tolist(), strict=True)
        ]
        for file, bit in places:
            flip(file, TABLE_OFFSET * 8 + bit)
        forget_catalog(path)
        hit = np.isin(segment * geometry.slot_count + slot, entries)
        assert hit.any()
        with small_store(path) as store:
            namespace = opaque(store)
            result = check(namespace, keys)
            assert np.array_equal(result.ok, ~hit)
            assert (result.status[hit] == PageStatus.MISS_ABSENT).all()
            found = namespace.contains(
                deleted
            )  # a tombstone that was hit is a tombstone no more, and nothing else either
            assert not found.any()
            assert store.catalog.stats()["pages"] == np.count_nonzero(~hit)
        for file, bit in places:
            flip(file, TABLE_OFFSET * 8 + bit)
    forget_catalog(path)
    with small_store(path) as store:
        assert check(opaque(store), keys).all_ok


def test_a_flipped_bit_of_a_superblock_costs_that_segment_at_most_and_names_it(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(RNG_SEED)
    path, group, nbytes = memory_path / "s", 20, 240_000
    keys = make_keys(100)
    with small_store(path) as store:
        assert save(opaque(store, nbytes), keys, nbytes).all_ok
        segment, _ = locate(opaque(store, nbytes), keys)
    files = segments(path)
    assert len(files) == 25
    for _ in range(SUPERBLOCK_FLIPS // group):
        chosen = rng.choice(len(files), group, replace=False)
        bits = rng.integers(0, SUPERBLOCK_BYTES * 8, group)
        for number, bit in zip(chosen.tolist(), bits.tolist(), strict=True):
            flip(files[number], bit)
        forget_catalog(path)
        caplog.clear()
        with small_store(path) as store:
            result = check(opaque(store, nbytes), keys, nbytes)
            hit = np.isin(segment, chosen)
            assert np.array_equal(result.ok, ~hit)
            said = logged(caplog.records)
            assert all(str(files[number]) in said for number in chosen)
            assert store.stats()["segments"]["lost"] == group
        for number, bit in zip(chosen.tolist(), bits.tolist(), strict=True):
            flip(files[number], bit)
    forget_catalog(path)
    with small_store(path) as store:
        assert check(opaque(store, nbytes), keys, nbytes).all_ok


def test_whole_records_that_change_places_are_misses(tmp_path: Path) -> None:
    """What a drive that mixes addresses up returns is intact, and wrong."""
    path = tmp_path / "s"
    keys = make_keys(100)
    with small_store(path) as store:
        namespace = opaque(store)
        assert save(namespace, keys).all_ok
        segment, offset = locate(namespace, keys)
        file = path / "segments" / f"{segment[0]:08d}.seg"
        with file.open("r+b") as raw:
            raw.seek(offset[10])
            one = raw.read(8192)
            raw.seek(offset[20])
            other = raw.read(8192)
            raw.seek(offset[10])
            raw.write(other)
            raw.seek(offset[20])
            raw.write(one)
        wrong = [
            number for number, status in enumerate(statuses(check(namespace, keys))) if status != "LOADED"
        ]
        assert wrong == [10, 20]


def test_without_verification_nothing_is_dropped_for_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "s"
    keys = make_keys(5)
    with small_store(path, verify=False) as store:
        namespace = opaque(store)
        assert save(namespace, keys).all_ok
        segment, offset = locate(namespace, keys)
        flip(path / "segments" / f"{segment[0]:08d}.seg", int(offset[0]) * 8)
        memory = np.zeros((5, 8192), np.uint8)
        assert namespace.load(keys, memory).result(60).all_ok
        assert namespace.contains(keys).all()
