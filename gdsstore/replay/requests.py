"""What a replay consists of: requests, each a list of block ids, from a workload that can be read again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request. Two requests share a prefix exactly as far as their `blocks` are equal from the start."""

    arrival_s: float  # seconds since the workload's start
    input_tokens: int
    output_tokens: int
    blocks: I64  # one id a block of the prompt; the last block may be partly filled
    session: int  # requests of one session build on one another


class Workload(Protocol):
    """Requests in order of arrival. Each iteration starts anew and yields the same requests."""

    @property
    def name(self) -> str: ...

    @property
    def block_tokens(self) -> int:
        """Tokens in a full block."""
        ...

    def __iter__(self) -> Iterator[Request]: ...


def portion(workload: Workload, skip: int = 0, requests: int | None = None) -> Iterator[Request]:
    """`requests` requests (None: all) after the first `skip`. Raises ArgumentError for negative numbers."""
    if skip < 0 or (requests is not None and requests < 0):
        raise ArgumentError("skip and requests cannot be negative", skip=skip, requests=requests)
    return islice(iter(workload), skip, None if requests is None else skip + requests)


def share(requests: Iterator[Request], worker: int, workers: int) -> Iterator[Request]:
    """The requests of one worker of `workers`: whole sessions, in the trace's order.

    A session is never split, so what a turn needs was asked for by the same worker, earlier. Between workers
    there is no order, as there is none between two inference servers on one store.
    """
    return (request for request in requests if request.session % workers == worker)
