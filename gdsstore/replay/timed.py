"""Runs a replay with time, once for each variant, on one store and the same requests."""

from __future__ import annotations

from collections.abc import Callable

import gdsstore
from gdsstore.bound import BoundNamespace
from gdsstore.engines.choose import make_engine
from gdsstore.engines.throttle import ThrottledEngine
from gdsstore.layout import align_up
from gdsstore.replay.timed_plan import Schedule, TimedPlan, Variant
from gdsstore.replay.timed_report import TimedReport, VariantReport, report_variant
from gdsstore.replay.timed_server import RealClock, Served, TimedServer, VirtualClock
from gdsstore.replay.timed_store import TimedStore, TimedTally
from gdsstore.replay.truth import U8
from gdsstore.replay.worker import BUFFER_BYTES, compile_checks
from gdsstore.transfer.cost import CostModel

MODEL = "replay-timed"

Progress = Callable[[Variant, int], None]
"""Called with the variant under way and how many of its requests are served."""


def replay_timed(
    plan: TimedPlan,
    progress: Progress = lambda variant, done: None,
    variants: tuple[Variant, ...] = tuple(Variant),
) -> TimedReport:
    """Replay the plan's requests by the clock, once for each variant.

    The store's pages of earlier replays with time are dropped before each. Raises ArgumentError for a trace that cannot be
    replayed, DeadlineError where the store hangs, and what `gdsstore.open` raises. Wrong pages are in the report.
    """
    schedule = plan.schedule()
    compile_checks()
    with _open(plan) as store:
        store.preallocate(schedule.unique_pages * align_up(plan.replay.page_bytes))
        store.moving()  # starting the engine is no part of the first load
        layout = gdsstore.PageLayout.opaque(plan.replay.page_bytes)
        namespace = store.namespace(model=MODEL, layout=layout)
        rows = max(1, BUFFER_BYTES // plan.replay.page_bytes)

        def new_buffer() -> U8:
            arena = store.arena(rows * plan.replay.page_bytes)  # the array keeps it mapped
            return arena.array[: rows * plan.replay.page_bytes].reshape(rows, plan.replay.page_bytes)

        reports = [
            _run(variant, plan, schedule, namespace, new_buffer, store.config.io_deadline_s, progress)
            for variant in variants
        ]
        engine = str(store.stats()["engine"])
        namespace.clear()
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


def _open(plan: TimedPlan) -> gdsstore.Store:
    config = gdsstore.Config.load(capacity=plan.replay.capacity, **plan.replay.store_settings())
    engine = None
    if plan.throttle_bytes_s is not None:
        inner = make_engine(
            config.engine, posix_threads=config.posix_threads, in_flight_ranges=config.in_flight_ranges
        )
        engine = ThrottledEngine(inner, plan.throttle_bytes_s)
    return gdsstore.open(plan.replay.stores, config=config, engine=engine)


def _run(
    variant: Variant,
    plan: TimedPlan,
    schedule: Schedule,
    namespace: BoundNamespace,
    new_buffer: Callable[[], U8],
    deadline_s: float,
    progress: Progress,
) -> VariantReport:
    namespace.clear()
    cost = CostModel(prefill_tokens_s=schedule.prefill_tokens_s) if variant is Variant.COST else None

    def serve(store: TimedStore | None) -> Served:
        server = TimedServer(
            store,
            # Without a store nothing real happens, so there is nothing to wait for.
            VirtualClock() if store is None else RealClock(),
            prefill_tokens_s=schedule.prefill_tokens_s,
            block_tokens=schedule.block_tokens,
            page_bytes=plan.replay.page_bytes,
            prefetch=variant in (Variant.PREFETCH, Variant.COST),
            cost=cost,
        )
        return server.run(schedule.requests, lambda done: progress(variant, done))

    if variant is Variant.NO_STORE:
        return report_variant(variant, serve(None), TimedTally(), plan.replay.page_bytes)
    store = TimedStore(namespace, new_buffer, deadline_s, cost)
    try:
        store.save_now(schedule.there)
        served = serve(store)
    finally:
        store.close()
    return report_variant(variant, served, store.tally, plan.replay.page_bytes)
