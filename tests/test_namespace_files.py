"""A namespace's file that was lost or damaged is whole again once the namespace is used, and a clear holds from then on."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import gdsstore
from gdsstore.engines.posix import PosixEngine


def open_store(path: Path) -> gdsstore.Store:
    return gdsstore.open(path, capacity="8MiB", segment_bytes="1MiB", engine=PosixEngine(1))


@pytest.mark.parametrize(
    "content", [None, b"", b"\xff\xfe", b"{}", b"[]", b'{"describes": {}}', b'{"cleared_before": 1}']
)
def test_a_clear_holds_though_the_file_was_damaged_before(tmp_path: Path, content: bytes | None) -> None:
    layout = gdsstore.PageLayout.opaque(4096)
    keys = [bytes([i]) * 32 for i in range(4)]
    with open_store(tmp_path) as store:
        namespace = store.namespace(model="m", layout=layout)
        assert namespace.save(keys, np.ones((4, 4096), np.uint8)).result(30).all_ok
    (file,) = (tmp_path / "namespaces").iterdir()
    file.unlink() if content is None else file.write_bytes(content)
    with open_store(tmp_path) as store:
        assert store.namespace(model="m", layout=layout).clear() == 4
        assert len(store.directory.namespaces()) == 1
    shutil.rmtree(tmp_path / "catalog")
    with open_store(tmp_path) as store:
        assert store.namespace(model="m", layout=layout).lookup(keys) == 0


@pytest.mark.parametrize("drop", ["clear", "delete"])
def test_a_store_without_a_page_left_is_rebuilt_empty(tmp_path: Path, drop: str) -> None:
    layout = gdsstore.PageLayout.opaque(4096)
    keys = [bytes([i]) * 32 for i in range(4)]
    with open_store(tmp_path) as store:
        namespace = store.namespace(model="m", layout=layout)
        assert namespace.save(keys, np.ones((4, 4096), np.uint8)).result(30).all_ok
        if drop == "clear":
            namespace.clear()
        else:
            namespace.delete(keys)
    shutil.rmtree(tmp_path / "catalog")
    with open_store(tmp_path) as store:
        namespace = store.namespace(model="m", layout=layout)
        assert not namespace.contains(keys).any()
        assert namespace.save(keys, np.ones((4, 4096), np.uint8)).result(30).all_ok
