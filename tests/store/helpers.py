"""Small stores, pages whose bytes follow from their keys, and child processes, for the tests of the store."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore import BoundNamespace, Config, LoadResult, PageLayout, PageStatus, SaveResult, Store
from gdsstore.catalog.keys import index_keys
from gdsstore.engines.base import Engine

MiB = 1 << 20
REPO = Path(__file__).parents[2]
WAIT_S = 120.0  # for futures: a bug must not hang the tests

U8 = npt.NDArray[np.uint8]


def small_config(**settings: Any) -> Config:
    """Segments of 1 MiB, little memory, nothing behind the test's back."""
    defaults: dict[str, Any] = {
        "capacity": "64MiB",
        "segment_bytes": "1MiB",
        "engine": "posix",
        "posix_threads": 2,
        "workers": 2,
        "staging_bytes": "4MiB",
        "chunk_bytes": "256KiB",
        "huge_pages": "off",
        "free_segments": 0,
        "catalog_map_bytes": "64MiB",
        "grace_s": 0,
        "drive_breaker": "off",
        "io_deadline_s": 60,  # what hangs has a deadline of its own; a busy machine may need a while for a first save
        "maintain_interval_s": 3600,
    }
    return Config(**{**defaults, **settings})


def small_store(path: Any, /, *, own_engine: Engine | None = None, **settings: Any) -> Store:
    return Store(path, small_config(**settings), own_engine)


def opaque(store: Store, page_bytes: int = 8192, **facts: Any) -> BoundNamespace:
    return store.namespace(model="test", layout=PageLayout.opaque(page_bytes), **facts)


def make_keys(count: int, salt: object = "") -> U8:
    """uint8 (count, 32)."""
    raw = b"".join(hashlib.sha256(f"{salt}-{i}".encode()).digest() for i in range(count))
    return np.frombuffer(raw, np.uint8).reshape(count, 32)


def truth(keys: U8, page_bytes: int) -> U8:
    """What the pages of these keys hold: uint8 (n, page_bytes), every byte following from the key."""
    words = -(-page_bytes // 8)
    seeds = np.ascontiguousarray(keys).view(np.uint64)[:, 0]
    odd = np.arange(1, 2 * words, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    table = (seeds[:, None] ^ odd) * np.uint64(0xFF51AFD7ED558CCD)
    return (table ^ (table >> np.uint64(29))).view(np.uint8)[:, :page_bytes].copy()


def save(namespace: BoundNamespace, keys: U8, page_bytes: int = 8192, **options: Any) -> SaveResult:
    return namespace.save(keys, truth(keys, page_bytes), **options).result(WAIT_S)


def load(
    namespace: BoundNamespace, keys: U8, page_bytes: int = 8192, **options: Any
) -> tuple[LoadResult, U8]:
    """The result, and the memory that was loaded into (filled with 0xEE before)."""
    memory = np.full((len(keys), page_bytes), 0xEE, np.uint8)
    return namespace.load(keys, memory, **options).result(WAIT_S), memory


def check(namespace: BoundNamespace, keys: U8, page_bytes: int = 8192, **options: Any) -> LoadResult:
    """Load and compare: what counts as loaded must be the truth."""
    result, memory = load(namespace, keys, page_bytes, **options)
    right = (memory == truth(keys, page_bytes)).all(axis=1)
    wrong = np.flatnonzero(result.ok & ~right)
    assert len(wrong) == 0, f"wrong bytes were served for pages {wrong[:10]} of {len(keys)}"
    return result


def statuses(result: SaveResult | LoadResult) -> list[str]:
    return [PageStatus(code).name for code in result.status.tolist()]


def segments(path: Path) -> list[Path]:
    return sorted((path / "segments").glob("*.seg"))


def physical_bytes(*paths: Path) -> int:
    """What all files below take on the drive."""
    total = 0
    for file in (file for path in paths for file in path.rglob("*") if not file.is_symlink()):
        with contextlib.suppress(FileNotFoundError):  # upkeep makes segments under another name first
            total += os.lstat(file).st_blocks * 512
    return total


@contextlib.contextmanager
def memory_directory() -> Iterator[Path]:
    """A directory in memory, where syncs cost nothing, for tests that open stores a hundred times."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file, as a failing drive would: nothing else changes."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        value = file.read(1)[0] ^ 1 << bit % 8
        file.seek(bit // 8)
        file.write(bytes([value]))


def locate(namespace: BoundNamespace, keys: U8) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Segment, and offset in its file, of pages that are there: two int64 (n,)."""
    store = namespace._store
    where = store.catalog.resolve(*index_keys(keys, namespace.digest))
    assert where.found.all()
    return where.segment.astype(np.int64), namespace._drive.geometry.slot_offset(where.slot.astype(np.int64))


def forget_catalog(path: Path) -> None:
    """What a power loss means for the catalog of a closed store."""
    for name in ("data.mdb", "lock.mdb"):
        (path / "catalog" / name).unlink(missing_ok=True)


def python(code: str, *arguments: object, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with these helpers imported. Its output comes back; a crash shows as a negative code."""
    return subprocess.run(
        _command(code, arguments), capture_output=True, text=True, timeout=timeout_s, cwd=REPO, check=False
    )


def start_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """The same, without waiting; standard input and output are pipes."""
    return subprocess.Popen(
        _command(code, arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO
    )


def _command(code: str, arguments: Sequence[object]) -> list[str]:
    header = "import os, sys\nfrom pathlib import Path\nimport numpy as np\nimport gdsstore\nfrom tests.store.helpers import *\n"
    return [sys.executable, "-c", header + textwrap.dedent(code), *map(str, arguments)]


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """The standard output of a child that must not fail."""
    assert done.returncode == 0, f"the child ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def logged(records: Sequence[logging.LogRecord], level: int = logging.WARNING) -> str:
    return "\n".join(record.getMessage() for record in records if record.levelno >= level)


__all__ = [name for name in dir() if not name.startswith("_") and name != "annotations"]
