"""Conversations on a store too small for them, and a server that is killed in the middle."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError

import pytest
from server import ServerClient, running_server

from tests.sglang_server.launch import FLOAT32, backend_environment, gdsstore_storage
from tests.sglang_server.processes import kill, throwaway_server
from tests.sglang_server.stored import generations, tool
from tests.sglang_server.workload import Question, check_answer, check_no_call_failed, conversations

pytestmark = pytest.mark.slow

CLIENTS, CONVERSATIONS, TURNS = 4, 20, 10
REQUESTS = CONVERSATIONS * TURNS
KILLED_AFTER = REQUESTS // 2

# Memory tiers that hold a few conversations, and a store that does not hold all of them either: what its catalog and its heat
# file leave of the capacity is about 300 of the 600 pages.
TIERS = ("--max-total-tokens", "1536")
SMALL_STORE = {"capacity": "20MiB", "segment_bytes": "1MiB", "grace_s": 0.5}
TIER_NAMES = ("device", "host", "storage")
# Of a client's conversations: with all alike, the next one would always be the one that was just evicted.
POPULARITY = (8, 4, 2, 1, 1)


class Clients:
    """Four clients; each works through its conversations turn by turn. Goes on where it was when the server was gone."""

    def __init__(self, talks: list[list[Question]]) -> None:
        self._left = [shuffled(talks[client::CLIENTS], seed=client) for client in range(CLIENTS)]
        self._lock = threading.Lock()
        self.answered = 0
        self.tokens: Counter[str] = Counter()

    def work(self, server: ServerClient, each_answer: Callable[[int], None]) -> None:
        """Until every question is answered or the server is gone. Every answer is checked."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda left: self._ask_all(server, left, each_answer), self._left))

    def _ask_all(
        self, server: ServerClient, left: list[Question], each_answer: Callable[[int], None]
    ) -> None:
        while left:
            question = left[0]
            try:
                answer = server.generate(question.prompt, max_new_tokens=len(question.answer.token_ids))
            except (URLError, HTTPException, ConnectionError):
                return
            check_answer(answer, question.answer)
            del left[0]
            with self._lock:
                self.answered += 1
                now = self.answered
                self.tokens["asked"] += len(question.prompt)
                for tier in TIER_NAMES:
                    self.tokens[tier] += int(answer.cached_details.get(tier, 0))
            each_answer(now)


def shuffled(talks: list[list[Question]], seed: int) -> list[Question]:
    """The questions of several conversations, some of which go on more often than others. Turns keep their order."""
    chance = random.Random(seed)
    turns = chance.choices(range(len(talks)), POPULARITY, k=20 * REQUESTS)
    left = [list(talk) for talk in talks]
    order = [left[at].pop(0) for at in turns if left[at]]
    assert not any(left)
    return order


def test_a_store_that_evicts_and_a_killed_server_give_no_wrong_answer(
    memory_server: ServerClient, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    clients = Clients(conversations(memory_server, seed=5, count=CONVERSATIONS, turns=TURNS))
    seen: list[dict[int, int]] = []
    storage = gdsstore_storage(folder, settings=SMALL_STORE, host_to_device_ratio=1.5)

    with running_server(storage=storage, env=backend_environment(), extra_args=(*FLOAT32, *TIERS)) as server:

        def watch(answered: int) -> None:
            if answered % 10 == 0:
                seen.append(generations(folder))
            if answered == KILLED_AFTER:
                kill(server)

        clients.work(server, watch)
        check_no_call_failed(server)
        assert KILLED_AFTER <= clients.answered < KILLED_AFTER + CLIENTS
    first = Counter(clients.tokens)

    with throwaway_server(
        storage=storage, env=backend_environment(), extra_args=(*FLOAT32, *TIERS)
    ) as server:
        clients.work(server, lambda answered: seen.append(generations(folder)))
        assert clients.answered == REQUESTS
        check_no_call_failed(server)
        server.flush_cache()
        _, stats = tool("stats", folder)
        assert stats["physical_bytes"] <= stats["capacity_bytes"]
    second = clients.tokens - first

    reclaimed = sum(
        generation != before[number]
        for before, after in itertools.pairwise(seen)
        for number, generation in after.items()
        if number in before
    )
    for what, tokens in (("before the kill", first), ("after it", second)):
        shares = ", ".join(f"{tier} {tokens[tier] / tokens['asked']:.1%}" for tier in TIER_NAMES)
        print(f"{what}: {tokens['asked']} prompt tokens, of them from {shares}")
    print(f"{reclaimed} segments reclaimed, 0 of {clients.answered} answers wrong")
    assert reclaimed > 0
    assert first["storage"] > 0
    assert second["storage"] > 0
    status, found = tool("verify", folder)
    assert (status, found["damaged"]) == (0, [])
