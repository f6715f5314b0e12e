"""The files of the bounce engine: the drive that each is on, and a way around O_DIRECT for ranges that it refuses."""

from __future__ import annotations

import errno
import fcntl
import logging
import os

import numpy as np

from gdsstore.engines.base import I32, I64, Engine, RangePlan
from gdsstore.engines.files import FileTable
from gdsstore.errors import GdsStoreError
from gdsstore.layout import ALIGNMENT

log = logging.getLogger("gdsstore.engines")


class BounceFiles:
    """Attached to `inner` too. Thread-safe."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self._sizes, self._drives = FileTable(), FileTable()

    def attach(self, fd: int, size: int) -> None:
        self._sizes.add(fd, size)
        try:
            self._inner.attach(fd, size)
            self._drives.add(fd, _drive(fd))
        except BaseException:
            self._sizes.discard(fd)
            self._inner.detach(fd)
            raise

    def detach(self, fd: int) -> None:
        self._sizes.discard(fd)
        self._drives.discard(fd)
        self._inner.detach(fd)

    def drives(self, fd: I32) -> I64:
        """A number for the drive of each file. Shape (n,), as `fd`."""
        return self._drives.sizes(fd)

    def openings(self, plan: RangePlan) -> Openings:
        """The descriptors to move a plan with. To be closed when nothing moves through them any more."""
        return Openings(self._inner, plan, self._sizes.sizes(plan.fd))


class Openings:
    """Descriptors for a plan's ranges: the file's own, or, for ranges that are not aligned while it is open with O_DIRECT, one
    without that. Such ranges are few: records are aligned. `fd` and `errno` have shape (n,)."""

    def __init__(self, inner: Engine, plan: RangePlan, sizes: I64) -> None:
        self._inner = inner
        self._opened: list[int] = []
        self.fd: I32 = plan.fd.copy()
        self.errno: I32 = np.zeros(len(plan), np.int32)
        odd = ((plan.file_offset | plan.length) % ALIGNMENT != 0) & (sizes >= 0)
        for fd in np.unique(plan.fd[odd]).tolist():
            mine = odd & (plan.fd == fd)
            try:
                self.fd[mine] = self._buffered(fd, int(sizes[mine][0]))
            except OSError as error:
                # A closed descriptor has no entry in /proc.
                self.errno[mine] = errno.EBADF if error.errno == errno.ENOENT else error.errno or errno.EIO
            except GdsStoreError as error:
                log.warning("%s refuses a file without O_DIRECT: %s", inner.name, str(error))
                self.errno[mine] = errno.EIO

    def close(self) -> None:
        for fd in self._opened:
            self._inner.detach(fd)
            os.close(fd)
        self._opened.clear()

    def _buffered(self, fd: int, size: int) -> int:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return fd
        kept = flags & (os.O_ACCMODE | os.O_SYNC | os.O_DSYNC)
        buffered = os.open(f"/proc/self/fd/{fd}", kept | os.O_CLOEXEC)
        try:
            self._inner.attach(buffered, size)
        except BaseException:
            os.close(buffered)
            raise
        self._opened.append(buffered)
        return buffered


def _drive(fd: int) -> int:
    try:
        return os.fstat(fd).st_dev + 1  # 0 is a device number too
    except OSError:
        return 1  # its ranges will have the errno
