"""The daemon's HTTP side: metrics, health, status and the live page. Needs the extra `service`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gdsstore.errors import GdsStoreError
from gdsstore.service.http_guard import Guard
from gdsstore.service.node_totals import NodeTotals
from gdsstore.service.page_files import page_files
from gdsstore.service.shared import Shared
from gdsstore.service.status import Facts, StatusBoard, ready
from gdsstore.store import Store

Handler = Callable[[Request], Awaitable[Response]]


def make_app(
    store: Store,
    facts: Facts,
    token: str | None = None,
    *,
    board: StatusBoard | None = None,
    node: NodeTotals | None = None,
    hosts: Collection[str] = (),
) -> Starlette:
    """The ASGI app over an open store. Answers GET and HEAD only; nothing in it changes the store.

    `facts`: see `status.Facts`. `token`: what callers must bring, as `Authorization: Bearer TOKEN`, on every path but /healthz
    and the page's own files, which hold no data; None: nothing. `board`: the status that others show too; None: one of its own.
    `node`: what other processes did, for the metrics; None: they are those of this process only.
    `hosts`: names that the Host header may have, beside localhost and addresses.
    """
    shown = board or StatusBoard(store, facts)
    metrics = Shared(lambda: _metrics(store, node))
    files = page_files()

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        reason = ready(store, facts())
        return PlainTextResponse(f"{reason or 'ok'}\n", 503 if reason else 200)

    async def status(request: Request) -> Response:
        document = await shown.latest()
        return Response(_json(document), media_type="application/json")

    async def metrics_text(request: Request) -> Response:
        content, kind = await metrics.latest()
        return Response(content, media_type=kind)

    async def page(request: Request) -> Response:
        content, kind = files[request.url.path]
        return Response(content, media_type=kind)

    handlers: dict[str, Handler] = {
        "/healthz": healthz,
        "/readyz": readyz,
        "/api/status": status,
        "/metrics": metrics_text,
        **dict.fromkeys(files, page),
    }
    app = Starlette(
        routes=[Route(path, handler, methods=["GET"]) for path, handler in handlers.items()],
        middleware=[Middleware(Guard, hosts=hosts, token=token, open_paths={"/healthz", *files})],
        exception_handlers={GdsStoreError: _unavailable},
    )
    app.router.redirect_slashes = False  # no answer repeats what the Host header said
    return app


async def _unavailable(request: Request, error: Exception) -> Response:
    """The store cannot say it now: closed, busy, or its drive hangs."""
    return PlainTextResponse(" ".join(str(error).split()) + "\n", 503)


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _metrics(store: Store, node: NodeTotals | None) -> tuple[bytes, str]:
    """Content and media type."""
    from gdsstore.observe import metrics  # needs prometheus-client, which the other answers do not

    return metrics.render(store, None if node is None else node.share), metrics.CONTENT_TYPE
