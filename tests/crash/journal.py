"""What a worker promised: one line an event, appended before or after the call that it tells of.

A line is written by one `write`, so a kill leaves whole lines; the page cache survives the process.

    PID saving|saved|kept|deleting|deleted LANE LOW HIGH     pages LOW, LOW + 2, ... HIGH; kept: saved and durable
    PID syncing|synced                                       what was saved before `syncing` is durable
    PID cut                                                  the power went: what was not durable may be there or not
    PID phase WORD
    PID fail TEXT
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt


class Promise(IntEnum):
    """What may be said of a page after a kill."""

    NOTHING = 0  # never touched
    EITHER = 1  # a call was under way
    THERE = 2  # its save was acknowledged, and nobody began to delete it
    GONE = 3  # its deletion was acknowledged


_MEANING = {
    "saving": Promise.EITHER,
    "saved": Promise.THERE,
    "kept": Promise.THERE,
    "deleting": Promise.EITHER,
    "deleted": Promise.GONE,
}

_write = os.write  # tests replace it


class Journal:
    """The writing end, one a process."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lock = threading.RLock()

    def pages(self, word: str, lane: int, positions: npt.NDArray[np.int64]) -> None:
        """Note an event of pages of one parity whose positions step by two."""
        if len(positions):
            low, high = int(positions[0]), int(positions[-1])
            self._line(f"{word} {lane} {low} {high}")

    def mark(self, word: str) -> None:
        """Note `syncing` or `synced`."""
        self._line(word)

    def phase(self, word: str) -> None:
        self._line(f"phase {word}")

    def fail(self, text: str) -> None:
        self._line("fail " + " ".join(text.split()))

    def end(self, word: str) -> None:
        """Note `cut` as the last line: what other threads have to say waits for ever."""
        self._lock.acquire()
        self._line(word)

    def _line(self, text: str) -> None:
        with self._lock:
            _write(self._fd, f"{os.getpid()} {text}\n".encode())


@dataclass(slots=True)
class Ledger:
    """All promises of a journal: for each lane an array of Promise by position, and what of it is durable."""

    lanes: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _durable: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)
    _syncing: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)

    def lane(self, number: int, size: int = 0) -> npt.NDArray[np.uint8]:
        have = self.lanes.setdefault(number, np.zeros(0, np.uint8))
        if len(have) < size:
            more = max(size, 2 * len(have)) - len(have)
            have = self.lanes[number] = np.append(have, np.zeros(more, np.uint8))
            durable = self._durable.get(number, np.zeros(0, np.bool_))
            self._durable[number] = np.append(durable, np.zeros(more, np.bool_))
        return have

    def note(self, word: str, lane: int, low: int, high: int) -> None:
        part = self.lane(lane, high + 1)[low : high + 1 : 2]
        durable = self._durable[lane][low : high + 1 : 2]
        if word == "saving":
            # A page that is there stays there: saving it again changes nothing.
            part[part != Promise.THERE] = Promise.EITHER
        else:
            part[:] = _MEANING[word]
        if word in ("kept", "deleting"):
            durable[:] = word == "kept"

    def mark(self, word: str) -> None:
        if word == "syncing":
            self._syncing = {number: promises == Promise.THERE for number, promises in self.lanes.items()}
        elif word == "synced":
            for number, due in self._syncing.items():
                self._durable[number][: len(due)] |= due & (self.lanes[number][: len(due)] == Promise.THERE)
        else:
            for number, promises in self.lanes.items():
                lost = (promises != Promise.NOTHING) & ~(self._durable[number] & (promises == Promise.THERE))
                promises[lost] = Promise.EITHER


def read_ledger(path: Path) -> Ledger:
    """The promises of all complete lines."""
    ledger = Ledger()
    for line in lines(path):
        words = line.split()
        if words[1] == "fail":
            ledger.failures.append(line)
        elif words[1] in _MEANING:
            ledger.note(words[1], *map(int, words[2:]))
        elif words[1] in ("syncing", "synced", "cut"):
            ledger.mark(words[1])
    return ledger


def lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def phases(path: Path, pid: int) -> list[str]:
    """The phases that a process went through, in order."""
    start = f"{pid} phase "
    return [line[len(start) :] for line in lines(path) if line.startswith(start)]
