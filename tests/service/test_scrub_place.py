"""A scrub that is interrupted again and again still comes to the last segment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore import Store
from gdsstore.service.scrub import Scrubber
from gdsstore.service.scrub_place import NAME, ScrubPlace
from gdsstore.verify.payloads import PayloadReader
from tests.service.daemons import until
from tests.store.helpers import make_keys, memory_directory, opaque, save, small_config, small_store
from tests.verify.rig import PAGE_BYTES, SLOTS, offline

SEGMENTS = 5
SOON_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "s", daemon="off") as opened:
        assert save(opaque(opened, PAGE_BYTES), make_keys(SEGMENTS * SLOTS), PAGE_BYTES).all_ok
        yield opened


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The segments that are read, one behind the other."""
    seen: list[int] = []
    check = PayloadReader.check

    def watched(me: PayloadReader, table: Any, *given: Any) -> Any:
        seen.append(int(table.superblock.segment_id))
        return check(me, table, *given)

    monkeypatch.setattr(PayloadReader, "check", watched)
    return seen


def scrubber(store: Store) -> Scrubber:
    return Scrubber(store, small_config(), 1 << 40)


def one_segment(store: Store, read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrub that is stopped while it reads its second segment."""
    made, before = scrubber(store), len(read)
    advance = Scrubber._advance

    def stopping(me: Scrubber, done: int, total: int) -> None:
        if len(read) == before + 2:
            me._stop.set()
        advance(me, done, total)

    with monkeypatch.context() as patch:
        patch.setattr(Scrubber, "_advance", stopping)
        made.start()
        until(lambda: not made._thread.is_alive())


def test_a_scrub_goes_on_where_the_one_before_it_was_stopped(
    store: Store, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = sorted(store.volumes[0].segment_ids())[:SEGMENTS]
    for _ in range(SEGMENTS):
        one_segment(store, read, monkeypatch)
    assert set(read) == set(numbers)
    # Each one read what the one before it had begun, and one more.
    assert read[::2] == numbers
    assert read[1:-1:2] == numbers[1:]


def test_a_pass_that_began_in_the_middle_reads_every_segment(store: Store, read: list[int]) -> None:
    numbers = sorted(store.volumes[0].segment_ids())[:SEGMENTS]
    place = ScrubPlace(store.directory.root)
    place.enter(numbers[3])
    made, now = scrubber(store), time.time()
    made.start()
    until(lambda: made.facts.passes == 1)
    assert made.stop(SOON_S)
    assert read == [*numbers[3:], *numbers[:3]]
    assert made.facts.last_pass_s is not None
    assert made.facts.last_pass_s >= now
    again = scrubber(store)
    assert again.facts.last_pass_s == made.facts.last_pass_s
    assert again.facts.passes == 0
    assert ScrubPlace(store.directory.root).segment == 0


def test_what_a_killed_daemon_read_is_kept_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, now = ScrubPlace(tmp_path), [100.0]
    monkeypatch.setattr("gdsstore.service.scrub_place.time.monotonic", lambda: now[0])
    for segment, at in ((7, 100.0), (8, 109.0), (9, 110.0), (10, 119.0)):
        now[0] = at
        place.enter(segment)
        assert ScrubPlace(tmp_path).segment == (7 if at < 110 else 9)


GOOD = {"segment": 4, "last_pass_s": 1e9}


@given(
    content=st.one_of(
        st.binary(max_size=40),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "x"]), inner),
        ).map(lambda value: json.dumps(value).encode()),
        st.just(b"[" * 20_000),
    )
)
def test_a_damaged_place_is_no_error(content: bytes) -> None:
    with memory_directory() as directory:
        (directory / NAME).write_bytes(content)
        place = ScrubPlace(directory)
        assert 0 <= place.segment < 1 << 32
        assert place.last_pass_s is None or place.last_pass_s >= 0
        place.enter(3)
        assert ScrubPlace(directory).segment == 3


@pytest.mark.parametrize("what", ["directory", "link", "fifo", "unreadable"])
def test_a_place_that_is_no_file_is_no_error(store: Store, read: list[int], what: str) -> None:
    path = store.directory.root / NAME
    if what == "directory":
        path.mkdir()
    elif what == "link":
        path.symlink_to("store.json")
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.touch(mode=0)
    made = scrubber(store)
    made.start()
    until(lambda: made.facts.passes == 1)
    assert made.stop(SOON_S)
    assert len(read) == SEGMENTS
    assert json.loads((store.directory.root / "store.json").read_text())["segment_bytes"]


def test_a_segment_that_is_no_more_is_no_place_to_begin(store: Store, read: list[int]) -> None:
    ScrubPlace(store.directory.root).enter(4_000_000)
    made = scrubber(store)
    made.start()
    until(lambda: made.facts.passes == 1)
    assert made.stop(SOON_S)
    assert len(read) == SEGMENTS


def test_the_place_is_no_strange_file_in_the_store(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", daemon="off") as store:
        assert save(opaque(store, PAGE_BYTES), make_keys(3), PAGE_BYTES).all_ok
        ScrubPlace(store.directory.root).passed()
    assert (tmp_path / "s" / NAME).stat().st_mode & 0o777 == 0o600
    found = offline(tmp_path / "s")
    assert (found.damaged, found.left_out) == ([], [])
    with small_store(tmp_path / "s", daemon="off") as store:
        assert opaque(store, PAGE_BYTES).contains(make_keys(3)).all()
