"""Pages whose bytes are known, so that what has become something else is not written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore.memory.views import PageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMemory(PageMemory):
    """`raw`: the raw checksum sum that the record of each page has, uint64 (n,). A save of a page with another one fails with
    FAILED_CHECKSUM."""

    raw: npt.NDArray[np.uint64]

    def take(self, index: npt.NDArray[np.intp]) -> KnownMemory:
        return KnownMemory(
            address=self.address[index],
            length=self.length[index],
            owner=self.owner,
            ready=self.ready,
            raw=self.raw[index],
        )
