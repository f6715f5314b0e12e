"""The scratch file that paths are measured with: fully written, opened as data files are, and gone afterwards in any case."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from gdsstore.engines.base import Op, RangePlan
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.sizes import MiB
from gdsstore.volume.direct import REFUSED

PREFIX = ".gdsstore-paths-"  # no segment's name begins with a dot
FILL_BYTES = MiB

_left_behind: list[object] = []  # memory that a call which hangs still reads


class ScratchFile:
    """A file of `nbytes` bytes in a directory: `fd`, with O_DIRECT where the filesystem does it.

    It keeps its name as long as it is used, for engines that open a file by name, and is locked meanwhile: that tells it from
    what a killed process left, which is removed here. Raises OSError; DeadlineError where the drive takes longer than
    `deadline_s` seconds to write it.
    """

    def __init__(self, directory: Path, nbytes: int, deadline_s: float) -> None:
        remove_leftovers(directory)
        self.nbytes = nbytes
        self._path = directory / f"{PREFIX}{os.getpid()}-{threading.get_ident()}"
        self._kept_open = False
        self.fd = self._open()
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._fill(deadline_s)
        except BaseException:
            self.close()
            raise

    def keep_open(self) -> None:
        """A call that hangs still uses the descriptor: its number must not become another file's."""
        self._kept_open = True

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        if not self._kept_open:
            os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(self._path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno not in REFUSED:
                raise
        with contextlib.suppress(FileNotFoundError):  # some filesystems make the file before they refuse
            os.unlink(self._path)
        return os.open(self._path, flags, 0o600)

    def _fill(self, deadline_s: float) -> None:
        """P2PDMA refuses holes and extents that were never written, or is slow on them."""
        # Random: a drive or filesystem that compresses would be measured at something else.
        memory = np.frombuffer(mmap.mmap(-1, FILL_BYTES), np.uint8)
        memory[:] = np.random.default_rng().integers(0, 256, FILL_BYTES, np.uint8)
        offset = np.arange(0, self.nbytes, FILL_BYTES, dtype=np.int64)
        length = np.minimum(FILL_BYTES, self.nbytes - offset)
        address = np.full(len(offset), memory.ctypes.data, np.uint64)
        plan = RangePlan(np.full(len(offset), self.fd, np.int32), offset, address, length)
        engine = PosixEngine(1)  # one thread: the file grows from its beginning to its end
        try:
            engine.attach(self.fd, self.nbytes)
            transfer = engine.submit(Op.WRITE, plan)
            results = transfer.wait(deadline_s)
            if not transfer.done:
                self.keep_open()
                _left_behind.append(memory)
                raise DeadlineError("the drive did not write a scratch file in time", deadline_s=deadline_s)
            bad = np.flatnonzero(~results.complete(plan))
            if len(bad):
                code = int(results.errno[bad[0]])
                if code:
                    raise OSError(code, os.strerror(code), str(self._path))
                raise EngineError("the drive cut a write short; is it full?", path=str(self._path))
        finally:
            engine.close(0.0 if self._kept_open else deadline_s)


def remove_leftovers(directory: Path) -> None:
    """Remove scratch files that killed processes left. Those of living ones are locked, and stay."""
    for path in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may be at it too
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
            finally:
                os.close(fd)
