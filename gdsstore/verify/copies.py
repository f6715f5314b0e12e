"""Whether copies of pages are whole, for a rebuild that has several of a page to choose from."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gdsstore.config import Config
from gdsstore.directory import StoreInfo
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import DeadlineError
from gdsstore.transfer.results import PageStatus
from gdsstore.verify.payloads import PayloadReader
from gdsstore.verify.result import Damage
from gdsstore.verify.table import read_table
from gdsstore.volume.format import Entries
from gdsstore.volume.volume import Volume
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.verify")

# For all copies: who opens the store waits for it, and other processes wait a minute at the most.
TIME_S = 30.0
# A block that the power cut short may be unreadable.
NOT_THERE = (PageStatus.MISS_CHECKSUM, PageStatus.MISS_IO)


class Copies:
    """Reads payloads of a store that is being opened. Starts nothing before it is asked."""

    def __init__(self, volumes: Sequence[Volume], info: StoreInfo, config: Config) -> None:
        self._volumes, self._info, self._config = volumes, info, config
        self._open = contextlib.ExitStack()
        self._reader: PayloadReader | None = None
        self._silent: set[int] = set()  # volumes that did not answer
        self._deadline: Deadline | None = None

    def arrived(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which of these have a payload of their checksum on the drive, shape (n,). Where the drive does not say, or not within
        `TIME_S`, all are taken to have: a load will tell. Does not raise."""
        self._deadline = self._deadline or Deadline(TIME_S)
        whole = np.ones(len(entries), np.bool_)
        segments, which = np.unique(entries["segment_id"], return_inverse=True)
        newest = np.zeros(len(segments), np.uint64)
        np.maximum.at(newest, which, entries["sequence"])
        for number in np.argsort(newest)[::-1].tolist():  # what was under way is among the last
            if self._deadline.passed:
                log.warning("not all copies of pages were compared with their checksums: it takes too long")
                break
            mine = np.flatnonzero(which == number)
            slots = entries["slot"][mine].astype(np.int64)
            by_slot = np.argsort(slots)
            try:
                whole[mine[by_slot]] = self._check(int(segments[number]), slots[by_slot])
            except Exception:  # others may be read well, and the store is to be opened in any case
                log.exception("copies of pages could not be compared with their checksums")
        return whole

    def _check(self, segment_id: int, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        for volume in self._volumes:
            if volume.index in self._silent:
                continue
            table = read_table(volume, segment_id, self._info.uuid, self._info.segment_bytes)
            if isinstance(table, Damage):
                continue
            try:
                status = self._payloads().check(table, volume, slots, lambda offset: None)
            except DeadlineError:
                status = np.full(len(slots), PageStatus.MISS_DEADLINE, np.uint8)
            if (status == PageStatus.MISS_DEADLINE).any():
                log.error("%s does not say which copies of pages are whole", volume.path)
                self._silent.add(volume.index)
                self._reader = None  # it may hold on to this one's memory and threads
            return np.asarray(~np.isin(status, NOT_THERE))
        return np.ones(len(slots), np.bool_)

    def _payloads(self) -> PayloadReader:
        if self._reader is None:
            engine = PosixEngine(self._config.posix_threads)
            reader = PayloadReader(engine, self._volumes, self._info.segment_bytes, self._config)
            self._reader = self._open.enter_context(reader)
        return self._reader

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
