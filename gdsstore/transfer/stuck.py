"""Transfers that had not ended when their calls did: what belonged to them is kept until they have, and their drives are judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gdsstore.engines.base import Op
from gdsstore.transfer.flight import Flight
from gdsstore.transfer.results import Unfinished
from gdsstore.volume.health import VolumeHealth


@dataclass(slots=True, eq=False)
class _Stuck:
    unfinished: list[Unfinished]
    let_go: Callable[[], None]
    op: Op
    started: float
    undecided: tuple[int, ...]  # see Flight


class StuckTransfers:
    """Thread-safe. `health`: told of volumes that have not answered for `stall_s` seconds."""

    def __init__(self, health: Mapping[Op, Sequence[VolumeHealth]] | None, stall_s: float) -> None:
        self._health, self._stall_s = health, stall_s
        self._lock = threading.Lock()
        self._entries: list[_Stuck] = []

    def add(self, flight: Flight, unfinished: list[Unfinished], let_go: Callable[[], None]) -> None:
        """A flight has ended, but not what is `unfinished` of it. `let_go` is called when that has, in a `sweep`."""
        with self._lock:
            self._entries.append(_Stuck(unfinished, let_go, flight.op, flight.started, flight.undecided))

    def sweep(self) -> int:
        """Let go of what has ended. Returns how many have not."""
        with self._lock:
            ended = [entry for entry in self._entries if all(work.done for work in entry.unfinished)]
            self._entries = [entry for entry in self._entries if entry not in ended]
            left = list(self._entries)
            late = [self._judge(entry) for entry in left]
        for entry in ended:
            entry.let_go()
        for entry, volumes in zip(left, late, strict=True):
            for volume in volumes:
                if self._health is not None:
                    seconds = time.monotonic() - entry.started
                    self._health[entry.op][volume].record(ok=False, nbytes=0, seconds=seconds, timed_out=True)
        return len(left)

    def _judge(self, entry: _Stuck) -> tuple[int, ...]:
        """The volumes that are known now not to answer; each only once."""
        if time.monotonic() - entry.started < self._stall_s:
            return ()
        volumes, entry.undecided = entry.undecided, ()
        return volumes
