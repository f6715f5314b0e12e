"""Loads: queued at admission, started as one with their batch, and waited for layer by layer by the forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gdsstore import GdsStoreError, LoadResult
from gdsstore.transfer.results import CallResult
from sglang_backend.device_pools import host_indices
from sglang_backend.linker_layers import OnLayers, Progress, ended, let_go, load_layers, load_warm
from sglang_backend.linker_pools import U8, StoredPool, Wanted, among, raw_keys
from sglang_backend.linker_prefetch import Prefetched
from sglang_backend.linker_worker import Worker

log = logging.getLogger("gdsstore.sglang")

NOTHING = -1


class LoadFailedError(GdsStoreError):
    """Pages of a batch did not arrive, so that the batch's requests are aborted."""


@dataclass(frozen=True, slots=True)
class _Request:
    wanted: tuple[Wanted, ...]
    prefetched: Prefetched | None


@dataclass(frozen=True, slots=True)
class _Batch:
    index: int  # of SGLang's counter
    requests: tuple[_Request, ...]
    ready: Sequence[Any]  # events after which the indices can be read
    verdict: Future[bool]


@dataclass(frozen=True, slots=True)
class _Call:
    """Pages of one pool for one load. `warm`: from the host cache, as a whole; else from the drive, by layers."""

    stored: StoredPool
    keys: U8
    pages: Any
    warm: bool

    def start(self, on_layers: OnLayers, deadline_s: float) -> Future[LoadResult]:
        if self.warm:
            return load_warm(self.stored.bound, self.keys, self.pages, deadline_s)
        return load_layers(self.stored.bound, self.keys, self.pages, on_layers, deadline_s)


