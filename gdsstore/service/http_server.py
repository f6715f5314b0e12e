"""Serving the HTTP app inside the daemon's event loop. Needs the extra `service`."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from gdsstore.errors import StoreError, from_os_error

KEEP_ALIVE_S = 10
GRACE_S = 3  # for answers that are under way when the server stops
IDLE_LOOK_S = 15.0
MAX_CONNECTIONS = 128
MAX_HEADER_BYTES = 16 << 10


class HttpServer:
    """A bound socket and what answers on it, at `address` (host, port). `serve` runs in the caller's event loop until `stop`."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """`port` 0: any free one, see `address`. Raises StoreError where the address cannot be had."""
        self._socket = _bound(host, port)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            app,
            http=_ImpatientProtocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=MAX_CONNECTIONS,  # that many are taken at once, before any can be turned away
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        self._server = _Server(config)

    async def serve(self) -> None:
        """Answer until `stop` is called. Closes the socket."""
        with contextlib.closing(self._socket):
            await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Let `serve` end: at once for idle connections, after a few seconds for the others. Any thread may call it."""
        self._server.should_exit = True


def serve_http(app: ASGIApp, host: str = "127.0.0.1", port: int = 0) -> HttpServer:
    """Bind now, so that a port in use is an error at start; `await server.serve()` answers. Raises StoreError."""
    return HttpServer(app, host, port)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The daemon handles signals itself: it has more to end than this server."""
        yield


class _ImpatientProtocol(H11Protocol):
    """Closes connections on which no request gets done, where uvicorn would wait for the rest of a header for ever, and those
    that are too many: any user of the machine can open them, and each takes a descriptor that the store may need for a file."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._watch(before=None, first=True)

    def _watch(self, before: object, *, first: bool = False) -> None:
        if self.transport.is_closing():
            return
        if not first and self.cycle is before:
            self.transport.abort()
            return
        self.loop.call_later(IDLE_LOOK_S, self._watch, self.cycle)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(MAX_CONNECTIONS)
            bound.setblocking(False)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        what = f"cannot answer HTTP on {host}:{port}; is another daemon there? Choose another port"
        raise from_os_error(error, what, StoreError) from error
    return bound
