"""A drive that refuses an fdatasync: what it covered is not durable, whoever asks and however often."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

import gdsstore
from gdsstore.catalog import allocate
from gdsstore.waiting import Deadline

PAGE_BYTES = 16384


def keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def refuse(fd: int) -> None:
    raise OSError(errno.EIO, "refused")


def test_a_commit_after_a_failed_sync_does_not_call_the_same_segment_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gdsstore.open(tmp_path, capacity="64MiB", durability="commit", engine="posix") as store:
        namespace = store.namespace(model="m", layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
        pages = np.ones((4, PAGE_BYTES), np.uint8)
        run = store.pool.reserve(PAGE_BYTES, 1, Deadline(10))[0]  # another save, still under way
        with store.pool.writing(run):
            pass
        with monkeypatch.context() as patch:
            patch.setattr(allocate.os, "fdatasync", refuse)
            with pytest.raises(gdsstore.VolumeError, match="fdatasync"):
                store.sync()
        with pytest.raises(gdsstore.VolumeError, match="fdatasync"):
            store.pool.sync(Deadline(10))  # what the other save does before it commits
        store.pool.finish(run, failed=True)
        mine = keys(4)
        assert namespace.save(mine, pages).result(30).count(gdsstore.PageStatus.SAVED) == 4
        assert namespace.lookup(mine) == 4


def test_a_save_whose_sync_fails_is_not_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gdsstore.open(tmp_path, capacity="64MiB", durability="commit", engine="posix") as store:
        namespace = store.namespace(model="m", layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
        namespace.save(keys(1), np.ones((1, PAGE_BYTES), np.uint8)).result(30)  # makes the segment
        mine = keys(4)
        with monkeypatch.context() as patch:
            patch.setattr(allocate.os, "fdatasync", refuse)
            result = namespace.save(mine, np.ones((4, PAGE_BYTES), np.uint8)).result(30)
        assert result.count(gdsstore.PageStatus.FAILED_IO) == 4
        assert namespace.lookup(mine) == 0
