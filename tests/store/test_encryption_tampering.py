"""Whoever can write to the drive, checksums and all, can make pages miss, and cannot make them wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gdsstore import BoundNamespace, PageStatus
from gdsstore.sealing.cipher import HEAD_BYTES, SALT_BYTES, TAG_BYTES
from tests.store.helpers import WAIT_S, check, forget_catalog, load, make_keys, opaque, save, truth
from tests.store.sealed_helpers import OnDrive, flipped, sealed_store

KEYS = make_keys(8)
NBYTES = 5000
# The first and last byte of each part of a record.
PARTS = {
    "salt": (0, SALT_BYTES - 1),
    "nonce": (SALT_BYTES, HEAD_BYTES - 1),
    "ciphertext": (HEAD_BYTES, HEAD_BYTES + NBYTES - 1),
    "tag": (HEAD_BYTES + NBYTES, HEAD_BYTES + NBYTES + TAG_BYTES - 1),
    "padding": (HEAD_BYTES + NBYTES + TAG_BYTES, 8191),
}


def places(path: Path, *, weights: str = "", nbytes: int = NBYTES) -> list[OnDrive]:
    """Where the records of KEYS lie; they are saved where they are not there."""
    with sealed_store(path) as store:
        bound = opaque(store, nbytes, weights=weights)
        assert save(bound, KEYS, nbytes).all_ok
        return [OnDrive.of(bound, KEYS, i, nbytes) for i in range(len(KEYS))]


def after(path: Path, look: Callable[[BoundNamespace], None], **facts: str) -> None:
    """What is found once the catalog was made anew from what the drive says."""
    forget_catalog(path)
    with sealed_store(path) as store:
        look(opaque(store, NBYTES, **facts))


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_is_a_miss(tmp_path: Path, part: str) -> None:
    where = places(tmp_path / "s")
    for place, byte in zip(where, PARTS[part], strict=False):
        place.write(flipped(place.read(), byte))
    with sealed_store(tmp_path / "s") as store:
        result = check(opaque(store, NBYTES), KEYS, NBYTES)
        assert (result.status[:2] == PageStatus.MISS_CHECKSUM).all()
        assert result.ok[2:].all()
        assert not opaque(store, NBYTES).contains(KEYS[:2]).any()


@pytest.mark.parametrize("part", [part for part in PARTS if part != "padding"])
def test_a_flipped_bit_with_a_right_checksum_is_a_miss_and_leaves_nothing(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = places(tmp_path / "s")
    for place, byte in zip(where, PARTS[part], strict=False):
        place.forge(flipped(place.read(), byte))

    def look(bound: BoundNamespace) -> None:
        assert bound.lookup(KEYS) == len(KEYS), "the forged records are in the rebuilt catalog"
        result, memory = load(bound, KEYS, NBYTES)
        assert (result.status[:2] == PageStatus.MISS_CHECKSUM).all()
        assert result.ok[2:].all()
        assert not memory[:2].any(), "what the cipher wrote before it saw the tag is still there"
        assert "changed on the drive" in caplog.text
        # Dropped for good, and free to be saved anew.
        assert not bound.contains(KEYS[:2]).any()
        assert bound._store.stats()["damaged_pages"] == 2
        assert save(bound, KEYS, NBYTES).count(PageStatus.SAVED) == 2
        assert check(bound, KEYS, NBYTES).all_ok

    after(tmp_path / "s", look)


def test_forged_padding_changes_nothing(tmp_path: Path) -> None:
    where = places(tmp_path / "s")
    where[0].forge(flipped(where[0].read(), PARTS["padding"][0]))
    after(tmp_path / "s", lambda bound: None if check(bound, KEYS, NBYTES).all_ok else pytest.fail("a miss"))


def test_a_record_in_another_keys_place_is_a_miss(tmp_path: Path) -> None:
    where = places(tmp_path / "s")
    first, second = where[0].read(), where[1].read()
    where[0].forge(second)
    where[1].forge(first)

    def look(bound: BoundNamespace) -> None:
        result = check(bound, KEYS, NBYTES)
        assert (result.status[:2] == PageStatus.MISS_CHECKSUM).all()
        assert result.ok[2:].all()

    after(tmp_path / "s", look)


def test_a_record_of_another_namespace_is_a_miss(tmp_path: Path) -> None:
    mine, others = places(tmp_path / "s"), places(tmp_path / "s", weights="other")
    mine[0].forge(others[0].read())

    def look(bound: BoundNamespace) -> None:
        result = check(bound, KEYS, NBYTES)
        assert result.status[0] == PageStatus.MISS_CHECKSUM
        assert result.ok[1:].all()

    after(tmp_path / "s", look)


def test_a_record_of_another_store_with_the_same_key_is_a_miss(tmp_path: Path) -> None:
    mine, others = places(tmp_path / "s"), places(tmp_path / "other")
    mine[0].forge(others[0].read())

    def look(bound: BoundNamespace) -> None:
        assert check(bound, KEYS, NBYTES).status[0] == PageStatus.MISS_CHECKSUM

    after(tmp_path / "s", look)


def test_a_page_in_the_clear_does_not_pass_for_a_sealed_one(tmp_path: Path) -> None:
    where = places(tmp_path / "s")
    where[0].forge(truth(KEYS[:1], where[0].record_bytes).tobytes())

    def look(bound: BoundNamespace) -> None:
        assert check(bound, KEYS, NBYTES).status[0] == PageStatus.MISS_CHECKSUM

    after(tmp_path / "s", look)


def test_an_earlier_record_of_the_same_page_misses_unless_its_checksum_is_forged(tmp_path: Path) -> None:
    """docs/encryption.md says so: the key names the page's content, so what comes back is what was once saved under it."""
    old = places(tmp_path / "s")[0].read()
    newer = np.full((1, NBYTES), 7, np.uint8)
    with sealed_store(tmp_path / "s") as store:
        bound = opaque(store, NBYTES)
        assert bound.delete(KEYS[:1]).all()
        assert bound.save(KEYS[:1], newer).result(WAIT_S).all_ok
        place = OnDrive.of(bound, KEYS, 0, NBYTES)
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    place.write(old)
    with sealed_store(tmp_path / "s") as store:
        assert load(opaque(store, NBYTES), KEYS, NBYTES)[0].status[0] == PageStatus.MISS_CHECKSUM
    # With the table's help.
    again = OnDrive(
        tmp_path / "copy" / "segments" / place.file.name,
        place.offset,
        place.slot,
        place.record_bytes,
        place.payload_bytes,
        place.uuid,
    )
    again.forge(old)
    after(
        tmp_path / "copy", lambda bound: None if check(bound, KEYS, NBYTES).ok[0] else pytest.fail("a miss")
    )


def test_tampered_pages_do_not_enter_the_host_cache(tmp_path: Path) -> None:
    where = places(tmp_path / "s")
    where[0].forge(flipped(where[0].read(), HEAD_BYTES))
    forget_catalog(tmp_path / "s")
    with sealed_store(tmp_path / "s", host_cache="8MiB") as store:
        bound = opaque(store, NBYTES)
        handle = bound.prefetch(KEYS)
        assert handle.wait(WAIT_S)
        assert handle.progress.warm == len(KEYS) - 1
        assert store.stats()["host_cache"]["resident_records"] == len(KEYS) - 1
        assert check(bound, KEYS, NBYTES).loaded == len(KEYS) - 1
