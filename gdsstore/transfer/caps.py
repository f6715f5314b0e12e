"""The caps of the volumes, learned from the chunks that end on them: see CapSearch for what is looked for.

Pure: no clock, no I/O. Each method that needs it takes `now` (seconds on any clock that does not go back).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gdsstore.engines.base import Op
from gdsstore.transfer.caps_search import LEAST_CHUNKS, CapSearch

INTERVAL_CAPS: Final = 3  # times the cap that end in an interval: some drives report many chunks at once
INTERVAL_S: Final = 0.01
FULL_SHARE: Final = 0.5  # of an interval's time that the cap was the limit: else it says nothing of the cap
OTHERS_SHARE: Final = 0.1  # of its bytes that may have gone the other way

Trusted = Callable[[int, Op], bool]
"""Whether a volume, by its index, answers as it should in this direction."""


class CapMeter:
    """The cap of one direction of one volume.

    An interval is measured from the end of one chunk to the end of another. Only such count in which the cap was the limit, every
    chunk moved whole, and next to nothing went the other way; when the cap has changed, one begins after what was under way before.
    """

    def __init__(self, chunk_bytes: int, chunks: int) -> None:
        self._search = CapSearch(chunks)
        self._chunk_bytes, self._default = chunk_bytes, chunks
        self._largest = 0  # bytes of a chunk: a page may be larger than `chunk_bytes`
        self.nbytes = chunks * chunk_bytes
        """The cap, in bytes."""
        self._lacked_at: float | None = None  # when one found no room first, since the last chunk ended
        self.begin_again()

    def lacked(self, now: float) -> None:
        """A chunk found no room under the cap."""
        if self._lacked_at is None:
            self._lacked_at = now

    def begin_again(self) -> None:
        """What was measured of this interval says nothing."""
        self._since: float | None = None
        self._to_settle = self.nbytes
        self._moved = self._others = 0
        self._full_s = 0.0

    def other_way(self, nbytes: int) -> None:
        """Bytes that moved in the other direction."""
        self._others += nbytes

    def ended(self, nbytes: int, now: float, trusted: Callable[[], bool]) -> None:
        """A chunk has moved whole."""
        self._largest = max(self._largest, nbytes)
        lacked_at, self._lacked_at = self._lacked_at, None
        if self._since is None:
            self._to_settle -= nbytes
            if self._to_settle <= 0:
                self._begin(now)
            return
        self._moved += nbytes
        if lacked_at is not None:
            self._full_s += now - lacked_at
        took = now - self._since
        if self._moved < INTERVAL_CAPS * self.nbytes or took < INTERVAL_S:
            return
        limited = self._full_s >= FULL_SHARE * took and self._others <= OTHERS_SHARE * self._moved
        if limited and trusted():
            self._search.measured(self._moved / took)
        before, self.nbytes = self.nbytes, self._bytes_of(self._search.in_use)
        if self.nbytes == before:
            self._begin(now)
        else:
            self.begin_again()

    def _begin(self, now: float) -> None:
        self._since = now
        self._moved = self._others = 0
        self._full_s = 0.0

    def _bytes_of(self, chunks: int) -> int:
        nbytes = chunks * self._chunk_bytes
        if chunks >= self._default:
            return nbytes
        return min(max(nbytes, LEAST_CHUNKS * self._largest), self._default * self._chunk_bytes)


class LearnedCaps:
    """The caps of all volumes in bytes, in each direction. They begin with `chunks` chunks, and stay between LEAST_CHUNKS and
    MOST times that. Not thread-safe."""

    def __init__(self, volumes: int, chunk_bytes: int, chunks: int, trusted: Trusted) -> None:
        """`trusted` is asked with the locks of the caller held: it must not wait."""
        self._trusted = trusted
        self._meters = [{op: CapMeter(chunk_bytes, chunks) for op in Op} for _ in range(volumes)]

    def nbytes(self, volume: int, op: Op) -> int:
        """The cap as it is now."""
        return self._meters[volume][op].nbytes

    def lacked(self, volume: int, op: Op, now: float) -> None:
        """A chunk found no room on a volume."""
        self._meters[volume][op].lacked(now)

    def ended(self, volume: int, op: Op, nbytes: int, now: float) -> None:
        """A chunk has moved whole, at the first try. Look at `nbytes` after it."""
        for each, meter in self._meters[volume].items():
            if each is op:
                meter.ended(nbytes, now, lambda: self._trusted(volume, op))
            else:
                meter.other_way(nbytes)

    def disturbed(self, volume: int) -> None:
        """A chunk failed, was cancelled, or is late: what the drive does now is not what it can do."""
        for meter in self._meters[volume].values():
            meter.begin_again()
