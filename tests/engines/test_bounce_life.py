"""The bounce engine's life: how it begins, what it does while a drive hangs, and its end."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gdsstore.engines import bounce_pump
from gdsstore.engines.base import Op, RangePlan, Transfer
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.faults import Fault, FaultKind, Window
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import ConfigError, DeviceError, EngineError
from gdsstore.memory.device_arena import DeviceArena
from tests.engines.bounce_rig import (
    ARENA_BLOCKS,
    CONTENT,
    FILE_BLOCKS,
    GROUP_BLOCKS,
    DeviceBytes,
    OpenFile,
    blocks,
    hanging,
    small,
    until,
)
from tests.engines.rig import BLOCK, TIMEOUT_S, run

pytestmark = pytest.mark.own_process(CUDASIM_POISON=0xEE)

# ---- beginning ----


def test_an_arena_that_is_too_small_is_refused(gpu: ModuleType) -> None:
    with pytest.raises(ConfigError, match="at least 32768 bytes"):
        BounceEngine(PosixEngine(1), arena_bytes=GROUP_BLOCKS * BLOCK - 1)


def test_an_engine_that_does_not_start_leaves_nothing(gpu: ModuleType) -> None:
    with pytest.raises(DeviceError, match="no such device"):
        BounceEngine(PosixEngine(1), device=7)
    gpu.cuda_faults("cuStreamCreate@2=cu:2")
    before = gpu.cuda_calls("cuMemHostUnregister")
    with pytest.raises(DeviceError, match="cuStreamCreate"):
        small()
    assert gpu.cuda_calls("cuMemHostUnregister") == before + 1


def test_there_is_no_thread_before_the_first_plan(gpu: ModuleType) -> None:
    ended = run("""
import threading
from tests.cudasim import simgpu
simgpu.load()
from gdsstore.engines.bounce import BounceEngine
from gdsstore.engines.posix import PosixEngine
with BounceEngine(PosixEngine(2)):
    print(threading.active_count())
