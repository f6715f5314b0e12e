"""The store's cost model: fed by its loads, asked by its look-ups."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from gdsstore.config import Config
from gdsstore.errors import ArgumentError
from gdsstore.observe.counters import Counters
from gdsstore.transfer.cost import Advice, CostModel, CostSetting
from gdsstore.transfer.policy_stats import Reads


class StoreCost:
    """Thread-safe. With `cost_model` off it learns nothing, and every hit is worth its load."""

    def __init__(self, config: Config, counters: Counters, reads: Callable[[], Reads]) -> None:
        self.setting = config.cost_model
        self._counters, self._reads = counters, reads
        self._model = CostModel(prefill_tokens_s=config.prefill_tokens_s or None)

    def observe_prefill(self, tokens: int, seconds: float, cached_tokens: int = 0) -> None:
        """Say that `tokens` tokens were computed in `seconds`, behind `cached_tokens` that were not. Where `prefill_tokens_s` is
        not set, nothing is advised before the first of these."""
        self._model.observe_prefill(tokens, seconds, cached_tokens)

    @contextlib.contextmanager
    def observed(self, loaded_bytes: Callable[[], int]) -> Iterator[None]:
        """Around a load from the drives; `loaded_bytes` says in the end how many bytes it got."""
        if self.setting is CostSetting.OFF:
            yield
            return
        start, before = time.monotonic(), self._reads()
        yield
        seconds, after, mine = time.monotonic() - start, self._reads(), loaded_bytes()
        # What the drives did for others meanwhile went before it, or beside it.
        done = after.granted_bytes - after.under_way_bytes - (before.granted_bytes - before.under_way_bytes)
        self._model.observe_load(mine, seconds, max(0, done - mine))

    def advise(
        self,
        pages: int,
        page_bytes: int,
        page_tokens: int,
        *,
        rest_tokens: int = 0,
        cached_tokens: int = 0,
        wait_s: float = 0.0,
        queued_bytes: int = 0,
    ) -> Advice:
        """See `BoundNamespace.advise`."""
        if page_tokens <= 0:
            raise ArgumentError("nothing can be advised for pages of no tokens; give the layout page_tokens")
        if self.setting is CostSetting.OFF:
            return Advice(pages, 0.0, 0.0, 0.0, "cost_model is off")
        reads = self._reads()
        advice = self._model.advise(
            pages=pages,
            page_bytes=page_bytes,
            page_tokens=page_tokens,
            queued_bytes=queued_bytes + reads.under_way_bytes + reads.waiting_bytes,
            cached_tokens=cached_tokens,
            rest_tokens=rest_tokens,
            wait_s=wait_s,
        )
        self._counters.add("advised_pages", pages)
        self._counters.add("advised_pages_computed", pages - advice.load_pages)
        return advice

    def worth_loading(self, pages: int, warm: int, asked: int, page_bytes: int, page_tokens: int) -> int:
        """What a look-up of `asked` pages says of `pages` that are there, the first `warm` of them in the host cache, where they
        cost nothing."""
        if page_tokens <= 0:
            return pages
        advice = self.advise(
            pages - warm,
            page_bytes,
            page_tokens,
            rest_tokens=(asked - pages) * page_tokens,
            cached_tokens=warm * page_tokens,
        )
        return warm + advice.load_pages if self.setting is CostSetting.ENFORCE else pages


def leading(mask: npt.NDArray[np.bool_]) -> int:
    """How many are true from the start."""
    return len(mask) if mask.all() else int(mask.argmin())
