"""Format version 1, byte for byte. Users' drives hold it: a change here means a new format version, not a new golden file."""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path

import numpy as np
import pytest

from gdsstore.volume.format import ENTRY, SUPERBLOCK_BYTES, TABLE_OFFSET, Superblock, entry_salt, intact
from tests.store.helpers import small_store
from tests.volume import golden_segment as golden


@pytest.fixture(scope="module")
def pinned() -> dict[str, object]:
    content: dict[str, object] = json.loads(golden.GOLDEN.read_text())
    return content


def test_the_format_is_still_the_pinned_one(pinned: dict[str, object]) -> None:
    assert golden.describe(golden.segment()) == pinned


def test_the_pinned_bytes_are_still_understood(pinned: dict[str, object]) -> None:
    entries = np.frombuffer(bytes.fromhex("".join(pinned["entries"])), ENTRY)  # type: ignore[call-overload]
    start, crc = bytes.fromhex(str(pinned["superblock_start"])), bytes.fromhex(str(pinned["superblock_crc"]))
    superblock = Superblock.decode(start.ljust(SUPERBLOCK_BYTES - 4, b"\0") + crc, "golden")
    assert superblock.store_uuid == golden.STORE_UUID
    assert superblock.generation == golden.CLOCK_NS
    assert (superblock.geometry.slot_bytes, superblock.geometry.slot_count) == (8192, 125)
    assert intact(entries, entry_salt(superblock.store_uuid)).all()
    assert np.array_equal(entries["key"], golden.keys())
    assert entries["flags"].tolist() == [1, 3, 1]


def test_a_store_writes_the_pinned_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: dict[str, object]
) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(bytes=golden.STORE_UUID))
    monkeypatch.setattr("time.time_ns", lambda: golden.CLOCK_NS)
    with small_store(tmp_path / "s", capacity="64MiB") as store:
        namespace = store.namespace(golden.NAMESPACE)
        assert namespace.save(golden.keys(), golden.pages()).result().all_ok
        assert namespace.delete(golden.keys()[golden.DELETED_PAGE :][:1]).tolist() == [True]
    raw = (tmp_path / "s" / "segments" / "00000000.seg").read_bytes()
    written = golden.describe(raw)
    assert written == pinned, next(
        (name, written[name], pinned[name]) for name in pinned if written[name] != pinned[name]
    )
    assert hashlib.sha256(raw).hexdigest() == pinned["sha256"]
    assert len(raw) == golden.SEGMENT_BYTES
    assert raw[TABLE_OFFSET:][: ENTRY.itemsize].hex() == pinned["entries"][0]  # type: ignore[index]
