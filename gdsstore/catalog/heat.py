"""When pages were last used: one 4-byte stamp a slot, in a file that all processes of a store map.

Stamps are written without a lock; a lost one costs a little recency and nothing else. A stamp counts 1/64 s and wraps after
two years; 0 means never. Stamps that lie in the future (the clock went back) count as just used, but protect nothing for
longer than the grace period.

The file's head also has the largest sequence that any process of the store gave out: see `gdsstore.sequence`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gdsstore.errors import StoreError, from_os_error
from gdsstore.layout import ALIGNMENT, align_up
from gdsstore.volume.format import MAX_SEGMENTS

log = logging.getLogger("gdsstore.catalog")

MAGIC = b"GDSHEAT1"
TICKS_PER_S = 64
HEADER_BYTES = 4096
SEQUENCE_OFFSET = 16
GROW_SEGMENTS = 64
PREFIX_SKEW = 32  # pages further down a prefix are stamped older, one tick for each 32: leaves go first


def tick() -> int:
    return (int(time.time() * TICKS_PER_S) & 0xFFFFFFFF) or 1


class Heat:
    """The stamps of one store. Thread-safe."""

    def __init__(self, path: Path, segment_bytes: int) -> None:
        self._stride = segment_bytes // ALIGNMENT  # slots that a segment can have at the most
        self._lookup_offset = HEADER_BYTES
        self._stamp_offset = HEADER_BYTES + align_up(4 * MAX_SEGMENTS)
        self._lock = threading.Lock()
        header = MAGIC + self._stride.to_bytes(8, "little")
        try:
            most_bytes = self._stamp_offset + 4 * self._stride * MAX_SEGMENTS
            self._fd = _open_whole(path, header, self._stamp_offset, most_bytes)
        except OSError as error:
            raise from_os_error(error, "cannot use the heat file", StoreError) from error
        self._segments = -1
        self.sequence = np.frombuffer(mmap.mmap(self._fd, HEADER_BYTES), np.uint64, 1, SEQUENCE_OFFSET)
        self._lookups = np.zeros(0, np.uint32)
        self._stamps = np.zeros((0, self._stride), np.uint32)
        self._map()

    def _map(self) -> None:
        size = os.fstat(self._fd).st_size
        self._segments = max(0, (size - self._stamp_offset) // (4 * self._stride))
        mapped = mmap.mmap(self._fd, self._stamp_offset + 4 * self._stride * self._segments)
        self._lookups = np.frombuffer(mapped, np.uint32, MAX_SEGMENTS, self._lookup_offset)
        stamps = np.frombuffer(mapped, np.uint32, self._stride * self._segments, self._stamp_offset)
        self._stamps = stamps.reshape(self._segments, self._stride)

    def cover(self, segment_id: int) -> None:
        """Make room for a segment's stamps. Raises StoreError where the drive is full."""
        if segment_id >= MAX_SEGMENTS:
            raise StoreError(f"segment ids are used up ({MAX_SEGMENTS}); make a new store")
        with self._lock:
            if segment_id < self._segments:
                return
            self._map()  # another process may have grown the file
            if segment_id < self._segments:
                return
            count = segment_id + 1 + GROW_SEGMENTS * (4096 // max(self._stride, 64))
            start = self._stamp_offset + 4 * self._stride * self._segments
            try:
                os.posix_fallocate(
                    self._fd, start, 4 * self._stride * (min(count, MAX_SEGMENTS) - self._segments)
                )
            except OSError as error:
                raise from_os_error(error, "cannot grow the heat file", StoreError) from error
            self._map()

    def _covered(self, segment_id: int) -> bool:
        """Whether the stamps have room up to this segment. On a full drive they may not: then recency is lost, no page."""
        try:
            self.cover(segment_id)
        except StoreError:
            return False
        return True

    def touch(self, segment: npt.NDArray[np.uint32], slot: npt.NDArray[np.uint32]) -> None:
        """Stamp pages, given in prefix order; arrays of shape (n,)."""
        if len(segment) == 0 or not self._covered(int(segment.max())):
            return
        skew = np.arange(len(segment), dtype=np.int64) // PREFIX_SKEW
        self._stamps[segment, slot] = np.maximum(tick() - skew, 1).astype(np.uint32)

    def looked_up(self, segment: npt.NDArray[np.uint32]) -> None:
        """Note that pages of these segments were reported as there: they stay for the grace period."""
        if len(segment) and self._covered(int(segment.max())):
            self._lookups[segment] = tick()

    def protected(self, segment_id: int, grace_s: float) -> bool:
        """Whether a page of this segment was reported within the grace period."""
        stamp = int(self._lookups[segment_id])
        if stamp == 0 or grace_s <= 0:
            return False
        return abs(_signed(tick() - stamp)) < grace_s * TICKS_PER_S

    def ages(self, segment_id: int, slots: int) -> npt.NDArray[np.float64]:
        """Seconds since each slot was last used, shape (slots,). Never used: two years."""
        if not self._covered(segment_id):
            return np.full(slots, (1 << 32) / TICKS_PER_S)
        stamps = self._stamps[segment_id, :slots]
        ages = (np.uint32(tick()) - stamps).astype(np.float64)  # modulo 2^32
        ages[ages > 1 << 31] = 0.0  # from the future
        ages[stamps == 0] = 1 << 32
        return ages / TICKS_PER_S

    def reset(self, segment_id: int) -> None:
        """Forget a segment's stamps, for its next use."""
        if self._covered(segment_id):
            self._stamps[segment_id] = 0
            self._lookups[segment_id] = 0

    @property
    def used_bytes(self) -> int:
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Let go of the file; the mappings go with their last user."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def _signed(ticks: int) -> int:
    return (ticks + (1 << 31)) % (1 << 32) - (1 << 31)


def _open_whole(path: Path, header: bytes, least_bytes: int, most_bytes: int) -> int:
    """A descriptor of the heat file, which has blocks on the drive for all of its bytes: from `least_bytes` to `most_bytes`.

    A damaged file is replaced and not mended: others may have it mapped, and die where it is made shorter.
    """
    damaged = False
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        pass
    else:
        size = os.fstat(fd).st_size
        damaged = not least_bytes <= size <= most_bytes or os.pread(fd, len(header), 0) != header
        if not damaged:
            return _allocated(fd, size)
        os.close(fd)
        log.warning("%s is damaged; when pages were last used is forgotten", path)
    aside = path.with_name(f"{path.name}.{os.urandom(8).hex()}.new")
    try:
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _allocated(fd, least_bytes)
        os.pwrite(fd, header, 0)
        if damaged:
            os.rename(aside, path)
            return fd
        try:
            os.link(aside, path)
        except FileExistsError:  # another process was quicker
            os.close(fd)
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        return fd
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)


def _allocated(fd: int, size: int) -> int:
    """Not sparse: on a full drive, a store into a hole of a mapping kills the process (SIGBUS)."""
    try:
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
