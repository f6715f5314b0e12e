"""One client's connection: who it is, what it says, and the end of it."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass

from gdsstore.node import messages, wire
from gdsstore.node.errors import ProtocolError
from gdsstore.node.messages import Hello, Refusal, Welcome
from gdsstore.node.socket_file import peer_uid, trusted
from gdsstore.service.handlers import Client, Office
from gdsstore.service.refused import RefusedError

log = logging.getLogger("gdsstore.service")

HELLO_S = 5.0
MESSAGE_S = 10.0  # for the rest of a message, or for an answer to be taken
BUFFER_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class House:
    """What a client is told in the beginning. `memory_fd`: None without shared memory."""

    library: str
    store: bytes
    memory_fd: int | None
    memory_bytes: int


class Session:
    """Runs until the client hangs up, breaks the protocol or is cancelled; then everything that it held is free."""

    def __init__(self, sock: socket.socket, house: House, office: Office, name: str) -> None:
        """Takes over a connected socket that does not block."""
        self._sock, self._house = sock, house
        self.client = Client(office, name)
        self._busy = self._wants_memory = False

    @property
    def is_client(self) -> bool:
        """Whether it is more than a look at the status, as `gdsstore top` takes it. Once true, it stays so."""
        return self._wants_memory or self.client.takes_part

    @property
    def at_work(self) -> bool:
        """Whether a request is being answered, records are read, or a prefetch is under way."""
        return self._busy or len(self.client.leases) > 0 or self.client.prefetches.under_way > 0

    async def run(self) -> None:
        try:
            if await self._greet():
                await self._talk()
        except ProtocolError as error:
            log.warning("a client was cut off: %s", error)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            log.debug("a client is gone: %r", error)
        finally:
            self.client.close()
            self._sock.close()

    # --- the beginning ---

    async def _greet(self) -> bool:
        """Whether the two understand each other."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(HELLO_S):
            header = await self._exactly(wire.HEADER.size)
            body = await self._exactly(wire.body_bytes(header, wire.MAX_HELLO_BYTES))
            hello = messages.decode_hello(body)
            try:
                self._check(hello)
            except RefusedError as refused:
                log.warning("a client was refused: %s", refused)
                await loop.sock_sendall(self._sock, _framed(refused.answer))
                return False
            house, fd = self._house, self._house.memory_fd
            wants = fd is not None and hello.memory
            welcome = Welcome(
                wire.PROTOCOL_VERSION, house.library, house.store, house.memory_bytes if wants else 0
            )
            # The first bytes on this socket, and few: it has room for them.
            fds = [fd] if wants and fd is not None else []
            message = _framed(welcome)
            if socket.send_fds(self._sock, [message], fds) != len(message):
                raise ProtocolError("the client takes no answer")
            self._wants_memory = hello.memory
        return True

    def _check(self, hello: Hello) -> None:
        """Raises RefusedError."""
        if not trusted(uid := peer_uid(self._sock)):
            raise RefusedError(Refusal.ARGUMENT, f"user {uid} is not the daemon's, and not root")
        if hello.protocol != wire.PROTOCOL_VERSION:
            raise RefusedError(
                Refusal.VERSION,
                f"the daemon (gdsstore {self._house.library}) speaks version {wire.PROTOCOL_VERSION} of the protocol, the client "
                f"(gdsstore {hello.library[:40]}) {hello.protocol}; use one version of gdsstore for both",
            )
        if hello.store not in (b"", self._house.store):
            raise RefusedError(Refusal.STORE, "the daemon serves another store; was the directory made anew?")

    async def _exactly(self, nbytes: int) -> bytes:
        loop, got = asyncio.get_running_loop(), b""
        while len(got) < nbytes:
            part = await loop.sock_recv(self._sock, nbytes - len(got))
            if not part:
                raise ConnectionResetError("the client hung up")
            got += part
        return got

    # --- requests ---

    async def _talk(self) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=self._sock, limit=BUFFER_BYTES)
        try:
            while True:
                header = await reader.readexactly(wire.HEADER.size)
                self._busy = True
                async with asyncio.timeout(MESSAGE_S):
                    body = await reader.readexactly(wire.body_bytes(header, wire.MAX_REQUEST_BYTES))
                answer = await self.client.answer(messages.decode_request(body))
                if answer is not None:
                    writer.write(_framed(answer))
                    async with asyncio.timeout(MESSAGE_S):
                        await writer.drain()
                self._busy = False
                await asyncio.sleep(0)  # what a client has sent ahead does not keep the others waiting
        finally:
            writer.transport.abort()


def _framed(answer: messages.Answer) -> bytes:
    try:
        return wire.frame(messages.encode(answer), wire.MAX_ANSWER_BYTES)
    except ProtocolError:
        too_long = RefusedError(Refusal.LIMIT, "the answer is too long for one message")
        return wire.frame(messages.encode(too_long.answer), wire.MAX_ANSWER_BYTES)
