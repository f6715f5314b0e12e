"""What stops a daemon from serving, and what does not."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gdsstore.config import Config
from gdsstore.service.listening import only_daemon
from tests.cli.command import run
from tests.service.daemons import LIGHT, PATIENCE_S, Daemon, filled
from tests.store.helpers import REPO

KEY = "11" * 32


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    filled(tmp_path / "s", 1)[0].close()
    return tmp_path / "s"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_daemon_that_still_touches_its_memory(closed: Path, number: signal.Signals) -> None:
    code = """
import sys, time
from pathlib import Path
from gdsstore.cli.serve import serve
from gdsstore.store import Store
def slow(store):
    print("touching", flush=True)
    while True:
        time.sleep(0.01)
Store.shared_memory = slow
serve([Path(sys.argv[1])], no_http=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(closed)],
        cwd=REPO,
        env={**os.environ, **LIGHT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "touching\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "stopped before it served anybody" in said
    assert "Traceback" not in said
    assert not (closed / "node.sock").exists()


def test_a_full_drive_takes_no_number_and_is_served_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with only_daemon(tmp_path):
        pass


@pytest.mark.parametrize("where", ["GDSSTORE_ENCRYPTION_KEY", "GDSSTORE_ENCRYPTION_KEY_FILE"])
def test_an_encrypted_store_is_served_without_its_key_and_shares_nothing(
    closed: Path, tmp_path: Path, where: str
) -> None:
    key = KEY if where.endswith("KEY") else str(tmp_path / "absent")
    daemon = Daemon(
        closed, "--no-http", "--scrub-rate", "0", env={where: key, "GDSSTORE_HOST_CACHE": "16MiB"}
    ).wait_ready()
    assert daemon.terminate() == 0
    assert "no host memory is shared" in daemon.log


def test_memory_to_share_is_refused_where_pages_are_encrypted(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDSSTORE_ENCRYPTION_KEY", KEY)
    done = run("serve", "--store", closed, "--no-http", "--host-cache", "16MiB")
    assert done.exit_code == 2
    assert "--host-cache does not go with encryption" in done.stderr
    assert KEY not in done.stderr


def test_the_unit_gives_the_daemon_an_environment_that_it_takes() -> None:
    """Every variable of its file reaches the daemon, which refuses a GDSSTORE_* that is no setting."""
    unit = (REPO / "deploy" / "systemd" / "gdsstore.service").read_text()
    given = dict(re.findall(r"^#   (\w+)=(.*)$", unit, re.MULTILINE))
    command = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0]
    assert sorted(given) == sorted(set(re.findall(r"\$\{?(\w+)", command)))
    Config.load(env=given)
    docs = (REPO / "docs" / "daemon.md").read_text()
    assert all(f"    {name}={value}\n" in docs for name, value in given.items())
