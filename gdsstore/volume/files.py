"""The open data files of a store, attached to its engine: opened when first used, closed when too many are open."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Engine
from gdsstore.errors import GdsStoreError
from gdsstore.volume.volume import Inode, Volume, inode_of

log = logging.getLogger("gdsstore.volume")


@dataclass(slots=True)
class _Open:
    fd: int
    volume: int
    inode: Inode
    pins: int = 0
    doomed: bool = False  # close when nobody uses it any more


class SegmentFiles:
    """Descriptors by segment id. Thread-safe. A descriptor stays open, and attached, while it is pinned.

    `leaving` is called with a descriptor and its volume before it is detached. `owner`: the store's uuid, where nothing else tells
    whether a file is one of its segments; then its superblock is read when it is opened.
    """

    def __init__(
        self,
        engine: Engine,
        volumes: Sequence[Volume],
        segment_bytes: int,
        max_open: int,
        leaving: Callable[[int, int], None] = lambda fd, volume: None,
        owner: bytes | None = None,
    ) -> None:
        self._engine, self._volumes, self._leaving, self._owner = engine, volumes, leaving, owner
        self._segment_bytes, self._max_open = segment_bytes, max_open
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _Open] = OrderedDict()  # least recently used first
        self._replaced: list[_Open] = []  # in use, while the segment has another file by now

    def pin(
        self,
        segments: npt.NDArray[np.uint32],
        volumes: npt.NDArray[np.int64],
        *,
        writing: bool = False,
    ) -> npt.NDArray[np.int32]:
        """Descriptors for n distinct segments, -1 where the file cannot be opened or, for `writing`, is not the one whose table
        this process writes to. Unpin them all, -1 or not."""
        fds = np.full(len(segments), -1, np.int32)
        for i, (segment, volume) in enumerate(zip(segments.tolist(), volumes.tolist(), strict=True)):
            if 0 <= volume < len(self._volumes):
                fds[i] = self._pin(segment, self._volumes[volume], writing)
        with self._lock:
            self._close_idle()
        return fds

    def unpin(self, segments: npt.NDArray[np.uint32], fds: npt.NDArray[np.int32]) -> None:
        with self._lock:
            for segment, fd in zip(segments.tolist(), fds.tolist(), strict=True):
                files = [*self._replaced, self._files.get(segment)]
                file = next((file for file in files if file is not None and file.fd == fd), None)
                if file is not None:
                    file.pins -= 1
            self._close_idle()

    def open_files(self) -> list[tuple[int, int]]:
        """Descriptor and volume of each file that is open now."""
        with self._lock:
            return [(file.fd, file.volume) for file in [*self._files.values(), *self._replaced]]

    def close(self) -> None:
        """Close what nobody uses. What is still pinned stays open: closing it under a transfer would hit another file."""
        with self._lock:
            for file in self._files.values():
                file.doomed = True
            self._close_idle()

    def _pin(self, segment: int, volume: Volume, writing: bool) -> int:
        mine = volume.filling.get(segment) if writing else None
        if mine is not None and volume.inode(segment) != mine:
            log.error("%s was exchanged while it was filled", volume.segment_path(segment))
            return -1
        file = self._pin_open(segment, mine)
        if file is None:
            opened = self._open(segment, volume)  # without the lock: it may wait for the drive
            if opened is None:
                return -1
            file = self._enter(segment, volume, opened, mine)
        return -1 if file is None else file.fd

    def _pin_open(self, segment: int, mine: Inode | None) -> _Open | None:
        with self._lock:
            file = self._files.get(segment)
            if file is None or file.doomed or (mine is not None and file.inode != mine):
                return None
            file.pins += 1
            self._files.move_to_end(segment)
            return file

    def _open(self, segment: int, volume: Volume) -> _Open | None:
        path = volume.segment_path(segment)
        try:
            fd = volume.open_data(segment)
        except OSError as error:
            log.error("segment %s: %s", path, error.strerror)
            return None
        opened = _Open(fd, volume.index, inode_of(os.fstat(fd)))
        if self._owner is not None and volume.holds_another(segment, self._owner):
            log.error("%s is not a segment of this store, or another one", path)
            os.close(fd)
            return None
        return opened

    def _enter(self, segment: int, volume: Volume, opened: _Open, mine: Inode | None) -> _Open | None:
        """The file to use now that one was opened: another thread may have been quicker."""
        with self._lock:
            file = self._files.get(segment)
            if file is None or file.doomed or file.inode != opened.inode:
                try:
                    self._engine.attach(opened.fd, self._segment_bytes)
                except GdsStoreError as error:  # the engine's, or its device's
                    log.error("segment %s: %s", volume.segment_path(segment), error)
                    os.close(opened.fd)
                    return None
                if file is not None:
                    file.doomed = True
                    self._replaced.append(file)
                file = self._files[segment] = opened
            else:
                os.close(opened.fd)
            file.pins += 1
            self._files.move_to_end(segment)
            return file

    def _close_idle(self) -> None:
        surplus = len(self._files) - self._max_open
        for segment, file in list(self._files.items()):
            if surplus <= 0 and not file.doomed:
                continue
            if file.pins == 0:
                del self._files[segment]
                self._let_go(file)
                surplus -= 1
        for file in [file for file in self._replaced if file.pins == 0]:
            self._replaced.remove(file)
            self._let_go(file)

    def _let_go(self, file: _Open) -> None:
        self._leaving(file.fd, file.volume)
        self._engine.detach(file.fd)
        os.close(file.fd)
