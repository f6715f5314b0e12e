"""Which prefixes of a waiting request can be restored. On the scheduler thread, for every request in every scheduling pass: from
memory, in numpy, and remembered.

A remembered answer is good for a part of the time for which the store keeps what it reported. It is given again without asking
the store as long as no load has failed in between; after that the store is asked anew, and its promise is renewed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_backend import hits
from sglang_backend.device_pools_kinds import KV
from sglang_backend.linker_pools import U8, StoredPool, raw_keys

REMEMBERED = 4096  # requests
WHOLE_S, PART_S = 2.0, 0.1  # an answer that more pages may be added to at any moment is asked for more often
SHARE_OF_GRACE = 0.25

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Answer:
    last_key: str  # of a chain: it stands for all before it
    pages: int
    lengths: list[int]
    until: float
    failures: int


class Lookup:
    """For one thread. `grace_s`: for how long the store keeps what it reported."""

    def __init__(self, pools: Sequence[StoredPool], grace_s: float) -> None:
        self._pools = tuple(pools)
        self._whole_s = min(WHOLE_S, SHARE_OF_GRACE * grace_s)
        self._part_s = min(PART_S, self._whole_s)
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self.asked = 0  # how often the store was

    def lengths(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """All lengths, in pages and rising, that every pool can restore. `transfers`: SGLang's PoolTransfers."""
        by_source = {str(transfer.name.value): transfer for transfer in transfers}
        keys = by_source[KV].keys if KV in by_source else None
        if not keys:
            return []
        known = self._answers.get(rid)
        failures = sum(stored.quarantine.failures for stored in self._pools)
        if (
            known is not None
            and (known.last_key, known.pages, known.failures) == (keys[-1], len(keys), failures)
            and time.monotonic() < known.until
        ):
            return known.lengths
        lengths = self._ask(raw_keys(keys), by_source)
        whole = bool(lengths) and lengths[-1] == len(keys)
        until = time.monotonic() + (self._whole_s if whole else self._part_s)
        self._answers[rid] = _Answer(keys[-1], len(keys), lengths, until, failures)
        self._answers.move_to_end(rid)
        if len(self._answers) > REMEMBERED:  # nothing says when a request is gone
            self._answers.popitem(last=False)
        return lengths

    def forget(self, rid: str) -> None:
        self._answers.pop(rid, None)

    def clear(self) -> None:
        self._answers.clear()

    def _ask(self, keys: U8, by_source: dict[str, Any]) -> list[int]:
        self.asked += 1
        for stored in self._of(KV):
            keys = keys[: stored.bound.lookup(keys)]
            keys = keys[: hits.leading(stored.quarantine.free(keys))] if len(keys) else keys
        if len(keys) == 0:
            return []
        mask = np.ones(len(keys), np.bool_)
        for source, transfer in by_source.items():
            for stored in self._of(source) if source != KV else ():
                present = stored.bound.contains(keys) & stored.quarantine.free(keys)
                mask &= hits.trailing_pages(present, len(transfer.keys or ()))
        lengths: list[int] = (np.flatnonzero(mask) + 1).tolist()
        return lengths

    def _of(self, source: str) -> list[StoredPool]:
        return [stored for stored in self._pools if stored.pool.source == source]
