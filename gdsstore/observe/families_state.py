"""The metrics of the state that a store is in: its volumes, its space, and its host cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gdsstore.observe.families import Family, Look, Samples, Section, counter, gauge, one
from gdsstore.volume.health import Breaker

DIRECTIONS: Final = ("read", "write")


def _health(value: Callable[[Any], float]) -> Callable[[Look], Samples]:
    return lambda look: [
        ((path, direction), value(drive[direction]))
        for path, drive, _ in look.drives
        for direction in DIRECTIONS
    ]


def _under_way(name: str) -> Callable[[Look], Samples]:
    return lambda look: [((path,), transfers[name]) for path, _, transfers in look.drives]


def _caps(look: Look) -> Samples:
    return [
        ((path, direction), transfers[f"{direction}_cap_bytes"])
        for path, _, transfers in look.drives
        for direction in DIRECTIONS
    ]


def _space(name: str) -> Callable[[Look], Samples]:
    def read(look: Look) -> Samples:
        volumes = [path for path, *_ in look.drives]
        known = zip(volumes, look.spaces, strict=True)
        return [((path,), getattr(space, name)) for path, space in known if space is not None]

    return read


def _cached(name: str) -> Callable[[Look], Samples]:
    return one(lambda look: (look.stats["host_cache"] or {}).get(name, 0))


def _cached_by_origin(name: str) -> Callable[[Look], Samples]:
    return lambda look: [
        ((origin,), (look.stats["host_cache"] or {}).get(f"{name}_{origin}", 0))
        for origin in ("prefetch", "load", "save")
    ]


def _now(name: str, key: str, help_: str) -> Family:
    return gauge(name, help_, f'`stats()["host_cache"]["{key}"]`', _cached(key))


def _ever(name: str, key: str, help_: str) -> Family:
    return counter(name, help_, f'`stats()["host_cache"]["{key}"]`', _cached(key))


def _catalog(name: str, key: str, help_: str) -> Family:
    return gauge(name, help_, f'`stats()["catalog"]["{key}"]`', one(lambda look: look.stats["catalog"][key]))


def _of_store(name: str, key: str, help_: str) -> Family:
    return gauge(name, help_, f'`stats()["{key}"]`', one(lambda look: look.stats[key]))


def _reclaimed(name: str, key: str, help_: str) -> Family:
    return counter(name, help_, f'`stats()["{key}"]`', one(lambda look: look.stats[key]))


def _judged(name: str, key: str, help_: str) -> Family:
    source = f'`stats()["drives"][i][direction]["{key}"]`'
    return counter(name, help_, source, _health(lambda found: found[key]), *("volume", "direction"))


def _flying(name: str, key: str, help_: str) -> Family:
    return gauge(name, help_, f'`stats()["transfers"]["volumes"][i]["{key}"]`', _under_way(key), "volume")


STATE: Final = (
    Section(
        "Volumes",
        (
            gauge(
                "gdsstore_volume_sick",
                "1 where the volume is not used, as it answers with errors or not at all; it is tried again by itself.",
                '`stats()["drives"][i][direction]["breaker"]` is not closed',
                _health(lambda found: found["breaker"] is not Breaker.CLOSED),
                *("volume", "direction"),
            ),
            gauge(
                "gdsstore_volume_slow",
                "1 where the volume is much slower than it was and than the others; saves avoid it.",
                '`["slow"]` there',
                _health(lambda found: found["slow"]),
                *("volume", "direction"),
            ),
            _judged(
                "gdsstore_volume_transfers_total", "transfers", "Chunks and probes that say how the drive is."
            ),
            _judged("gdsstore_volume_errors_total", "errors", "Of these, those that failed or did not end."),
            _judged(
                "gdsstore_volume_timeouts_total", "timeouts", "Of these, those that did not end in time."
            ),
            _judged("gdsstore_volume_breaker_opened_total", "opened", "How often the volume became sick."),
            _flying("gdsstore_volume_in_flight_bytes", "in_flight_bytes", "Bytes under way now."),
            _flying("gdsstore_volume_in_flight_operations", "in_flight_ops", "Pages under way now."),
            _flying(
                "gdsstore_volume_late_bytes",
                "late_bytes",
                "Bytes whose deadline has passed, and which the engine has not let go of.",
            ),
            _flying("gdsstore_volume_late_operations", "late_ops", "Pages of which the same is so."),
            gauge(
                "gdsstore_volume_cap_bytes",
                "Bytes that may be under way: what was found to keep the volume busy; 8 chunks where nothing was found yet.",
                '`stats()["transfers"]["volumes"][i]["<direction>_cap_bytes"]`',
                _caps,
                *("volume", "direction"),
            ),
            gauge(
                "gdsstore_volume_size_bytes",
                "Size of the volume's filesystem; missing where it cannot be told.",
                "statvfs of the volume's directory",
                _space("total_bytes"),
                "volume",
            ),
            gauge(
                "gdsstore_volume_free_bytes",
                "What is free on it for this user. The store's capacity counts what it has taken already.",
                "the same",
                _space("free_bytes"),
                "volume",
            ),
            gauge(
                "gdsstore_volume_segments",
                "Segments on the volume by state.",
                '`stats()["drives"][i]["segments"]`; summed over volumes it is `stats()["segments"]`',
                lambda look: [
                    ((path, state), count)
                    for path, drive, _ in look.drives
                    for state, count in drive["segments"].items()
                ],
                *("volume", "state"),
            ),
            gauge(
                "gdsstore_volume_filled_bytes",
                "Bytes of its segments' slots that hold a record, or held one until it was deleted.",
                '`stats()["drives"][i]["filled_bytes"]`',
                lambda look: [((path,), drive["filled_bytes"]) for path, drive, _ in look.drives],
                "volume",
            ),
        ),
    ),
    Section(
        "Space",
        (
            _of_store("gdsstore_capacity_bytes", "capacity_bytes", "Disk that the store may take."),
            _of_store(
                "gdsstore_physical_bytes",
                "physical_bytes",
                "Disk that it takes: segments, catalog, heat file.",
            ),
            _of_store("gdsstore_segment_size_bytes", "segment_bytes", "Size of a segment."),
            _catalog("gdsstore_catalog_pages", "pages", "Pages that the catalog knows."),
            _catalog(
                "gdsstore_catalog_used_bytes", "used_bytes", "Bytes of the catalog's file that are in use."
            ),
            _catalog("gdsstore_catalog_map_bytes", "map_bytes", "The bound on that file."),
            _catalog("gdsstore_catalog_readers", "readers", "Readers' places that were ever taken in it."),
            _reclaimed(
                "gdsstore_reclaimed_segments_total",
                "segments_reclaimed",
                "Segments that this process reclaimed.",
            ),
            _reclaimed(
                "gdsstore_reclaimed_pages_total", "pages_reclaimed", "Pages that were dropped with them."
            ),
            _reclaimed("gdsstore_reclaimed_bytes_total", "bytes_reclaimed", "Bytes of these pages' records."),
            _of_store(
                "gdsstore_maintainer", "maintainer", "1 where this process is the one that makes room."
            ),
            gauge(
                "gdsstore_store_info",
                "1. `engine`: what moves host memory; empty before the first save or load.",
                'the directory, `gdsstore.__version__`, `stats()["engine"]`',
                lambda look: [((look.path, look.version, look.stats["engine"] or ""), 1)],
                *("store", "version", "engine"),
            ),
        ),
    ),
    Section(
        "Host cache",
        (
            _now("gdsstore_host_cache_size_bytes", "size_bytes", "Memory of the host cache; 0 without one."),
            _now(
                "gdsstore_host_cache_resident_bytes", "resident_bytes", "Of these, bytes that hold a record."
            ),
            _now("gdsstore_host_cache_dirty_bytes", "dirty_bytes", "Of these, bytes that no drive has yet."),
            _now("gdsstore_host_cache_resident_records", "resident_records", "Records in it."),
            _now(
                "gdsstore_host_cache_dirty_records",
                "dirty_records",
                "Of these, records that no drive has yet.",
            ),
            _now(
                "gdsstore_host_cache_pins",
                "pins",
                "What keeps records from being evicted now; one may have several.",
            ),
            _now(
                "gdsstore_host_cache_quarantined_records",
                "quarantined_records",
                "Records that I/O which hangs may still touch.",
            ),
            _now("gdsstore_host_cache_lent_bytes", "lent_bytes", "Bytes that other processes read now."),
            counter(
                "gdsstore_host_cache_inserted_records_total",
                "Records that came, by what brought them.",
                '`stats()["host_cache"]["inserted_<origin>"]`',
                _cached_by_origin("inserted"),
                "origin",
            ),
            counter(
                "gdsstore_host_cache_unused_records_total",
                "Records that were evicted without a hit, by what had brought them.",
                '`stats()["host_cache"]["unused_<origin>"]`',
                _cached_by_origin("unused"),
                "origin",
            ),
            _ever("gdsstore_host_cache_evicted_records_total", "evictions", "Records that were evicted."),
            _ever(
                "gdsstore_host_cache_deleted_records_total",
                "dropped",
                "Records that were deleted or cleared.",
            ),
            _ever("gdsstore_host_cache_no_room_records_total", "no_room", "Records that found no room."),
            _ever(
                "gdsstore_host_cache_written_records_total",
                "written_back",
                "Dirty records that were written.",
            ),
            _ever(
                "gdsstore_host_cache_lent_records_total", "lent", "Records that were lent to other processes."
            ),
            _ever(
                "gdsstore_host_cache_not_lent_records_total",
                "not_lent",
                "Records that were not, as too much was lent already.",
            ),
            _ever(
                "gdsstore_host_cache_failed_writes_total",
                "write_failures",
                "Writes of dirty records that failed; each is tried once more, later.",
            ),
            _ever(
                "gdsstore_host_cache_lost_records_total",
                "dirty_lost",
                "Dirty records that are gone without having been written.",
            ),
            _ever(
                "gdsstore_host_cache_damaged_records_total",
                "damaged",
                "Records whose bytes had changed in memory before they were written; they were dropped.",
            ),
            _ever(
                "gdsstore_host_cache_dropped_trials_total",
                "trials_dropped",
                "Records on trial that were evicted before their second use.",
            ),
            _ever(
                "gdsstore_host_cache_moved_regions_total",
                "regions_moved",
                "Regions that went from one record size to another.",
            ),
        ),
    ),
)
