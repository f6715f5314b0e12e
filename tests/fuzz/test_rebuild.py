"""Fuzz: rebuilding a catalog from segment files that say all kinds of things, alone and about each other."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.fuzz.harness import fuzz, instrumented, quickly  # noqa: E402

with instrumented():
    from gdsstore.catalog.index import Catalog
    from gdsstore.catalog.keys import index_keys
    from gdsstore.catalog.recovery import rebuild
    from gdsstore.volume.format import (
        ENTRY,
        FLAG_DELETED,
        FLAG_STORED,
        TABLE_OFFSET,
        Geometry,
        Superblock,
        entry_salt,
        intact,
    )
    from gdsstore.volume.volume import Volume

import numpy as np  # noqa: E402

from tests.fuzz.inputs import Choices  # noqa: E402
from tests.fuzz.segments import entries, tamper, write_segment  # noqa: E402

UUID = bytes(range(16))
SEGMENT_BYTES, SLOT_BYTES, SEGMENTS = 64 << 10, 4096, 3
GEOMETRY = Geometry.of(SEGMENT_BYTES, SLOT_BYTES)
NAMESPACES = [bytes([digest]) * 16 for digest in (0, 1)]
KEYS = np.repeat(np.arange(6, dtype=np.uint8)[:, None], 32, axis=1)


def one_input(data: bytes) -> None:
    choices = Choices(data)
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="gdsstore-fuzz-"))
    try:
        volumes = [Volume(number, directory / str(number)) for number in range(2)]
        for volume in volumes:
            volume.prepare()
        for number in range(SEGMENTS):
            _make(choices, choices.one(volumes), choices.one((number, number, number, 0)))
        cleared = {NAMESPACES[0]: choices.below(200)} if choices.below(2) else {}
        (directory / "catalog").mkdir()
        catalog = Catalog(directory / "catalog", 4 << 20)
        try:
            recovered = rebuild(
                catalog,
                volumes,
                UUID,
                SEGMENT_BYTES,
                cleared,
                lambda copies: np.array([choices.below(2) for _ in copies], np.bool_),
            )
            catalog.complete(UUID)
            _check(catalog, volumes, cleared, recovered.pages)
        finally:
            catalog.close()
    finally:
        shutil.rmtree(directory)


def _make(choices: Choices, volume: Volume, segment_id: int) -> None:
    generation = choices.one((5, 6, 1 << 63))
    table = entries(choices, GEOMETRY.slot_count, UUID, generation, segment_id)
    content = tamper(choices, Superblock(UUID, segment_id, generation, GEOMETRY), table)
    write_segment(volume.segment_path(segment_id), content, choices.one((SEGMENT_BYTES, SEGMENT_BYTES, 6000)))


def _check(catalog: Catalog, volumes: list[Volume], cleared: dict[bytes, int], pages: int) -> None:
    """Every page that the catalog has is one that an entry of that slot stands for: whole, of this use, not cleared."""
    with catalog.read() as txn:
        rows = {row.segment_id: row for row in catalog.segments(txn)}
    found = 0
    for digest in NAMESPACES:
        where = catalog.resolve(*index_keys(KEYS, digest))
        for number in np.flatnonzero(where.found).tolist():
            found += 1
            row = rows[int(where.segment[number])]
            raw = volumes[row.volume].segment_path(row.segment_id).read_bytes()
            entry = np.frombuffer(raw, ENTRY, 1, TABLE_OFFSET + 128 * int(where.slot[number]))
            assert intact(entry, entry_salt(UUID))[0]
            assert entry["generation"][0] == row.generation == where.generation[number]
            assert entry["flags"][0] & (FLAG_STORED | FLAG_DELETED) == FLAG_STORED
            assert (entry["key"][0] == KEYS[number]).all()
            assert entry["namespace"][0].tobytes() == digest
            assert entry["payload_bytes"][0] == where.payload_bytes[number] <= row.slot_bytes
            assert entry["checksum"][0] == where.checksum[number]
            assert entry["sequence"][0] > cleared.get(digest, 0)
    assert found <= pages


test_a_rebuild_believes_whole_entries_only = quickly(one_input, 100)

if __name__ == "__main__":
    fuzz(one_input)
