"""Pages of one namespace on the drives, sealed: `DrivePages`' calls, for pages in the clear."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdsstore.catalog.records import Locations
from gdsstore.drive_pages import Call, DrivePages
from gdsstore.engines.base import Op
from gdsstore.layered_calls import LayeredLoad
from gdsstore.layered_saves import LayeredSave
from gdsstore.namespace import Namespace
from gdsstore.sealing.identity import SealedNamespace
from gdsstore.sealing.side import ClearMemory
from gdsstore.transfer.load import Landed
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.results import LoadResult, PageStatus, SaveResult

if TYPE_CHECKING:
    from gdsstore.store import Store

log = logging.getLogger("gdsstore.store")


class SealedPages:
    """Thread-safe; lives as long as its store is open.

    `page_bytes` and `record_bytes` are those of pages in the clear, as the host cache keeps them; `digest` and `geometry` are
    those of the sealed ones.
    """

    def __init__(self, store: Store, namespace: Namespace, identity: SealedNamespace) -> None:
        self._drive = DrivePages(store, identity)
        self.digest, self.geometry = self._drive.digest, self._drive.geometry
        self.page_bytes, self.record_bytes = namespace.layout.page_bytes, namespace.layout.record_bytes

    def save(self, call: Call, layered: LayeredSave | None = None) -> SaveResult:
        """See `DrivePages.save`. A page is sealed whole: `layered` is waited for to the end of the forward."""
        if layered is not None and len(call):
            try:
                ended = layered.wait_whole(call.deadline, call.admission)
                failure = (
                    PageStatus.FAILED_CANCELLED if call.admission.stopping else PageStatus.FAILED_DEADLINE
                )
            except Exception:  # of the caller's `ready`
                log.exception("a layer-wise save failed")
                ended, failure = False, PageStatus.FAILED_IO
            if not ended:
                result = SaveResult(np.full(len(call), failure, np.uint8))
                self.count(result.reasons())
                return result
        return self._drive.save(self._named(call, wants_sums=False))

    def load(
        self,
        call: Call,
        landed: Landed | None = None,
        meanwhile: Iterator[None] | None = None,
        *,
        verify: bool = False,
        layered: LayeredLoad | None = None,
    ) -> LoadResult:
        """See `DrivePages.load`. A page is opened whole: `layered` hears of all layers at once, of verified pages."""
        named = self._named(call, wants_sums=landed is not None)
        result = self._drive.load(named, landed, meanwhile, verify=verify)
        if layered is not None:
            layered.tell_whole(np.flatnonzero(result.ok))
        return result

    def _named(self, call: Call, *, wants_sums: bool) -> Call:
        memory = call.memory
        named = ClearMemory(
            address=memory.address,
            length=memory.length,
            owner=memory.owner,
            ready=memory.ready,
            digest=self.digest,
            keys=call.keys,
            clear_bytes=self.page_bytes,
            wants_sums=wants_sums,
        )
        return replace(call, memory=named)

    # --- the rest is the drive's ---

    @property
    def io_deadline_s(self) -> float:
        return self._drive.io_deadline_s

    def mover(self, call: Call, op: Op, pages: int) -> Mover:
        """What copies so many pages of the host cache now; see `DrivePages.mover`."""
        return self._drive.mover(call, op, pages)

    def count(self, outcomes: dict[str, int]) -> None:
        """See `DrivePages.count`."""
        self._drive.count(outcomes)

    def has(self, keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """See `DrivePages.has`."""
        return self._drive.has(keys)

    def remove(self, index: npt.NDArray[np.uint64], where: Locations) -> npt.NDArray[np.bool_]:
        """See `DrivePages.remove`."""
        return self._drive.remove(index, where)