class Loads:
    """All methods are for the scheduler's thread. `counter`: SGLang's LayerWiseLoadCounter. `streams`: CUDA streams that may be
    at work on rows that SGLang has given to a load since. With its overlap schedule a request that has ended takes part in one more
    forward, which writes to rows that are free already. Reads from the drive do not wait for them, writes to the rows do."""

    def __init__(
        self,
        pools: Sequence[StoredPool],
        layers: int,
        counter: Any,
        deadline_s: float,
        streams: Sequence[int] = (),
    ) -> None:
        self._pools, self._layers, self._counter = tuple(pools), layers, counter
        self._deadline_s, self._streams = deadline_s, tuple(streams)
        self._queued: dict[str, _Request] = {}
        self._verdicts: dict[int, Future[bool]] = {}
        self.pages_loaded = self.pages_failed = 0
        self.pages_warm = 0  # of those that were to be loaded, how many a prefetch had brought
        device = self._pools[0].pool.buffers.device
        self._worker: Worker[_Batch] = Worker("gdsstore-load", self._run, lambda _waiting: 1, device)

    def queue(self, rid: str, transfers: Sequence[Any], prefetched: Prefetched | None = None) -> bool:
        """False where there is nothing to load, or the request has a load already; the same on every rank."""
        wanted = Wanted.of(transfers, copy=False)
        if not wanted or rid in self._queued:
            return False
        self._queued[rid] = _Request(wanted, prefetched)
        return True

    def cancel(self, rid: str) -> tuple[bool, Prefetched | None]:
        """Whether it was queued, and what had been brought for it."""
        request = self._queued.pop(rid, None)
        return request is not None, None if request is None else request.prefetched

    def start(self, record_ready: Callable[[], Sequence[Any]]) -> int:
        """Start all that is queued. Returns the counter's index for the batch, or NOTHING."""
        if not self._queued:
            return NOTHING
        requests, self._queued = tuple(self._queued.values()), {}
        index = int(self._counter.update_producer())
        verdict: Future[bool] = Future()
        self._verdicts[index] = verdict
        self._worker.put(_Batch(index, requests, record_ready(), verdict))
        return index

    def finish(self, index: int) -> bool:
        """Wait until nothing writes for this batch any more; whether every page arrived and was right."""
        landed = bool(self._counter.finish(index))
        verdict = self._verdicts.pop(index, None)
        return landed and (verdict is None or verdict.result())

    def reset(self) -> None:
        """Return when nothing touches the device pools any more."""
        self._queued.clear()
        for batch in self._worker.drain(0.0):  # no forward waits for these any more
            self._fail(batch, LoadFailedError("the linker was reset before the load began"))
        self._verdicts.clear()

    def close(self) -> None:
        self.reset()
        self._worker.close()

    # --- in the worker's thread ---

    def _run(self, batches: list[_Batch]) -> None:
        for batch in batches:
            try:
                self._load(batch)
            except Exception as error:  # whatever it is: a forward waits
                log.exception("a load of %d requests failed", len(batch.requests))
                self._fail(batch, error)

    def _load(self, batch: _Batch) -> None:
        for event in batch.ready:
            event.synchronize()
        calls = self._calls(batch)
        progress = Progress(
            [call.stored.pool.needed_at for call in calls],
            self._layers,
            lambda layer: self._counter.complete(batch.index, layer),
        )
        started: list[tuple[int, _Call, Future[LoadResult]]] = []
        failed: list[str] = []
        for number, call in enumerate(calls):
            try:
                started.append((number, call, call.start(progress.of(number), self._deadline_s)))
            except Exception as error:
                # Whatever it is: those that were started write to rows of the same requests.
                log.error("the pages of pool %s cannot be loaded", call.stored.pool.name, exc_info=error)
                failed.append(f"{call.stored.pool.name}: {error}")
        results: list[tuple[_Call, CallResult | Exception]] = []
        for number, call, future in started:  # all of them end before anything else can go wrong
            what = f"a load of pool {call.stored.pool.name}"
            result = ended(future, what, 2 * self._deadline_s)
            if not isinstance(result, Exception):
                let_go(call.stored.bound, call.pages, result, what)
                if call.warm:
                    progress.of(number)(0, len(call.stored.pool.needed_at), result.ok)
            results.append((call, result))
        for call, result in results:
            failed += self._judge(call.stored, call.keys, result)
        if failed:
            self._fail(batch, LoadFailedError("; ".join(failed)))
        else:
            progress.finish()
            batch.verdict.set_result(True)

    def _calls(self, batch: _Batch) -> list[_Call]:
        """What to load: of each pool what is warm, first, and the rest. Raises GdsStoreError, and then nothing is begun."""
        warm: dict[str, list[U8]] = {}
        for request in batch.requests:
            for name, keys in (request.prefetched.settle() if request.prefetched else {}).items():
                warm.setdefault(name, []).append(keys)
        calls: list[_Call] = []
        for stored in self._pools:
            pool = stored.pool
            mine = [
                each for request in batch.requests for each in request.wanted if each.source == pool.source
            ]
            keys = raw_keys([key for each in mine for key in each.keys])
            slots = host_indices([each.indices for each in mine]).reshape(len(keys), -1)
            here = among(keys, warm.get(pool.name, ()))
            self.pages_warm += int(here.sum())
            for some, is_warm in ((here, True), (~here, False)):
                if some.any():
                    pages = pool.pages(slots[some].reshape(-1), self._streams)
                    calls.append(_Call(stored, keys[some], pages, is_warm))
        return sorted(calls, key=lambda call: not call.warm)

    def _judge(self, stored: StoredPool, keys: U8, result: CallResult | Exception) -> list[str]:
        """Why the load failed, if it did. Its pages are a miss from now on."""
        if isinstance(result, Exception):
            log.error("%d pages of pool %s were not loaded", len(keys), stored.pool.name, exc_info=result)
            stored.quarantine.add(keys)
            self.pages_failed += len(keys)
            return [f"{stored.pool.name}: {result}"]
        missed = ~result.ok
        self.pages_loaded += len(keys) - int(missed.sum())
        if not missed.any():
            return []
        self.pages_failed += int(missed.sum())
        lost = keys[missed]
        stored.hold(lost)
        log.error(
            "%d of %d pages of pool %s were not loaded: %s",
            int(missed.sum()),
            len(keys),
            stored.pool.name,
            result.reasons(),
        )
        return [f"{stored.pool.name}: {result.reasons()}"]

    def _fail(self, batch: _Batch, error: Exception) -> None:
        self._counter.fail(batch.index, error)
        if not batch.verdict.done():
            batch.verdict.set_result(False)
