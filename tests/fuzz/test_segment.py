"""Fuzz: reading a segment's superblock and record table, by the rebuild, by verify, and by what buries pages."""

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
    from gdsstore.catalog.records import SegmentState
    from gdsstore.catalog.recovery import scan_segment
    from gdsstore.errors import GdsStoreError
    from gdsstore.verify.result import Damage
    from gdsstore.verify.table import read_table
    from gdsstore.volume.format import Geometry, Superblock
    from gdsstore.volume.tombstones import bury
    from gdsstore.volume.volume import Volume

import numpy as np  # noqa: E402

from tests.fuzz.inputs import Choices  # noqa: E402
from tests.fuzz.segments import SPARSE_BYTES, entries, tamper, write_segment  # noqa: E402

UUID = bytes(range(16))
SEGMENT_BYTES, SLOT_BYTES, ID, GENERATION = 64 << 10, 4096, 3, 77


def one_input(data: bytes) -> None:
    choices = Choices(data)
    geometry = Geometry.of(SEGMENT_BYTES, SLOT_BYTES)
    table = entries(choices, geometry.slot_count, UUID, GENERATION, ID)
    content = tamper(choices, Superblock(UUID, ID, GENERATION, _geometry(choices)), table)
    length = choices.one((SEGMENT_BYTES, SEGMENT_BYTES, SEGMENT_BYTES, *SPARSE_BYTES))
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="gdsstore-fuzz-"))
    try:
        volume = Volume(0, directory)
        volume.prepare()
        write_segment(volume.segment_path(ID), content, length)
        _decode(content)
        _scan(volume)
        _verify(volume)
        slots = np.array([choices.below(64) for _ in range(choices.below(5))], np.uint32)
        _bury(volume, geometry, np.unique(slots))
    finally:
        shutil.rmtree(directory)


def _geometry(choices: Choices) -> Geometry:
    """Mostly the store's; else one that is right in itself, and large."""
    if choices.below(3) < 2:
        return Geometry.of(SEGMENT_BYTES, choices.one((SLOT_BYTES, SLOT_BYTES, 8192)))
    segment_bytes = choices.one((1 << 30, 1 << 38, (1 << 40) + 4096, 1 << 43))
    return Geometry.of(segment_bytes, choices.one((SLOT_BYTES, SLOT_BYTES, 8192, 1 << 15, 1 << 20)))


def _decode(content: bytes) -> None:
    try:
        decoded = Superblock.decode(content, "here")
    except GdsStoreError:
        return
    geometry = decoded.geometry
    assert geometry.slot_count > 0
    assert geometry.data_offset + geometry.slot_count * geometry.slot_bytes <= geometry.segment_bytes


def _scan(volume: Volume) -> None:
    found = scan_segment(volume, ID, UUID, SEGMENT_BYTES)
    assert (found.row.state is SegmentState.LOST) == bool(found.problem)
    if found.entries is None:
        return
    slots = found.entries["slot"]
    assert len(np.unique(slots)) == len(slots)
    assert found.row.slot_count <= SEGMENT_BYTES // 4096, (
        "more slots than the heat file has stamps for a segment"
    )
    assert found.row.filled <= found.row.slot_count
    assert (found.entries["generation"] == found.row.generation).all()


def _verify(volume: Volume) -> None:
    table = read_table(volume, ID, UUID, SEGMENT_BYTES)
    if not isinstance(table, Damage):
        assert len(table.entries) == table.superblock.geometry.slot_count
        assert not (table.live & table.damaged).any()


def _bury(volume: Volume, geometry: Geometry, slots: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> None:
    before = volume.segment_path(ID).stat().st_size
    try:
        bury(volume, ID, geometry, GENERATION, slots, UUID, 10**18)
    except GdsStoreError:
        return
    assert volume.segment_path(ID).stat().st_size == before


test_damaged_segments_are_read_or_refused = quickly(one_input, 300)

if __name__ == "__main__":
    fuzz(one_input)
