"""Who can reach the daemon, and that there is one."""

from __future__ import annotations

import os
import pwd
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gdsstore.errors import StoreBusyError, StoreError
from gdsstore.node import socket_file
from gdsstore.node.client import NodeClient
from gdsstore.node.errors import DaemonError
from gdsstore.service.listening import ListeningSocket, only_daemon
from tests.service.conftest import Node
from tests.service.daemons import Daemon, answered, soon
from tests.store.helpers import REPO, python, succeeded

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


def test_only_the_owner_can_open_the_socket(node: Node) -> None:
    for name in ("node.sock", "node.lock"):
        assert stat.S_IMODE((node.directory / name).lstat().st_mode) == 0o600
    assert list(node.directory.glob("*.new")) == []


@needs_root
def test_another_user_is_turned_away(node: Node) -> None:
    """Even one who got around the modes of the directory and the socket, by an open descriptor of it."""
    code = """
        import socket, os
        held = os.open(sys.argv[1], os.O_PATH)
        os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"/proc/self/fd/{held}")
            sock.settimeout(30)
            print(sock.recv(1))
        except OSError as error:
            print(type(error).__name__)
    """
    path = node.directory / "node.sock"
    assert succeeded(python(code, path)) == "PermissionError"
    path.chmod(0o666)
    try:
        assert succeeded(python(code, path)) in ("b''", "ConnectionResetError")
    finally:
        path.chmod(0o600)
    assert "turned away" in node.daemon.log


@needs_root
def test_a_socket_of_another_user_is_not_talked_to(tmp_path: Path) -> None:
    """Whoever put it there could serve anything. Root's is trusted by all, so the client is not root here."""
    code = """
        import pwd
        from gdsstore.node import socket_file
        from gdsstore.waiting import Deadline
        held = os.open(sys.argv[1], os.O_RDONLY)
        os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
        try:
            socket_file.connect(Path(f"/proc/self/fd/{held}"), Deadline(5))
        except Exception as error:
            print(type(error).__name__, "another user" in str(error))
    """
    with listening(tmp_path / "node.sock"):
        os.chown(tmp_path / "node.sock", 12345, 12345)
        (tmp_path / "node.sock").chmod(0o777)
        tmp_path.chmod(0o755)
        assert succeeded(python(code, tmp_path)) == "DaemonError True"
    assert pwd.getpwuid(65534).pw_name == "nobody"


def test_a_link_in_the_socket_s_place_is_not_followed(tmp_path: Path) -> None:
    with listening(tmp_path / "elsewhere.sock"):
        (tmp_path / "node.sock").symlink_to("elsewhere.sock")
        assert socket_file.identity(tmp_path) is None
        with pytest.raises(DaemonError):
            socket_file.connect(tmp_path, soon())


def test_a_file_in_the_socket_s_place_is_no_daemon(tmp_path: Path) -> None:
    (tmp_path / "node.sock").write_text("")
    client = NodeClient(tmp_path)
    assert not client.connected
    with pytest.raises(DaemonError, match="no socket"):
        client.status(soon())


def test_a_second_daemon_is_refused_and_the_first_serves_on(node: Node, client: NodeClient) -> None:
    second = Daemon(node.directory, "--no-http")
    assert second.wait() == 2
    assert (
        f"another daemon serves this store; stop it first [path={node.directory}, pid={node.daemon.pid}]"
        in (second.log.replace("\n", " "))
    )
    assert answered(lambda: client.lookup(node.namespace.digest, node.keys, soon())).found.all()


def test_the_socket_of_a_dead_daemon_is_replaced(tmp_path: Path) -> None:
    listening(tmp_path / "node.sock").close()
    with pytest.raises(DaemonError):
        socket_file.connect(tmp_path, soon())
    made = ListeningSocket(tmp_path)
    socket_file.connect(tmp_path, soon()).close()
    made.close()


def test_the_lock_is_for_one_at_a_time(tmp_path: Path) -> None:
    with only_daemon(tmp_path):
        with pytest.raises(StoreBusyError) as caught, only_daemon(tmp_path):
            pass
        assert caught.value.context["pid"] == str(os.getpid())
    with only_daemon(tmp_path):
        pass


def test_a_socket_is_made_in_a_path_that_no_address_has_room_for(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    made = ListeningSocket(deep)
    client = socket_file.connect(deep, soon())
    client.close()
    made.close()
    assert list(deep.iterdir()) == []


def test_a_daemon_that_ends_leaves_the_socket_of_its_follower(tmp_path: Path) -> None:
    first, second = ListeningSocket(tmp_path), ListeningSocket(tmp_path)
    first.close()
    assert socket_file.identity(tmp_path) == second.identity
    second.close()
    assert socket_file.identity(tmp_path) is None


def test_a_directory_that_takes_no_socket_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot make the daemon's socket"):
        ListeningSocket(tmp_path / "absent")


def test_a_library_process_needs_no_msgspec_without_a_daemon(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["msgspec"] = None
from pathlib import Path
from gdsstore.node.client import NodeClient
from gdsstore.waiting import Deadline
import numpy as np
client = NodeClient(Path(sys.argv[1]))
print(client.lease(bytes(16), np.zeros((1, 32), np.uint8), Deadline(1)))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "None"
    (tmp_path / "node.sock").unlink(missing_ok=True)
    with listening(tmp_path / "node.sock"):
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "None"
    assert 'pip install "gdsstore[service]"' in done.stderr
