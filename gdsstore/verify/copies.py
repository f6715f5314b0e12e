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
from gdsstore.errors import GdsStoreError
from gdsstore.transfer.results import PageStatus
from gdsstore.verify.payloads import PayloadReader
from gdsstore.verify.result import Damage
from gdsstore.verify.table import read_table
from gdsstore.volume.format import Entries
from gdsstore.volume.volume import Volume

log = logging.getLogger("gdsstore.verify")


class Copies:
    """Reads payloads of a store that is being opened. Starts nothing before it is asked."""

    def __init__(self, volumes: Sequence[Volume], info: StoreInfo, config: Config) -> None:
        self._volumes, self._info, self._config = volumes, info, config
        self._open = contextlib.ExitStack()
        self._reader: PayloadReader | None = None

    def arrived(self, entries: Entries) -> npt.NDArray[np.bool_]:
        """Which of these have a payload of their checksum on the drive, shape (n,). Where the drive does not say, all are taken
        to have: a load will tell. Does not raise."""
        whole = np.ones(len(entries), np.bool_)
        try:
            for segment_id in np.unique(entries["segment_id"]).tolist():
                mine = np.flatnonzero(entries["segment_id"] == segment_id)
                slots = entries["slot"][mine].astype(np.int64)
                by_slot = np.argsort(slots)
                whole[mine[by_slot]] = self._check(segment_id, slots[by_slot])
        except (GdsStoreError, OSError) as error:
            log.error("copies of pages could not be compared with their checksums: %s", error)
        return whole

    def _check(self, segment_id: int, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        if self._reader is None:
            engine = PosixEngine(self._config.posix_threads)
            reader = PayloadReader(engine, self._volumes, self._info.segment_bytes, self._config)
            self._reader = self._open.enter_context(reader)
        for volume in self._volumes:
            table = read_table(volume, segment_id, self._info.uuid, self._info.segment_bytes)
            if not isinstance(table, Damage):
                status = self._reader.check(table, volume, slots, lambda offset: None)
                return np.asarray(status != PageStatus.MISS_CHECKSUM)
        return np.ones(len(slots), np.bool_)

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
