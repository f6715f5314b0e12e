"""Runs a replay with time, once for each variant, on one store and the same requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

import gdsstore
from gdsstore.bound import BoundNamespace
from gdsstore.engines.choose import make_engine
from gdsstore.engines.throttle import ThrottledEngine
from gdsstore.layout import align_up
from gdsstore.replay.timed_plan import Schedule, TimedPlan, Variant
from gdsstore.replay.timed_report import TimedReport, VariantReport, report_variant
from gdsstore.replay.timed_server import RealClock, Served, TimedServer, VirtualClock
from gdsstore.replay.timed_store import TimedStore, TimedTally, save_now
from gdsstore.replay.truth import KEY_BYTES, U8
from gdsstore.replay.worker import BUFFER_BYTES, compile_checks
from gdsstore.sizes import GiB, KiB
from gdsstore.transfer.cost import CostSetting

MODEL = "replay-timed"
HOST_CACHE_BYTES = GiB  # where the settings ask for none
WARM_UP_BYTES = 256 * KiB
WARM_UP_LOADS = (2, 4, 16, 64)  # pages

Progress = Callable[[Variant, int], None]
"""Called with the variant under way and how many of its requests are served."""


def replay_timed(
    plan: TimedPlan,
    progress: Progress = lambda variant, done: None,
    variants: tuple[Variant, ...] = tuple(Variant),
) -> TimedReport:
    """Replay the plan's requests by the clock, once for each variant.

    The store is opened for each, with a host cache where it prefetches; its pages of earlier replays with time are dropped before.
    Raises ArgumentError for a trace that cannot be replayed, DeadlineError where the store hangs, and what `gdsstore.open` raises.
    Wrong pages are in the report.
    """
    schedule = plan.schedule()
    compile_checks()
    reports, engine = [], ""
    for variant in variants:
        report, name = _run(variant, plan, schedule, progress)
        reports.append(report)
        engine = engine or name
    return TimedReport(
        trace=schedule.name,
        requests=len(schedule.requests),
        seconds=schedule.requests[-1].arrival_s,
        scale=schedule.scale,
        prefill_tokens_s=schedule.prefill_tokens_s,
        throttle_mbps=None if plan.throttle_bytes_s is None else plan.throttle_bytes_s / 1e6,
        page_bytes=plan.replay.page_bytes,
        block_tokens=schedule.block_tokens,
        engine=engine,
        variants=reports,
    )


def _run(
    variant: Variant, plan: TimedPlan, schedule: Schedule, progress: Progress
) -> tuple[VariantReport, str]:
    """What a variant did, and the engine that moved its pages ("" for none)."""
    page_bytes = plan.replay.page_bytes

    def serve(store: TimedStore | None) -> Served:
        server = TimedServer(
            store,
            # Without a store nothing real happens, so there is nothing to wait for.
            VirtualClock() if store is None else RealClock(),
            prefill_tokens_s=schedule.prefill_tokens_s,
            block_tokens=schedule.block_tokens,
            prefetch=variant in (Variant.PREFETCH, Variant.COST),
            gives_up=variant is Variant.COST,
        )
        return server.run(schedule.requests, lambda done: progress(variant, done))

    if variant is Variant.NO_STORE:
        return report_variant(variant, serve(None), TimedTally(), page_bytes), ""
    # What was there before is on the drive, and nowhere else.
    with _open(Variant.STORE, plan, schedule) as store:
        store.preallocate(schedule.unique_pages * align_up(page_bytes))
        namespace = _namespace(store, plan, schedule)
        namespace.clear()
        _save_warm_up(store)
        save_now(namespace, schedule.there, _buffer(store, page_bytes))
    with _open(variant, plan, schedule) as store:
        _warm_up(store)
        namespace = _namespace(store, plan, schedule)
        side = TimedStore(
            namespace, lambda: _buffer(store, page_bytes), store.config.io_deadline_s, schedule.block_tokens
        )
        try:
            served = serve(side)
        finally:
            side.close()
        namespace.clear()
        return report_variant(variant, served, side.tally, page_bytes), str(store.stats()["engine"])


def _save_warm_up(store: gdsstore.Store) -> None:
    namespace, keys = _warm_up_pages(store)
    save_now(namespace, keys, _buffer(store, WARM_UP_BYTES))


def _warm_up(store: gdsstore.Store) -> None:
    """As a server that has been up for a while: the engine is started, what is compiled is loaded, and the cost model has seen
    loads of growing size."""
    namespace, keys = _warm_up_pages(store)
    buffer, deadline_s = _buffer(store, WARM_UP_BYTES), store.config.io_deadline_s
    if store.config.host_cache:
        namespace.prefetch(keys[:1]).wait(deadline_s)
    for first, last in itertools.pairwise((0, 1, *np.cumsum(WARM_UP_LOADS).tolist())):
        namespace.load(keys[first:last], buffer[: last - first]).result(2 * deadline_s)
    namespace.clear()


def _warm_up_pages(store: gdsstore.Store) -> tuple[BoundNamespace, U8]:
    layout = gdsstore.PageLayout.opaque(WARM_UP_BYTES, tag="warm-up")
    keys = np.random.default_rng(0).integers(0, 256, (sum(WARM_UP_LOADS), KEY_BYTES), np.uint8)
    return store.namespace(model=MODEL, layout=layout), keys


def _namespace(store: gdsstore.Store, plan: TimedPlan, schedule: Schedule) -> BoundNamespace:
    layout = gdsstore.PageLayout.opaque(plan.replay.page_bytes, page_tokens=schedule.block_tokens)
    return store.namespace(model=MODEL, layout=layout)


def _buffer(store: gdsstore.Store, page_bytes: int) -> U8:
    """Fast memory for pages: uint8[n, page_bytes]."""
    rows = max(1, BUFFER_BYTES // page_bytes)
    arena = store.arena(rows * page_bytes)  # the array keeps it mapped
    return arena.array[: rows * page_bytes].reshape(rows, page_bytes)


def _open(variant: Variant, plan: TimedPlan, schedule: Schedule) -> gdsstore.Store:
    settings = plan.replay.store_settings()
    config = gdsstore.Config.load(capacity=plan.replay.capacity, **settings)
    has_cache = variant in (Variant.PREFETCH, Variant.COST)
    settings["host_cache"] = (config.host_cache or HOST_CACHE_BYTES) if has_cache else 0
    if variant is Variant.COST:
        settings |= {"cost_model": CostSetting.ENFORCE, "prefill_tokens_s": round(schedule.prefill_tokens_s)}
    config = gdsstore.Config.load(capacity=plan.replay.capacity, **settings)
    engine = None
    if plan.throttle_bytes_s is not None:
        inner = make_engine(
            config.engine, posix_threads=config.posix_threads, in_flight_ranges=config.in_flight_ranges
        )
        engine = ThrottledEngine(inner, plan.throttle_bytes_s)
    return gdsstore.open(plan.replay.stores, config=config, engine=engine)
