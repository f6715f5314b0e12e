"""Runs a replay: in this process, or in several that share the store, and adds up what they saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from gdsstore.replay.lru import PageLru
from gdsstore.replay.plan import ReplayPlan
from gdsstore.replay.processes import run_processes
from gdsstore.replay.report import Report
from gdsstore.replay.requests import portion
from gdsstore.replay.truth import PageKeys
from gdsstore.replay.worker import WorkerResult, open_store, run_worker

Progress = Callable[[int], None]
"""Called often, with the number of requests done so far by all workers."""


def replay(plan: ReplayPlan, progress: Progress = lambda done: None) -> Report:
    """Replay the plan's requests through its store and check every loaded page.

    Raises ArgumentError for a trace that cannot be replayed, DeadlineError where a store or worker hangs, and
    what `gdsstore.open` raises. Wrong pages are in the report, not an error.
    """
    plan.workload()  # refuse a bad trace before a store is made for it
    if plan.processes == 1:
        results = [run_worker(plan, 0, progress)]
    else:
        open_store(plan).close()  # what is wrong with the store is said once, here
        results = run_processes(plan, progress)
    return _report(plan, results)


def _report(plan: ReplayPlan, results: list[WorkerResult]) -> Report:
    tallies = [result.tally for result in results]
    workload = plan.workload()
    pages = sum(tally.pages for tally in tallies)
    hit = sum(tally.pages_hit for tally in tallies)
    loaded = sum(tally.pages_loaded for tally in tallies)
    saves = _added(tally.saves for tally in tallies)
    saved = saves["SAVED"]
    capacity_bytes = results[0].capacity_bytes
    cold, warm = _lru_hits(plan, capacity_bytes)
    seconds = max(result.ended_s for result in results) - min(result.began_s for result in results)
    lookup_s, load_s, save_s = (
        np.array([second for tally in tallies for second in getattr(tally, name)])
        for name in ("lookup_s", "load_s", "save_s")
    )
    cpu_s = sum(result.cpu_s - result.tally.own_cpu_s for result in results)
    written = sum(result.drive_bytes_written for result in results)
    gb = plan.page_bytes / 1e9  # a page
    return Report(
        trace=workload.name,
        requests=sum(tally.requests for tally in tallies),
        tokens=pages * workload.block_tokens,
        hit_rate=_ratio(hit, pages) or 0.0,
        lru_hit_rate=_ratio(cold, pages) or 0.0,
        lru_hit_rate_warm=_ratio(warm, pages) or 0.0,
        pages=pages,
        pages_hit=hit,
        pages_saved=saved,
        pages_loaded=loaded,
        pages_verified=sum(tally.pages_verified for tally in tallies),
        wrong_pages=sum(tally.wrong_pages for tally in tallies),
        wrong_keys=[key for tally in tallies for key in tally.wrong_keys][:8],
        misses=dict(_added(tally.misses for tally in tallies)),
        saves=dict(saves),
        load_gbps=_ratio(loaded * gb, float(load_s.sum())),
        save_gbps=_ratio(saved * gb, float(save_s.sum())),
        moved_gbps=_ratio((loaded + saved) * gb, seconds),
        cpu_s_per_gb=_ratio(cpu_s, (loaded + saved) * gb),
        drive_bytes_read=sum(result.drive_bytes_read for result in results),
        drive_bytes_written=written,
        drive_bytes_written_per_hit_byte=_ratio(written, hit * plan.page_bytes),
        lookup_latency_p50_ms=_percentile_ms(lookup_s, 50),
        lookup_latency_p99_ms=_percentile_ms(lookup_s, 99),
        load_latency_p50_ms=_percentile_ms(load_s, 50),
        load_latency_p99_ms=_percentile_ms(load_s, 99),
        save_latency_p50_ms=_percentile_ms(save_s, 50),
        save_latency_p99_ms=_percentile_ms(save_s, 99),
        engine=results[0].engine,
        faults=dict(_added(Counter(result.faults) for result in results)),
        capacity_bytes=capacity_bytes,
        page_bytes=plan.page_bytes,
        block_tokens=workload.block_tokens,
        processes=plan.processes,
        seconds=seconds,
    )


def _lru_hits(plan: ReplayPlan, capacity_bytes: int) -> tuple[int, int]:
    """Pages that a plain LRU hits: one that is empty at the start, one that saw the skipped requests."""
    capacity_pages = max(1, capacity_bytes // plan.page_bytes)
    cold, cold_hits = PageLru(capacity_pages), 0
    if plan.skip == 0:
        cold_hits = sum(cold.request(pages) for pages in _page_names(plan, 0))
        return cold_hits, cold_hits
    warm, warm_hits = PageLru(capacity_pages), 0
    for number, pages in enumerate(_page_names(plan, plan.skip)):
        hits = warm.request(pages)
        if number >= plan.skip:
            warm_hits += hits
            cold_hits += cold.request(pages)
    return cold_hits, warm_hits


def _page_names(plan: ReplayPlan, before: int) -> Iterator[list[int]]:
    """8 bytes of each page's key, a list a request, from `before` requests ahead of the plan's first."""
    keys = PageKeys()
    requests = None if plan.requests is None else plan.requests + before
    for request in portion(plan.workload(), plan.skip - before, requests):
        yield keys.of(request.blocks, request.session)[:, :8].copy().view(np.uint64).ravel().tolist()


def _added(counters: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total += counter
    return total


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentile_ms(seconds: Any, percent: int) -> float | None:
    return float(np.percentile(seconds, percent)) * 1000 if len(seconds) else None
