"""Calls that may hang keep nobody, and their threads are used again."""

from __future__ import annotations

import errno
import threading

import pytest

from gdsstore.catalog import late_calls
from gdsstore.catalog.late_calls import LateCalls, result_by
from gdsstore.errors import DeadlineError
from gdsstore.waiting import Deadline
from tests.transfer.late_drive import LONG_S, soon


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gdsstore-call"]


def test_one_thread_serves_calls_that_come_one_after_the_other() -> None:
    calls = LateCalls()
    served = {result_by(calls.start(threading.get_ident), Deadline(LONG_S)) for _ in range(50)}
    assert len(served) == 1
    calls.close()


def test_a_caller_is_let_go_at_its_deadline_and_the_call_goes_on() -> None:
    calls, go = LateCalls(), threading.Event()
    late = calls.start(lambda: go.wait(LONG_S))
    with pytest.raises(DeadlineError):
        result_by(late, Deadline(0.01))
    assert result_by(calls.start(lambda: 7), Deadline(LONG_S)) == 7
    go.set()
    assert result_by(late, Deadline(LONG_S))
    calls.close()


@pytest.mark.parametrize("error", [OSError(errno.ETIMEDOUT, "timed out"), ValueError("a bug")])
def test_what_a_call_raises_is_raised_as_it_is_and_its_thread_lives_on(error: Exception) -> None:
    def fail() -> None:
        raise error

    calls = LateCalls()
    with pytest.raises(type(error)) as raised:
        result_by(calls.start(fail), Deadline(LONG_S))
    assert raised.value is error
    assert result_by(calls.start(lambda: 7), Deadline(LONG_S)) == 7
    calls.close()


def test_threads_end_with_their_last_call_after_a_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_calls, "MAX_IDLE", 2)
    before, go = set(threads()), threading.Event()
    calls = LateCalls()
    under_way = [calls.start(lambda: go.wait(LONG_S)) for _ in range(5)]
    assert len(set(threads()) - before) == 5
    go.set()
    for call in under_way:
        result_by(call, Deadline(LONG_S))
    soon(lambda: len(set(threads()) - before) == 2)
    go.clear()
    last = calls.start(lambda: go.wait(LONG_S))
    calls.close()
    soon(lambda: len(set(threads()) - before) == 1)
    assert result_by(calls.start(lambda: 7), Deadline(LONG_S)) == 7
    go.set()
    assert result_by(last, Deadline(LONG_S))
    soon(lambda: not set(threads()) - before)
