"""The status document: true, bounded, shared, and made outside the event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import DeadlineError, Store, StoreClosedError
from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.service import status_segments
from gdsstore.service.errors_ring import ErrorRing
from gdsstore.service.shared import Shared
from gdsstore.service.status import StatusBoard, collect
from gdsstore.service.status_segments import SegmentSurvey
from tests.store.helpers import REPO, check, load, make_keys, opaque, save, small_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "s", host_cache="8MiB") as opened:
        yield opened


# --- what it says ---


def test_pages_are_counted_by_tier_and_by_reason(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as first:
        save(opaque(first), make_keys(6))
    with small_store(tmp_path / "s", host_cache="8MiB") as store:
        pages = opaque(store)
        check(pages, make_keys(6))  # from the drive
        check(pages, make_keys(6))  # from memory
        load(pages, make_keys(2, "absent"))
        found = collect(store)
    tiers = {tier["tier"]: tier for tier in found["tiers"]}
    assert (tiers["host"]["hits"], tiers["host"]["misses"]) == (6, {"absent": 8})
    assert (tiers["drive"]["hits"], tiers["drive"]["misses"]) == (6, {"absent": 2})
    assert (found["pages"]["loaded"], found["pages"]["missed"]) == (12, {"absent": 2})


def test_every_byte_has_its_path(store: Store) -> None:
    save(opaque(store), make_keys(10))
    (row,) = collect(store)["throughput"]
    assert (row["engine"], row["direction"], row["volume"]) == ("posix", "write", str(store.directory.root))
    assert row["bytes"] >= 10 * 8192


def test_namespaces_and_segments_hold_what_was_saved(store: Store) -> None:
    first, second = opaque(store), opaque(store, 65536, pool="draft", weights="0123456789abcdef")
    save(first, make_keys(130))
    save(second, make_keys(5), 65536)
    first.delete(make_keys(4))
    found = collect(store)
    assert found["namespaces"] == {
        "count": 2,
        "rows": [
            {"namespace": first.digest.hex(), "name": "test", "pages": 126, "bytes": 126 * 8192},
            {
                "namespace": second.digest.hex(),
                "name": "test · 0123456789ab · draft",
                "pages": 5,
                "bytes": 5 * 65536,
            },
        ],
    }
    segments = found["segments"]
    cells = segments["cells"]
    assert (segments["count"], segments["seen"], segments["a_cell"]) == (3, 3, 1)
    assert segments["states"] == {"free": 0, "open": 2, "sealed": 1, "lost": 0}
    by_namespace = dict.fromkeys((0, 1), 0)
    for number, pages in zip(cells["namespace"], cells["pages"], strict=True):
        by_namespace[number] += pages
    assert by_namespace == {0: 126, 1: 5}
    assert max(cells["fill"]) == 1.0
    assert all(0 <= age < 3600 for age in cells["age_s"])


def test_it_is_plain_json(store: Store) -> None:
    save(opaque(store), make_keys(3))
    found = collect(store, {"pid": 1})
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_every_field_is_in_the_docs(store: Store) -> None:
    text = (REPO / "docs" / "live-page.md").read_text(encoding="utf-8")
    assert {field for field in collect(store) if f"`{field}`" not in text} == set()


def test_a_volume_that_is_gone_is_sick_and_the_rest_is_told(tmp_path: Path) -> None:
    with small_store([tmp_path / "a", tmp_path / "b"]) as store:
        store.volumes[1].path = tmp_path / "unmounted"
        first, second = collect(store)["drives"]
    assert (first["health"], first["free_bytes"] > 0) == ("healthy", True)
    assert (second["health"], second["free_bytes"]) == ("sick", None)


def test_a_closed_store_has_no_status(tmp_path: Path) -> None:
    store = small_store(tmp_path / "s")
    store.close()
    with pytest.raises(StoreClosedError):
        collect(store)


# --- large stores ---


def pretend_segments(store: Store, count: int) -> None:
    with store.catalog.write() as txn:
        for number in range(count):
            state = SegmentState.SEALED if number % 2 else SegmentState.OPEN
            row = SegmentRow(number, 0, state, 65536, 15, number + 1, 15 if number % 2 else 3)
            store.catalog.put_segment(txn, row)


@pytest.mark.parametrize("count", [status_segments.CELLS, status_segments.CELLS + 1, 5000])
def test_a_large_store_has_a_few_hundred_cells(store: Store, count: int) -> None:
    pretend_segments(store, count)
    segments = collect(store)["segments"]
    cells = segments["cells"]
    assert len({len(column) for column in cells.values()}) == 1
    assert -(-count // segments["a_cell"]) == len(cells["first"]) <= status_segments.CELLS
    assert cells["first"] == list(range(0, count, segments["a_cell"]))
    assert sum(segments["states"].values()) == count
    if segments["a_cell"] > 1:
        assert cells["fill"][0] == pytest.approx(np.mean([3 / 15, 1.0] * 7), abs=0.25)


def test_a_survey_gets_round_to_every_segment_and_sees_changes_first(store: Store) -> None:
    pages = opaque(store, 65536)
    save(pages, make_keys(75), 65536)  # five segments
    survey = SegmentSurvey(store)
    for expected in (1, 2, 3, 4, 5, 5):  # without any time, one a look
        survey.look(0.0)
        assert survey.document()["segments"]["seen"] == expected
    assert survey.document()["namespaces"]["rows"][0]["pages"] == 75
    pages.delete(make_keys(75))  # changes no row: it takes another round to be seen
    for _ in range(5):
        survey.look(0.0)
    assert survey.document()["namespaces"]["rows"][0]["pages"] == 0
    save(pages, make_keys(1, "more"), 65536)
    survey.look(0.0)
    assert survey.document()["namespaces"]["rows"][0]["pages"] == 1


# --- shared by all who ask ---


def test_all_who_ask_in_the_same_second_get_one_answer(store: Store) -> None:
    calls = []

    def facts() -> dict[str, Any]:
        calls.append(threading.current_thread())
        return {}

    board = StatusBoard(store, facts)

    async def ask() -> list[dict[str, Any]]:
        return await asyncio.gather(*(board.latest() for _ in range(20)))

    answers = asyncio.run(ask())
    assert all(answer is answers[0] for answer in answers)
    assert len(calls) == 1
    assert calls[0] is not threading.main_thread()


def test_what_hangs_keeps_nobody_waiting() -> None:
    release, answers = threading.Event(), iter(["old", "new"])

    def make() -> str:
        answer = next(answers)
        if answer == "new":
            assert release.wait(30)
        return answer

    shared = Shared(make, least_age_s=0.0)

    async def scenario() -> None:
        assert await shared.latest(30) == "old"
        shared._expires = 0.0
        assert await shared.latest(0.01) == "old"  # what there is
        waiting = asyncio.create_task(shared.latest(30))
        await asyncio.sleep(0)
        given_up = asyncio.create_task(shared.latest(30))
        await asyncio.sleep(0)
        given_up.cancel()  # must not take the answer from the others
        release.set()
        assert await waiting == "new"

    asyncio.run(scenario())


def test_without_an_older_answer_a_hang_is_an_error() -> None:
    release = threading.Event()
    shared = Shared(lambda: release.wait(30))
    try:
        with pytest.raises(DeadlineError, match="drive"):
            asyncio.run(shared.latest(0.01))
        with pytest.raises(DeadlineError):
            shared.wait(0.01)
    finally:
        release.set()


def test_a_failure_is_told_and_the_next_one_tries_again() -> None:
    answers: list[Any] = [StoreClosedError("closed"), "well"]

    def make() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    shared = Shared(make)
    with pytest.raises(StoreClosedError):
        shared.wait(30)
    assert shared.wait(30) == "well"


# --- last errors ---


def test_the_last_warnings_are_kept_newest_first(store: Store) -> None:
    log = logging.getLogger("gdsstore.volume")
    with ErrorRing(kept=3).installed() as ring:
        for number in range(5):
            log.warning("number %d", number)
        log.error("number %d", 4)
        log.error("number %d", 4)
        log.info("not this one")
        entries = StatusBoard(store, None, ring).wait(30)["errors"]
    log.warning("not listening any more")
    assert [(each["level"], each["message"], each["count"]) for each in entries] == [
        ("error", "number 4", 2),
        ("warning", "number 4", 1),
        ("warning", "number 3", 1),
    ]
    assert ring.entries() == entries


def test_a_long_message_is_cut_and_a_cause_is_named() -> None:
    log = logging.getLogger("gdsstore.store")
    with ErrorRing().installed() as ring:
        log.warning("x" * 10_000)
        try:
            raise OSError(5, "Input/output error")
        except OSError:
            log.exception("a save failed")
    cause, long = ring.entries()
    assert cause["message"] == "a save failed: OSError: [Errno 5] Input/output error"
    assert len(long["message"]) <= 400
