"""A real server with the linker: 50 clients at the same time, a device pool and a store that evict, and a drive that fails."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from server import Generation, LinkerOptions, ServerClient, ServerError

from tests.sglang_linker.faulty_linker import COUNTS
from tests.sglang_server.launch import FLOAT32, backend_environment
from tests.sglang_server.processes import throwaway_server
from tests.sglang_server.stored import tool
from tests.sglang_server.workload import Question, check_answer, conversations

pytestmark = pytest.mark.slow

CLIENTS, TURNS = 50, 4
# Room for a fifth of the conversations on the device, and for a good half of them on the drive.
POOL = ("--max-total-tokens", "2048")
SETTINGS: dict[str, Any] = {
    "capacity": "24MiB",
    "segment_bytes": "1MiB",
    "grace_s": 2.0,
    "load_deadline_s": 5,
}
RETRIES = 20  # a page that failed is a miss for the next attempt, so that a request gets on with each


@pytest.fixture(scope="module")
def talks() -> list[list[Question]]:
    with throwaway_server(env=backend_environment(), extra_args=FLOAT32) as server:
        return conversations(server, seed=9, count=CLIENTS, turns=TURNS)


class Clients:
    def __init__(self, server: ServerClient) -> None:
        self._server = server
        self._lock = threading.Lock()
        self.seen: Counter[str] = Counter()

    def talk(self, questions: Sequence[Question]) -> None:
        """Turn by turn. Every answer is checked, and a request that failed for its load is repeated."""
        for question in questions:
            answer, repeated = self._ask(question)
            check_answer(answer, question.answer)
            with self._lock:
                self.seen.update(
                    answers=1, repeated=repeated, asked=len(question.prompt), cached=answer.cached_tokens
                )

    def _ask(self, question: Question) -> tuple[Generation, int]:
        for attempt in range(RETRIES):
            try:
                return self._server.generate(
                    question.prompt, max_new_tokens=len(question.answer.token_ids)
                ), attempt
            except ServerError as error:
                if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
        raise AssertionError(f"a request failed {RETRIES} times")


@pytest.mark.parametrize("prefetch", [False, True], ids=["drive", "host cache"])
def test_fifty_clients_get_right_answers_from_a_drive_that_fails(
    talks: list[list[Question]], tmp_path: Path, prefetch: bool
) -> None:
    folder, counts = tmp_path / "store", tmp_path / "counts"
    more = {"host_cache": "8MiB", "write_policy": "never"} if prefetch else {}
    linker = LinkerOptions(
        "tests.sglang_linker.faulty_linker", "FaultyLinker", {"path": str(folder), **SETTINGS, **more}
    )
    arguments = (*FLOAT32, *POOL, *(("--schedule-policy", "lpm") if prefetch else ()))
    env = backend_environment(**{COUNTS: str(counts)})
    with throwaway_server(linker=linker, env=env, extra_args=arguments) as server:
        clients = Clients(server)
        for _ in range(2):  # the second time most of it was stored, and little of it is on the device
            with ThreadPoolExecutor(CLIENTS) as threads:
                list(threads.map(clients.talk, talks))
        server.flush_cache()
        injected = json.loads(counts.read_text())
        _, stats = tool("stats", folder)
    print(f"{dict(clients.seen)}; {injected}; {stats['catalog']['pages']} pages stored")
    assert clients.seen["answers"] == 2 * CLIENTS * TURNS
    assert sum(injected[kind] for kind in ("errno", "short", "corrupt", "misdirect")) > 0
    assert injected["loaded"] > 0
    assert injected["saved"] > stats["catalog"]["pages"], "nothing was evicted from the store"
    assert (injected["warm"] > 0) == prefetch
    assert stats["physical_bytes"] <= stats["capacity_bytes"]
