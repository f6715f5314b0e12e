"""The choice of path in use, on a virtual clock: steady under noise, quick after a lasting change, and sparing with tries."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.engines.base import Op
from gdsstore.engines.paths import Path
from gdsstore.engines.select import Measurement, Rules, Selection
from gdsstore.errors import ArgumentError

DIRECT, BOUNCE, COMPAT = Path.DIRECT, Path.BOUNCE, Path.COMPAT
BOTH = (DIRECT, BOUNCE)
SIZE = 1 << 20
RULES = Rules()
speeds = st.floats(1e6, 1e11)


class Traffic:
    """Transfers of one cell, one after the other, on a clock of their own."""

    def __init__(self, direct: float = 0, bounce: float = 0, rules: Rules = RULES) -> None:
        known = [(DIRECT, direct), (BOUNCE, bounce)]
        measured = [Measurement(op, SIZE, 8, path, speed) for op in Op for path, speed in known if speed]
        self.now = 1000.0
        self.selection = Selection(BOTH, measured, rules=rules, clock=lambda: self.now)
        self.took: list[Path] = []

    def run(
        self,
        transfers: int,
        speed: Callable[[Path], float],
        *,
        nbytes: int = 8 * SIZE,
        every_s: float = 0.01,
        op: Op = Op.READ,
    ) -> Counter[Path]:
        """What `transfers` of them took."""
        took: list[Path] = []
        for _ in range(transfers):
            path = self.selection.pick(op, SIZE, 8)
            self.now += every_s
            self.selection.moved(op, SIZE, 8, path, nbytes, nbytes / speed(path))
            took.append(path)
        self.took += took
        return Counter(took)

    @property
    def taken(self) -> Path:
        return next(cell.path for cell in self.selection.cells() if cell.op is Op.READ)


# --- from measurements ---


@given(direct=speeds, ratio=st.floats(0.5, 1.5))
def test_the_faster_one_is_taken_and_the_preferred_one_unless_it_is_slower_by_the_margin(
    direct: float, ratio: float
) -> None:
    traffic = Traffic(direct, direct * ratio)
    assert traffic.selection.pick(Op.READ, SIZE, 8) is (BOUNCE if direct * ratio > 1.1 * direct else DIRECT)


def test_without_measurements_the_preferred_one_is_taken_and_the_other_soon_tried() -> None:
    traffic = Traffic()
    took = traffic.run(2 * RULES.try_every, lambda path: 1e9)
    assert traffic.took[0] is DIRECT
    assert took[BOUNCE] == 1


@given(
    points=st.dictionaries(st.tuples(st.integers(12, 26), st.integers(0, 7)), speeds, min_size=1),
    size=st.integers(12, 26),
    submitters=st.integers(0, 7),
)
def test_the_nearest_point_that_was_measured_counts(
    points: dict[tuple[int, int], float], size: int, submitters: int
) -> None:
    measured = [Measurement(Op.READ, 1 << at, 1 << n, DIRECT, speed) for (at, n), speed in points.items()]
    selection = Selection(BOTH, measured)
    selection.pick(Op.READ, 1 << size, 1 << submitters)
    (cell,) = selection.cells()
    least = min(math.hypot(at - size, n - submitters) for at, n in points)
    near = {speed for (at, n), speed in points.items() if math.hypot(at - size, n - submitters) == least}
    assert cell.bytes_per_s[DIRECT] in near


def test_directions_and_sizes_are_chosen_for_themselves() -> None:
    measured = [
        Measurement(op, size, n, path, 2e9 if path is better else 1e9)
        for op, size, n, better in [
            (Op.READ, 1 << 18, 1, DIRECT),
            (Op.READ, 1 << 22, 32, BOUNCE),
            (Op.WRITE, 1 << 20, 8, BOUNCE),
        ]
        for path in BOTH
    ]
    selection = Selection(BOTH, measured)
    assert selection.pick(Op.READ, 1 << 17, 2) is DIRECT
    assert selection.pick(Op.READ, 3 << 20, 20) is BOUNCE
    assert selection.pick(Op.WRITE, 1 << 17, 2) is BOUNCE


# --- in use ---


@settings(max_examples=40)
@given(
    base=st.floats(1e8, 1e10),
    noise=st.lists(st.floats(1.0, 1.099), min_size=7, max_size=50),
    every_s=st.sampled_from([0.0001, 0.1, 5.0, 100.0]),
)
def test_noise_below_the_margin_changes_nothing(base: float, noise: list[float], every_s: float) -> None:
    traffic = Traffic(base, base)
    seen = iter(range(10**9))
    for _ in range(20):
        traffic.run(100, lambda path: base * noise[next(seen) % len(noise)], every_s=every_s)
        assert traffic.taken is DIRECT


@settings(max_examples=40)
@given(
    ratio=st.floats(1.25, 20),
    slower=st.booleans(),
    noise=st.lists(st.floats(0.97, 1.03), min_size=5, max_size=20),
)
def test_after_a_lasting_change_the_faster_path_is_taken_and_kept(
    ratio: float, slower: bool, noise: list[float]
) -> None:
    traffic = Traffic(2e9, 1e9)
    traffic.run(100, lambda path: 2e9 if path is DIRECT else 1e9)
    speed = {DIRECT: 1e9 / ratio, BOUNCE: 1e9} if slower else {DIRECT: 2e9, BOUNCE: 2e9 * ratio}
    seen = iter(range(10**9))
    traffic.run(10 * RULES.try_every, lambda path: speed[path] * noise[next(seen) % len(noise)], every_s=0.5)
    assert traffic.taken is BOUNCE
    took = traffic.run(1000, lambda path: speed[path] * noise[next(seen) % len(noise)], every_s=0.5)
    assert traffic.taken is BOUNCE
    assert took[DIRECT] <= 1000 // RULES.try_every


def test_one_outlier_of_the_other_path_changes_nothing() -> None:
    traffic = Traffic(1e9, 1e9)
    outliers = iter([9e9])
    for _ in range(20):
        traffic.run(100, lambda path: next(outliers, 1e9) if path is BOUNCE else 1e9, every_s=1.0)
        assert traffic.taken is DIRECT


def test_a_figure_of_an_idle_drive_alone_does_not_beat_live_traffic() -> None:
    """Both are slower under load than when they were measured; only the one that is taken shows it at first."""
    traffic = Traffic(5e9, 4e9)
    for _ in range(20):
        traffic.run(100, lambda path: 1e9 if path is DIRECT else 0.8e9)
        assert traffic.taken is DIRECT


@settings(max_examples=40)
@given(
    stretches=st.lists(
        st.tuples(st.integers(1, 200), speeds, speeds, st.sampled_from([0.001, 1.0, 70.0])), max_size=12
    )
)
def test_tries_are_few_in_number_and_bytes(stretches: list[tuple[int, float, float, float]]) -> None:
    traffic = Traffic(1e9, 1e9)
    for transfers, direct, bounce, every_s in stretches:
        before, at = traffic.taken if traffic.took else DIRECT, len(traffic.took)
        traffic.run(transfers, lambda path, s=(direct, bounce): s[path is BOUNCE], every_s=every_s)  # type: ignore[misc]
        if traffic.taken is before:
            tried = [n for n, path in enumerate(traffic.took[at:], at) if path is not before]
            assert all(later - earlier >= RULES.try_every for earlier, later in itertools.pairwise(tried))
            assert len(tried) <= RULES.try_share * len(traffic.took)


def test_a_try_waits_until_its_share_of_the_bytes_allows_it() -> None:
    rules = Rules(try_share=0.001)
    traffic = Traffic(1e9, 1e9, rules)
    took = traffic.run(5000, lambda path: 1e9, every_s=100.0)
    assert 0 < took[BOUNCE] * 8 * SIZE <= rules.try_share * 5000 * 8 * SIZE


def test_a_path_that_is_known_well_and_slower_is_not_tried() -> None:
    traffic = Traffic(2e9, 1e9)
    took = traffic.run(5000, lambda path: 2e9 if path is DIRECT else 1e9, every_s=RULES.stale_s / 5001)
    assert took[BOUNCE] == 0


def test_one_try_at_a_time_is_under_way() -> None:
    traffic = Traffic(1e9)
    traffic.run(RULES.try_every - 1, lambda path: 1e9)
    assert [traffic.selection.pick(Op.READ, SIZE, 8) for _ in range(500)].count(BOUNCE) == 1
    traffic.now += RULES.stale_s  # it was lost
    assert traffic.selection.pick(Op.READ, SIZE, 8) is BOUNCE


# --- failures ---


def test_a_path_that_fails_is_left_at_once_and_comes_back() -> None:
    traffic = Traffic(2e9, 1e9)
    speed = {DIRECT: 2e9, BOUNCE: 1e9}.__getitem__
    traffic.run(10, speed)
    traffic.selection.failed(Op.READ, DIRECT)
    assert traffic.run(100, speed, every_s=RULES.backoff_s / 101)[DIRECT] == 0
    assert traffic.selection.pick(Op.WRITE, SIZE, 8) is DIRECT  # the other direction did not fail
    traffic.run(10 * RULES.try_every, speed)
    assert traffic.taken is DIRECT


def test_what_ends_well_while_a_path_is_left_alone_does_not_bring_it_back() -> None:
    traffic = Traffic(2e9, 1e9)
    traffic.run(100, lambda path: 1e9)
    traffic.selection.failed(Op.READ, DIRECT)
    traffic.run(5, lambda path: 1e9, every_s=0.0)
    for _ in range(10):
        traffic.selection.moved(Op.READ, SIZE, 8, DIRECT, SIZE, SIZE / 9e9)
    assert traffic.taken is BOUNCE


def test_a_path_that_goes_on_failing_is_tried_less_and_less() -> None:
    traffic = Traffic(2e9, 1e9)
    failures: list[float] = []
    while len(failures) < 10:
        if traffic.selection.pick(Op.READ, SIZE, 8) is DIRECT:
            failures.append(traffic.now)
            for _ in range(30):  # one fault ends many transfers
                traffic.selection.failed(Op.READ, DIRECT)
        else:
            traffic.selection.moved(Op.READ, SIZE, 8, BOUNCE, 8 * SIZE, 0.008)
        traffic.now += 0.1
    pauses = [later - earlier for earlier, later in itertools.pairwise(failures)]
    for n, pause_s in enumerate(pauses):
        least = min(RULES.backoff_s * 2**n, RULES.backoff_max_s)
        assert least <= pause_s <= least + 0.1 * RULES.try_every + 0.2


@pytest.mark.parametrize("op", list(Op))
def test_where_all_fail_the_one_that_failed_first_is_taken(op: Op) -> None:
    traffic = Traffic(2e9, 1e9)
    traffic.run(1, lambda path: 1e9, op=op)
    for path in BOTH:
        traffic.selection.failed(op, path)
        traffic.now += 1
    assert traffic.selection.pick(op, SIZE, 8) is DIRECT
    assert traffic.selection.pick(op, SIZE, 1) is DIRECT  # a cell that nobody asked for before


# --- for every caller ---


@given(
    paths=st.lists(st.sampled_from(list(Path)), min_size=1, unique=True),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["pick", "moved", "failed"]),
            st.sampled_from(list(Op)),
            st.integers(1, 1 << 40),
            st.integers(1, 4096),
            st.sampled_from(list(Path)),
            st.floats(0, 1e3),
        ),
        max_size=120,
    ),
    measured=st.lists(
        st.builds(
            Measurement,
            st.sampled_from(list(Op)),
            st.integers(1, 1 << 40),
            st.integers(1, 4096),
            st.sampled_from(list(Path)),
            speeds,
        ),
        max_size=8,
    ),
)
def test_what_is_picked_is_always_a_candidate(
    paths: list[Path], calls: list[tuple[str, Op, int, int, Path, float]], measured: list[Measurement]
) -> None:
    now = 0.0
    selection = Selection(paths, measured, rules=Rules(try_every=2, try_share=1.0), clock=lambda: now)
    for call, op, size, submitters, path, seconds in calls:
        now += seconds
        if call == "moved":
            selection.moved(op, size, submitters, path, size, seconds)
        elif call == "failed":
            selection.failed(op, path)
        assert selection.pick(op, size, submitters) in paths
    assert {cell.path for cell in selection.cells()} <= set(paths)


def test_a_time_that_cannot_be_is_survived() -> None:
    traffic = Traffic(1e6)
    for seconds in (5e-324, 0.0, -1.0, 1e300):
        traffic.now += 2000
        traffic.selection.moved(Op.READ, SIZE, 8, DIRECT, 1, seconds)
        assert traffic.selection.pick(Op.READ, SIZE, 8) in BOTH


def test_threads_may_use_it_together() -> None:
    selection = Selection(BOTH, rules=Rules(try_every=2, try_share=0.5))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for n in range(2000):
                path = selection.pick(Op.READ, 1 << (12 + n % 12), 1 + number)
                selection.moved(Op.READ, 1 << (12 + n % 12), 1 + number, path, 4096, 1e-6 * (1 + n % 7))
                if n % 50 == 0:
                    selection.failed(Op.READ, path)
                    selection.cells()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


@pytest.mark.parametrize("paths", [(), (DIRECT, DIRECT)])
def test_candidates_that_make_no_sense_are_refused(paths: tuple[Path, ...]) -> None:
    with pytest.raises(ArgumentError):
        Selection(paths)
