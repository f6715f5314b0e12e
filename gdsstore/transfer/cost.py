"""Whether a hit is worth its load: loading against computing, both from what was measured lately."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError
from gdsstore.sizes import MiB

FIRST_BYTES = 4 * MiB  # loaded to learn the speed of a drive of which nothing is known
GROWTH = (
    4  # a load is at most that many times larger than what was seen: further away, predictions are guesses
)
WINDOW = 32  # measurements that count: drives drift fourfold within seconds
TRUSTED = 8  # measurements from which on errors are taken as measured
UNTRUSTED_ERROR = 1.5
PROBE_BYTES = MiB
PROBE_SHARE = (
    0.005  # of the time spent computing, that may be lost to find out whether the drive has become faster
)
LEARNING = "learning how fast the drive is"
SURPRISE = 3.0  # times faster or slower than predicted, twice in a row: this is another drive than the one measured before
SAME_SIZE = (
    0.05  # variance of 1/bytes over its mean squared, below which bytes and fixed costs cannot be told apart
)

Floats = npt.NDArray[np.float64]


class CostSetting(StrEnum):
    OFF = "off"  # every hit is loaded
    ADVISE = "advise"  # advice is counted, and every hit is loaded
    ENFORCE = "enforce"  # a hit is cut to what is advised


@dataclass(frozen=True, slots=True)
class Advice:
    """How many pages from the start to load; the rest of the request is computed."""

    load_pages: int
    expected_load_s: float  # of these pages, what is queued before them included
    expected_compute_s: float  # of all tokens that are not loaded
    compute_alone_s: float  # the same if nothing is loaded; 0.0 where the prefill rate is not known
    reason: str


class CostModel:
    """Learns from `observe_load` and `observe_prefill`, and advises. Thread-safe.

    A load is taken to cost a fixed time and a time a byte, prefill a time a token and, where `attention_s` is given, that many
    seconds for each pair of a token and one before it. What is compared is the dear end of the load's error and the cheap end of
    the prefill's: the 90th and 10th percentile of how far its last predictions were off.
    """

    def __init__(self, *, prefill_tokens_s: float | None = None, attention_s: float = 0.0) -> None:
        """`prefill_tokens_s`: tokens a second; None: learned. Raises ArgumentError for numbers that are none."""
        if prefill_tokens_s is not None and not (prefill_tokens_s > 0 and math.isfinite(prefill_tokens_s)):
            raise ArgumentError("a prefill rate is above 0 tokens a second", given=prefill_tokens_s)
        if not (attention_s >= 0 and math.isfinite(attention_s)):
            raise ArgumentError("attention_s is a number of seconds, 0 or more", given=attention_s)
        self._given_token_s = None if prefill_tokens_s is None else 1.0 / prefill_tokens_s
        self._attention_s = attention_s
        self._lock = threading.Lock()
        self._loads = _Loads()
        self._prefills: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # tokens, seconds without attention
        self._prefill_errors = _Errors()
        self._spare_s = 0.0

    def observe_load(self, nbytes: int, seconds: float, queued_bytes: int = 0) -> None:
        """A load of `nbytes` took `seconds`, behind `queued_bytes` of others."""
        if nbytes > 0 and seconds > 0:
            with self._lock:
                self._loads.add(nbytes + queued_bytes, seconds)
                if self._loads.surprises < 0:
                    self._spare_s = math.inf  # faster than thought: the next request looks again

    def observe_prefill(self, tokens: int, seconds: float, cached_tokens: int = 0) -> None:
        """`tokens` were computed in `seconds`, behind `cached_tokens` that were not."""
        if tokens <= 0 or seconds <= 0:
            return
        with self._lock:
            token_s = self._token_s()
            if token_s is not None:
                predicted = self._compute_s(token_s, cached_tokens, np.array([cached_tokens + tokens]))
                self._prefill_errors.add(seconds / float(predicted[0]))
            attention = float(self._compute_s(0.0, cached_tokens, np.array([cached_tokens + tokens]))[0])
            self._prefills.append((tokens, max(seconds - attention, 0.0)))

    def advise(
        self,
        *,
        pages: int,
        page_bytes: int,
        page_tokens: int,
        queued_bytes: int = 0,
        cached_tokens: int = 0,
        rest_tokens: int = 0,
        wait_s: float = 0.0,
        overlapped: bool = False,
    ) -> Advice:
        """What to do with a hit of `pages` pages of `page_bytes` bytes and `page_tokens` tokens each.

        `queued_bytes`: loads that go first. `cached_tokens`: before the hit, not to be loaded. `rest_tokens`: behind it, computed
        in any case. `wait_s`: until the request could be computed at all; a load costs nothing so long. `overlapped`: the rest
        is computed while the pages come, layer by layer, instead of after it.
        """
        if pages < 0 or page_bytes <= 0 or page_tokens <= 0:
            raise ArgumentError(
                "a hit has pages of at least a byte and a token",
                pages=pages,
                page_bytes=page_bytes,
                page_tokens=page_tokens,
            )
        with self._lock:
            token_s = self._token_s()
            end = cached_tokens + pages * page_tokens + rest_tokens
            if token_s is None:
                load_s = float(
                    self._loads.predict(np.array([pages * page_bytes + queued_bytes], np.float64))[0]
                )
                return Advice(pages, load_s if pages else 0.0, 0.0, 0.0, "the prefill rate is not known")
            first = cached_tokens + np.arange(pages + 1) * page_tokens
            compute_s = self._compute_s(token_s, first, end)
            load_s_of = self._loads.predict(
                np.arange(pages + 1, dtype=np.float64) * page_bytes + queued_bytes
            )
            load_s_of[0] = 0.0
            allowed = min(pages, max(1, self._loads.limit_bytes // page_bytes))
            lesson = (
                min(allowed, FIRST_BYTES // page_bytes) if self._loads.says_little(pages * page_bytes) else 0
            )
            dear_s = np.maximum(load_s_of[: allowed + 1] * self._loads.errors.high - wait_s, 0.0)
            cheap_s = compute_s[: allowed + 1] * self._prefill_errors.low
            total_s = np.maximum(dear_s, cheap_s) if overlapped else dear_s + cheap_s
            best = int(total_s.argmin())
            reason = _reason(best, allowed, pages)
            if lesson > best:
                best, reason = lesson, LEARNING
            if best == 0 and pages:
                probe = self._probe(min(allowed, max(1, PROBE_BYTES // page_bytes)), load_s_of, compute_s)
                best, reason = (probe, LEARNING) if probe else (best, reason)
            return Advice(best, float(load_s_of[best]), float(compute_s[best]), float(compute_s[0]), reason)

    def _probe(self, pages: int, load_s: Floats, compute_s: Floats) -> int:
        """Pages to load although computing is faster, or 0: without a load now and then nobody would see a drive recover."""
        self._spare_s += PROBE_SHARE * float(compute_s[0])
        loss_s = float(load_s[pages] + compute_s[pages] - compute_s[0])
        if loss_s > self._spare_s:
            return 0
        self._spare_s = 0.0
        return pages

    def _token_s(self) -> float | None:
        if self._given_token_s is not None:
            return self._given_token_s
        tokens = sum(tokens for tokens, _ in self._prefills)
        return sum(seconds for _, seconds in self._prefills) / tokens if tokens else None

    def _compute_s(
        self, token_s: float, first: int | npt.NDArray[np.int64], end: int | npt.NDArray[np.int64]
    ) -> Floats:
        """Seconds to compute the tokens `first` to `end` of a request: each attends to all before it."""
        tokens = np.asarray(end, np.float64) - first
        pairs = tokens * (np.asarray(end, np.float64) + first) / 2
        return np.asarray(token_s * tokens + self._attention_s * pairs, np.float64)


def _reason(best: int, allowed: int, pages: int) -> str:
    if best == 0:
        return "computing is faster" if pages else "there is nothing to load"
    if best == pages:
        return "loading is faster"
    return "larger loads were not seen yet" if best == allowed else "computing the rest is faster"


class _Errors:
    """How far predictions were off: measured over predicted."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=2 * WINDOW)

    def add(self, ratio: float) -> None:
        self._ratios.append(ratio)

    @property
    def high(self) -> float:
        """What to multiply a prediction with for its dear end, 1.0 or more."""
        if len(self._ratios) < TRUSTED:
            return max([UNTRUSTED_ERROR, *self._ratios])
        return max(1.0, float(np.percentile(self._ratios, 90)))

    @property
    def low(self) -> float:
        """The same for its cheap end, 1.0 or less."""
        if not self._ratios:  # a given rate that nothing contradicts
            return 1.0
        return min(1.0, float(np.percentile(self._ratios, 10)))


