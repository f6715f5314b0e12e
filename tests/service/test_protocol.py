"""Whatever comes over the wire, the daemon serves the others on, and a client goes on without a daemon that talks nonsense."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdsstore.node import messages, socket_file, wire
from gdsstore.node.client import NodeClient
from gdsstore.node.errors import ProtocolError
from gdsstore.node.messages import Refusal
from gdsstore.waiting import Deadline
from tests.service.conftest import Node
from tests.service.daemons import answered, soon
from tests.store.helpers import make_keys

PATIENCE_S = 30.0
SAME_DAEMON = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextlib.contextmanager
def connection(node: Node) -> Iterator[socket.socket]:
    sock = socket_file.connect(node.directory, soon())
    sock.settimeout(PATIENCE_S)
    with sock:
        yield sock


def hello(**fields: object) -> bytes:
    message = {"kind": "hello", "protocol": wire.PROTOCOL_VERSION, "library": "x", "store": b"", **fields}
    return framed(msgspec.msgpack.encode(message))


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def ended(sock: socket.socket) -> bytes:
    """All that the daemon says before it hangs up."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            said += part
    return said


def said(sock: socket.socket) -> messages.Answer:
    body = wire.Reader(sock).read(Deadline(PATIENCE_S))
    assert body is not None
    return messages.decode_answer(body)


def still_serves(node: Node, client: NodeClient) -> None:
    assert client.connected
    assert answered(lambda: client.lookup(node.namespace.digest, node.keys, soon())).found.all()


@SAME_DAEMON
@given(garbage=st.binary(min_size=1, max_size=300), greeted=st.booleans())
def test_garbage_ends_its_own_connection_only(
    node: Node, client: NodeClient, garbage: bytes, greeted: bool
) -> None:
    with connection(node) as sock:
        if greeted:
            sock.sendall(hello(memory=False))
            assert isinstance(said(sock), messages.Welcome)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
        ended(sock)
    still_serves(node, client)


VALID = [
    messages.Lookup(bytes(16), bytes(64)),
    messages.Lease(bytes(16), bytes(32)),
    messages.Prefetch(bytes(16), bytes(32), 1.0, -3),
    messages.Release([1, 2, 3]),
    messages.PrefetchStatus(7),
    messages.Ping(),
]


@SAME_DAEMON
@given(
    request=st.sampled_from(VALID), at=st.integers(0, 1 << 16), byte=st.integers(0, 255), cut=st.booleans()
)
def test_a_damaged_request_is_refused_or_ends_its_own_connection(
    node: Node, client: NodeClient, request: messages.Request, at: int, byte: int, cut: bool
) -> None:
    body = bytearray(messages.encode(request))
    if cut:
        del body[at % len(body) :]
    else:
        body[at % len(body)] = byte
    with connection(node) as sock:
        sock.sendall(hello(memory=False))
        said(sock)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(framed(bytes(body)))
            sock.shutdown(socket.SHUT_WR)
        ended(sock)
    still_serves(node, client)


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize("length", [0, wire.MAX_REQUEST_BYTES + 1, 0xFFFFFFFF])
def test_a_message_of_an_impossible_length_is_not_waited_for(node: Node, length: int, greeted: bool) -> None:
    with connection(node) as sock:
        if greeted:
            sock.sendall(hello(memory=False))
            said(sock)
        sock.sendall(struct.pack(">I", length))
        assert ended(sock) == b""
    assert "a message has a length that none can have" in node.daemon.log


def test_a_long_first_message_is_not_taken(node: Node) -> None:
    with connection(node) as sock:
        sock.sendall(struct.pack(">I", wire.MAX_HELLO_BYTES + 1))
        assert ended(sock) == b""


