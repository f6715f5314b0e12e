"""The daemon's HTTP side over a store, in a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gdsstore import Store
from gdsstore.service.errors_ring import ErrorRing
from gdsstore.service.http import make_app
from gdsstore.service.http_server import HttpServer, serve_http
from gdsstore.service.node_totals import NodeTotals
from gdsstore.service.status import StatusBoard

WAIT_S = 60.0


@dataclass
class Facts:
    """What a daemon would say of itself; change `draining` and the like while it serves."""

    values: dict[str, Any] = field(
        default_factory=lambda: {
            "pid": os.getpid(),
            "version": "0.1.0",
            "clients": 3,
            "leases": 17,
            "draining": False,
        }
    )
    started: float = field(default_factory=time.monotonic)

    def __call__(self) -> dict[str, Any]:
        return {**self.values, "uptime_s": time.monotonic() - self.started}


@contextlib.contextmanager
def serving(
    store: Store,
    *,
    token: str | None = None,
    facts: Facts | None = None,
    node: NodeTotals | None = None,
    port: int = 0,
) -> Iterator[tuple[str, HttpServer]]:
    """The URL, and the server to stop; at the end of the `with` it is stopped in any case."""
    facts = facts or Facts()
    with ErrorRing().installed() as ring:
        board = StatusBoard(store, facts, ring, node)
        server = serve_http(make_app(store, facts, token, board=board, node=node), port=port)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()), name="http")
        thread.start()
        try:
            host, port = server.address
            yield f"http://{host}:{port}", server
        finally:
            server.stop()
            thread.join(WAIT_S)
            assert not thread.is_alive(), "the server did not stop"
