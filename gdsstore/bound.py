"""A namespace of an open store: the calls that look up, save, load and delete its pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gdsstore.bound_moving import MovingCalls
from gdsstore.catalog.keys import index_keys
from gdsstore.costing import leading
from gdsstore.errors import StoreError
from gdsstore.namespace import Keys, as_key_array
from gdsstore.transfer.cost import Advice, CostSetting


class BoundNamespace(MovingCalls):
    """Pages of one namespace. Made by `Store.namespace`; thread-safe; lives as long as its store is open."""

    # --- looking up: memory only, microseconds ---

    def lookup(self, keys: Keys) -> int:
        """How many pages from the start are stored, up to the first that is not; with `cost_model` = enforce, only as many as
        are worth their load.

        What was found stays loadable for `grace_s`. Raises ArgumentError for keys that are not 32 bytes.
        """
        found = self._present(keys, prefix=True)
        pages = leading(found)
        if pages == 0 or self._store.cost.setting is CostSetting.OFF:
            return pages
        warm = 0 if self._warm is None else leading(self._warm.contains(as_key_array(keys)[:pages]))
        sizes = self._record_bytes, self.namespace.layout.page_tokens
        return self._store.cost.worth_loading(pages, warm, len(found), *sizes)

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """For each key whether its page is stored. Shape (n,)."""
        return self._present(keys, prefix=False)

    def advise(
        self,
        pages: int,
        *,
        rest_tokens: int = 0,
        cached_tokens: int = 0,
        wait_s: float = 0.0,
        queued_bytes: int = 0,
    ) -> Advice:
        """How many of a hit's first `pages` pages are worth their load from the drives; see docs/api.md.

        `cached_tokens`: before the hit, and there already. `rest_tokens`: behind it, computed in any case. `wait_s`: seconds until
        the request could be computed at all. `queued_bytes`: of prefetches that go first; the store knows of the loads itself.
        Raises ArgumentError where the layout does not say how many tokens a page holds.
        """
        return self._store.cost.advise(
            pages,
            self._record_bytes,
            self.namespace.layout.page_tokens,
            rest_tokens=rest_tokens,
            cached_tokens=cached_tokens,
            wait_s=wait_s,
            queued_bytes=queued_bytes,
        )

    def _present(self, keys: Keys, *, prefix: bool) -> npt.NDArray[np.bool_]:
        array = as_key_array(keys)
        index, tag = index_keys(array, self.digest)
        warm = self._warm if self._warm is not None and self._warm.holds_unwritten else None
        with self._store.using() as store:
            where = store.catalog.present(index, tag, prefix=prefix and warm is None)
            segment, slot = where.segment[where.found], where.slot[where.found]
            store.heat.touch(segment, slot)
            store.heat.looked_up(segment)  # what is reported now stays loadable for the grace period
            found = where.found if warm is None else where.found | warm.contains(array)
            hits = int(np.count_nonzero(found))
            store.counters.looked_up(hits, len(index) - hits)
            return found

    # --- deleting ---

    def delete(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Drop pages. Returns for each key whether there was one to drop. Their space comes back with their segment.

        Raises DeadlineError where one is being written to a drive that hangs: then they may still be there.
        """
        array = as_key_array(keys)
        index, tag = index_keys(array, self.digest)
        with self._store.using() as store:
            warm = None if self._warm is None else self._warm.drop(array, self._deadline(None))
            gone = self._drive.remove(index, store.catalog.resolve(index, tag))
            if self._warm is None or warm is None:
                return gone
            # Again: what was read from the drive until a moment ago.
            return gone | warm | self._warm.drop(array, self._deadline(None))

    def clear(self) -> int:
        """Drop all pages of this namespace. Returns how many there were on the drives.

        Raises StoreError where that cannot be noted on the drive.
        """
        with self._store.using() as store:
            if self._warm is not None:
                self._warm.clear(self._deadline(None))
            if store.volumes[0].is_of_another(store.uuid):
                raise StoreError("the directory holds another store now", path=str(store.directory.root))
            store.directory.describe_namespace(self.identity)  # the mark is kept with it
            store.directory.mark_cleared(self.digest, store.sequencer.take())
            dropped = 0
            with store.catalog.read() as txn:
                rows = store.catalog.segments(txn)
            for row in rows:
                with store.catalog.write(pages=row.filled) as txn:
                    dropped += store.catalog.drop_pages(txn, row.segment_id, self.digest)
            if self._warm is not None:
                self._warm.clear(self._deadline(None))  # what was read from the drives until a moment ago
            return dropped
