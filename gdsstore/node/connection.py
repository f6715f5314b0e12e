"""One connection to the daemon: a request at a time, with a deadline each. Needs msgspec."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gdsstore.errors import DeadlineError
from gdsstore.memory.arena import Mode
from gdsstore.memory.shared import SharedView
from gdsstore.node import messages, socket_file, wire
from gdsstore.node.errors import DaemonError, ProtocolError
from gdsstore.node.lease import DaemonLease, addresses
from gdsstore.node.messages import PrefetchState
from gdsstore.node.reporting import report_of
from gdsstore.observe.activity import Activity
from gdsstore.waiting import Deadline

U8 = npt.NDArray[np.uint8]
HUNG_S = 5.0  # an answer that is later than this does not come; nobody waits for it meanwhile
CLOSE_S = 1.0
RELEASE_S = 0.02
MOST_RELEASES = 4096  # in one message

A = TypeVar("A")


class NodeLookup(NamedTuple):
    """`leading`: keys from the start whose pages are stored, up to the first that is not; `found`: bool (n,)."""

    leading: int
    found: npt.NDArray[np.bool_]


class NodeProgress(NamedTuple):
    """Of a prefetch: `warm` of the `wanted` pages are in the daemon's cache."""

    state: PrefetchState
    warm: int
    wanted: int


def library_version() -> str:
    import gdsstore  # when it is called: the package imports its parts first

    return gdsstore.__version__


