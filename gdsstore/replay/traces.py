"""Readers of recorded traces: Mooncake and compact agent format, plain or gzip, told apart by content.

Formats (both JSON lines):

- Mooncake (FAST'25 release): `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: one id for each
  512-token block, shared over the whole trace. It names no sessions; see `_SessionGuess`.
- Agents (kv-cache-tester): one session a line, `block_size` and `requests`, each
  `[t_s, in_tok, out_tok, lcp_blocks, runs]`. A request has the first `lcp_blocks` blocks of the one before,
  then the runs `[first id, count]`. Ids are local to the session.
"""

from __future__ import annotations

import gzip
import heapq
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError, from_os_error
from gdsstore.replay.requests import I64, Request

MOONCAKE_BLOCK_TOKENS = 512
AGENTS_LIVE = 16  # agent sessions that run side by side; the recording holds each session by itself
_SESSION_SHIFT = 32  # an agent block's id: the session's index above, its local id below these bits
_LINE_LIMIT = 64 << 20  # bytes; the longest real line has 0.1 MB
_TIME_LIMIT = 1e15  # seconds or milliseconds; also keeps out NaN and infinity
_BLOCKS_LIMIT = 1 << 20  # blocks a request; bounds what one damaged run can allocate


class _BadLineError(Exception):
    """What is wrong with the line in hand; `_lines`' caller adds the file and the line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file, streamed anew by each iteration. Make one with `open_trace`."""

    path: Path
    format: str  # "mooncake" or "agents"
    block_tokens: int

    @property
    def name(self) -> str:
        return self.path.name

    def __iter__(self) -> Iterator[Request]:
        return _agents(self.path, self.block_tokens) if self.format == "agents" else _mooncake(self.path)


def open_trace(path: str | Path) -> Trace:
    """Recognise a trace by its first line. Raises ArgumentError, naming file and line, if it is none."""
    path = Path(path)
    for number, line in _lines(path):
        if "hash_ids" in line:
            return Trace(path, "mooncake", MOONCAKE_BLOCK_TOKENS)
        if "requests" in line and "block_size" in line:
            try:
                return Trace(path, "agents", _whole(line, "block_size", least=1))
            except _BadLineError as problem:
                raise _damaged(path, number, str(problem)) from None
        raise _damaged(
            path, number, "neither a Mooncake request (hash_ids) nor an agent session (requests, block_size)"
        )
    raise ArgumentError("the trace holds no request; give a trace file or none at all", path=str(path))


def _mooncake(path: Path) -> Iterator[Request]:
    sessions = _SessionGuess()
    for number, line in _lines(path):
        try:
            blocks = _ids(line.get("hash_ids"))
            yield Request(
                arrival_s=_seconds(line.get("timestamp"), "timestamp") / 1000,
                input_tokens=_whole(line, "input_length"),
                output_tokens=_whole(line, "output_length"),
                blocks=blocks,
                session=sessions.of(blocks),
            )
        except _BadLineError as problem:
            raise _damaged(path, number, str(problem)) from None


class _SessionGuess:
    """Sessions of a trace that names none: a request joins the session whose block is the deepest it repeats.

    The first block does not count: a system prompt makes it common to requests that share nothing else.
    """

    def __init__(self) -> None:
        self._of_block: dict[int, int] = {}
        self._count = 0

    def of(self, blocks: I64) -> int:
        ids = blocks.tolist()
        known = 0
        while known < len(ids) and ids[known] in self._of_block:
            known += 1
        if known > 1:
            session = self._of_block[ids[known - 1]]
        else:
            session = self._count
            self._count += 1
        self._of_block.update(dict.fromkeys(ids[known:], session))
        return session


def _agents(path: Path, block_tokens: int) -> Iterator[Request]:
    """Merge the sessions by time: `AGENTS_LIVE` at once, each followed by the file's next when it ends."""
    upcoming = (
        _agent_session(path, number, line, index, block_tokens)
        for index, (number, line) in enumerate(_lines(path))
    )
    live: list[tuple[float, int, Request, float, Iterator[Request]]] = []

    def begin(start_s: float) -> None:
        for session in upcoming:
            first = next(session, None)
            if first is not None:
                heapq.heappush(live, (start_s + first.arrival_s, first.session, first, start_s, session))
                return

    for _ in range(AGENTS_LIVE):
        begin(0.0)
    while live:
        at_s, index, request, start_s, session = heapq.heappop(live)
        yield Request(at_s, request.input_tokens, request.output_tokens, request.blocks, request.session)
        following = next(session, None)
        if following is None:
            begin(at_s)
        else:
            heapq.heappush(live, (start_s + following.arrival_s, index, following, start_s, session))


