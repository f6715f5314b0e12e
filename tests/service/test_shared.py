"""One answer for all who ask: also where it cannot be made, or never comes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from gdsstore.errors import DeadlineError, StoreError
from gdsstore.service.shared import Shared


def test_an_answer_that_hangs_is_not_waited_for_by_everybody_for_ever() -> None:
    release = threading.Event()
    shared = Shared(lambda: release.wait(60.0), least_age_s=0.0)

    async def ask(patience_s: float) -> None:
        with pytest.raises(DeadlineError):
            await shared.latest(patience_s)

    async def all_ask() -> None:
        await ask(0.01)
        await asyncio.sleep(0.02)
        for _ in range(50):
            await ask(0.01)

    pending: Future[Any] = shared.ask()
    try:
        asyncio.run(all_ask())
        assert len(vars(pending)["_done_callbacks"]) < 5
    finally:
        release.set()
    assert pending.result(60.0)
    assert shared.wait(60.0)


def test_a_moment_without_threads_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared(lambda: 7)

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(StoreError, match="no more threads"):
            shared.ask()
    assert shared.wait(60.0) == 7
