"""Offloads: tree nodes on their way to the store, in the order in which SGLang named them.

A node's rows are locked until its completion is taken, so the backlog is bounded, and what does not fit is dropped and counted.
Whether it fits depends only on what SGLang has named and taken back, which is the same on every rank: the ranks' lists of
pending nodes must never differ.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore import PageStatus
from sglang_backend.device_pools import host_indices
from sglang_backend.linker_layers import ended
from sglang_backend.linker_pools import U8, StoredPool, Wanted, raw_keys
from sglang_backend.linker_sessions import Sessions
from sglang_backend.linker_worker import Worker

log = logging.getLogger("gdsstore.sglang")

TOGETHER = 1024  # pages in one save
DRAIN_S = 5.0  # a flush lets what is pending be stored for so long
SAID_EVERY_S = 10.0

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Node:
    wanted: tuple[Wanted, ...]
    ready: Sequence[Any]  # events after which the rows are written
    pages: int
    session: str | None


class Offloads:
    """`backlog_pages`: pages that may be pending. `sessions`: is told what each session stored. Methods are for the scheduler's
    thread."""

    def __init__(
        self,
        pools: Sequence[StoredPool],
        backlog_pages: int,
        deadline_s: float,
        sessions: Sessions | None = None,
    ) -> None:
        self._pools, self._sessions = tuple(pools), sessions
        self._backlog_pages, self._deadline_s = backlog_pages, deadline_s
        self._results: deque[bool] = deque()  # of the worker's
        self._pending: deque[int] = deque()  # pages of the nodes whose completion was not taken
        self._pending_pages = 0
        self._said = -SAID_EVERY_S
        self.pages_saved = self.pages_failed = self.pages_dropped = 0
        device = self._pools[0].pool.buffers.device
        self._worker: Worker[_Node] = Worker("gdsstore-offload", self._run, _together, device)

    def offload(
        self,
        transfers: Sequence[Any],
        record_ready: Callable[[], Sequence[Any]],
        session: str | None = None,
    ) -> bool:
        """False where nothing is stored and no completion follows."""
        wanted = Wanted.of(transfers, copy=True)
        if not wanted:
            return False
        pages = max(len(each.keys) for each in wanted)  # the KV pool's
        if self._pending and self._pending_pages + pages > self._backlog_pages:
            self._drop(pages)
            return False
        self._pending.append(pages)
        self._pending_pages += pages
        self._worker.put(
            _Node(wanted, record_ready(), pages, session)
        )  # recorded after the copies, so that it covers them
        return True

    def completed(self) -> int:
        return len(self._results)

    def pop(self) -> bool:
        """Take the oldest completion: whether the node is stored, in every pool."""
        self._pending_pages -= self._pending.popleft()
        return self._results.popleft()

    def reset(self) -> None:
        """Return when nothing reads the device pools any more. What is not stored by then is forgotten."""
        left = self._worker.drain(DRAIN_S)
        if left:
            log.warning("%d nodes were not stored before the reset", len(left))
        self._results.clear()
        self._pending.clear()
        self._pending_pages = 0

    def close(self) -> None:
        self.reset()
        self._worker.close()

    def _drop(self, pages: int) -> None:
        self.pages_dropped += pages
        now = time.monotonic()
        if now - self._said >= SAID_EVERY_S:
            self._said = now
            log.warning(
                "the store is behind: %d pages wait, %d were dropped so far",
                self._pending_pages,
                self.pages_dropped,
            )

    # --- in the worker's thread ---

    def _run(self, nodes: list[_Node]) -> None:
        stored = np.zeros(len(nodes), np.bool_)
        try:
            stored = self._save(nodes)
        except Exception:  # whatever it is: SGLang waits for the completions
            log.exception("an offload of %d nodes failed", len(nodes))
        self._results.extend(stored.tolist())

    def _save(self, nodes: list[_Node]) -> Mask:
        """Whether each node is stored. One save a pool, and the nodes' pages in it from head to tail, oldest node first. A key that
        comes twice, or is stored already, is not written again."""
        for event in (event for node in nodes for event in node.ready):
            event.synchronize()
        stored = np.ones(len(nodes), np.bool_)
        calls = []
        for each in self._pools:
            mine = [
                (number, wanted)
                for number, node in enumerate(nodes)
                for wanted in node.wanted
                if wanted.source == each.pool.source
            ]
            if not mine or not each.writes:
                continue
            node_of_page = np.repeat([number for number, _ in mine], [len(wanted.keys) for _, wanted in mine])
            try:
                keys = raw_keys([key for _, wanted in mine for key in wanted.keys])
                pages = each.pool.pages(host_indices([wanted.indices for _, wanted in mine]))
                future = each.bound.save(keys, pages, deadline_s=self._deadline_s)
            except Exception as error:
                # Whatever it is: those that were started read rows of the same nodes.
                log.error("the pages of pool %s cannot be saved", each.pool.name, exc_info=error)
                stored[node_of_page] = False
                continue
            calls.append((each, keys, node_of_page, future))
        # All of them end before anything else can go wrong: rows are given back when this returns.
        results = [
            ended(future, f"an offload of pool {each.pool.name}", 2 * self._deadline_s)
            for each, *_, future in calls
        ]
        for (each, keys, node_of_page, _), result in zip(calls, results, strict=True):
            if isinstance(result, Exception):
                log.error("%d pages of pool %s were not saved", len(keys), each.pool.name, exc_info=result)
                stored[node_of_page] = False
                self.pages_failed += len(keys)
                continue
            saved = result.status == PageStatus.SAVED
            each.quarantine.lift(keys[saved])
            self.pages_saved += int(saved.sum())
            self._note_sessions(nodes, each, keys, node_of_page, result.ok)
            failed = ~result.ok
            if failed.any():
                self.pages_failed += int(failed.sum())
                stored[node_of_page[failed]] = False
                log.warning(
                    "%d of %d pages of pool %s were not saved: %s",
                    int(failed.sum()),
                    len(keys),
                    each.pool.name,
                    result.reasons(),
                )
        return stored

    def _note_sessions(
        self, nodes: list[_Node], pool: StoredPool, keys: U8, node_of_page: npt.NDArray[np.int64], ok: Mask
    ) -> None:
        for number, node in enumerate(nodes):
            if self._sessions is not None and node.session is not None:
                self._sessions.turn(node.session, pool, keys[(node_of_page == number) & ok])


def _together(waiting: list[_Node]) -> int:
    """How many of the nodes that wait go into one save."""
    pages = np.cumsum([node.pages for node in waiting])
    return int(np.searchsorted(pages, TOGETHER, "right"))
