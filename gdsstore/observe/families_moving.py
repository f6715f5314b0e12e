"""The metrics of what moves: bytes, pages and calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from gdsstore.observe.families import Look, Samples, Section, counter, gauge, histogram, one
from gdsstore.transfer.policy_terms import State
from gdsstore.transfer.results import PageStatus

IO: Final = ("direction", "path", "engine", "volume", "class")
OUTCOMES: Final = (State.DONE, State.CANCELLED, State.DROPPED, State.EXPIRED, State.REFUSED)
ABOVE: Final = ("host", "shared")  # the tiers above the drives


def _io(value: str) -> Any:
    return lambda look: [
        ((row.direction, row.path, row.engine, row.volume, row.cls), getattr(row, value)) for row in look.io
    ]


def _chunk_times(look: Look) -> Samples:
    return [
        ((path, direction), drive["latency"][direction])
        for path, drive, _ in look.drives
        for direction in ("read", "write")
    ]


def _hits(look: Look) -> Iterator[tuple[tuple[str, ...], int]]:
    above = {tier: look.count(f"pages_loaded_from_{tier}") for tier in ABOVE}
    yield from (((tier,), n) for tier, n in above.items())
    yield ("drive",), look.count("pages_loaded") - sum(above.values())


def _misses(look: Look) -> Iterator[tuple[tuple[str, ...], int]]:
    yield ("host", "absent"), (look.stats["host_cache"] or {"misses": 0})["misses"]
    yield ("shared", "checksum"), look.count("shared_pages_refused")
    for reason, count in _by_reason(look, "MISS_"):
        yield ("drive", reason), count


def _saves(look: Look) -> Iterator[tuple[tuple[str, ...], int]]:
    yield ("saved",), look.count("pages_saved")
    yield ("already_there",), look.count("pages_already_there")
    yield from (((reason,), count) for reason, count in _by_reason(look, "FAILED_"))


def _by_reason(look: Look, prefix: str) -> Iterator[tuple[str, int]]:
    for status in PageStatus:
        if status.name.startswith(prefix):
            yield status.name.removeprefix(prefix).lower(), look.count(f"pages_{status.name.lower()}")


def _of_class(name: str) -> Any:
    return lambda look: [((cls,), counts[name]) for cls, counts in look.classes]


def _times(name: str) -> Any:
    return lambda look: [((cls,), found) for cls, found in look.stats["latency"][name].items()]


MOVING: Final = (
    Section(
        "Bytes",
        (
            counter(
                "gdsstore_io_bytes_total",
                "Bytes of pages that moved between memory and a volume, by the way they took and what for.",
                "`Store.io_report()`; summed over classes it is `Store.path_report()`",
                _io("nbytes"),
                *IO,
            ),
            counter(
                "gdsstore_io_operations_total",
                "Requests that moved these bytes, as they were given to the drive or to cuFile.",
                "`Store.io_report()`",
                _io("operations"),
                *IO,
            ),
            histogram(
                "gdsstore_io_chunk_duration_seconds",
                "From giving a chunk's requests to the engine until the call saw their end, or gave them up.",
                '`stats()["drives"][i]["latency"]`',
                _chunk_times,
                *("volume", "direction"),
            ),
            counter(
                "gdsstore_io_retried_pages_total",
                "Pages whose I/O was tried a second time.",
                '`stats()["io_retries"]`',
                one(lambda look: look.count("io_retries")),
            ),
            counter(
                "gdsstore_io_stuck_transfers_total",
                "Transfers that had not ended when their call did; their memory is quarantined until they have.",
                '`stats()["stuck_transfers"]`',
                one(lambda look: look.count("stuck_transfers")),
            ),
        ),
    ),
    Section(
        "Hits and misses",
        (
            counter(
                "gdsstore_lookup_pages_total",
                "Keys of lookups; behind the first one that is not there, all of a lookup's keys count as misses.",
                '`stats()["lookup_hits"]`, `["lookup_misses"]`',
                lambda look: [
                    (("hit",), look.count("lookup_hits")),
                    (("miss",), look.count("lookup_misses")),
                ],
                "result",
            ),
            counter(
                "gdsstore_hits_total",
                "Pages that were loaded or prefetched, by the tier that they came from.",
                '`stats()["pages_loaded"]`, of these `["pages_loaded_from_<tier>"]`',
                _hits,
                "tier",
            ),
            counter(
                "gdsstore_misses_total",
                "Pages that a tier was asked for and did not give. A miss of the drives is one of the call.",
                '`stats()["pages_miss_<reason>"]`; above the drives `["host_cache"]["misses"]`, `["shared_pages_refused"]`',
                _misses,
                *("tier", "reason"),
            ),
            counter(
                "gdsstore_damaged_pages_total",
                "Pages whose bytes on the drive were not what their checksum says; they were dropped.",
                '`stats()["damaged_pages"]`',
                one(lambda look: look.count("damaged_pages")),
            ),
            counter(
                "gdsstore_save_pages_total",
                "Pages of saves by outcome.",
                '`stats()["pages_saved"]`, `["pages_already_there"]`, `["pages_failed_<result>"]`',
                _saves,
                "result",
            ),
            counter(
                "gdsstore_advised_pages_total",
                "Pages that the cost model was asked about, by what it advised.",
                '`stats()["advised_pages"]`, `["advised_pages_computed"]`',
                lambda look: [
                    (("load",), look.count("advised_pages") - look.count("advised_pages_computed")),
                    (("compute",), look.count("advised_pages_computed")),
                ],
                "advice",
            ),
        ),
    ),
    Section(
        "Calls and queues",
        (
            gauge(
                "gdsstore_calls_waiting",
                "Calls that wait for a worker now.",
                '`stats()["transfers"]["classes"][class]["waiting"]`',
                _of_class("waiting"),
                "class",
            ),
            gauge(
                "gdsstore_calls_oldest_wait_seconds",
                "How long the oldest of them has waited; 0 where none waits.",
                '`["oldest_s"]` there',
                _of_class("oldest_s"),
                "class",
            ),
            gauge(
                "gdsstore_calls_running",
                "Calls that run now.",
                '`["running"]` there',
                _of_class("running"),
                "class",
            ),
            counter(
                "gdsstore_calls_started_total",
                "Calls that a worker began.",
                '`["started"]` there',
                _of_class("started"),
                "class",
            ),
            counter(
                "gdsstore_calls_joined_total",
                "Calls that shared the flight of another one for the same keys.",
                '`["joined"]` there',
                _of_class("joined"),
                "class",
            ),
            counter(
                "gdsstore_calls_ended_total",
                "Calls by how they ended. dropped: an offload waited longer than its budget; expired: its deadline passed before "
                "it began; refused: its queue was full.",
                '`["done"]`, `["cancelled"]`, `["dropped"]`, `["expired"]`, `["refused"]` there',
                lambda look: [
                    ((cls, state.value), counts[state.value])
                    for cls, counts in look.classes
                    for state in OUTCOMES
                ],
                *("class", "outcome"),
            ),
            histogram(
                "gdsstore_call_wait_seconds",
                "From a call's submission until a worker began it.",
                '`stats()["latency"]["wait"]`',
                _times("wait"),
                "class",
            ),
            histogram(
                "gdsstore_call_run_seconds",
                "From a call's begin to its end. A layer-wise save runs for as long as its forward does.",
                '`stats()["latency"]["run"]`',
                _times("run"),
                "class",
            ),
        ),
    ),
)
