"""Wherever a bit of what a segment holds flips, verification names the file, the kind and the slot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.store.helpers import flip, make_keys, opaque, save, segments, small_store
from tests.verify.rig import DATA_OFFSET, offline

FLIPS = 60
SLOTS, SLOT_BYTES = 16, 61_440  # of segments of 1 MiB


def expected(byte: int) -> tuple[str, int | None]:
    if byte < 4096:
        return "superblock", None
    if byte < DATA_OFFSET:
        return "entry", (byte - 4096) // 128
    return "payload", (byte - DATA_OFFSET) // SLOT_BYTES


def test_every_single_flip_is_found_where_it_is(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        # 60,000 bytes: the padding behind a page is covered by its checksum as well.
        save(opaque(store, 60_000), make_keys(2 * SLOTS), 60_000)
    assert len(segments(tmp_path)) == 2
    rng = np.random.default_rng(5)
    used = DATA_OFFSET + SLOTS * SLOT_BYTES
    places = [
        *rng.integers(0, 4096, FLIPS // 3),
        *rng.integers(4096, 4096 + SLOTS * 128, FLIPS // 3),
        *rng.integers(DATA_OFFSET, used, FLIPS // 3),
    ]
    victim = segments(tmp_path)[1]
    for byte in (int(place) for place in places):
        bit = 8 * byte + int(rng.integers(8))
        flip(victim, bit)
        (damage,) = offline(tmp_path).damaged
        kind, slot = expected(byte)
        assert (damage.file, damage.kind, damage.slot) == (str(victim), kind, slot), bit
        flip(victim, bit)
    assert offline(tmp_path).damaged == []