@pytest.mark.parametrize(
    "request_",
    [
        messages.Lookup(bytes(16), bytes(33)),
        messages.Lookup(bytes(15), bytes(32)),
        messages.Lease(bytes(16), bytes(32 * (wire.MAX_KEYS + 1))),
        messages.Prefetch(bytes(16), bytes(32), -1.0),
        messages.Prefetch(bytes(16), bytes(32), float("nan")),
        messages.Prefetch(bytes(16), bytes(32), 1.0, 10**6),
        messages.Release([0] * 5000),
        messages.Release([-1]),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_request_out_of_bounds_ends_its_connection(
    node: Node, client: NodeClient, request_: messages.Request
) -> None:
    with connection(node) as sock:
        sock.sendall(hello(memory=False))
        said(sock)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(framed(messages.encode(request_)))
        assert ended(sock) == b""
    still_serves(node, client)


def test_another_version_is_told_so(node: Node) -> None:
    with connection(node) as sock:
        sock.sendall(hello(protocol=99, library="9.9", something_new=[1, 2]))
        refused = said(sock)
        assert isinstance(refused, messages.Refused)
        assert refused.code is Refusal.VERSION
        assert f"speaks version {wire.PROTOCOL_VERSION}" in refused.message
        assert "9.9" in refused.message
        assert ended(sock) == b""


def test_leases_of_others_cannot_be_released(node: Node, client: NodeClient) -> None:
    from tests.service.daemons import leased, leases, prefetched

    prefetched(client, node.namespace, node.keys)
    lease = leased(client, node.namespace, node.keys)
    with connection(node) as sock:
        sock.sendall(hello(memory=False))
        said(sock)
        sock.sendall(framed(messages.encode(messages.Release(list(range(1, 2000))))))
        sock.sendall(framed(messages.encode(messages.Ping())))
        assert isinstance(said(sock), messages.Pong)
    assert leases(client) == 1
    lease.close()


# --- the client, against a daemon that is none ---


def memfd(nbytes: int, *, sealed: bool = True) -> int:
    import fcntl

    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@contextlib.contextmanager
def impostor(directory: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """Something that listens in a daemon's place, and does `serve` with each connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / wire.SOCKET_NAME))
    listener.listen()

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    serve(sock)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        (directory / wire.SOCKET_NAME).unlink()


def welcome(sock: socket.socket, fd: int | None, nbytes: int) -> None:
    sock.recv(65536)
    body = messages.encode(messages.Welcome(wire.PROTOCOL_VERSION, "x", bytes(16), nbytes))
    rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sock.sendmsg([framed(body)], rights)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=1, max_size=200), greeted=st.booleans(), as_message=st.booleans())
def test_a_client_survives_whatever_it_is_told(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes, greeted: bool, as_message: bool
) -> None:
    directory = tmp_path_factory.mktemp("impostor")
    fd = memfd(1 << 16)

    def serve(sock: socket.socket) -> None:
        if greeted:
            welcome(sock, fd, 1 << 16)
        sock.recv(65536)
        sock.sendall(framed(garbage) if as_message else garbage)

    with impostor(directory, serve):
        client = NodeClient(directory)
        assert client.connected == greeted
        assert client.lease(bytes(16), make_keys(3), Deadline(PATIENCE_S)) is None
        assert client.lookup(bytes(16), make_keys(3), Deadline(PATIENCE_S)) is None
        client.close()
    os.close(fd)


@pytest.mark.parametrize(
    ("offsets", "record_bytes", "found"),
    [
        ([1 << 16], 4096, [True]),
        ([(1 << 16) - 4096], 8192, [True]),
        ([100], 4096, [True]),
        ([0], 0, [True]),
        ([0], 5000, [True]),
        ([(1 << 64) - 4096], 4096, [True]),
        ([0, 4096], 4096, [True]),
        ([], 4096, [True]),
    ],
)
def test_records_outside_of_the_memory_are_not_read(
    tmp_path: Path, offsets: list[int], record_bytes: int, found: list[bool]
) -> None:
    fd = memfd(1 << 16)

    def serve(sock: socket.socket) -> None:
        welcome(sock, fd, 1 << 16)
        sock.recv(65536)
        where = np.array(offsets, "<u8").tobytes()
        mask = messages.pack_mask(np.array(found))
        sock.sendall(framed(messages.encode(messages.Leased(1, record_bytes, mask, where))))
        sock.recv(65536)

    with impostor(tmp_path, serve):
        client = NodeClient(tmp_path)
        assert client.connected
        assert client.lease(bytes(16), make_keys(1), Deadline(PATIENCE_S)) is None
        assert not client.connected  # whoever says such things is not believed again
        client.close()
    os.close(fd)


@pytest.mark.parametrize("nbytes", [1 << 17, 1 << 62])
def test_memory_that_is_smaller_than_it_says_is_not_mapped(tmp_path: Path, nbytes: int) -> None:
    fd = memfd(1 << 16)
    with impostor(tmp_path, lambda sock: welcome(sock, fd, nbytes)):
        assert not NodeClient(tmp_path).connected
    os.close(fd)


def test_memory_that_can_shrink_is_not_mapped(tmp_path: Path) -> None:
    fd = memfd(1 << 16, sealed=False)
    with impostor(tmp_path, lambda sock: welcome(sock, fd, 1 << 16)):
        assert not NodeClient(tmp_path).connected
    os.close(fd)


def test_descriptors_that_nobody_asked_for_are_closed(tmp_path: Path) -> None:
    fd = memfd(1 << 16)
    before = len(os.listdir("/proc/self/fd"))

    def serve(sock: socket.socket) -> None:
        sock.recv(65536)
        body = messages.encode(messages.Welcome(wire.PROTOCOL_VERSION, "x", bytes(16), 0))
        rights = array.array("i", [fd, fd, fd])
        sock.sendmsg([framed(body)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    with impostor(tmp_path, serve):
        client = NodeClient(tmp_path)
        client.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # what other tests have left may go meanwhile
    os.close(fd)


# --- the wire alone ---


@given(bodies=st.lists(st.binary(min_size=1, max_size=300), max_size=6), cuts=st.lists(st.integers(1, 40)))
def test_messages_come_whole_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    here, there = socket.socketpair()
    with here, there:
        reader, stream = wire.Reader(here), b"".join(wire.frame(body, 1000) for body in bodies)
        came = []
        for size in [*cuts, len(stream) or 1]:
            there.sendall(stream[:size])
            stream = stream[size:]
            while (body := reader.read(Deadline(0.0))) is not None:
                came.append(body)
        assert came == bodies
        assert reader.empty
        there.close()
        with pytest.raises(ProtocolError):
            reader.read(Deadline(1.0))


@given(mask=st.lists(st.booleans(), max_size=70), count=st.integers(0, 70))
def test_a_mask_fits_its_keys_or_is_refused(mask: list[bool], count: int) -> None:
    packed = messages.pack_mask(np.array(mask, np.bool_))
    if -(-len(mask) // 8) != -(-count // 8):
        with pytest.raises(ProtocolError):
            messages.unpack_mask(packed, count)
    else:
        assert messages.unpack_mask(packed, count).tolist()[: len(mask)] == mask[:count]