class Connection:
    """Thread-safe. Every call raises DeadlineError, ProtocolError or DaemonError where the connection is of no use any more; None
    means that the daemon refused this one request, or that the answer is not there yet."""

    def __init__(self, sock: socket.socket, reader: wire.Reader, view: SharedView | None) -> None:
        self._sock, self._reader = sock, reader
        self.view = view
        self.reports_sent = 0  # or begun to be
        self._turn = threading.Lock()
        self._owed_since: float | None = None  # an answer that came too late for who asked is read first
        self._released: deque[int] = deque()
        self._pid = os.getpid()

    @classmethod
    def open(
        cls, directory: Path, store: bytes, deadline: Deadline, *, memory: bool = True, pin: Mode = "off"
    ) -> Connection:
        """Connect to the daemon of the store in `directory`, whose uuid is `store` (b"": whichever), and map its `memory`.

        `pin` "auto": for CUDA, where this process uses CUDA already. Raises StoreError too, where the memory cannot be mapped.
        """
        sock = socket_file.connect(directory, deadline)
        fd: int | None = None
        try:
            hello = messages.Hello(wire.PROTOCOL_VERSION, library_version(), store, memory)
            wire.send(sock, wire.frame(messages.encode(hello), wire.MAX_HELLO_BYTES), deadline)
            reader = wire.Reader(sock)
            body, fd = reader.read_with_fd(deadline)
            welcome = _expect(messages.Welcome, messages.decode_answer(body))
            if welcome.protocol != wire.PROTOCOL_VERSION:
                raise ProtocolError("the daemon speaks another version", theirs=welcome.protocol)
            view = None
            if memory and welcome.memory_bytes:
                if fd is None:
                    raise ProtocolError("the daemon did not send its memory")
                view = SharedView(fd, welcome.memory_bytes, pin=pin)
            return cls(sock, reader, view)
        except BaseException:
            sock.close()
            raise
        finally:
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        """The daemon frees the leases. Their memory stays mapped until the last one is closed."""
        self._hang_up()
        # Not under a thread that waits for an answer: the number of its descriptor could be another file's by then.
        if self._turn.acquire(timeout=CLOSE_S):
            self._sock.close()
            self._turn.release()
        self.view = None

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer

    # --- requests ---

    def lookup(self, namespace: bytes, keys: U8, deadline: Deadline) -> NodeLookup | None:
        found = self._ask(messages.Found, messages.Lookup(namespace, keys.tobytes()), deadline)
        return (
            None if found is None else NodeLookup(found.leading, messages.unpack_mask(found.mask, len(keys)))
        )

    def lease(self, namespace: bytes, keys: U8, deadline: Deadline) -> DaemonLease | None:
        view = self.view
        if view is None:
            return None
        got = self._ask(messages.Leased, messages.Lease(namespace, keys.tobytes()), deadline)
        if got is None:
            return None
        found = messages.unpack_mask(got.mask, len(keys))
        address = addresses(view, found, got.offsets, got.record_bytes)
        return DaemonLease(view, found, address, got.record_bytes, partial(self._give_back, got.lease))

    def prefetch(
        self, namespace: bytes, keys: U8, deadline_s: float, priority: int, deadline: Deadline
    ) -> int | None:
        request = messages.Prefetch(namespace, keys.tobytes(), deadline_s, priority)
        started = self._ask(messages.Started, request, deadline)
        return None if started is None else started.prefetch

    def prefetch_progress(self, prefetch: int, deadline: Deadline) -> NodeProgress | None:
        return self._progress(messages.PrefetchStatus(prefetch), deadline)

    def cancel_prefetch(self, prefetch: int, deadline: Deadline) -> NodeProgress | None:
        return self._progress(messages.PrefetchCancel(prefetch), deadline)

    def report(self, run: bytes, activity: Activity, again: bool, deadline: Deadline) -> bool:
        """See `NodeTier.report`. `run`: 16 bytes, of the process's store. `again`: one of it was sent before."""
        return self._ask(messages.Counted, report_of(run, activity, again=again), deadline) is not None

    def status(self, deadline: Deadline) -> dict[str, Any]:
        """Raises DaemonError where the daemon refuses."""
        with self._turn:
            answer = self._exchange(messages.Status(), deadline)
        if answer is None:
            raise DeadlineError("the daemon does not answer")
        return _expect(messages.StatusIs, answer).status

    def _progress(
        self, request: messages.PrefetchStatus | messages.PrefetchCancel, deadline: Deadline
    ) -> NodeProgress | None:
        got = self._ask(messages.Progress, request, deadline)
        return None if got is None else NodeProgress(got.state, got.warm, got.wanted)

    # --- one at a time ---

    def _ask(self, kind: type[A], request: messages.Request, deadline: Deadline) -> A | None:
        if not self._turn.acquire(timeout=deadline.left_s):
            return None  # others had it all the time, which says nothing about the daemon
        try:
            if self._owed_since is not None and not self._settle():
                return None
            answer = self._exchange(request, deadline)
        finally:
            self._turn.release()
        self._send_released()
        if answer is None:
            return None
        if isinstance(answer, messages.Refused) and answer.code is not messages.Refusal.CLOSING:
            return None
        return _expect(kind, answer)

    def _exchange(self, request: messages.Request, deadline: Deadline) -> messages.Answer | None:
        if not self._reader.empty:
            raise ProtocolError("the daemon answers what nobody asked")
        self.reports_sent += isinstance(request, messages.Report)
        wire.send(self._sock, wire.frame(messages.encode(request), wire.MAX_REQUEST_BYTES), deadline)
        self._owed_since = time.monotonic()
        body = self._reader.read(deadline)
        if body is None:
            return None
        self._owed_since = None
        return messages.decode_answer(body)

    def _settle(self) -> bool:
        """Take the answer that is owed, if it is there by now. Never waits."""
        body = self._reader.read(Deadline(0.0))
        if body is not None:
            self._owed_since = None
            late = messages.decode_answer(body)
            if isinstance(late, messages.Leased) and late.lease:
                self._released.append(late.lease)  # nobody waits for it any more
            return True
        if self._owed_since is not None and time.monotonic() - self._owed_since > HUNG_S:
            raise DeadlineError("the daemon does not answer", seconds=HUNG_S)
        return False

    def _give_back(self, lease: int) -> None:
        """Never waits for those who ask, and never raises: who has the turn sends it along."""
        if lease and os.getpid() == self._pid:
            self._released.append(lease)
            self._send_released()

    def _send_released(self) -> None:
        # Looked at again after the turn: what came in meanwhile could not be sent by who brought it.
        while self._released and self._turn.acquire(blocking=False):
            try:
                leases = [self._released.popleft() for _ in range(min(len(self._released), MOST_RELEASES))]
                message = wire.frame(messages.encode(messages.Release(leases)), wire.MAX_REQUEST_BYTES)
                wire.send(self._sock, message, Deadline(RELEASE_S))
            except (DeadlineError, ProtocolError):
                self._hang_up()  # half a message may be on its way; the next request tells its caller
                self._released.clear()
            finally:
                self._turn.release()


def _expect(kind: type[A], answer: messages.Answer) -> A:
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, messages.Refused):
        raise DaemonError(f"the daemon refused: {answer.message}", code=answer.code.value)
    raise ProtocolError("the daemon's answer is one to another question", answer=type(answer).__name__)
