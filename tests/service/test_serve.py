"""`gdsstore serve` as a command: its options, its errors, its service manager, and its HTTP side."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gdsstore.node.client import NodeClient
from tests.cli.command import run
from tests.service.conftest import Node
from tests.service.daemons import Daemon, answered, filled, serving, soon, until
from tests.store.helpers import REPO, flip, locate, opaque, segments, small_store

TOKEN = "a-token-of-enough-letters"


def get(url: str, token: str | None = None, host: str | None = None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    headers |= {} if host is None else {"Host": host}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def url(daemon: Daemon) -> str:
    found = re.search(r"http://\S+:\d+/", daemon.log)
    assert found is not None
    return found[0]


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    filled(tmp_path / "s", 1)[0].close()
    return tmp_path / "s"


def refused(path: Path, *options: str) -> str:
    """What is said about options with which no daemon starts."""
    done = run("serve", "--store", path, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    return str(done.stderr)


def test_it_answers_http_on_the_port_that_it_names(node: Node) -> None:
    assert get(url(node.daemon) + "healthz") == 200
    assert get(url(node.daemon) + "readyz") == 200
    assert get(url(node.daemon) + "api/status") == 200


def test_names_are_answered_where_they_were_given(node: Node, closed: Path, tmp_path: Path) -> None:
    names = ["gdsstore.monitoring.svc", "Node-7_a"]
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    options = [*(word for name in names for word in ("--allow-host", name)), "--token-file", str(token)]
    with serving(closed, "--http", "127.0.0.1:0", *options) as daemon:
        asked = url(daemon) + "api/status"
        for host in (names[0], f"{names[0]}:9470", "node-7_A", "localhost", "127.0.0.1"):
            assert get(asked, TOKEN, host) == 200
            assert get(asked, None, host) == 401, "a name is no token"
        for host in ("monitoring.svc", "evil.example", f"{names[0]}.evil.example"):
            assert get(asked, TOKEN, host) == 421
    assert get(url(node.daemon) + "api/status", host=names[0]) == 421


@pytest.mark.parametrize(
    "name", ["", "node7:9470", "*", "http://node7", "node 7", ".", "n" * 300, "-", "näme"]
)
def test_a_host_that_is_no_name_is_refused(closed: Path, name: str) -> None:
    assert "the name of a host" in refused(closed, f"--allow-host={name}")


def test_a_token_is_asked_for_where_there_is_one(closed: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    with serving(closed, "--http", "0.0.0.0:0", "--token-file", str(token)) as daemon:
        at = url(daemon).replace("0.0.0.0", "127.0.0.1") + "api/status"
        assert (get(at), get(at, "wrong"), get(at, TOKEN)) == (401, 401, 200)
        assert TOKEN not in daemon.log
        assert daemon.terminate() == 0


def test_http_that_others_reach_needs_a_token(closed: Path) -> None:
    assert "needs a token" in refused(closed, "--http", "0.0.0.0:0")


@pytest.mark.parametrize(
    ("text", "mode", "what"),
    [(TOKEN, 0o644, "others can read"), ("short", 0o600, "at least 16"), ("", 0o600, "at least")],
)
def test_a_token_that_protects_nothing_is_refused(
    closed: Path, tmp_path: Path, text: str, mode: int, what: str
) -> None:
    token = tmp_path / "token"
    token.write_text(text)
    token.chmod(mode)
    assert what in refused(closed, "--http", "127.0.0.1:0", "--token-file", str(token))


@pytest.mark.parametrize("given", ["9470", "127.0.0.1:", "127.0.0.1:99999", "::1:80", ":80"])
def test_an_address_that_is_none_is_refused(closed: Path, given: str) -> None:
    assert "HOST:PORT" in refused(closed, "--http", given)


def test_a_port_in_use_is_said_at_start(closed: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        daemon = Daemon(closed, "--http", f"127.0.0.1:{sock.getsockname()[1]}")
        assert daemon.wait() == 2
    assert "cannot answer HTTP" in daemon.log
    assert "Traceback" not in daemon.log
    assert not (closed / "node.sock").exists()


def test_a_path_without_a_store_is_refused_and_stays_empty(tmp_path: Path) -> None:
    assert "there is no store here" in refused(tmp_path / "absent", "--no-http")
    assert not (tmp_path / "absent").exists()


def test_the_service_manager_hears_of_its_life(closed: Path, tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(60)
        env = {"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "40000"}
        with serving(closed, env=env) as daemon:
            heard = [manager.recv(4096).decode() for _ in range(4)]
            assert sum(f"READY=1\nSTATUS=serving {closed}" in text for text in heard) == 1
            assert heard.count("WATCHDOG=1\n") == 3
            assert daemon.terminate() == 0
            while "STOPPING=1" not in (text := manager.recv(4096).decode()):
                assert text == "WATCHDOG=1\n"


def test_without_a_cache_the_daemon_still_looks_up_and_scrubs(tmp_path: Path) -> None:
    store, namespace, keys = filled(tmp_path / "s")
    with store:
        daemon = Daemon(tmp_path / "s", "--no-http", "--scrub-rate", "1KiB").wait_ready()
        client = NodeClient(tmp_path / "s")
        assert answered(lambda: client.lookup(namespace.digest, keys, soon())).found.all()
        assert client.lease(namespace.digest, keys, soon()) is None
        assert not client.prefetch(namespace.digest, keys, 1.0)
        assert client.connected
        client.close()
        assert daemon.terminate() == 0  # a slow scrub ends with it
        assert "the scrub did not end" not in daemon.log


def test_the_daemon_scrubs_and_drops_what_is_damaged(tmp_path: Path) -> None:
    store, namespace, keys = filled(tmp_path / "s")
    segment, offset = locate(namespace, keys[:1])
    store.close()
    flip(segments(tmp_path / "s")[int(segment[0])], int(offset[0]) * 8 + 77)
    daemon = Daemon(tmp_path / "s", "--no-http", "--scrub-rate", "1GiB").wait_ready()
    until(lambda: "scrub: 64 pages" in daemon.log)
    assert daemon.log.count("the payload does not have its checksum") == 1
    assert daemon.terminate() == 0
    with small_store(tmp_path / "s", daemon="off") as again:
        assert opaque(again).contains(keys).tolist() == [False] + [True] * 63


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    unit = REPO / "deploy" / "systemd" / "gdsstore.service"
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
