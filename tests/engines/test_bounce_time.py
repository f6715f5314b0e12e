"""The bounce engine when things take time: overlap, slow devices, a full arena, and deadlines."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gdsstore.engines.base import Op, RangePlan, RangeResults, Transfer
from gdsstore.engines.faults import Window
from gdsstore.engines.posix import PosixEngine
from tests.engines.bounce_rig import (
    ARENA_BLOCKS,
    CONTENT,
    FILE_BLOCKS,
    GROUP_BLOCKS,
    POISON,
    DeviceBytes,
    OpenFile,
    Watched,
    blocks,
    hanging,
    held_stream,
    small,
    until,
)
from tests.engines.rig import BLOCK, TIMEOUT_S, random_bytes

pytestmark = pytest.mark.own_process(CUDASIM_POISON=0xEE)
SLOW_DEVICE = pytest.mark.own_process(CUDASIM_POISON=0xEE, CUDASIM_STREAM_DELAY_US=3000)

# ---- overlap ----


def test_the_drive_reads_on_while_a_group_is_copied(gpu: ModuleType, opened: OpenFile) -> None:
    drive = Watched()
    with small(drive) as engine:
        fd, device = opened(engine), DeviceBytes(len(CONTENT))
        ranges = device.plan(fd, blocks(3 * GROUP_BLOCKS))
        with held_stream(gpu, engine, Op.READ):
            transfer = engine.submit(Op.READ, ranges)
            until(lambda: drive.ended == 3)
            assert not transfer.done
            assert engine.moved.bytes_by() == {}
        assert transfer.wait(TIMEOUT_S).complete(ranges).all()
        assert np.array_equal(device.get()[: 3 * GROUP_BLOCKS * BLOCK], CONTENT[: 3 * GROUP_BLOCKS * BLOCK])


def test_the_device_copies_on_while_a_group_is_written(
    gpu: ModuleType, opened: OpenFile, tmp_path: Path
) -> None:
    drive = hanging(Window(stop=BLOCK))
    with small(drive) as engine:
        fd, device = opened(engine), DeviceBytes(len(CONTENT), written := random_bytes(len(CONTENT), 22))
        ranges = device.plan(fd, blocks(3 * GROUP_BLOCKS))
        transfer = engine.submit(Op.WRITE, ranges)
        rest = slice(GROUP_BLOCKS * BLOCK, 3 * GROUP_BLOCKS * BLOCK)
        until(lambda: (tmp_path / "file-0").read_bytes()[rest] == written[rest].tobytes())
        assert not transfer.done
        drive.release_hangs()
        assert transfer.wait(TIMEOUT_S).complete(ranges).all()


@SLOW_DEVICE
def test_with_a_slow_device_the_drive_is_groups_ahead(gpu: ModuleType, opened: OpenFile) -> None:
    drive = Watched()
    with small(drive) as engine:
        fd, device = opened(engine), DeviceBytes(len(CONTENT))
        ahead = 0
        for _ in range(20):  # a busy machine may look away while it is so
            before, drive.transfers = sum(engine.moved.bytes_by().values()), []
            transfer = engine.submit(Op.READ, ranges := device.plan(fd, blocks(FILE_BLOCKS)))
            while not transfer.done:
                copied = (sum(engine.moved.bytes_by().values()) - before) // (GROUP_BLOCKS * BLOCK)
                ahead = max(ahead, drive.ended - copied)
                time.sleep(0.001)
            assert transfer.wait(0.0).complete(ranges).all()
            if ahead >= 2:
                break
        assert ahead >= 2, "groups that were read and not copied yet"


@SLOW_DEVICE
@pytest.mark.parametrize("stride", [BLOCK, BLOCK + 512])
def test_nothing_is_done_before_a_slow_device_is(
    gpu: ModuleType, opened: OpenFile, tmp_path: Path, stride: int
) -> None:
    with small() as engine:
        fd, n = opened(engine), 3 * GROUP_BLOCKS
        device = DeviceBytes(n * stride)
        ranges = device.plan(fd, blocks(n), stride=stride)
        assert engine.submit(Op.READ, ranges).wait(TIMEOUT_S).complete(ranges).all()
        # Read on another stream, which waits for none of the engine's.
        arrived = device.get().reshape(n, stride)
        assert np.array_equal(arrived[:, :BLOCK].ravel(), CONTENT[: n * BLOCK])
        assert (arrived[:, BLOCK:] == POISON).all()
        device.put(written := random_bytes(n * stride, 23))
        assert engine.submit(Op.WRITE, ranges).wait(TIMEOUT_S).complete(ranges).all()
        wanted = np.ascontiguousarray(written.reshape(n, stride)[:, :BLOCK]).tobytes()
        assert (tmp_path / "file-0").read_bytes()[: n * BLOCK] == wanted


@SLOW_DEVICE
def test_threads_with_more_than_the_arena_holds_all_get_their_own_bytes(
    gpu: ModuleType, opened: OpenFile
) -> None:
    with small() as engine:
        wrong: list[object] = []
        jobs = [(opened(engine), DeviceBytes(len(CONTENT)), seed) for seed in range(4)]

        def work(fd: int, device: DeviceBytes, seed: int) -> None:
            try:
                device.put(written := random_bytes(len(CONTENT), 100 + seed))
                ranges = device.plan(fd, blocks(FILE_BLOCKS))
                assert engine.submit(Op.WRITE, ranges).wait(TIMEOUT_S).complete(ranges).all()
                order = np.random.default_rng(seed).permutation(FILE_BLOCKS)
                mixed = device.plan(fd, (order * BLOCK).tolist())
                halves = [mixed.take(slice(0, 50)), mixed.take(slice(50, FILE_BLOCKS))]
                for half, transfer in [(half, engine.submit(Op.READ, half)) for half in halves]:
                    assert transfer.wait(TIMEOUT_S).complete(half).all()
                expected = written.reshape(FILE_BLOCKS, BLOCK)[order].ravel()
                assert np.array_equal(device.get(), expected)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert engine._arena.stats().peak_bytes <= ARENA_BLOCKS * BLOCK
        assert engine._arena.stats().leased_bytes == 0


def test_a_full_arena_is_waited_for(gpu: ModuleType, opened: OpenFile) -> None:
    with small() as engine:
        fd, device = opened(engine), DeviceBytes(len(CONTENT))
        ranges = device.plan(fd, blocks(FILE_BLOCKS))
        with held_stream(gpu, engine, Op.READ):
            transfers = [engine.submit(Op.READ, ranges) for _ in range(3)]
            until(lambda: engine._arena.stats().leased_bytes == ARENA_BLOCKS * BLOCK)
            assert not any(transfer.done for transfer in transfers)
        for transfer in transfers:
            assert transfer.wait(TIMEOUT_S).complete(ranges).all()
        assert np.array_equal(device.get(), CONTENT)


# ---- deadlines ----


def test_a_read_that_comes_after_its_deadline_is_not_copied_to_the_device(
    gpu: ModuleType, opened: OpenFile
) -> None:
    drive = hanging()
    with small(drive) as engine:
        fd, device = opened(engine), DeviceBytes(4 * BLOCK)
        copies = gpu.cuda_calls("cuMemcpyAsync")
        transfer = engine.submit(Op.READ, device.plan(fd, blocks(4)))
        until(lambda: drive.injected["hang"] > 0)
        assert transfer.wait(0.05).errno.tolist() == [errno.ETIMEDOUT] * 4
        assert not transfer.done
        assert engine._arena.stats().leased_bytes == 4 * BLOCK, "the drive may still write there"
        drive.release_hangs()
        until(lambda: transfer.done)
        results = transfer.wait(TIMEOUT_S)
        assert (results.errno.tolist(), results.moved.tolist()) == ([errno.ETIMEDOUT] * 4, [0] * 4)
        assert gpu.cuda_calls("cuMemcpyAsync") == copies
        assert engine._arena.stats().leased_bytes == 0
        assert (device.get() == POISON).all()


def test_what_is_copied_after_its_deadline_is_not_written_to_the_drive(
    gpu: ModuleType, opened: OpenFile, tmp_path: Path
) -> None:
    drive = Watched()
    with small(drive) as engine:
        fd, device = opened(engine), DeviceBytes(len(CONTENT))
        copies = gpu.cuda_calls("cuMemcpyAsync")
        with held_stream(gpu, engine, Op.WRITE):
            transfer = engine.submit(Op.WRITE, device.plan(fd, blocks(FILE_BLOCKS)))
            until(lambda: gpu.cuda_calls("cuMemcpyAsync") > copies)
            assert (transfer.wait(0.05).errno == errno.ETIMEDOUT).all()
            assert not transfer.done, "copies out of the memory are under way"
        until(lambda: transfer.done)
        assert (transfer.wait(0.0).errno == errno.ETIMEDOUT).all()
        assert not drive.transfers
        assert (tmp_path / "file-0").read_bytes() == CONTENT.tobytes()


def test_a_copy_that_has_begun_goes_on_after_the_deadline_until_the_transfer_is_done(
    gpu: ModuleType, opened: OpenFile
) -> None:
    drive = Watched()
    with small(drive) as engine:
        fd, device = opened(engine), DeviceBytes(len(CONTENT))
        copies = gpu.cuda_calls("cuMemcpyAsync")
        with held_stream(gpu, engine, Op.READ):
            transfer = engine.submit(Op.READ, ranges := device.plan(fd, blocks(FILE_BLOCKS)))
            until(lambda: gpu.cuda_calls("cuMemcpyAsync") > copies)
            assert (transfer.wait(0.0).errno == errno.ETIMEDOUT).all()
            assert not transfer.done
        until(lambda: transfer.done)
        whole = transfer.wait(0.0).complete(ranges)
        arrived = device.get().reshape(FILE_BLOCKS, BLOCK)
        assert whole.any()
        assert np.array_equal(arrived[whole], CONTENT.reshape(FILE_BLOCKS, BLOCK)[whole])
        assert (arrived[~whole] == POISON).all()


def test_what_nobody_has_begun_by_the_deadline_is_not_begun(gpu: ModuleType, opened: OpenFile) -> None:
    with small(Watched()) as engine:
        fd, device = opened(engine), DeviceBytes(len(CONTENT))
        with held_stream(gpu, engine, Op.READ):
            ranges = device.plan(fd, blocks(FILE_BLOCKS))
            whole = ranges.take(slice(0, ARENA_BLOCKS))
            first = engine.submit(Op.READ, whole)
            until(lambda: engine._arena.stats().leased_bytes == ARENA_BLOCKS * BLOCK)
            second = engine.submit(Op.READ, ranges)
            until(lambda: any(engine._pump._queues.values()))
            assert (second.wait(0.0).errno == errno.ETIMEDOUT).all()
            assert second.done, "its memory is free at once"
            until(lambda: not any(engine._pump._queues.values()))
        assert first.wait(TIMEOUT_S).complete(whole).all()
        assert (second.wait(0.0).errno == errno.ETIMEDOUT).all()


class Endless(Transfer):
    """Under way until `done` is set; remembers whether it was called off."""

    done = False
    called_off = False

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges

    def wait(self, timeout_s: float) -> RangeResults:
        self.called_off = True
        return RangeResults(np.zeros(self._ranges, np.int64), np.full(self._ranges, errno.EIO, np.int32))


class EndlessDrive(PosixEngine):
    def __init__(self) -> None:
        super().__init__(1)
        self.transfers: list[Endless] = []

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        self.transfers.append(Endless(len(plan)))
        return self.transfers[-1]


def test_the_inner_engine_is_told_of_the_deadline(gpu: ModuleType, opened: OpenFile) -> None:
    with small(drive := EndlessDrive()) as engine:
        transfer = engine.submit(Op.READ, DeviceBytes(BLOCK).plan(opened(engine), [0]))
        until(lambda: bool(drive.transfers))
        assert not drive.transfers[0].called_off
        transfer.wait(0.0)
        until(lambda: drive.transfers[0].called_off)
        assert not transfer.done
        drive.transfers[0].done = True
