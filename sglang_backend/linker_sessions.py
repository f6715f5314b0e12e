"""Sessions as an eviction hint: what a conversation stored stays as warm as its newest turn.

While a conversation's pages are on the device nobody asks the store for them, so that their heads grow cold there, and would be
evicted before the tails that are of no use without them. SGLang names the session with each node that it offloads
(`session_id` of a request, with --enable-session-radix-cache), and tells a linker of no session's end: a session that has ended
grows cold by itself.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gdsstore import GdsStoreError, Store
from gdsstore.catalog.keys import index_keys
from sglang_backend.linker_pools import U8, StoredPool

log = logging.getLogger("gdsstore.sglang")

SESSIONS = 4096
PAGES = 1 << 18  # of all sessions and pools: 8 MiB of keys
SESSION_PAGES = 1 << 12  # of one session in one pool; the first are the ones that all others need
WARMED_EVERY_S = 5.0  # a prompt is offloaded in many parts


@dataclass(slots=True)
class _Stored:
    """Of one session in one pool. `keys`: (n, 32), from head to tail."""

    keys: U8
    warmed: float  # when, by time.monotonic


class Sessions:
    """Which pages the sessions stored. For one thread. `sessions`, `pages`: how much of it is remembered at the most."""

    def __init__(self, store: Store, *, sessions: int = SESSIONS, pages: int = PAGES) -> None:
        self._store, self._most_sessions, self._most_pages = store, sessions, pages
        self._stored: OrderedDict[str, dict[str, _Stored]] = OrderedDict()  # by session, by pool
        self._pages = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def pages(self) -> int:
        """Remembered now."""
        return self._pages

    def turn(self, session: str, stored: StoredPool, keys: U8) -> None:
        """A part of a session's newest turn was stored, or was there already: `keys`, (n, 32), from head to tail. What the session
        stored in that pool before counts as just used."""
        pools = self._stored.setdefault(session, {})
        self._stored.move_to_end(session)
        known = pools.setdefault(stored.pool.name, _Stored(np.zeros((0, 32), np.uint8), time.monotonic()))
        if time.monotonic() - known.warmed >= WARMED_EVERY_S:
            known.warmed = time.monotonic()
            self._warm(stored, known.keys)
        fresh = keys[~np.isin(_whole(keys), _whole(known.keys))][: SESSION_PAGES - len(known.keys)]
        known.keys = np.concatenate([known.keys, fresh])
        self._pages += len(fresh)
        while len(self._stored) > self._most_sessions or (
            self._pages > self._most_pages and len(self._stored) > 1
        ):
            _, oldest = self._stored.popitem(last=False)
            self._pages -= sum(len(each.keys) for each in oldest.values())

    def _warm(self, stored: StoredPool, keys: U8) -> None:
        index, tag = index_keys(keys, stored.bound.digest)
        try:
            with self._store.using() as store:
                where = store.catalog.present(index, tag, prefix=False)
                # Not as a look-up does it, which would keep their segments for the time of grace.
                store.heat.touch(where.segment[where.found], where.slot[where.found])
        except GdsStoreError as error:
            log.warning("the pages of a session could not be kept warm: %s", error)


def _whole(keys: U8) -> npt.NDArray[np.void]:
    """Each key as one value."""
    return np.ascontiguousarray(keys).view(np.dtype((np.void, 32))).reshape(-1)
