"""Where the daemon answers HTTP, and for whom."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdsstore.errors import ConfigError, MissingExtraError
from gdsstore.service.node_totals import NodeTotals
from gdsstore.service.status import Facts, StatusBoard
from gdsstore.store import Store

if TYPE_CHECKING:
    from gdsstore.service.http_server import HttpServer

log = logging.getLogger("gdsstore.service")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """`token`: what callers must bring; None: nothing, which only loopback addresses may have. `port` 0: any free one. `names`:
    under which callers reach it, beside its address and `localhost`; see `http_guard`.

    Raises ConfigError for an address that others reach, without a token, and for names that are none.
    """

    host: str
    port: int
    token: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.token is None and not _is_loopback(self.host):
            raise ConfigError(
                "HTTP on an address that other machines reach needs a token: give --token-file, or a loopback address",
                host=self.host,
            )
        for name in self.names:
            if not NAME.fullmatch(name):
                raise ConfigError(
                    "the name of a host is letters, digits, dots and dashes, without a port", given=name
                )


def parse_address(text: str, token: str | None, names: Sequence[str] = ()) -> HttpAddress:
    """HOST:PORT, [IPv6]:PORT. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address whose end would be taken for a port
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError("an HTTP address is HOST:PORT, such as 127.0.0.1:9470", given=text)
    return HttpAddress(host, int(port), token, tuple(names))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Web:
    """The daemon's HTTP server, made where `address` is not None."""

    def __init__(
        self, store: Store, facts: Facts, board: StatusBoard, node: NodeTotals, address: HttpAddress | None
    ) -> None:
        """Binds now. Raises StoreError where the address cannot be had, MissingExtraError."""
        self._server: HttpServer | None = None
        if address is None:
            return
        try:
            from gdsstore.service.http import make_app
            from gdsstore.service.http_server import serve_http
        except MissingExtraError:
            raise
        except ImportError as error:
            raise MissingExtraError(error.name or "starlette", "service", "answering HTTP") from error
        self._server = serve_http(
            make_app(store, facts, address.token, board=board, node=node, hosts=address.names),
            address.host,
            address.port,
        )

    @property
    def address(self) -> str | None:
        """HOST:PORT that it answers on."""
        if self._server is None:
            return None
        host, port = self._server.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Answer for the length of a `with`."""
        if self._server is None:
            yield
            return
        serving = asyncio.create_task(self._server.serve())
        serving.add_done_callback(_ended)
        try:
            yield
        finally:
            self._server.stop()
            await asyncio.wait([serving])


def _ended(serving: asyncio.Task[None]) -> None:
    if not serving.cancelled() and (error := serving.exception()) is not None:
        log.error("the HTTP server failed; the socket is served on", exc_info=error)