""")
    assert ended.stdout == "1\n", ended.stderr


# ---- hangs ----


def test_ranges_that_hang_keep_neither_their_plan_nor_others_from_moving(
    gpu: ModuleType, opened: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounce_pump, "STUCK_S", 0.02)
    drive = hanging(Window(stop=ARENA_BLOCKS // 2 * BLOCK))
    with small(drive) as engine:
        device = DeviceBytes(len(CONTENT))
        fd = opened(engine)
        transfer = engine.submit(Op.READ, ranges := device.plan(fd, blocks(FILE_BLOCKS)))
        others = device.plan(fd, blocks(FILE_BLOCKS)[ARENA_BLOCKS:])
        assert engine.submit(Op.READ, others).wait(TIMEOUT_S).complete(others).all()
        moving = (FILE_BLOCKS - ARENA_BLOCKS // 2 + len(others)) * BLOCK
        until(lambda: sum(engine.moved.bytes_by().values()) == moving)
        assert transfer.wait(0.0).complete(ranges).sum() == FILE_BLOCKS - ARENA_BLOCKS // 2
        assert not transfer.done
        drive.release_hangs()


def test_a_drive_that_hangs_leaves_room_for_another(
    gpu: ModuleType, opened: OpenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm = Path("/dev/shm", f"gdsstore-test-{os.getpid()}")
    shm.write_bytes(CONTENT.tobytes())
    elsewhere = os.open(shm, os.O_RDWR)
    shm.unlink()
    monkeypatch.setattr(bounce_pump, "STUCK_S", 0.02)
    with small(drive := FaultyEngine(PosixEngine(2), (), seed=0)) as engine:
        fd, device = opened(engine), DeviceBytes(len(CONTENT))
        if os.fstat(fd).st_dev == os.fstat(elsewhere).st_dev:
            pytest.skip("there is one filesystem only")
        engine.attach(elsewhere, len(CONTENT))
        others = device.plan(elsewhere, blocks(FILE_BLOCKS))
        assert engine.submit(Op.READ, others).wait(TIMEOUT_S).complete(others).all()
        drive._faults, drive._left = (Fault(FaultKind.HANG, match=Window(fd)),), [None]
        stuck = [engine.submit(Op.READ, device.plan(fd, blocks(FILE_BLOCKS))) for _ in range(3)]
        threading.Event().wait(0.1)  # let it take all that it can get
        assert engine.submit(Op.READ, others).wait(TIMEOUT_S).complete(others).all()
        for transfer in stuck:
            assert (transfer.wait(0.0).errno == errno.ETIMEDOUT).all()
        drive.release_hangs()
        engine.detach(elsewhere)
    os.close(elsewhere)


class Broken(PosixEngine):
    """Its first transfer cannot be asked how it is."""

    def __init__(self) -> None:
        super().__init__(1)
        self.broken = 1

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        transfer = super().submit(op, plan)
        if self.broken:
            self.broken -= 1
            transfer.__class__ = type("Mad", (transfer.__class__,), {"done": property(lambda _: 1 // 0)})
        return transfer


def test_an_engine_inside_that_breaks_is_no_success_and_others_go_on(
    gpu: ModuleType, opened: OpenFile, caplog: pytest.LogCaptureFixture
) -> None:
    engine = small(Broken())
    fd, device = opened(engine), DeviceBytes(len(CONTENT))
    bad = engine.submit(Op.READ, ranges := device.plan(fd, blocks(4)))
    assert engine.submit(Op.READ, ranges).wait(TIMEOUT_S).complete(ranges).all()
    assert bad.wait(0.05).errno.tolist() == [errno.ETIMEDOUT] * 4
    assert not bad.done
    assert "in a way that nobody foresaw" in caplog.text
    engine.close(0.05)
    assert engine._arena.stats().leased_bytes == 4 * BLOCK


# ---- the end ----


def test_close_waits_for_what_is_under_way_and_gives_everything_back(
    gpu: ModuleType, opened: OpenFile
) -> None:
    before, pinned = gpu.usage(), gpu.cuda_calls("cuMemHostUnregister")
    engine = small()
    fd, device = opened(engine), DeviceBytes(len(CONTENT))
    transfers = [engine.submit(Op.READ, ranges := device.plan(fd, blocks(FILE_BLOCKS))) for _ in range(3)]
    engine.close(TIMEOUT_S)
    assert all(transfer.wait(0.0).complete(ranges).all() for transfer in transfers)
    assert gpu.cuda_calls("cuMemHostUnregister") == pinned + 1
    device.cuda.free(device.address)
    assert gpu.usage() == before


def test_close_does_not_wait_longer_than_asked_and_a_later_one_ends_it(
    gpu: ModuleType, opened: OpenFile
) -> None:
    engine = small(drive := hanging(Window(stop=BLOCK)))
    arena = DeviceArena(1 << 20, registrars=[engine])
    fd = opened(engine)
    ranges = DeviceBytes(len(CONTENT)).plan(fd, blocks(4))
    ranges.address[:] += np.uint64(arena.address) - ranges.address[0]
    transfer = engine.submit(Op.READ, ranges)
    until(lambda: engine._arena.stats().leased_bytes > 0)
    engine.close(0.05)
    assert not transfer.done
    with pytest.raises(EngineError, match="hangs"):
        engine.deregister(arena.address)
    assert not arena.close(0)
    with pytest.raises(EngineError):
        engine.submit(Op.READ, ranges)
    drive.release_hangs()
    until(lambda: transfer.done)
    assert not transfer.wait(0.0).complete(ranges).any(), "its deadline was the engine's end"
    until(lambda: engine.close(0.05) or engine._freed)
    assert arena.close(TIMEOUT_S)


def test_a_drive_that_hangs_does_not_keep_the_process(gpu: ModuleType, tmp_path: Path) -> None:
    ended = run(f"""
from pathlib import Path
from tests.cudasim import simgpu
simgpu.load()
from gdsstore.engines.base import Op
from tests.engines.rig import BLOCK, open_file
from tests.engines.bounce_rig import DeviceBytes, hanging, small
engine = small(hanging())
fd = open_file(Path({str(tmp_path / "file")!r}), BLOCK)
engine.attach(fd, BLOCK)
transfer = engine.submit(Op.READ, DeviceBytes(BLOCK).plan(fd, [0]))
engine.close(0.1)
print(transfer.done)
""")
    assert (ended.stdout, ended.returncode) == ("False\n", 0), ended.stderr
