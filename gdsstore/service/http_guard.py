"""Who may ask over HTTP, and what they may ask: checked before any answer is made."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection, Iterable

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = frozenset({"localhost"})
METHODS = ("GET", "HEAD")
MAX_HEADERS = 64
HOST = re.compile(r"(?P<bracket>\[)?(?P<name>(?(bracket)[0-9a-f:.]+|[^:\[\]]+))(?(bracket)\])(:[0-9]+)?")

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuses what is not for this daemon, and puts the security headers on every answer.

    `hosts`: names that the Host header may have beside `localhost` and addresses. A name that anybody can point at this machine
    (DNS rebinding) is refused; an address cannot be pointed elsewhere. `token`: what `Authorization: Bearer` must bring on all
    paths but the `open_paths`; None: nothing.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: Collection[str], token: str | None, open_paths: Collection[str]
    ) -> None:
        self._app = app
        self._hosts = LOOPBACK_NAMES | {host.lower() for host in hosts}
        self._token = None if token is None else token.encode()
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if len(headers) > MAX_HEADERS:
            return PlainTextResponse("too many headers\n", 431)
        hosts = _values(headers, b"host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return PlainTextResponse(
                "this daemon does not answer under that name; ask for its address, or localhost, or start it with --allow-host\n",
                421,
            )
        if scope["method"] not in METHODS:
            return PlainTextResponse("only GET and HEAD\n", 405, {"Allow": ", ".join(METHODS)})
        if _values(headers, b"transfer-encoding") or any(
            value != b"0" for value in _values(headers, b"content-length")
        ):
            return PlainTextResponse("no request has a body\n", 413, {"Connection": "close"})
        if self._token is not None and scope["path"] not in self._open_paths and not self._may(headers):
            return PlainTextResponse(
                "a token is needed\n", 401, {"WWW-Authenticate": 'Bearer realm="gdsstore"'}
            )
        return None

    def _is_ours(self, host: bytes) -> bool:
        match = HOST.fullmatch(host.decode("latin-1").lower())
        return match is not None and (match["name"] in self._hosts or _is_address(match["name"]))

    def _may(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = _values(headers, b"authorization")
        if len(given) != 1 or self._token is None:
            return False
        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
