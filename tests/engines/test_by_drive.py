"""A drive that hangs holds up its own ranges and nobody else's. What else an engine promises is in test_contract.py."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdsstore.engines.base import Engine, Op
from gdsstore.engines.by_drive import ByDriveEngine
from gdsstore.engines.faulty import Fault, FaultKind, FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import EngineError
from tests.engines.bounce_rig import until
from tests.engines.rig import BLOCK, TIMEOUT_S, HangingMemory, file_of, memory, move, open_file, plan

PAGES = 8


@pytest.fixture
def hanging() -> Iterator[HangingMemory]:
    memory = HangingMemory(PAGES)
    yield memory
    memory.release()


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[list[int]]:
    fds = [open_file(tmp_path / name, PAGES * BLOCK) for name in ("a", "b")]
    yield fds
    for fd in fds:
        os.close(fd)


def attach(engine: Engine, fds: list[int]) -> None:
    for fd in fds:
        engine.attach(fd, PAGES * BLOCK)


EACH = [BLOCK * i for i in range(0, PAGES, 2)]  # with gaps, so that each is a call of its own


def test_a_drive_that_hangs_in_the_kernel_leaves_the_others_alone(
    fds: list[int], hanging: HangingMemory
) -> None:
    engine = ByDriveEngine(lambda: PosixEngine(2), file_of)
    attach(engine, fds)
    stuck = engine.submit(Op.READ, plan(fds[0], EACH, hanging.bytes, BLOCK))  # more than it can do at a time
    hanging.touched(2)
    assert set(stuck.wait(0.1).errno.tolist()) == {errno.ETIMEDOUT}
    move(engine, Op.READ, plan(fds[1], EACH, memory(PAGES * BLOCK), BLOCK))
    assert not stuck.done
    hanging.release()
    engine.close(10.0)


def test_of_a_plan_over_two_drives_only_the_sick_one_is_late(fds: list[int]) -> None:
    sick = FaultyEngine(PosixEngine(2), [Fault(FaultKind.HANG)], seed=0)
    makers = iter([sick, PosixEngine(2)])
    engine = ByDriveEngine(lambda: next(makers), file_of)
    attach(engine, fds)
    ranges = plan([fds[0], fds[1]] * 2, [0, 0, BLOCK, BLOCK], buffer := memory(4 * BLOCK), BLOCK)
    buffer[:] = 7
    transfer = engine.submit(Op.READ, ranges)
    until(lambda: not buffer.reshape(4, BLOCK)[1::2].any())  # what has not begun by its deadline never does
    results = transfer.wait(0.2)
    assert results.complete(ranges).tolist() == [False, True, False, True]
    assert results.errno.tolist() == [errno.ETIMEDOUT, 0, errno.ETIMEDOUT, 0]
    assert not transfer.done
    sick.release_hangs()
    assert transfer.wait(TIMEOUT_S).complete(ranges).all()
    assert transfer.done
    engine.close(10.0)


def test_drives_of_one_filesystem_share_an_engine(fds: list[int]) -> None:
    made: list[Engine] = []

    def make() -> Engine:
        made.append(PosixEngine(1))
        return made[-1]

    with ByDriveEngine(make) as engine:
        attach(engine, fds)
        assert len(made) == 1
        assert engine.name == "posix"


def test_an_engine_that_cannot_be_made_for_a_further_drive_fails_its_files_only(fds: list[int]) -> None:
    made: list[Engine] = []

    def make() -> Engine:
        if made:
            raise EngineError("no more of them")
        made.append(PosixEngine(1))
        return made[0]

    with ByDriveEngine(make, file_of) as engine:
        engine.attach(fds[0], PAGES * BLOCK)
        with pytest.raises(EngineError, match="no more"):
            engine.attach(fds[1], PAGES * BLOCK)
        move(engine, Op.READ, plan(fds[0], [0], memory(BLOCK), BLOCK))
