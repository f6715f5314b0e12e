"""A workload of our own, for when no trace is at hand: chats that share a system prompt and grow by turns."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gdsstore.errors import ArgumentError
from gdsstore.replay.requests import Request

_SESSION_SHIFT = 32
_TURN_SHIFT = 20
_THINK_S = 20.0  # mean pause of a user between two turns
_SESSION_GAP_S = 2.0  # mean time between the starts of two sessions


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Sessions of 1 to `2 * turns - 1` turns, `turns` on average; all begin with one system prompt.

    Each turn repeats what was said before and adds the last answer and a new question, `turn_tokens` both on
    average. The same fields give the same requests.
    """

    seed: int = 0
    sessions: int = 200
    turns: int = 5
    block_tokens: int = 512
    system_tokens: int = 1024
    turn_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.seed < 0 or min(self.sessions, self.turns, self.block_tokens, self.turn_tokens) < 1:
            raise ArgumentError(
                "a workload needs a seed >= 0 and sessions, turns and token counts of at least 1"
            )
        if self.system_tokens < 0:
            raise ArgumentError(
                "a system prompt cannot have fewer than 0 tokens", system_tokens=self.system_tokens
            )

    @property
    def name(self) -> str:
        return f"multi-turn, seed {self.seed}"

    def __iter__(self) -> Iterator[Request]:
        starts = np.random.default_rng(self.seed)
        at_s = 0.0
        live: list[tuple[float, int, Request, Iterator[Request]]] = []
        for session in range(self.sessions):
            yield from _until(at_s, live)
            turns = self._session(session, at_s)
            first = next(turns)
            heapq.heappush(live, (first.arrival_s, session, first, turns))
            at_s += starts.exponential(_SESSION_GAP_S)
        yield from _until(np.inf, live)

    def _session(self, session: int, start_s: float) -> Iterator[Request]:
        dice = np.random.default_rng([self.seed, session])
        system_blocks = (
            self.system_tokens // self.block_tokens
        )  # a block half of the prompt's belongs to the session
        tokens, at_s = self.system_tokens, start_s
        for turn in range(int(dice.integers(1, 2 * self.turns))):
            question, answer = (max(1, int(dice.exponential(self.turn_tokens / 2))) for _ in range(2))
            tokens += question
            blocks = np.arange(-(-tokens // self.block_tokens), dtype=np.int64)
            blocks[system_blocks:] += (session + 1) << _SESSION_SHIFT
            if tokens % self.block_tokens:  # what fills up this block later makes it another one
                blocks[-1] += (turn + 1) << _TURN_SHIFT
            yield Request(at_s, tokens, answer, blocks, session)
            tokens += answer
            at_s += dice.exponential(_THINK_S)


def _until(at_s: float, live: list[tuple[float, int, Request, Iterator[Request]]]) -> Iterator[Request]:
    """The live sessions' requests up to a time, in order."""
    while live and live[0][0] <= at_s:
        _, session, request, turns = heapq.heappop(live)
        yield request
        following = next(turns, None)
        if following is not None:
            heapq.heappush(live, (following.arrival_s, session, following, turns))
