"""What `pip install gdsstore` alone brings is enough for every command but those that an extra is for, which say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.helpers import make_keys, opaque, save, small_store

REPO = Path(__file__).parents[2]
# Of all extras: what `dev` installs, and a user may not have.
ABSENT = [
    *("msgspec", "prometheus_client", "starlette", "uvicorn", "cryptography", "httpx"),
    *("nixl", "torch", "triton", "kvikio", "cupy", "pynvml", "nvtx", "matplotlib", "sglang"),
]
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
from gdsstore.cli.main import app
sys.argv[0] = "gdsstore"
app()
"""
TIMEOUT_S = 120


def run(*arguments: str, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "s"
    with small_store(path, daemon="off") as opened:
        assert save(opaque(opened), make_keys(4)).all_ok
    return path


def test_pages_are_replayed(tmp_path: Path) -> None:
    done = run("replay", "--requests", "5", "--page-bytes", "64KiB", "--quiet", "--json", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"wrong_pages": 0' in done.stdout


@pytest.mark.parametrize("command", ["inspect", "verify", "stats", "top --once"])
def test_a_store_is_looked_at(store: Path, command: str) -> None:
    name, *options = command.split()
    done = run(name, "--store", str(store), *options)
    assert done.returncode == 0, done.stderr


def test_what_needs_an_extra_says_which_in_one_sentence(store: Path) -> None:
    done = run("serve", "--store", str(store))
    assert done.returncode == 2
    assert 'pip install "gdsstore[service]"' in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_help_needs_nothing() -> None:
    assert run("--help").returncode == 0
