"""The nixl engine: what is under way at a time, blame after errors, what hangs, and machines where it does not work."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.engines import nixl, posix
from gdsstore.engines.base import Op, Transfer
from gdsstore.engines.choose import make_engine
from gdsstore.engines.nixl import NixlEngine
from gdsstore.engines.nixl_ring import Progress
from gdsstore.errors import ConfigError
from tests.engines.bounce_rig import until
from tests.engines.rig import BLOCK, TIMEOUT_S, memory, move, new_nixl, open_file, plan, random_bytes, run


@pytest.fixture
def engine() -> Iterator[NixlEngine]:
    with new_nixl() as engine:
        yield engine


@pytest.fixture
def pipe(engine: NixlEngine) -> Iterator[tuple[int, int]]:
    """An attached descriptor whose reads hang in io_uring until something is written to the other."""
    read, write = os.pipe()
    engine.attach(read, 1 << 20)
    yield read, write
    os.close(write)  # ends the reads
    engine.close(TIMEOUT_S)
    os.close(read)


def wait_until_done(transfer: Transfer) -> None:
    pause = threading.Event()
    for _ in range(12000):
        if transfer.done:
            return
        pause.wait(0.005)
    pytest.fail("the transfer did not end")


def test_io_uring_goes_on_after_errors(engine: NixlEngine, tmp_path: Path) -> None:
    content = random_bytes(64 * BLOCK)
    fd = open_file(tmp_path / "file", 64 * BLOCK, content=content)
    engine.attach(fd, 1024 * BLOCK)
    buffer = memory(64 * BLOCK)
    offsets = [i * BLOCK for i in range(64)]
    for turn in range(20):
        buffer[:] = 0
        bad = plan(fd, offsets, buffer, BLOCK)
        bad.file_offset[turn] = 100 * BLOCK  # NIXL may read there, the file has ended
        good_buffer = memory(64 * BLOCK)
        failing, good = (
            engine.submit(Op.READ, bad),
            engine.submit(Op.READ, ranges := plan(fd, offsets, good_buffer, BLOCK)),
        )
        assert good.wait(TIMEOUT_S).complete(ranges).all()
        assert np.array_equal(good_buffer, content)
        results = failing.wait(TIMEOUT_S)
        assert np.flatnonzero(~results.complete(bad)).tolist() == [turn]
        assert (results.moved[turn], results.errno[turn]) == (0, 0)
    assert engine.moved_again == 20 * 64, "only the parts with an error were moved again"
    os.close(fd)


def test_ranges_outside_their_file_do_not_take_their_neighbours_off_io_uring(
    engine: NixlEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fd = open_file(tmp_path / "file", 4 * BLOCK)
    engine.attach(fd, 4 * BLOCK)
    offsets = [0, 3 * BLOCK, -2 * BLOCK, 9 * BLOCK]
    results = engine.submit(Op.READ, plan(fd, offsets, memory(8 * BLOCK), 2 * BLOCK)).wait(TIMEOUT_S)
    assert results.moved.tolist() == [2 * BLOCK, BLOCK, 0, 0]
    assert results.errno.tolist() == [0, 0, errno.EINVAL, 0]
    assert engine.moved_again == 0
    assert "go through posix" not in caplog.text
    os.close(fd)


def test_a_failed_write_is_blamed_on_its_range(engine: NixlEngine, tmp_path: Path) -> None:
    good, bad = (
        open_file(tmp_path / "good", 8 * BLOCK),
        open_file(tmp_path / "bad", 8 * BLOCK, flags=os.O_RDONLY),
    )
    for fd in (good, bad):
        engine.attach(fd, 8 * BLOCK)
    buffer = random_bytes(3 * BLOCK)
    results = engine.submit(Op.WRITE, plan([good, bad, good], [0, 0, BLOCK], buffer, BLOCK)).wait(TIMEOUT_S)
    assert results.errno.tolist() == [0, errno.EBADF, 0]
    assert results.moved.tolist() == [BLOCK, 0, BLOCK]
    assert (tmp_path / "good").read_bytes()[: 2 * BLOCK] == np.delete(buffer.reshape(3, -1), 1, 0).tobytes()
    os.close(good)
    os.close(bad)


def test_a_wait_ends_by_its_deadline_while_the_kernel_hangs(
    engine: NixlEngine, pipe: tuple[int, int], tmp_path: Path
) -> None:
    fd = open_file(tmp_path / "file", BLOCK, content=(content := random_bytes(BLOCK)))
    engine.attach(fd, BLOCK)
    good, late = memory(BLOCK), memory(BLOCK)
    transfer = engine.submit(Op.READ, plan([pipe[0]], [0], late, BLOCK))
    until(lambda: engine._active)
    assert transfer.wait(0.1).errno.tolist() == [errno.ETIMEDOUT]
    assert not transfer.done
    move(engine, Op.READ, plan(fd, [0], good, BLOCK))  # others go on
    assert np.array_equal(good, content)
    assert not transfer.done
    os.write(pipe[1], b"x" * BLOCK)
    wait_until_done(transfer)
    # After the deadline the kernel did write: that is why the memory is quarantined until then.
    assert late.tobytes() == b"x" * BLOCK
    assert transfer.wait(0.0).moved.tolist() == [BLOCK]
    os.close(fd)


def test_what_fails_after_its_deadline_is_not_moved_again(
    engine: NixlEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A drive that hangs ends with an error at last. By then the memory may be somebody else's.
    fd = open_file(tmp_path / "file", BLOCK, content=(content := random_bytes(BLOCK)))
    engine.attach(fd, BLOCK)
    poll, state, requests = engine._ring.poll, Progress.RUNNING, []

    def hangs(request: Any) -> Progress:
        requests.append(request)
        return state

    monkeypatch.setattr(engine._ring, "poll", hangs)
    buffer = memory(BLOCK)
    transfer = engine.submit(Op.READ, plan(fd, [0], buffer, BLOCK))
    until(lambda: transfer.done or requests)
    assert transfer.wait(0.1).errno.tolist() == [errno.ETIMEDOUT]
    while not np.array_equal(buffer, content):  # it arrives all the same; NIXL just does not say so
        poll(requests[-1])
    buffer[:] = 0
    state = Progress.FAILED
    wait_until_done(transfer)
    assert engine.moved_again == 0
    move(engine._blame, Op.READ, plan(fd, [0], memory(BLOCK), BLOCK))  # behind what might have been queued
    assert not buffer.any(), "the memory was written to after the deadline"
    os.close(fd)


def test_ranges_that_were_to_be_moved_again_are_not_begun_after_the_deadline(
    engine: NixlEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = open_file(tmp_path / "file", 64 * BLOCK, content=random_bytes(64 * BLOCK))
    engine.attach(fd, BLOCK)  # what lies behind goes through posix
    begun, go_on = [], threading.Event()
    really = posix._PosixTransfer._move

    def slow(self: Any, run: int) -> None:
        begun.append(run)
        go_on.wait(TIMEOUT_S)
        really(self, run)

    monkeypatch.setattr(posix._PosixTransfer, "_move", slow)
    buffer = memory(8 * BLOCK)
    transfer = engine.submit(Op.READ, plan(fd, [8 * i * BLOCK for i in range(8)], buffer, BLOCK))
    until(lambda: transfer.done or len(begun) == nixl.BLAME_THREADS)
    transfer.wait(0.2)
    under_way = len(begun)
    assert under_way == nixl.BLAME_THREADS < 8
    go_on.set()
    wait_until_done(transfer)
    assert len(begun) == under_way
    os.close(fd)


def test_no_more_ranges_than_asked_for_are_under_way(tmp_path: Path) -> None:
    read, write = os.pipe()
    with new_nixl(in_flight_ranges=4) as engine:
        fd = open_file(tmp_path / "file", 64 * BLOCK)
        engine.attach(read, 1 << 20)
        engine.attach(fd, 64 * BLOCK)
        hanging = engine.submit(Op.READ, plan([read] * 3, [0, 1, 2], memory(3), 1))
        waiting = engine.submit(Op.READ, plan(fd, [0, BLOCK], memory(2 * BLOCK), BLOCK))
        buffer = memory(BLOCK)
        buffer[:] = 7
        small = engine.submit(Op.READ, plan(fd, [0], buffer, BLOCK))
        # One place is free. `small` would fit, but it does not overtake.
        assert waiting.wait(0.1).errno.tolist() == [errno.ETIMEDOUT] * 2
        assert waiting.done, "what never began has let go of its memory"
        assert small.wait(TIMEOUT_S).errno.tolist() == [0]
        assert not hanging.done
        os.write(write, b"abc")
        assert hanging.wait(TIMEOUT_S).moved.tolist() == [1, 1, 1]
        os.close(fd)
    os.close(read)
    os.close(write)


def test_reads_leave_work_for_later_until_little_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A drive that reports all it was given at once would otherwise leave all checksums for after its last byte.
    monkeypatch.setattr(nixl, "GIVEN_MIN_BYTES", 2 * BLOCK)
    monkeypatch.setattr(nixl, "GIVEN_MAX_BYTES", 16 * BLOCK)
    with new_nixl() as engine:
        content = random_bytes(64 * BLOCK)
        fd = open_file(tmp_path / "file", 64 * BLOCK, content=content)
        engine.attach(fd, 64 * BLOCK)
        given: list[tuple[int, int]] = []  # bytes with the drive after each start, and bytes not done then
        start = engine._start

        def watched(part: Any) -> None:
            start(part)
            under_way = sum(each.nbytes for each in engine._active)
            given.append((under_way, under_way + engine._queued_bytes))

        monkeypatch.setattr(engine, "_start", watched)
        buffer = memory(64 * BLOCK)
        parts = [plan(fd, [i * BLOCK, (i + 1) * BLOCK], buffer[i * BLOCK :], BLOCK) for i in range(0, 64, 2)]
        with engine._turn:  # so that all are queued when the first starts, however slow this thread is
            transfers = [engine.submit(Op.READ, part) for part in parts]
        assert all(each.wait(TIMEOUT_S).complete(p).all() for each, p in zip(transfers, parts, strict=True))
        assert np.array_equal(buffer, content)
        assert all(part <= max(2 * BLOCK, min(16 * BLOCK, left // 2 + 1)) for part, left in given)
        assert max(part for part, _ in given) > 8 * BLOCK, "it was given more than one part at a time"
        os.close(fd)


def test_what_hangs_for_long_does_not_count_against_the_others(
    engine: NixlEngine, pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "STUCK_S", 0.05)
    fd = open_file(tmp_path / "file", 8 * BLOCK, content=(content := random_bytes(8 * BLOCK)))
    engine.attach(fd, 8 * BLOCK)
    monkeypatch.setattr(nixl, "GIVEN_MAX_BYTES", 1)  # the hanging request fills it
    hanging = engine.submit(Op.READ, plan([pipe[0]], [0], memory(BLOCK), BLOCK))
    buffer = memory(8 * BLOCK)
    move(engine, Op.READ, plan(fd, [i * BLOCK for i in range(8)], buffer, BLOCK))
    assert np.array_equal(buffer, content)
    assert not hanging.done
    os.close(fd)


def test_what_waited_in_vain_never_touches_its_memory(tmp_path: Path) -> None:
    read, write = os.pipe()
    with new_nixl(in_flight_ranges=1) as engine:
        fd = open_file(tmp_path / "file", BLOCK, content=random_bytes(BLOCK))
        engine.attach(read, 1 << 20)
        engine.attach(fd, BLOCK)
        hanging = engine.submit(Op.READ, plan([read], [0], memory(1), 1))
        waiting = engine.submit(Op.READ, plan(fd, [0], buffer := memory(BLOCK), BLOCK))
        waiting.wait(0.05)
        os.write(write, b"a")
        assert hanging.wait(TIMEOUT_S).moved.tolist() == [1]
        move(engine, Op.READ, plan(fd, [0], memory(BLOCK), BLOCK))
        assert waiting.done
        assert not buffer.any()
        os.close(fd)
    os.close(read)
    os.close(write)


def test_a_transfer_that_nobody_waits_for_gives_its_place_back(tmp_path: Path) -> None:
    with new_nixl(in_flight_ranges=8) as engine:
        fd = open_file(tmp_path / "file", 64 * BLOCK)
        engine.attach(fd, 64 * BLOCK)
        for _ in range(50):
            engine.submit(Op.READ, plan(fd, [i * BLOCK for i in range(8)], memory(8 * BLOCK), BLOCK))
        move(engine, Op.READ, plan(fd, [0], memory(BLOCK), BLOCK))
        os.close(fd)


def test_close_leaves_a_hanging_transfer_to_the_kernel_and_the_process_exits(engine: NixlEngine) -> None:
    ended = run("""
