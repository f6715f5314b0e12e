"""How messages travel: 4 bytes of length (big-endian), then as many bytes of msgpack. docs/daemon.md has the whole protocol.

Every length is checked before memory is taken for it.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct

from gdsstore.errors import DeadlineError
from gdsstore.namespace import DIGEST_BYTES, KEY_BYTES
from gdsstore.node.errors import ProtocolError
from gdsstore.waiting import Deadline

PROTOCOL_VERSION = 2
SOCKET_NAME = "node.sock"

HEADER = struct.Struct(">I")
MAX_KEYS = 65536  # of one message
MAX_REQUEST_BYTES = MAX_KEYS * KEY_BYTES + DIGEST_BYTES + 4096
MAX_ANSWER_BYTES = 4 << 20  # a status may be long; offsets of MAX_KEYS records take 512 KiB
MAX_HELLO_BYTES = 4096  # before the two know that they understand each other
_CHUNK = 1 << 18
_LEAST_S = 0.001  # a timeout of 0 would mean: do not block


def frame(body: bytes, most: int) -> bytes:
    """A message as it travels. Raises ProtocolError where it is longer than `most` bytes."""
    if len(body) > most:
        raise ProtocolError("the message is too long", nbytes=len(body), most=most)
    return HEADER.pack(len(body)) + body


def body_bytes(header: bytes, most: int) -> int:
    """How many bytes follow a header. Raises ProtocolError for none and for more than `most`."""
    nbytes = int(HEADER.unpack(header)[0])
    if not 0 < nbytes <= most:
        raise ProtocolError("a message has a length that none can have", nbytes=nbytes, most=most)
    return nbytes


def send(sock: socket.socket, message: bytes, deadline: Deadline) -> None:
    """Send a whole frame. Raises DeadlineError, and ProtocolError where the other end is gone."""
    try:
        sock.settimeout(max(deadline.left_s, _LEAST_S))
        sock.sendall(message)
    except TimeoutError as error:
        raise DeadlineError("the daemon takes no message") from error
    except OSError as error:
        raise ProtocolError("the daemon is gone", errno=error.errno) from error


class Reader:
    """The messages that come over one blocking socket. One that is late is not lost: the next call reads on. For one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    @property
    def empty(self) -> bool:
        """Whether nothing came that was not asked for."""
        return not self._buffer

    def read(self, deadline: Deadline, most: int = MAX_ANSWER_BYTES) -> bytes | None:
        """The next message; None where it is not there by the deadline. One that has passed already: what is there now counts.

        Raises ProtocolError where the other end is gone, or announces more than `most` bytes.
        """
        while (body := self._take(most)) is None:
            try:
                self._sock.settimeout(deadline.left_s)  # 0: does not block
                part = self._sock.recv(_CHUNK)
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as error:
                raise ProtocolError("the daemon is gone", errno=error.errno) from error
            if not part:
                raise ProtocolError("the daemon closed the connection")
            self._buffer += part  # memory grows with what has come, not with what was promised
        return body

    def read_with_fd(self, deadline: Deadline) -> tuple[bytes, int | None]:
        """The first message of a connection, and the file descriptor that came with it, which the caller closes.

        Raises as `read`, and DeadlineError.
        """
        fds: list[int] = []
        try:
            self._sock.settimeout(max(deadline.left_s, _LEAST_S))
            # One descriptor is all that there is room for: the kernel closes what else was sent.
            part, ancillary, _, _ = self._sock.recvmsg(
                MAX_HELLO_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
            )
            fds = [fd for level, kind, data in ancillary for fd in _fds(level, kind, data)]
            if not part:
                raise ProtocolError("the daemon closed the connection")
            self._buffer += part
            body = self.read(deadline, MAX_HELLO_BYTES)
            if body is None:
                raise DeadlineError("the daemon does not answer")
            return body, fds.pop() if fds else None
        except TimeoutError as error:
            raise DeadlineError("the daemon does not answer") from error
        except OSError as error:
            raise ProtocolError("the daemon is gone", errno=error.errno) from error
        finally:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _take(self, most: int) -> bytes | None:
        if len(self._buffer) < HEADER.size:
            return None
        end = HEADER.size + body_bytes(bytes(self._buffer[: HEADER.size]), most)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return body


def _fds(level: int, kind: int, data: bytes) -> list[int]:
    if level != socket.SOL_SOCKET or kind != socket.SCM_RIGHTS:
        return []
    fds = array.array("i")
    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
