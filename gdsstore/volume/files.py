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
from gdsstore.volume.volume import Volume

log = logging.getLogger("gdsstore.volume")


@dataclass(slots=True)
class _Open:
    fd: int
    volume: int
    pins: int = 0
    doomed: bool = False  # close when nobody uses it any more


class SegmentFiles:
    """Descriptors by segment id. Thread-safe. A descriptor stays open, and attached, while it is pinned.

    `leaving` is called with a descriptor and its volume before it is detached.
    """

    def __init__(
        self,
        engine: Engine,
        volumes: Sequence[Volume],
        segment_bytes: int,
        max_open: int,
        leaving: Callable[[int, int], None] = lambda fd, volume: None,
    ) -> None:
        self._engine, self._volumes, self._leaving = engine, volumes, leaving
        self._segment_bytes, self._max_open = segment_bytes, max_open
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _Open] = OrderedDict()  # least recently used first

    def pin(self, segments: npt.NDArray[np.uint32], volumes: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Descriptors for n distinct segments, -1 where the file cannot be opened. Unpin them all, -1 or not."""
        fds = np.full(len(segments), -1, np.int32)
        with self._lock:
            for i, (segment, volume) in enumerate(zip(segments.tolist(), volumes.tolist(), strict=True)):
                file = self._files.get(segment)
                if file is None or file.doomed:
                    file = self._open(segment, volume)
                if file is not None:
                    file.pins += 1
                    self._files.move_to_end(segment)
                    fds[i] = file.fd
            self._close_idle()
        return fds

    def unpin(self, segments: npt.NDArray[np.uint32], fds: npt.NDArray[np.int32]) -> None:
        with self._lock:
            for segment, fd in zip(segments.tolist(), fds.tolist(), strict=True):
                file = self._files.get(segment)
                if file is not None and file.fd == fd:
                    file.pins -= 1
            self._close_idle()

    def open_files(self) -> list[tuple[int, int]]:
        """Descriptor and volume of each file that is open now."""
        with self._lock:
            return [(file.fd, file.volume) for file in self._files.values()]

    def close(self) -> None:
        """Close what nobody uses. What is still pinned stays open: closing it under a transfer would hit another file."""
        with self._lock:
            for file in self._files.values():
                file.doomed = True
            self._close_idle()

    def _open(self, segment: int, volume: int) -> _Open | None:
        if not 0 <= volume < len(self._volumes):
            return None
        try:
            fd = self._volumes[volume].open_data(segment)
        except OSError as error:
            log.error("segment %s: %s", self._volumes[volume].segment_path(segment), error.strerror)
            return None
        try:
            self._engine.attach(fd, self._segment_bytes)
        except GdsStoreError as error:  # the engine's, or its device's
            os.close(fd)
            log.error("segment %s: %s", self._volumes[volume].segment_path(segment), error)
            return None
        file = self._files[segment] = _Open(fd, volume)
        return file

    def _close_idle(self) -> None:
        surplus = len(self._files) - self._max_open
        if surplus <= 0 and not any(file.doomed for file in self._files.values()):
            return
        for segment, file in list(self._files.items()):
            if file.pins == 0 and (file.doomed or surplus > 0):
                del self._files[segment]
                self._leaving(file.fd, file.volume)
                self._engine.detach(file.fd)
                os.close(file.fd)
                surplus -= 1
