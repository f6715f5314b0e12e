"""One daemon for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gdsstore.bound import BoundNamespace
from gdsstore.node import client as client_module
from gdsstore.node.client import NodeClient
from gdsstore.store import Store
from tests.service.daemons import PATIENCE_S, Daemon, filled, serving
from tests.store.helpers import U8


@dataclass(frozen=True, slots=True)
class Node:
    """A running daemon, and the same store open here with pages in it."""

    daemon: Daemon
    store: Store
    namespace: BoundNamespace
    keys: U8
    directory: Path


@pytest.fixture(scope="package", autouse=True)
def patient() -> Iterator[None]:
    """A loaded machine is no daemon that hangs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "FIRST_CONNECT_S", PATIENCE_S)
        patch.setattr(client_module, "CONNECT_S", PATIENCE_S)
        yield


@pytest.fixture(scope="package")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    path = tmp_path_factory.mktemp("node") / "s"
    store, namespace, keys = filled(path)
    with store, serving(path, "--http", "127.0.0.1:0") as daemon:
        yield Node(daemon, store, namespace, keys, path)


@pytest.fixture
def client(node: Node) -> Iterator[NodeClient]:
    made = NodeClient(node.directory, store_uuid=node.store.uuid)
    assert made.connected
    yield made
    made.close()