class _Loads:
    """The line through the last loads: seconds = fixed + a byte's time x bytes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._fixed_s = self._byte_s = 0.0
        self._floor = self._most = self._ever = 0.0  # bytes
        self.surprises = 0  # in a row: above 0 slower than predicted, below 0 faster
        self.errors = _Errors()

    @property
    def limit_bytes(self) -> int:
        return max(FIRST_BYTES, int(GROWTH * self._most))

    def says_little(self, nbytes: int) -> bool:
        """Whether only small loads were seen, which tell what a load costs and not what a byte does, while this one is not."""
        return self._ever < PROBE_BYTES <= nbytes

    def add(self, nbytes: int, seconds: float) -> None:
        if self._seen:
            dear_s = float(self.predict(np.array([float(nbytes)]))[0])
            cheap_s = self._fixed_s + self._byte_s * nbytes
            self._judge(seconds / min(max(seconds, cheap_s), dear_s))
        self._seen.append((float(nbytes), seconds))
        x, y = np.array(self._seen).T
        self._most = float(x.max())
        self._ever = max(self._ever, self._most)
        # Relative errors count, so the fit is that of seconds a byte over 1/bytes.
        inverse, rate = 1.0 / x, y / x
        spread = float(inverse.var())
        self._fixed_s, self._floor = 0.0, float(x.min())
        if spread > SAME_SIZE * float(inverse.mean()) ** 2:
            slope = float(((inverse - inverse.mean()) * (rate - rate.mean())).mean()) / spread
            self._fixed_s = min(max(slope, 0.0), float(y.min()))
            self._floor = 0.0
        self._byte_s = float(((y - self._fixed_s) / x).mean())

    def _judge(self, ratio: float) -> None:
        self.errors.add(ratio)
        if 1 / SURPRISE <= ratio <= SURPRISE:
            self.surprises = 0
            return
        slower = 1 if ratio > 1 else -1
        self.surprises = self.surprises + slower if self.surprises * slower > 0 else slower
        if abs(self.surprises) > 1:
            self.surprises = 0
            self.errors = _Errors()
            last = self._seen[-1]
            self._seen.clear()
            self._seen.append(last)

    def predict(self, nbytes: Floats) -> Floats:
        """Seconds. Where all loads seen were about as large, a smaller one is taken to need as long as the smallest."""
        return np.asarray(self._fixed_s + self._byte_s * np.maximum(nbytes, self._floor), np.float64)
