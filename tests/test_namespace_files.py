"""A namespace's file that was lost or damaged is whole again once the namespace is used, and a clear holds from then on."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import gdsstore
from gdsstore.directory import StoreDirectory
from gdsstore.engines.posix import PosixEngine
from gdsstore.files import write_atomic


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


@pytest.mark.parametrize("other", ["describes", "clears"])
def test_a_clear_holds_though_somebody_else_writes_the_file_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Two processes that start at once describe the same namespace, and one of them clears it first of all."""
    one, two = StoreDirectory(tmp_path), StoreDirectory(tmp_path)
    one.prepare()
    namespace = gdsstore.Namespace("m", gdsstore.PageLayout.opaque(4096))
    if other == "clears":
        one.describe_namespace(namespace)
    writes, go_on = threading.Event(), threading.Event()

    def late(path: Path, content: bytes) -> None:
        if threading.current_thread() is slow:
            writes.set()
            go_on.wait(1.0)  # the other one is through by then, or waits for us
        write_atomic(path, content)

    monkeypatch.setattr("gdsstore.directory.write_atomic", late)
    work = one.describe_namespace if other == "describes" else lambda it: one.mark_cleared(it.digest, 3)
    slow = threading.Thread(target=work, args=(namespace,))
    slow.start()
    assert writes.wait(60)
    two.describe_namespace(namespace)
    two.mark_cleared(namespace.digest, 7)
    go_on.set()
    slow.join(60)
    assert two.cleared() == {namespace.digest: 7}


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
