"""Opening a store: make or read it, decide whether the catalog may be trusted, rebuild it if not, and match it with the drives."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gdsstore.catalog.index import Catalog
from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.catalog.recovery import Recovered, rebuild, scan_segment
from gdsstore.catalog.state import (
    Locks,
    State,
    Trust,
    boot_id,
    catalog_mark,
    delete_catalog,
    judge,
    read_state,
    write_state,
)
from gdsstore.config import Config
from gdsstore.directory import StoreDirectory, StoreInfo
from gdsstore.errors import DeadlineError, StoreBusyError, VolumeError
from gdsstore.sizes import GiB, format_size
from gdsstore.verify.copies import Copies
from gdsstore.volume.volume import Volume

log = logging.getLogger("gdsstore.store")

MIN_MAP_BYTES = 1 << 30
MAP_SHARE = 8  # the catalog of 4 KiB pages takes about a 40th of the capacity


@dataclass(slots=True)
class Reconciled:
    """What did not match when a catalog was compared with the drives."""

    gone: list[tuple[SegmentRow, int]] = field(
        default_factory=list
    )  # missing files, and the pages that went with them
    left_out: list[int] = field(
        default_factory=list
    )  # segments that cannot be used and were not known as such


@dataclass(slots=True)
class Opened:
    """What an opened store consists of."""

    info: StoreInfo
    volumes: list[Volume]
    catalog: Catalog
    capacity_bytes: int
    recovered: Recovered | None  # of a rebuild, if there was one
    why: str  # the catalog was used or rebuilt
    reconciled: Reconciled | None = None  # where the catalog was used, and nobody else had the store open


def open_parts(directory: StoreDirectory, locks: Locks, paths: Sequence[Path], config: Config) -> Opened:
    """Call inside `locks.opening()`. Raises StoreError and its kinds; then nothing is left open."""
    alone = locks.alone()
    state = read_state(directory.state)
    capacity = _capacity(directory, state, config, paths)
    fresh = not directory.exists()
    if fresh:
        volumes = [Volume(number, path) for number, path in enumerate(paths)]
        for volume in volumes:
            volume.prepare()
        info = directory.create(config.segment_bytes_for(capacity), paths)
    else:
        info = directory.read()
        directory.check_volumes(info, paths)
        volumes = [Volume(number, path) for number, path in enumerate(info.volumes)]
        for volume in volumes:
            volume.prepare()
    room = sum(volume.space().total_bytes for volume in volumes)
    if capacity > room:
        log.warning(
            "the capacity of %s is more than the %s of the store's filesystems; it ends where they are full",
            format_size(capacity),
            f"{room / GiB:.1f} GiB",
        )
    if state.capacity_bytes and capacity != state.capacity_bytes and not alone:
        raise StoreBusyError(
            f"other processes use this store with a capacity of {format_size(state.capacity_bytes)}; "
            "close them to change it, or leave the capacity out",
            asked=format_size(capacity),
        )
    if alone:
        directory.remove_half_written()
        for volume in volumes:
            volume.remove_partial()
    trust, why = judge(state, directory.catalog, alone)
    if trust is Trust.REBUILD:
        if not alone:
            raise StoreBusyError("the catalog was deleted while other processes use it; close them first")
        delete_catalog(directory.catalog)
    # Not clean from now on, and that durably, before the first write to the catalog.
    if state.clean or state.boot_id != boot_id() or state.capacity_bytes != capacity:
        write_state(directory.state, State(boot_id(), False, capacity, ""))
    catalog = Catalog(directory.catalog, _map_bytes(config, capacity))
    try:
        recovered = reconciled = None
        if trust is Trust.USE and not catalog.belongs_to(info.uuid):
            if not alone:
                raise StoreBusyError("the catalog belongs to another store; close its users first")
            trust, why = Trust.REBUILD, "the catalog was never completed, or belongs to another store"
            catalog.close()
            delete_catalog(directory.catalog)
            catalog = Catalog(directory.catalog, _map_bytes(config, capacity))
        if trust is Trust.REBUILD:
            with Copies(volumes, info, config) as copies:
                recovered = rebuild(
                    catalog, volumes, info.uuid, info.segment_bytes, directory.cleared(), copies.arrived
                )
            catalog.complete(info.uuid)
            if not fresh:
                log.warning(
                    "catalog rebuilt (%s): %d pages in %d segments", why, recovered.pages, recovered.segments
                )
        elif alone:
            reconciled = reconcile(catalog, volumes, info)
    except BaseException:
        catalog.close()
        raise
    return Opened(info, volumes, catalog, capacity, recovered, why, reconciled)


def close_parts(directory: StoreDirectory, locks: Locks, catalog: Catalog) -> None:
    """The last process out syncs the catalog and marks the store clean."""
    try:
        with locks.opening():
            alone = locks.alone()
            if alone:
                catalog.sync()
            if catalog.close() and alone:
                state = read_state(directory.state)
                mark = catalog_mark(directory.catalog)
                write_state(directory.state, replace(state, boot_id=boot_id(), clean=True, catalog_mark=mark))
    except (VolumeError, DeadlineError) as error:  # a full drive, say; no page is lost by it
        log.warning("the store is not marked as closed, so the next open checks its catalog: %s", error)
    finally:
        catalog.close()


def _capacity(directory: StoreDirectory, state: State, config: Config, paths: Sequence[Path]) -> int:
    if config.capacity is not None:
        return config.capacity
    if state.capacity_bytes:
        return state.capacity_bytes
    known = paths
    if directory.exists():
        info = directory.read()
        directory.check_volumes(info, paths)
        known = info.volumes
    volumes = [Volume(number, path) for number, path in enumerate(known)]
    for volume in volumes:
        volume.prepare()
    held = sum(sum(volume.segment_ids().values()) for volume in volumes)
    return max(held, (held + sum(volume.space().free_bytes for volume in volumes)) // 2)


def _map_bytes(config: Config, capacity: int) -> int:
    if config.catalog_map_bytes:
        return config.catalog_map_bytes
    return max(MIN_MAP_BYTES, capacity // MAP_SHARE // 4096 * 4096)


def reconcile(catalog: Catalog, volumes: Sequence[Volume], info: StoreInfo) -> Reconciled:
    """Match the catalog's segments with the files that are there: drop what is gone, take in what is new."""
    found_out = Reconciled()
    with catalog.read() as txn:
        rows = {row.segment_id: row for row in catalog.segments(txn)}
    files: dict[int, Volume] = {}
    for volume in volumes:
        for segment_id in volume.segment_ids():
            # One that is on two volumes counts where the catalog has it, else where it is found first.
            if segment_id not in files or (segment_id in rows and rows[segment_id].volume == volume.index):
                files[segment_id] = volume
    for segment_id, row in rows.items():
        if segment_id in files and files[segment_id].index == row.volume:
            continue
        if row.state is not SegmentState.LOST:
            log.error("%s is gone; its pages are dropped", volumes[row.volume].segment_path(segment_id))
        with catalog.write(pages=row.slot_count) as txn:
            dropped = catalog.drop_pages(txn, segment_id)
            catalog.forget_segment(txn, segment_id)
        if row.state is not SegmentState.LOST:
            found_out.gone.append((row, dropped))
    for segment_id, volume in files.items():
        known = rows.get(segment_id)
        if known is not None and known.state is not SegmentState.LOST:
            continue
        # Its pages, if any, are not in the catalog: only a whole rebuild can tell which of them are the newest. So an unknown
        # segment of ours is made free, and a foreign one is left alone and counted against the capacity.
        found = scan_segment(volume, segment_id, info.uuid, info.segment_bytes)
        state = SegmentState.LOST if found.problem else SegmentState.FREE
        if found.problem and known is None:
            log.error("segment left out: %s", found.problem)
            found_out.left_out.append(segment_id)
        with catalog.write() as txn:
            catalog.put_segment(txn, found.row.with_(state=state, filled=0))
            catalog.next_segment_id(txn, segment_id)
    return found_out
