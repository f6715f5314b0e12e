"""The namespaces that clients name by their digests: opened from what the store's directory says about them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

import numpy as np

from gdsstore.bound import BoundNamespace
from gdsstore.errors import ArgumentError, GdsStoreError
from gdsstore.layout import ByteOrder, PageKind, PageLayout
from gdsstore.namespace import KEY_BYTES, Namespace, Parallelism
from gdsstore.node.messages import Refusal
from gdsstore.service.refused import RefusedError
from gdsstore.store import Store

log = logging.getLogger("gdsstore.service")

FAILED_FOR_S = 1.0  # until an unknown one is looked for again
MOST_OPENING = 64
MOST_FAILED = 1024


def namespace_of(description: Mapping[str, Any]) -> Namespace:
    """The Namespace that `describe()` described. Raises ArgumentError where it is not one of this program's."""
    try:
        layout = description["layout"]
        named = {"kind": PageKind(layout["kind"]), "order": ByteOrder(layout["order"])}
        made = Namespace(
            model=description["model"],
            layout=PageLayout(**{**layout, **named}),
            weights=description["weights"],
            pool=description["pool"],
            layers=_span(description["layers"]),
            heads=_span(description["heads"]),
            parallelism=Parallelism(**description["parallelism"]),
            extra=tuple(description["extra"].items()),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"this describes no namespace that this program knows: {error}") from error
    if made.describe() != dict(description):
        raise ArgumentError("this describes a namespace of another version of this program")
    return made


def _span(span: Any) -> Any:
    return None if span is None else tuple(span)  # what it may hold, Namespace knows


class Namespaces:
    """Opens each once, in the background. For the event loop's thread."""

    def __init__(self, store: Store, executor: Executor) -> None:
        self._store, self._executor = store, executor
        self._open: dict[bytes, BoundNamespace] = {}
        self._opening: dict[bytes, asyncio.Future[BoundNamespace]] = {}
        self._failed: dict[bytes, tuple[float, str]] = {}
        self._told: set[bytes] = set()  # failures that the log has

    def __len__(self) -> int:
        return len(self._open)

    def find(self, digest: bytes) -> BoundNamespace:
        """An open namespace. Raises RefusedError while it is being opened (ask again), and where it cannot be."""
        bound = self._open.get(digest)
        if bound is not None:
            return bound
        failed = self._failed.get(digest)
        if failed is not None and time.monotonic() < failed[0]:
            raise RefusedError(Refusal.NAMESPACE, failed[1])
        if digest not in self._opening:
            if len(self._opening) >= MOST_OPENING:
                raise RefusedError(Refusal.LIMIT, "too many namespaces are being opened")
            self._failed.pop(digest, None)
            loop = asyncio.get_running_loop()
            opening = self._opening[digest] = loop.run_in_executor(self._executor, self._bind, digest)
            opening.add_done_callback(lambda done: self._opened(digest, done))
        raise RefusedError(Refusal.NOT_READY, "the namespace is being opened; ask again")

    def _bind(self, digest: bytes) -> BoundNamespace:
        """In a thread of the executor: reads files, and may make the host cache."""
        description = self._store.directory.namespaces().get(digest)
        if description is None:
            raise ArgumentError("no namespace of this digest was ever opened in this store", namespace=digest)
        bound = self._store.namespace(namespace_of(description))
        # The first call of its kind loads compiled code, for which the event loop shall not wait.
        nothing = np.zeros((0, KEY_BYTES), np.uint8)
        bound.contains(nothing)
        bound.hold(nothing, "").release()
        return bound

    def _opened(self, digest: bytes, done: asyncio.Future[BoundNamespace]) -> None:
        del self._opening[digest]
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._open[digest] = done.result()
            return
        if not isinstance(error, GdsStoreError):
            log.error("opening a namespace failed", exc_info=error)
        elif digest not in self._told:  # its clients only see that nothing is ever in the cache
            log.warning("the namespace %s cannot be served: %s", digest.hex(), error)
            self._told.add(digest)
        if len(self._told) >= MOST_FAILED:
            self._told.clear()
        if len(self._failed) >= MOST_FAILED:
            self._failed.clear()
        self._failed[digest] = (time.monotonic() + FAILED_FOR_S, str(error))