def _agent_session(
    path: Path, number: int, line: dict[str, Any], index: int, block_tokens: int
) -> Iterator[Request]:
    """The requests of one session, `arrival_s` counted from its own start."""
    try:
        if _whole(line, "block_size", least=1) != block_tokens:
            raise _BadLineError(f"block_size is not {block_tokens}, as in the lines before")
        rows = line.get("requests")
        if not isinstance(rows, list):
            raise _BadLineError("requests is not a list")
        previous = np.empty(0, dtype=np.int64)
        last_s = 0.0
        for row in rows:
            if not isinstance(row, list) or len(row) != 5:
                raise _BadLineError("a request is not [t_s, in_tok, out_tok, lcp_blocks, runs]")
            fields = {"in_tok": row[1], "out_tok": row[2], "lcp_blocks": row[3]}
            shared = _whole(fields, "lcp_blocks")
            if shared > len(previous):
                raise _BadLineError(
                    f"lcp_blocks is {shared}, but the request before has {len(previous)} blocks"
                )
            previous = np.concatenate([previous[:shared], _runs(row[4]) + (index << _SESSION_SHIFT)])
            last_s = max(last_s, _seconds(row[0], "t_s"))
            yield Request(last_s, _whole(fields, "in_tok"), _whole(fields, "out_tok"), previous, index)
    except _BadLineError as problem:
        raise _damaged(path, number, str(problem)) from None


def _runs(value: Any) -> I64:
    """The local ids of `[[first, count], ...]`."""
    if not isinstance(value, list):
        raise _BadLineError("runs is not a list")
    if not value:
        return np.empty(0, dtype=np.int64)
    runs = _int64(value, "runs")
    if runs.ndim != 2 or runs.shape[1] != 2 or (runs < 0).any():
        raise _BadLineError("runs is not a list of [first id, count]")
    first, count = runs[:, 0], runs[:, 1]
    if (runs >= 1 << (_SESSION_SHIFT - 1)).any() or count.sum() > _BLOCKS_LIMIT:
        raise _BadLineError("runs holds an id or a count that no session reaches")
    starts = np.cumsum(count) - count
    ids: I64 = np.arange(count.sum(), dtype=np.int64) + np.repeat(first - starts, count)
    return ids


def _ids(value: Any) -> I64:
    if not isinstance(value, list) or not value:
        raise _BadLineError("hash_ids is not a list of ids")
    ids = _int64(value, "hash_ids")
    if ids.ndim != 1 or (ids < 0).any():
        raise _BadLineError("hash_ids is not a list of ids >= 0")
    return ids


def _int64(value: list[Any], name: str) -> I64:
    try:
        array: npt.NDArray[Any] = np.asarray(value)
    except (ValueError, OverflowError):
        raise _BadLineError(f"{name} is ragged") from None
    if array.dtype != np.dtype(np.int64):
        raise _BadLineError(f"{name} holds something that is not a 64-bit whole number")
    return array


def _whole(fields: dict[str, Any], name: str, least: int = 0) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _BadLineError(f"{name} is not a whole number >= {least}")
    return value


def _seconds(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= _TIME_LIMIT:
        raise _BadLineError(f"{name} is not a time >= 0")
    return float(value)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and their JSON objects; blank lines are passed over."""
    number = 0
    try:
        with open(path, "rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            while text := stream.readline(_LINE_LIMIT):
                number += 1
                if len(text) == _LINE_LIMIT:
                    raise _damaged(path, number, f"longer than {_LINE_LIMIT} bytes")
                if not text.strip():
                    continue
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):
                    raise _damaged(path, number, "not JSON") from None
                if not isinstance(line, dict):
                    raise _damaged(path, number, "not a JSON object")
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise _damaged(path, number + 1, f"the gzip stream ends or breaks here ({problem})") from None
    except OSError as error:
        raise from_os_error(error, "cannot read the trace", ArgumentError) from error


def _damaged(path: Path, number: int, problem: str) -> ArgumentError:
    return ArgumentError(
        f"damaged trace, {path}, line {number}: {problem}; fetch it again or end before it with --requests",
        path=str(path),
        line=number,
    )
