"""What a round trip came to: bytes written, read back and compared. Data only, as the facts are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class IoPath(StrEnum):
    """How bytes get between a drive and a GPU, or host memory."""

    DIRECT = "direct"  # the drive reads and writes GPU memory itself
    COMPAT = "compat"  # cuFile falls back to host memory inside
    BOUNCE = "bounce"  # through our own pinned host memory
    HOST = "host"  # between the drive and host memory only


class Outcome(StrEnum):
    WORKS = "works"
    FAILED = "failed"
    NOT_INSTALLED = "not installed"


@dataclass(frozen=True, slots=True)
class PathBytes:
    """Bytes by the path that the engine counted them under."""

    direct: int = 0
    compat: int = 0
    bounce: int = 0


@dataclass(frozen=True, slots=True)
class Trip:
    """`device`: the GPU's CUDA ordinal, None for host memory. `o_direct`: past the page cache; else that was measured.

    `path`: the one that the bytes really took, None where none was moved. It is `direct` only where cuFile was forbidden to
    fall back and the engine counted every byte so. `detail`: why it failed, or why it was not direct. GB are 10^9 bytes.
    """

    engine: str
    outcome: Outcome
    detail: str | None = None
    device: int | None = None
    path: IoPath | None = None
    nbytes: int = 0
    o_direct: bool = False
    written: PathBytes | None = None
    read: PathBytes | None = None
    write_gbps: float | None = None
    read_gbps: float | None = None

    @property
    def works(self) -> bool:
        return self.outcome is Outcome.WORKS

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
