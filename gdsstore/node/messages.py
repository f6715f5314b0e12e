"""The messages between a process and the daemon, as typed structs. Needs msgspec; nothing else here imports it.

A connection begins with Hello and Welcome; then the process asks, and the daemon answers each request before it reads the next.
`Release` alone has no answer. Arrays travel as bytes: keys one after the other (32 bytes each), masks as bits
(`numpy.packbits`), offsets as little-endian uint64.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from gdsstore.errors import MissingExtraError
from gdsstore.namespace import DIGEST_BYTES, KEY_BYTES
from gdsstore.node.errors import ProtocolError
from gdsstore.node.wire import MAX_KEYS

try:
    import msgspec
    from msgspec import Meta, Struct
except ImportError:
    raise MissingExtraError("msgspec", "service", "talking to the node daemon") from None

WORD_CHARS = 48
MOST_ROWS = 1024  # of each of a report's tables

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
KeyBytes = Annotated[bytes, Meta(max_length=MAX_KEYS * KEY_BYTES)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Total = Annotated[float, Meta(ge=0, le=1e12)]  # of seconds
Word = Annotated[str, Meta(min_length=1, max_length=WORD_CHARS)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
MASK_BYTES = MAX_KEYS // 8


class Refusal(StrEnum):
    """Why the daemon does not do what it was asked for."""

    VERSION = "version"  # another protocol version
    STORE = "store"  # it serves another store
    NAMESPACE = "namespace"  # it has no description of this digest, or cannot use it
    NOT_READY = "not_ready"  # the namespace is just being opened: ask again
    LIMIT = "limit"  # too many leases, prefetches or connections
    ARGUMENT = "argument"
    NO_CACHE = "no_cache"
    CLOSING = "closing"
    FAILED = "failed"


class PrefetchState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNKNOWN = "unknown"  # never begun here, or forgotten


# --- what the process says ---


class Hello(Struct, tag_field="kind", tag="hello"):
    """`store`: the uuid of the store that the process has open, 16 bytes, or none: whichever it is. `memory`: whether it wants the
    shared memory, whose descriptor comes with the answer."""

    protocol: int
    library: str = ""
    store: bytes = b""
    memory: bool = True


class Lookup(Struct, tag_field="kind", tag="lookup"):
    namespace: Digest
    keys: KeyBytes


class Prefetch(Struct, tag_field="kind", tag="prefetch"):
    """`priority`: larger goes first; then what is needed first."""

    namespace: Digest
    keys: KeyBytes
    deadline_s: Seconds
    priority: Priority = 0


class PrefetchStatus(Struct, tag_field="kind", tag="prefetch_status"):
    prefetch: Number


class PrefetchCancel(Struct, tag_field="kind", tag="prefetch_cancel"):
    prefetch: Number


class Lease(Struct, tag_field="kind", tag="lease"):
    namespace: Digest
    keys: KeyBytes


class Release(Struct, tag_field="kind", tag="release"):
    leases: Annotated[list[Number], Meta(max_length=4096)]


class Status(Struct, tag_field="kind", tag="status"):
    pass


class Ping(Struct, tag_field="kind", tag="ping"):
    pass


class IoRow(Struct, array_like=True):
    """`volume`: its index in the store."""

    path: Word
    engine: Word
    volume: Number
    direction: Word
    cls: Word
    nbytes: Number
    operations: Number


class TimesRow(Struct, array_like=True):
    """A histogram: `counts` by bucket, and the sum of its seconds."""

    what: Word
    of: Word
    volume: Number | None
    counts: Annotated[list[Number], Meta(max_length=64)]
    sum_s: Total


class CallsRow(Struct, array_like=True):
    """Calls of a class: what is so now, and what became of the others since the store was opened."""

    cls: Word
    waiting: Number
    running: Number
    oldest_s: Total
    ended: Annotated[list[Number], Meta(max_length=16)]


class Report(Struct, tag_field="kind", tag="report"):
    """What a process did with the store since it opened it: see gdsstore.observe.activity.

    `run`: drawn by lot when it opened the store, `age_s` seconds ago. `process`: its name, for people. `again`: an earlier report
    of this run was sent, and may have been taken.
    """

    run: Annotated[bytes, Meta(min_length=16, max_length=16)]
    age_s: Total
    pid: Number
    process: Word
    io: Annotated[list[IoRow], Meta(max_length=MOST_ROWS)]
    pages: Annotated[dict[Word, Number], Meta(max_length=MOST_ROWS)]
    times: Annotated[list[TimesRow], Meta(max_length=MOST_ROWS)]
    calls: Annotated[list[CallsRow], Meta(max_length=16)]
    again: bool = False


Request = Lookup | Prefetch | PrefetchStatus | PrefetchCancel | Lease | Release | Status | Ping | Report


# --- what the daemon says ---


class Welcome(Struct, tag_field="kind", tag="welcome"):
    """`memory_bytes`: the size of the shared memory whose descriptor comes with this; 0 without one."""

    protocol: int
    library: str
    store: bytes
    memory_bytes: Number


class Refused(Struct, tag_field="kind", tag="refused"):
    code: Refusal
    message: str


class Found(Struct, tag_field="kind", tag="found"):
    """`leading`: how many keys from the start are stored; `mask`: which are, one bit a key."""

    leading: Number
    mask: Annotated[bytes, Meta(max_length=MASK_BYTES)]


class Started(Struct, tag_field="kind", tag="started"):
    prefetch: Number


class Progress(Struct, tag_field="kind", tag="progress"):
    """Pages: `warm` of the `wanted` ones are in the cache."""

    state: PrefetchState
    warm: Number
    wanted: Number


class Leased(Struct, tag_field="kind", tag="leased"):
    """`offsets`: of the records that `mask` says are there, in the shared memory. `lease` is 0 where none is."""

    lease: Number
    record_bytes: Number
    mask: Annotated[bytes, Meta(max_length=MASK_BYTES)]
    offsets: Annotated[bytes, Meta(max_length=MAX_KEYS * 8)]


class StatusIs(Struct, tag_field="kind", tag="status_is"):
    status: dict[str, Any]


class Pong(Struct, tag_field="kind", tag="pong"):
    pass


class Counted(Struct, tag_field="kind", tag="counted"):
    """A report was taken."""


Answer = Welcome | Refused | Found | Started | Progress | Leased | StatusIs | Pong | Counted

_encoder = msgspec.msgpack.Encoder()
_hello = msgspec.msgpack.Decoder(Hello)
_request = msgspec.msgpack.Decoder(Request)
_answer = msgspec.msgpack.Decoder(Answer)


def encode(message: Struct) -> bytes:
    """The msgpack bytes of a message."""
    return _encoder.encode(message)


def decode_hello(body: bytes) -> Hello:
    """Raises ProtocolError."""
    try:
        return _hello.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the connection does not begin with a hello: {error}") from error


def decode_request(body: bytes) -> Request:
    """Raises ProtocolError."""
    try:
        return _request.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"this is no request: {error}") from error


def decode_answer(body: bytes) -> Answer:
    """Raises ProtocolError."""
    try:
        return _answer.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"this is no answer: {error}") from error


def key_array(keys: bytes) -> npt.NDArray[np.uint8]:
    """uint8 (n, 32). Raises ProtocolError where it is not whole keys."""
    if len(keys) % KEY_BYTES:
        raise ProtocolError("keys have 32 bytes each", nbytes=len(keys))
    return np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)


def pack_mask(mask: npt.NDArray[np.bool_]) -> bytes:
    return np.packbits(mask).tobytes()


def unpack_mask(packed: bytes, count: int) -> npt.NDArray[np.bool_]:
    """bool (count,). Raises ProtocolError where there are fewer or more bits."""
    if len(packed) != -(-count // 8):
        raise ProtocolError("a mask does not fit its keys", nbytes=len(packed), keys=count)
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).view(np.bool_)
