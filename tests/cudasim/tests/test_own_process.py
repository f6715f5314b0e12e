"""The isolation of test modules itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = """
import sys
sys.path.insert(0, {folder!r})
from tests.cudasim.own_process import pytest_configure, pytest_runtest_logreport, pytest_runtest_protocol
"""
MODULE = """
import os, signal
import pytest
pytestmark = pytest.mark.own_process(COLOUR="blue")
def test_passes(): assert os.environ["COLOUR"] == "blue"
def test_fails(): assert os.getpid() == 0
def test_skips(): pytest.skip("not here")
def test_crashes(): os.kill(os.getpid(), signal.SIGKILL)
def test_is_behind_the_crash(): pass
@pytest.mark.parametrize("colour", ["red", pytest.param("green", marks=pytest.mark.own_process(COLOUR="green"))])
def test_has_the_nearest_environment(colour): assert os.environ["COLOUR"] == (colour if colour == "green" else "blue")
"""

MIXED = """
import pytest
closed = []
@pytest.fixture(scope="module")
def shared():
    yield
    closed.append(True)
def test_here(shared): pass
@pytest.mark.own_process(COLOUR="red")
def test_apart(): pass
"""
AFTERWARDS = """
import sys
def test_what_was_before_is_torn_down(): assert sys.modules["test_mixed"].closed
"""


def test_reports_come_back_and_a_crash_fails_what_it_hit(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(folder=str(Path(__file__).parents[3])))
    (tmp_path / "test_inner.py").write_text(MODULE)
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "test_mixed_afterwards.py").write_text(AFTERWARDS)
    (tmp_path / "test_outer.py").write_text("import os\ndef test_env(): assert 'COLOUR' not in os.environ")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert "4 failed, 6 passed, 1 skipped" in done.stdout
    assert "assert os.getpid() == 0" in done.stdout, "the failure is shown with its source"
    assert "was killed by signal 9" in done.stdout
    assert "not here" in done.stdout


LIMITS = """
def pytest_timeout_cancel_timer(item):
    with open({order!r}, "a") as file:
        file.write("no limit\\n")
"""
MEMBER = """
import pytest
@pytest.mark.own_process(COLOUR="blue")
def test_member():
    with open({order!r}, "a") as file:
        file.write("test\\n")
"""


def test_the_limit_of_one_test_is_none_of_the_whole_group(tmp_path: Path) -> None:
    order = tmp_path / "order"
    conftest = CONFTEST.format(folder=str(Path(__file__).parents[3])) + LIMITS.format(order=str(order))
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_inner.py").write_text(MEMBER.format(order=str(order)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=200"]
    command += [f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert "1 passed" in done.stdout
    assert order.read_text().split("\n")[0] == "no limit", "the first thing that happened"
