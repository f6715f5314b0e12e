"""The catalog: key -> location, in LMDB. A cache of the truth, which is the segments' record tables.

LMDB runs with `writemap` and without sync: measured safe against kill -9, unsafe against power loss, which is why
`catalog.state` decides whether these files may be opened at all. One write transaction at a time over all processes; every
method that writes takes the transaction of a `with catalog.write() as txn`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from gdsstore.catalog.items import extents_of, pages_of
from gdsstore.catalog.keys import U64
from gdsstore.catalog.lookup import EXTENT_KEY, Places, places, resolve
from gdsstore.catalog.records import (
    CATALOG_VERSION,
    PAGE,
    Extent,
    Locations,
    Run,
    SegmentRow,
)
from gdsstore.errors import StoreBusyError, StoreDamagedError, StoreError, from_os_error

MAX_READERS = 1024  # threads that may look up at the same time, over all processes
CLOSE_WAIT_S = 0.2  # for a transaction that is under way: enough where nothing hangs
_SEGMENT_KEY_BYTES = 4
_PAGE_BYTES = 4096  # LMDB's
_SPARE_BYTES = 4 << 20  # for branches, free lists and the small tables
_STEP_BYTES = 4 << 20
_LOCK_FILE_BYTES = 4096 + 64 * MAX_READERS  # a header, and a cache line a reader


class Catalog:
    """The catalog of one store, as one process sees it. Thread-safe."""

    def __init__(self, directory: Path, map_bytes: int) -> None:
        self._path, self._file, self._allocated = directory, -1, 0
        self._idle = threading.Condition()
        self._writes, self._closed = 0, False
        _allocate_lock_file(directory / "lock.mdb")
        _refuse_link(directory / "data.mdb")
        try:
            self._env = lmdb.open(
                str(directory),
                map_size=map_bytes,
                writemap=True,
                sync=False,
                metasync=False,
                readahead=False,  # look-ups are random
                max_dbs=4,
                max_readers=MAX_READERS,
                mode=0o600,
            )
            self._file = os.open(directory / "data.mdb", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._allocate(0)  # before the first write, which making the databases is
            self._pages = self._env.open_db(b"pages", integerkey=True)
            self._extents = self._env.open_db(b"extents")
            self._segments = self._env.open_db(b"segments")
            self._meta = self._env.open_db(b"meta")
        except lmdb.LockError as error:
            raise StoreBusyError(
                f"the catalog cannot be opened: {error}; another process with this process's id may have it open: containers "
                "that share a store need one PID namespace (Docker: pid: host; Kubernetes: hostPID: true)",
                path=str(directory),
            ) from error
        except lmdb.Error as error:
            raise StoreDamagedError(f"the catalog cannot be opened: {error}", path=str(directory)) from error
        except BaseException:
            self.close()
            raise

    # --- life ---

    def belongs_to(self, store_uuid: bytes) -> bool:
        """Whether this is the whole catalog of that store, in this version. One that was never completed is not."""
        with self.read() as txn:
            have = txn.get(b"identity", db=self._meta)
        return have is not None and bytes(have) == _identity(store_uuid)

    def complete(self, store_uuid: bytes) -> None:
        """Mark a rebuilt catalog as whole: the last step, or a rebuild that was killed would pass for a store without pages."""
        with self.write() as txn:
            txn.put(b"identity", _identity(store_uuid), db=self._meta)

    def sync(self) -> None:
        self._env.sync(True)

    def close(self) -> bool:
        """Idempotent. False where a write transaction does not end: its memory must not go under it, so it closes the catalog."""
        with self._idle:
            self._closed = True
            if self._idle.wait_for(lambda: self._writes == 0, CLOSE_WAIT_S):
                self._let_go()
            return self._writes == 0

    def _let_go(self) -> None:
        self._env.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self._idle:
            if self._closed:
                raise StoreError("the catalog was closed", path=str(self._path))
            self._writes += 1
        try:
            yield
        finally:
            with self._idle:
                self._writes -= 1
                self._idle.notify_all()
                if self._closed and self._writes == 0:
                    self._let_go()

    def reap_dead_readers(self) -> int:
        """Free the reader slots of processes that are gone; LMDB cannot reuse pages while it believes in them."""
        return int(self._env.reader_check())

    @contextlib.contextmanager
    def write(self, pages: int = 0) -> Iterator[Any]:
        """The store's one write transaction. Commits at the end of the `with`, or rolls back on an error.

        `pages`: about how many page entries will be changed. Raises StoreError where the drive or the map is full.
        """
        try:
            with self._open(), self._env.begin(write=True) as txn:
                self._allocate(pages)
                yield txn
        except lmdb.MapFullError as error:
            message = "the catalog is full; open the store with a larger catalog_map_bytes"
            raise StoreError(message, errno=errno.ENOSPC) from error
        except lmdb.Error as error:
            raise StoreError(f"the catalog failed: {error}", path=str(self._path)) from error

    def _allocate(self, pages: int) -> None:
        """Have blocks on the drive for all that a transaction can touch.

        LMDB's file is sparse and mapped: on a full drive, a store into a hole of it kills the process (SIGBUS).
        """
        used = (self._env.info()["last_pgno"] + 1) * _PAGE_BYTES
        touched = min(2 * pages * _PAGE_BYTES, used) + 64 * pages
        need = min(used + touched + _SPARE_BYTES, self._env.info()["map_size"])
        if need <= self._allocated:
            return
        target = min(need + _STEP_BYTES, self._env.info()["map_size"])
        try:
            os.posix_fallocate(self._file, self._allocated, target - self._allocated)
        except OSError as error:
            raise from_os_error(error, "no room for the catalog to grow", StoreError) from error
        self._allocated = target

    @contextlib.contextmanager
    def read(self) -> Iterator[Any]:
        try:
            with self._env.begin() as txn:
                yield txn
        except lmdb.Error as error:
            raise StoreError(f"the catalog failed: {error}", path=str(self._path)) from error

    # --- pages ---

    def present(self, index: U64, tag: U64, *, prefix: bool) -> Places:
        """Which of n pages are there, and in which slots. With `prefix`, nothing behind the first missing one is looked at."""
        with self.read() as txn:
            return places(txn, self._pages, self._extents, index, tag, prefix=prefix)

    def resolve(self, index: U64, tag: U64) -> Locations:
        """Locations of n pages."""
        with self.read() as txn:
            return resolve(txn, self._pages, self._extents, index, tag)

    def locate(self, index: U64, tag: U64) -> tuple[Locations, dict[int, SegmentRow]]:
        """Locations of n pages and, from the same moment, the rows of their segments."""
        with self.read() as txn:
            where = resolve(txn, self._pages, self._extents, index, tag)
            rows = {}
            for segment_id in np.unique(where.segment[where.found]).tolist():
                row = self.segment(txn, segment_id)
                if row is None:
                    where.found[where.segment == segment_id] = False
                else:
                    rows[segment_id] = row
        return where, rows

    def commit(self, txn: Any, namespace_digest: bytes, runs: Iterable[Run]) -> None:
        """Make pages visible. Their payload and table entries are written already."""
        pages: list[tuple[bytes, bytes]] = []
        with txn.cursor(db=self._extents) as extents:
            for run in runs:
                for key, value in extents_of(run, namespace_digest):
                    extents.put(key, value)
                pages += pages_of(run)
        pages.sort()  # neighbours in the tree share leaf pages in the cache
        with txn.cursor(db=self._pages) as cursor:
            # Two processes may save the same page. The older copy's extent must not answer for it any more: a page that is
            # deleted, or whose newer segment is dropped, would come back through its old neighbours.
            for _, older in cursor.getmulti([key for key, _ in pages]):
                _, segment, slot, first = np.frombuffer(older, PAGE, 1)[0].item()
                self._kill(txn, segment, slot, first, None)
            cursor.putmulti(pages)

    def append_sorted(self, txn: Any, pages: Sequence[tuple[bytes, bytes]]) -> None:
        """Put pages whose index keys rise, and lie behind every key that is there. For rebuilding."""
        with txn.cursor(db=self._pages) as cursor:
            cursor.putmulti(pages, append=True)

    def put_extents(self, txn: Any, namespace_digest: bytes, run: Run) -> None:
        for key, value in extents_of(run, namespace_digest):
            txn.put(key, value, db=self._extents)

    def remove(self, txn: Any, where: Locations, index: U64) -> npt.NDArray[np.bool_]:
        """Drop pages that still lie where `where` says. Returns which were dropped, shape (n,)."""
        gone = np.zeros(len(index), np.bool_)
        raw = index.tobytes()
        for i in np.flatnonzero(where.found).tolist():
            key = raw[8 * i : 8 * i + 8]
            value = txn.get(key, db=self._pages)
            if value is None:
                continue
            _, segment, slot, first = np.frombuffer(value, PAGE, 1)[0].item()
            same = (segment, slot) == (where.segment[i], where.slot[i])
            if same and self._kill(txn, segment, slot, first, int(where.generation[i])):
                gone[i] = txn.delete(key, db=self._pages)
        return gone

    def _kill(self, txn: Any, segment: int, slot: int, first: int, generation: int | None) -> bool:
        """Mark a page as dead in its extent. False where that is gone, or of another generation than the given one."""
        key = EXTENT_KEY.pack(segment, first)
        extent = txn.get(key, db=self._extents)
        if extent is None:
            return False
        old = Extent.decode(bytearray(extent))
        if generation is not None and old.generation != generation:
            return False
        old.items["live"][slot - first] = 0
        txn.put(key, Extent.encode(old.namespace, old.generation, old.idents, old.items), db=self._extents)
        return True

    # --- segments ---

    def segment(self, txn: Any, segment_id: int) -> SegmentRow | None:
        raw = txn.get(segment_id.to_bytes(_SEGMENT_KEY_BYTES, "big"), db=self._segments)
        return None if raw is None else SegmentRow.decode(segment_id, raw)

    def segments(self, txn: Any) -> list[SegmentRow]:
        with txn.cursor(db=self._segments) as cursor:
            return [SegmentRow.decode(int.from_bytes(key, "big"), value) for key, value in cursor]

    def put_segment(self, txn: Any, row: SegmentRow) -> None:
        txn.put(row.segment_id.to_bytes(_SEGMENT_KEY_BYTES, "big"), row.encode(), db=self._segments)

    def forget_segment(self, txn: Any, segment_id: int) -> None:
        txn.delete(segment_id.to_bytes(_SEGMENT_KEY_BYTES, "big"), db=self._segments)

    def next_segment_id(self, txn: Any, at_least: int = 0) -> int:
        """A number that no segment of this store had before, also not a deleted one."""
        number = max(int.from_bytes(txn.get(b"next_segment", b"", db=self._meta), "little"), at_least)
        txn.put(b"next_segment", (number + 1).to_bytes(8, "little"), db=self._meta)
        return number

    def return_segment_id(self, txn: Any, segment_id: int) -> None:
        """Take back the id that was given out last, for a segment that never came to be; any other id stays used."""
        if txn.get(b"next_segment", b"", db=self._meta) == (segment_id + 1).to_bytes(8, "little"):
            txn.put(b"next_segment", segment_id.to_bytes(8, "little"), db=self._meta)

    def drop_pages(self, txn: Any, segment_id: int, namespace_digest: bytes | None = None) -> int:
        """Drop all pages of a segment (of one namespace, if given). Returns how many were visible."""
        dropped = 0
        doomed = []
        for key, value in self.extents(txn, segment_id):
            if namespace_digest is not None and value[:16] != namespace_digest:
                continue
            doomed.append(key)
            first = int.from_bytes(key[4:], "big")
            extent = Extent.decode(value)
            raw = extent.idents["index"].tobytes()
            for i in np.flatnonzero(extent.items["live"]).tolist():
                page = raw[8 * i : 8 * i + 8]
                at = txn.get(page, db=self._pages)
                if at is not None and np.frombuffer(at, PAGE, 1)[0].item()[1:3] == (segment_id, first + i):
                    dropped += txn.delete(page, db=self._pages)
        for key in doomed:
            txn.delete(key, db=self._extents)
        return dropped

    def extents(self, txn: Any, segment_id: int | None = None) -> Iterator[tuple[bytes, bytes]]:
        """(key, value) of a segment's extents, or of all; see catalog.records."""
        with txn.cursor(db=self._extents) as cursor:
            start = b"" if segment_id is None else EXTENT_KEY.pack(segment_id, 0)
            if not cursor.set_range(start):
                return
            for key, value in cursor:
                if segment_id is not None and int.from_bytes(key[:4], "big") != segment_id:
                    return
                yield key, value

    def pages_by_namespace(self, txn: Any) -> dict[bytes, int]:
        """How many live pages each namespace digest has. Walks all extents: for tools, not for hot paths."""
        counts: dict[bytes, int] = {}
        for _, value in self.extents(txn):
            extent = Extent.decode(value)
            live = int(np.count_nonzero(extent.items["live"]))
            counts[extent.namespace] = counts.get(extent.namespace, 0) + live
        return counts

    @property
    def physical_bytes(self) -> int:
        """What the catalog's files take on the drive, also where they were deleted under it."""
        return os.fstat(self._file).st_blocks * 512 + _LOCK_FILE_BYTES

    def stats(self) -> dict[str, int]:
        with self.read() as txn:
            pages = txn.stat(self._pages)
        info = self._env.info()
        return {
            "pages": pages["entries"],
            "depth": pages["depth"],
            "used_bytes": (info["last_pgno"] + 1) * pages["psize"],
            "map_bytes": info["map_size"],
            "readers": info["num_readers"],
        }


def _allocate_lock_file(path: Path) -> None:
    """Have blocks for LMDB's lock file, which is mapped and would be sparse."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, "cannot use the catalog's lock file", StoreError) from error


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise StoreError("a link in place of the catalog is not followed; remove it", path=str(path))


def _identity(store_uuid: bytes) -> bytes:
    return CATALOG_VERSION.to_bytes(4, "little") + store_uuid
