"""A drive as a queueing model on a virtual clock, and calls that keep it busy through the transfer policy."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

from gdsstore.engines.base import Op
from gdsstore.transfer.caps import LearnedCaps
from gdsstore.transfer.policy import TransferPolicy
from gdsstore.transfer.policy_terms import Ask, AskState, Caps, Cost, Limits, Request, TransferClass

CHUNKS = 8  # of one call under way at most, and of all on one volume before anything was learned
NEVER = 1e12
KiB, MiB = 1 << 10, 1 << 20


@dataclass
class Drive:
    """Requests are served by `width` servers, first come first served, and take `latency_s` besides. `jitter`: the share of its
    mean by which a time may be off. `at_once`: of what it is given it reports nothing before all of it is done."""

    bytes_per_s: float
    latency_s: float
    width: int = 8
    request_bytes: int = 64 * KiB
    jitter: float = 0.1
    at_once: bool = False
    fails: float = 0.0  # share of the chunks, which fail at once

    def __post_init__(self) -> None:
        self._free = [0.0] * self.width
        self._random = random.Random(1)

    def done_at(self, nbytes: int, now: float) -> float:
        """When a chunk that it is given now will have moved."""
        done, size = 0.0, min(self.request_bytes, nbytes)
        for _ in range(-(-nbytes // size)):
            begins = max(self._free[0], now)
            free = begins + size * self.width / self.bytes_per_s * self._about_one()
            heapq.heapreplace(self._free, free)
            done = max(done, free + self.latency_s * self._about_one())
        return done

    def fails_now(self) -> bool:
        return self._random.random() < self.fails

    def _about_one(self) -> float:
        return 1 + self.jitter * (2 * self._random.random() - 1)


@dataclass
class Calls:
    """Calls without an end, on one volume."""

    drive: Drive
    chunk_bytes: int
    learned: LearnedCaps | None = None
    ops: tuple[Op, ...] = (Op.READ,) * 4  # of each call
    ahead: int = CHUNKS  # chunks of each that are under way at most
    cap_chunks: int = CHUNKS
    now: float = 0.0
    moved: int = 0  # bytes
    changes: list[int] = field(default_factory=list)  # caps in bytes, as they changed
    ends: dict[Request, int] = field(default_factory=dict)  # chunks that each call got through

    def __post_init__(self) -> None:
        caps = Caps(self.cap_chunks * self.chunk_bytes, 1 << 20)
        self.policy = TransferPolicy(Limits(workers=len(self.ops) + 3), [caps], self.learned)
        self._flying: list[tuple[float, int, Ask]] = []
        self._reported: list[Ask] = []
        self._numbers = itertools.count()
        self._under_way: dict[Request, int] = {}
        self._waiting: dict[Request, Ask] = {}
        for op in self.ops:
            cls = TransferClass.LOAD if op is Op.READ else TransferClass.OFFLOAD
            self.policy.submit(cls, op, 1, NEVER, 0.0)
            request = self.policy.start(0.0)
            assert request is not None
            self._under_way[request] = self.ends[request] = 0
        self.go_on()

    def cap(self, op: Op = Op.READ) -> int:
        """In chunks."""
        return self.policy.volumes[0].caps[op].nbytes // self.chunk_bytes

    def run(self, chunks: int) -> float:
        """Let so many chunks end; bytes a second meanwhile."""
        since, before = self.now, self.moved
        for _ in range(chunks):
            self._ask(self._end_one())
        return (self.moved - before) / (self.now - since)

    def stop(self, seconds: float) -> None:
        """Let everything end, and the drive be idle for a while."""
        for ask in self._waiting.values():
            self.policy.done(ask, self.now)
        self._waiting.clear()
        while self._flying or self._reported:
            self._end_one()
        self.now += seconds

    def go_on(self) -> None:
        for request in self._under_way:
            self._ask(request)

    def _ask(self, request: Request) -> None:
        """Until one waits, or the call has all under way that it may have."""
        while self._under_way[request] < self.ahead and request not in self._waiting:
            ask = self.policy.ask(request, {0: Cost(self.chunk_bytes, 1)}, self.now)
            if ask.state is AskState.WAITING:
                self._waiting[request] = ask
            else:
                self._begin(ask)

    def _begin(self, ask: Ask) -> None:
        self._under_way[ask.request] += 1
        ask.moved = not self.drive.fails_now()
        done = self.drive.done_at(self.chunk_bytes, self.now) if ask.moved else self.now + 1e-6
        heapq.heappush(self._flying, (done, next(self._numbers), ask))

    def _end_one(self) -> Request:
        if not self._reported:
            count = len(self._flying) if self.drive.at_once else 1
            for _ in range(count):
                at, _, ask = heapq.heappop(self._flying)
                self._reported.insert(0, ask)
                self.now = max(self.now, at)
        ask = self._reported.pop()
        request, volume = ask.request, self.policy.volumes[0]
        self.moved += self.chunk_bytes * ask.moved
        self.ends[request] += 1
        self._under_way[request] -= 1
        before = volume.caps[request.op]
        self.policy.done(ask, self.now)
        if volume.caps[request.op] is not before:
            self.changes.append(volume.caps[request.op].nbytes)
        granted = list(self.policy.decided)
        self.policy.decided.clear()
        for each in granted:
            del self._waiting[each.request]
            self._begin(each)
        for each in granted:
            self._ask(each.request)
        return request