import logging
logging.basicConfig(format="%(message)s")
from tests.engines.rig import *
engine = new_nixl()
read, write = os.pipe()
engine.attach(read, 1 << 20)
transfer = engine.submit(Op.READ, plan([read], [0], memory(1), 1))
engine.close(0.1)
engine.close(0.1)
print(transfer.done)
os.write(write, b"a")
print(transfer.wait(TIMEOUT_S).moved.tolist())
""")
    assert ended.stdout == "False\n[1]\n", ended.stderr
    assert "1 transfers had not ended" in ended.stderr
    assert ended.returncode == 0


def test_after_a_failed_start_everything_goes_through_posix(engine: NixlEngine, tmp_path: Path) -> None:
    # NIXL refuses more than 65536 requests at a time, after it has taken some of the transfer.
    ended = run(f"""
import logging
logging.basicConfig(format="%(message)s")
from pathlib import Path
from tests.engines.rig import *
engine = new_nixl(in_flight_ranges=66000)
read, write = os.pipe()
engine.attach(read, 1 << 20)
fd = open_file(Path({str(tmp_path / "file")!r}), BLOCK)
engine.attach(fd, BLOCK)
hanging = engine.submit(Op.READ, plan(read, list(range(65536 + 32)), memory(1 << 17), 1))
move(engine, Op.READ, plan(fd, [0], memory(BLOCK), BLOCK))
print(hanging.done, hanging.wait(0.05).errno[-1], flush=True)
engine.close(0.1)
os._exit(0)
""")
    assert ended.stdout == f"False {errno.ETIMEDOUT}\n", ended.stderr
    assert "everything goes through posix" in ended.stderr


def test_nixl_prints_nothing(engine: NixlEngine) -> None:
    ended = run("""
