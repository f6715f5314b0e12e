"""Does a store keep what a journal promised?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore import BoundNamespace, PageStatus, Store
from gdsstore.replay.truth import count_wrong
from tests.crash.journal import Ledger, Promise
from tests.crash.pages import LANE_BITS, keys_of, namespaces, room_for

CHUNK_PAGES = 512


@dataclass(frozen=True, slots=True)
class Terms:
    """What a check insists on, beside that no byte is ever wrong."""

    lossless: bool  # nothing may have been reclaimed: every promised page loads, every deleted one is gone
    alone: bool  # nobody writes meanwhile: what `contains` reports loads
    torn: bool  # the power went: a page without a promise may be reported and then turn out to be damaged


class BrokenPromiseError(Exception):
    """The store broke a promise; the message says which and for which pages."""


def check(store: Store, ledger: Ledger, terms: Terms) -> int:
    """Look up and load every page of a ledger; returns how many were loaded and right. Raises BrokenPromiseError."""
    loaded = 0
    for number, promises in ledger.lanes.items():
        for parity, namespace in enumerate(namespaces(store)):
            positions = np.arange(parity, len(promises), 2)
            positions = positions[promises[positions] != Promise.NOTHING]
            for start in range(0, len(positions), CHUNK_PAGES):
                part = positions[start : start + CHUNK_PAGES]
                loaded += _check_part(namespace, number, part, promises[part], terms)
    return loaded


def _check_part(
    namespace: BoundNamespace,
    lane: int,
    positions: npt.NDArray[np.int64],
    promises: npt.NDArray[np.uint8],
    terms: Terms,
) -> int:
    def broken(what: str, which: npt.NDArray[np.bool_], more: object = "") -> None:
        if which.any():
            raise BrokenPromiseError(
                f"{what}: {int(which.sum())} pages of lane {lane}: {positions[which][:8].tolist()} {more}"
            )

    keys = keys_of(lane << LANE_BITS | positions)
    there = namespace.contains(keys)
    if terms.lossless:
        broken("acknowledged and lost", (promises == Promise.THERE) & ~there)
        broken("deleted and back", (promises == Promise.GONE) & there)
    pages = room_for(len(keys), namespace.namespace.layout.page_bytes)
    pages[:] = 0xEE
    result = namespace.load(keys, pages).result()
    wrong = np.zeros(len(keys), np.bool_)
    wrong[count_wrong(keys, pages)] = True
    broken("WRONG BYTES", result.ok & wrong)
    if terms.alone:
        broken("not reported and loaded", ~there & result.ok)
    if terms.alone and not terms.torn:
        broken("reported and not loaded", there & ~result.ok, result.reasons())
    if not terms.torn:
        broken("damaged", result.status == PageStatus.MISS_CHECKSUM)
    if terms.lossless:
        broken("acknowledged and not loaded", (promises == Promise.THERE) & ~result.ok, result.reasons())
    return int(result.ok.sum())
