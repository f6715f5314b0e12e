"""What must be equal for two pages' bytes to be interchangeable, and its 16-byte digest.

The digest covers one versioned struct. A field that is missing from it is a way to serve another model's KV without an
error, so unknown facts are refused where the namespace is made, never left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gdsstore.errors import ArgumentError
from gdsstore.layout import PageKind, PageLayout

NAMESPACE_VERSION = 1
DIGEST_BYTES = 16
KEY_BYTES = 32

Keys: TypeAlias = npt.NDArray[np.uint8] | Sequence[bytes]
"""Page keys: 32-byte page hashes, as a uint8 array of shape (n, 32) or a sequence of bytes objects."""


class Identity(Protocol):
    """A namespace, as the drives know it: a Namespace, or what it is when its pages are sealed."""

    @property
    def digest(self) -> bytes:
        """16 bytes."""

    @property
    def layout(self) -> PageLayout:
        """Of its pages on the drives."""

    def describe(self) -> dict[str, Any]:
        """What the digest covers."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """A rank's place. Only the axes along which a page's bytes differ take part in the identity."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "dcp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not (type(rank) is int and type(size) is int and 0 <= rank < size):
                raise ArgumentError(f"{axis}_rank={rank!r} is not a rank of {axis}_size={size!r}")

    def describe(self, replicated: bool) -> dict[str, int]:
        axes = ("pp", "cp", "dcp") if replicated else ("tp", "pp", "cp", "dcp")
        return {
            f"{axis}_{what}": getattr(self, f"{axis}_{what}") for axis in axes for what in ("rank", "size")
        }


@dataclass(frozen=True, slots=True)
class Namespace:
    """One set of interchangeable pages.

    `model` is the model's name or path as served. `weights` identifies the weights behind that name: `weights_digest(path)`
    (gdsstore.weights) or a revision the user vouches for; two servers with different weights under one name must differ in it.
    `layers` and `heads` are (first, last) of the whole model, last not included; None means all of them.
    """

    model: str
    layout: PageLayout
    weights: str = ""
    pool: str = "kv"
    layers: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None
    parallelism: Parallelism = field(default_factory=Parallelism)
    extra: tuple[tuple[str, str], ...] = ()  # further facts of the caller's, in any order
    digest: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "pool"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ArgumentError(f"{name} must be a non-empty string, not {getattr(self, name)!r}")
        if not isinstance(self.weights, str):
            raise ArgumentError(f"weights must be a string (a digest or a revision), not {self.weights!r}")
        for name in ("layers", "heads"):
            span = getattr(self, name)
            if span is not None and not _is_span(span):
                raise ArgumentError(f"{name} must be (first, last) with 0 <= first < last, not {span!r}")
        if not isinstance(self.layout, PageLayout):
            raise ArgumentError(f"layout must be a PageLayout, not {self.layout!r}")
        if not isinstance(self.parallelism, Parallelism):
            raise ArgumentError(f"parallelism must be a Parallelism, not {self.parallelism!r}")
        if not all(_is_pair(pair) for pair in self.extra):
            raise ArgumentError(f"extra must be pairs of strings, not {self.extra!r}")
        if len({name for name, _ in self.extra}) != len(self.extra):
            raise ArgumentError("extra names a fact twice")
        object.__setattr__(self, "digest", digest_of(self.describe()))

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank holds the same bytes, so that one copy and one writer are enough."""
        return self.layout.kind is PageKind.MLA

    def describe(self) -> dict[str, Any]:
        """The versioned struct that the digest covers, as plain values."""
        return {
            "version": NAMESPACE_VERSION,
            "model": self.model,
            "weights": self.weights,
            "pool": self.pool,
            "layout": self.layout.describe(),
            "layers": None if self.layers is None else [int(x) for x in self.layers],
            "heads": None if self.heads is None else [int(x) for x in self.heads],
            "parallelism": self.parallelism.describe(self.replicated),
            "extra": dict(sorted(self.extra)),
        }


def _is_span(span: Any) -> bool:
    pair = isinstance(span, (tuple, list)) and len(span) == 2 and all(isinstance(end, int) for end in span)
    return pair and 0 <= span[0] < span[1]


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)


def digest_of(description: dict[str, Any]) -> bytes:
    """SHA-256 of the canonical JSON of a description, cut to 16 bytes."""
    canonical = json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).digest()[:DIGEST_BYTES]


def as_key_array(keys: Keys) -> npt.NDArray[np.uint8]:
    """Keys as a C-contiguous uint8 array of shape (n, 32). Raises ArgumentError on anything that is not 32-byte keys."""
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            raise ArgumentError(
                f"keys must be uint8 of shape (n, 32), not {keys.dtype} of shape {keys.shape}"
            )
        return np.ascontiguousarray(keys)
    if isinstance(keys, (bytes, bytearray, str)):
        raise ArgumentError("keys must be a sequence of 32-byte keys, not one string of bytes")
    try:
        joined = b"".join(keys)
    except TypeError:
        raise ArgumentError("keys must be bytes objects; hex strings: use bytes.fromhex") from None
    if len(joined) != KEY_BYTES * len(keys) or any(len(key) != KEY_BYTES for key in keys):
        raise ArgumentError("every key must be exactly 32 bytes (a SHA-256 page hash)")
    return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
