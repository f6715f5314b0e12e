"""Whether a filesystem does O_DIRECT, and from which memory alignment on. Probed once a volume, then latched."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from gdsstore.errors import from_os_error
from gdsstore.layout import ALIGNMENT

log = logging.getLogger("gdsstore.volume")

MEMORY_ALIGNMENTS = (512, ALIGNMENT)
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class DirectSupport:
    """`flags` opens data files; memory must be aligned to `memory_alignment` bytes, lengths and offsets to 4 KiB."""

    flags: int
    memory_alignment: int

    @property
    def direct(self) -> bool:
        return bool(self.flags & os.O_DIRECT)


def probe_direct(directory: Path) -> DirectSupport:
    """Write and read a block in `directory` with O_DIRECT. Falls back to buffered I/O with one loud warning.

    Raises VolumeError where the directory cannot be written at all.
    """
    path = directory / f".probe-{os.getpid()}-{id(directory):x}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in REFUSED:
            raise from_os_error(error, "cannot write into the volume") from error
        return _buffered(directory, error)
    try:
        return _try_alignments(fd)
    except OSError as error:
        if error.errno not in REFUSED:
            raise from_os_error(error, "cannot write into the volume") from error
        return _buffered(directory, error)
    finally:
        os.close(fd)
        os.unlink(path)


def _try_alignments(fd: int) -> DirectSupport:
    with mmap.mmap(-1, 3 * ALIGNMENT) as memory, memoryview(memory) as view:
        with view[:ALIGNMENT] as block:
            os.pwrite(fd, block, 0)
        for alignment in MEMORY_ALIGNMENTS:
            # Offset by the alignment, and by no more: a buffer that is better aligned proves nothing.
            with view[alignment : alignment + ALIGNMENT] as block:
                try:
                    if os.pwrite(fd, block, 0) == ALIGNMENT and os.preadv(fd, [block], 0) == ALIGNMENT:
                        return DirectSupport(os.O_DIRECT, alignment)
                except OSError as error:
                    if error.errno not in REFUSED:
                        raise
    raise OSError(errno.EINVAL, "O_DIRECT refuses 4 KiB blocks")


def _buffered(directory: Path, error: OSError) -> DirectSupport:
    log.warning(
        "%s does not do O_DIRECT (%s): pages go through the page cache, which is slower and takes memory; "
        "put the store on ext4 or xfs",
        directory,
        error.strerror,
    )
    return DirectSupport(0, 1)
