"""Small files are replaced whole or not at all, and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gdsstore.files import read_small, write_atomic
from tests.store.helpers import check, make_keys, opaque, save, small_store

KEYS = make_keys(20)


def test_a_small_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_atomic(path, b"old")

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    def short(*_: Any) -> int:
        return 1

    for name, fake in (("write", fail), ("write", short), ("fsync", fail), ("rename", fail)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fake)
            with pytest.raises(OSError, match=r"No space|full"):
                write_atomic(path, b"new")
        assert read_small(path) == b"old"
        assert [file.name for file in tmp_path.iterdir()] == ["f"]
    write_atomic(path, b"new")
    assert read_small(path) == b"new"


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    closed = tmp_path / "s"
    with small_store(closed) as store:
        assert save(opaque(store), KEYS).all_ok
    left = [
        closed / "state.json.1-2.new",
        closed / "namespaces" / "ab.json.1-2.new",
        closed / "segments" / "00000099.partial",
    ]
    for path in left:
        path.write_bytes(b"half")
    with small_store(closed) as store:
        assert check(opaque(store), KEYS).all_ok
    assert not any(path.exists() for path in left)
