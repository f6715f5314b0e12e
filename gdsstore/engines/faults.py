"""What can be made to go wrong in an engine, and how operators write it down."""

from __future__ import annotations

import difflib
import errno
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from gdsstore.engines.base import Op, RangePlan
from gdsstore.errors import ConfigError

Mask = npt.NDArray[np.bool_]


class FaultKind(Enum):
    ERRNO = "errno"  # the range fails, and none of its bytes move
    SHORT = "short"  # the tail of the range does not move
    CORRUPT = (
        "corrupt"  # one bit arrives flipped, in memory (READ) or in the file (WRITE), and success is reported
    )
    MISDIRECT = "misdirect"  # the neighbouring range of the file is read or written; with no neighbour, none (a lost write)
    DELAY = "delay"  # the range starts to move `delay_s` after it was submitted
    HANG = "hang"  # the range moves when the engine's `release_hangs` is called


@dataclass(frozen=True, slots=True)
class Window:
    """Ranges that touch bytes `start` to `stop` of a file, for `Fault.match`.

    `fd` None: of any file; `stop` None: to the end of the file.
    """

    fd: int | None = None
    start: int = 0
    stop: int | None = None

    def __call__(self, plan: RangePlan) -> Mask:
        hit = plan.file_offset + plan.length > self.start
        if self.stop is not None:
            hit &= plan.file_offset < self.stop
        if self.fd is not None:
            hit &= plan.fd == self.fd
        return hit


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. `op` None: in both directions; `match` None: anywhere; `limit` None: as often as it comes."""

    kind: FaultKind
    op: Op | None = None
    probability: float = 1.0  # for each range
    match: Callable[[RangePlan], Mask] | None = None  # which ranges of a plan can be hit; shape (n,)
    errno_code: int = errno.EIO
    delay_s: float = 0.02
    limit: int | None = None  # ranges that are hit, in all

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ConfigError(
                "a fault's probability is between 0 and 1", kind=self.kind.value, got=self.probability
            )
        if not (math.isfinite(self.delay_s) and self.delay_s >= 0.0):
            raise ConfigError(
                "a fault's delay is a number of seconds", kind=self.kind.value, got=self.delay_s
            )


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Faults from KIND:PROBABILITY[:DETAIL], separated by commas: "errno:0.02,short:0.01,delay:0.01:0.5,errno:0.001:ENOSPC".

    DETAIL is the errno's name for errno (EIO) and the seconds for delay (0.02). Raises ConfigError, which says what is wrong.
    """
    return tuple(_parse_fault(item.strip()) for item in text.split(",") if item.strip())


def _parse_fault(item: str) -> Fault:
    name, *numbers = item.split(":")
    kinds = {kind.value: kind for kind in FaultKind}
    if name not in kinds:
        close = difflib.get_close_matches(name, kinds, n=1)
        meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(kinds)}"
        raise ConfigError(f"unknown kind of fault: {meant}", fault=item)
    kind = kinds[name]
    if not 1 <= len(numbers) <= (2 if kind in (FaultKind.ERRNO, FaultKind.DELAY) else 1):
        raise ConfigError(
            "a fault is written KIND:PROBABILITY, or errno:PROBABILITY:NAME, or delay:PROBABILITY:SECONDS",
            fault=item,
        )
    probability = _number(numbers[0], item)
    if len(numbers) == 1:
        return Fault(kind, probability=probability)
    if kind is FaultKind.DELAY:
        return Fault(kind, probability=probability, delay_s=_number(numbers[1], item))
    codes = {name: code for code, name in errno.errorcode.items()}
    if numbers[1] not in codes:
        raise ConfigError("unknown errno: write its name, as in errno:0.01:ENOSPC", fault=item)
    return Fault(kind, probability=probability, errno_code=codes[numbers[1]])


def _number(text: str, item: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError("not a number", fault=item, got=text) from error