from gdsstore.engines.choose import make_engine
make_engine("nixl", posix_threads=1, in_flight_ranges=8).close(5)
""")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", "", 0)


def refuse(call: int) -> str:
    """Code after which a system call is EPERM in this process, as Docker's seccomp profile does it."""
    return f"""
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, {call}), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
"""


NO_NIXL = """
import sys
sys.modules["nixl"] = None  # how Python marks what cannot be imported
"""
AUTO = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
from gdsstore.engines.choose import make_engine
engine = make_engine("auto", posix_threads=1, in_flight_ranges=8)
print(engine.name)
engine.close(5)
try:
    make_engine("nixl", posix_threads=1, in_flight_ranges=8)
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("why", "error", "said"),
    [
        (refuse(425), "EngineError", "could not be started with io_uring"),  # io_uring_setup
        (refuse(426), "EngineError", "self-test"),  # io_uring_enter
        (NO_NIXL, "MissingExtraError", 'pip install "gdsstore[nixl]"'),
    ],
    ids=["no io_uring", "io_uring that moves nothing", "nixl is not installed"],
)
def test_auto_is_posix_where_nixl_does_not_work_and_says_why(
    engine: NixlEngine, why: str, error: str, said: str
) -> None:
    ended = run(why + AUTO)
    assert ended.stdout == f"posix\n{error}\n", ended.stderr
    assert len([line for line in ended.stderr.splitlines() if "gdsstore.engines" in line]) == 1
    assert "INFO gdsstore.engines engine posix instead of nixl" in ended.stderr
    assert said in ended.stderr


def test_engines_are_made_by_name(engine: NixlEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gdsstore.engines"):
        for name, made in (("posix", "posix"), ("nixl", "nixl"), ("auto", "nixl")):
            with make_engine(name, posix_threads=1, in_flight_ranges=8) as new:
                assert new.name == made
    assert not [record for record in caplog.records if record.name == "gdsstore.engines"]
    with pytest.raises(ConfigError, match="auto, nixl or posix"):
        make_engine("gds", posix_threads=1, in_flight_ranges=8)
