"""LMDB knows a reader by its process id, which containers with PID namespaces of their own can have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdsstore.catalog.index import Catalog
from gdsstore.errors import StoreBusyError

MAP_BYTES = 1 << 26
DEADLINE_S = 30

# Holds the lock by which LMDB marks that a process is alive: one byte of the lock file, at the offset of its id.
NAMESAKE = """
import fcntl, struct, sys
pid, lock_file = int(sys.argv[1]), open(sys.argv[2], "r+b")
fcntl.fcntl(lock_file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, pid, 1, 0))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_process_with_the_same_id_is_named_as_the_reason(tmp_path: Path) -> None:
    Catalog(tmp_path, MAP_BYTES).close()
    with subprocess.Popen(
        [sys.executable, "-I", "-c", NAMESAKE, str(os.getpid()), str(tmp_path / "lock.mdb")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as namesake:
        assert namesake.stdout is not None
        assert namesake.stdout.readline() == "locked\n"
        with pytest.raises(StoreBusyError, match="PID namespace"):
            Catalog(tmp_path, MAP_BYTES)
        namesake.communicate(timeout=DEADLINE_S)
    Catalog(tmp_path, MAP_BYTES).close()
