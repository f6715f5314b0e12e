"""Paths measured against each other on the simulated GPU: bounded, fair, honest about the way, and without a trace."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import ModuleType

import pytest

from gdsstore.engines.base import Op, RangePlan, Transfer
from gdsstore.engines.kvikio import KvikioEngine
from gdsstore.engines.measure import SIZES, SUBMITTERS, Measured, measure_paths
from gdsstore.engines.paths import Path
from gdsstore.engines.scratch import PREFIX, ScratchFile, remove_leftovers
from gdsstore.engines.select import Selection
from gdsstore.errors import ArgumentError, EngineError
from gdsstore.memory.device_arena import DeviceArena
from gdsstore.volume.volume import Volume
from tests.cudasim.fixtures import need
from tests.engines.rig import BLOCK

pytestmark = pytest.mark.own_process(CUDASIM_POISON=0xEE)

KiB, MiB = 1 << 10, 1 << 20
ARENA_BYTES = 16 * MiB
BUDGETS = {"budget_bytes": 16 * MiB, "budget_s": 60.0}  # a busy machine may need that time


class Rig:
    """Two contenders, and staging memory that both know."""

    def __init__(self) -> None:
        self.engines = {Path.DIRECT: KvikioEngine(4), Path.COMPAT: KvikioEngine(4, compat=True)}
        self.arena = DeviceArena(ARENA_BYTES, registrars=list(self.engines.values()))

    def measure(self, directory: FilePath, **limits: object) -> Measured:
        given = {"sizes": (16 * KiB, 64 * KiB), "submitters": (1, 4), **BUDGETS, **limits}
        return measure_paths(self.engines, directory, self.arena.address, ARENA_BYTES, **given)  # type: ignore[arg-type]

    @property
    def moved(self) -> int:
        return sum(sum(engine.moved.bytes_by().values()) for engine in self.engines.values())

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close(5.0)
        self.arena.close(5.0)


@pytest.fixture
def rig(gpu: ModuleType) -> Iterator[Rig]:
    need("kvikio")
    rig = Rig()
    yield rig
    rig.close()


def left_in(directory: FilePath) -> list[str]:
    return os.listdir(directory)


def test_each_path_has_a_figure_for_each_cell(rig: Rig, tmp_path: FilePath) -> None:
    found = rig.measure(tmp_path)
    assert found.problems == {}
    assert {each[:4] for each in found.measurements} == {
        (op, size, n, path)
        for op in Op
        for size in (16 * KiB, 64 * KiB)
        for n in (1, 4)
        for path in rig.engines
    }
    assert len(found.measurements) == 16
    assert all(each.bytes_per_s > 0 for each in found.measurements)
    assert Selection(list(rig.engines), found.measurements).pick(Op.READ, 64 * KiB, 4) in rig.engines
    assert left_in(tmp_path) == []


def test_the_defaults_fit_into_their_own_budget(rig: Rig, tmp_path: FilePath) -> None:
    found = measure_paths(rig.engines, tmp_path, rig.arena.address, ARENA_BYTES, budget_s=60.0)
    assert len(found.measurements) == 2 * len(Op) * len(SIZES) * len(SUBMITTERS)


def test_the_bytes_count_for_no_file_that_gets_the_same_descriptor(rig: Rig, tmp_path: FilePath) -> None:
    rig.measure(tmp_path)
    assert rig.moved > 0
    assert [engine.moved.take(fd) for engine in rig.engines.values() for fd in range(256)] == [{}] * 512


@pytest.mark.parametrize("budget_bytes", [2 * MiB, 8 * MiB, 20 * MiB])
def test_no_more_bytes_are_moved_than_allowed(rig: Rig, tmp_path: FilePath, budget_bytes: int) -> None:
    rig.measure(tmp_path, budget_bytes=budget_bytes)
    assert budget_bytes // 2 < rig.moved <= budget_bytes * 7 // 8  # the file took the rest


def test_the_paths_take_turns_and_each_round_begins_with_another(rig: Rig, tmp_path: FilePath) -> None:
    order: list[Path] = []
    for path, engine in rig.engines.items():
        record(engine, path, order)
    plan_bytes = 2 * MiB
    warm_up, two_rounds = 4 * plan_bytes, 8 * plan_bytes
    budget_bytes = (warm_up + two_rounds + MiB) * 8 // 7
    rig.measure(tmp_path, sizes=[plan_bytes // 8], submitters=[8], budget_bytes=budget_bytes)
    direct, compat = Path.DIRECT, Path.COMPAT
    assert order[4:] == [compat, direct, compat, direct, direct, compat, direct, compat]


def record(engine: KvikioEngine, path: Path, order: list[Path]) -> None:
    submit = engine.submit

    def recorded(op: Op, plan: RangePlan) -> Transfer:
        order.append(path)
        return submit(op, plan)

    engine.submit = recorded  # type: ignore[method-assign]


def test_when_the_time_is_over_nothing_more_is_begun(rig: Rig, tmp_path: FilePath) -> None:
    found = rig.measure(tmp_path, budget_s=0.0)
    assert (found.measurements, found.problems) == ((), {})
    assert left_in(tmp_path) == []


def test_the_file_is_written_whole_private_and_direct_before_anything_is_measured(
    rig: Rig, tmp_path: FilePath
) -> None:
    seen: list[tuple[int, int, int, bool]] = []
    engine = rig.engines[Path.DIRECT]
    attach = engine.attach

    def looked(fd: int, size: int) -> None:
        about = os.fstat(fd)
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        seen.append((about.st_size, about.st_blocks * 512 // size, stat.S_IMODE(about.st_mode), direct))
        attach(fd, size)

    engine.attach = looked  # type: ignore[method-assign]
    rig.measure(tmp_path, budget_bytes=8 * MiB)
    assert seen == [(MiB, 1, 0o600, True)]


def test_a_path_that_fails_has_no_figures_and_the_other_has_its_own(
    gpu: ModuleType, rig: Rig, tmp_path: FilePath
) -> None:
    gpu.cufile_faults("cuFileWrite@1+1=errno:5")
    rig.engines[Path.DIRECT]._detour.move = lambda *_: (0, errno.EIO)  # type: ignore[method-assign]
    found = rig.measure(tmp_path)
    assert set(found.problems) == {Path.DIRECT}
    assert os.strerror(errno.EIO) in found.problems[Path.DIRECT]
    assert {each.path for each in found.measurements} == {Path.COMPAT}
    assert found.usable([Path.DIRECT, Path.COMPAT]) == (Path.COMPAT,)
    assert left_in(tmp_path) == []


def test_a_path_that_fails_later_on_loses_the_figures_it_had(
    gpu: ModuleType, rig: Rig, tmp_path: FilePath
) -> None:
    gpu.cufile_faults("cuFileRead@40+1=short:0")
    found = rig.measure(tmp_path)
    assert set(found.problems) == {Path.DIRECT}
    assert {each.path for each in found.measurements} == {Path.COMPAT}


def test_a_path_whose_bytes_went_another_way_has_no_figures(
    gpu: ModuleType, rig: Rig, tmp_path: FilePath
) -> None:
    gpu.cufile_faults("cuFileRead@40+1=errno:5")  # the detour then moves them
    found = rig.measure(tmp_path)
    assert found.problems == {Path.DIRECT: "path direct: bytes of it went bounce"}
    found = measure_paths(
        {Path.DIRECT: rig.engines[Path.COMPAT]},
        tmp_path,
        rig.arena.address,
        ARENA_BYTES,
        budget_bytes=16 * MiB,
        budget_s=60.0,
    )
    assert (found.measurements, found.problems) == ((), {Path.DIRECT: "path direct: bytes of it went compat"})


def test_a_path_that_refuses_the_file_is_a_problem_of_that_path(rig: Rig, tmp_path: FilePath) -> None:
    def refuse(fd: int, size: int) -> None:
        raise EngineError("it does not like the file")

    rig.engines[Path.DIRECT].attach = refuse  # type: ignore[method-assign]
    found = rig.measure(tmp_path)
    assert found.problems == {Path.DIRECT: "it does not like the file"}
    assert {each.path for each in found.measurements} == {Path.COMPAT}


def test_a_path_that_hangs_is_given_up_and_the_memory_is_not_called_free(
    gpu: ModuleType, rig: Rig, tmp_path: FilePath
) -> None:
    gpu.cufile_faults("cuFileRead@1=delay:5000000")
    found = rig.measure(tmp_path, deadline_s=1.0)
    assert found.measurements == ()
    assert set(found.problems) == set(rig.engines)
    assert "did not end in 1 s" in found.problems[Path.DIRECT]
    assert found.under_way is not None
    assert not found.under_way.done
    assert left_in(tmp_path) == []
    until = time.monotonic() + 60
    while not found.under_way.done and time.monotonic() < until:
        time.sleep(0.01)
    assert found.under_way.done


def test_where_no_file_can_be_made_every_path_has_that_problem(rig: Rig, tmp_path: FilePath) -> None:
    found = rig.measure(tmp_path / "gone")
    assert set(found.problems) == set(rig.engines)
    assert all(os.strerror(errno.ENOENT) in why for why in found.problems.values())
    assert found.usable([Path.DIRECT, Path.COMPAT]) == (Path.DIRECT, Path.COMPAT)


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: FilePath) -> None:
    volume = Volume(0, tmp_path)
    volume.prepare()
    inside = volume.directory
    (inside / f"{PREFIX}1-1").write_bytes(bytes(BLOCK))
    (inside / f"{PREFIX}link").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_bytes(b"x")
    (inside / "00000001.seg").write_bytes(bytes(BLOCK))
    with ScratchFile(inside, BLOCK, 5.0):
        assert len(left_in(inside)) == 3
        remove_leftovers(inside)  # another process comes
        assert len(left_in(inside)) == 3
        assert set(volume.segment_ids()) == {1}
    assert sorted(left_in(inside)) == [f"{PREFIX}link", "00000001.seg"]
    assert (tmp_path / "precious").read_bytes() == b"x"


def test_a_full_drive_is_said_and_leaves_no_file(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MiB // 2, hard))
    try:
        with pytest.raises((OSError, EngineError)):
            ScratchFile(tmp_path, MiB, 5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "limits",
    [{"sizes": [1000]}, {"sizes": [0]}, {"submitters": [0]}, {"sizes": [4 * MiB], "submitters": [8]}],
)
def test_sizes_that_make_no_sense_are_refused(
    rig: Rig, tmp_path: FilePath, limits: dict[str, object]
) -> None:
    with pytest.raises(ArgumentError):
        rig.measure(tmp_path, **limits)


def test_two_may_measure_in_one_volume_at_the_same_time(tmp_path: FilePath) -> None:
    first = ScratchFile(tmp_path, BLOCK, 5.0)
    made: list[ScratchFile] = []
    thread = threading.Thread(target=lambda: made.append(ScratchFile(tmp_path, BLOCK, 5.0)))
    thread.start()
    thread.join(20)
    assert len(left_in(tmp_path)) == 2
    made[0].close()
    first.close()
    assert left_in(tmp_path) == []
