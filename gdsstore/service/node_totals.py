"""What all processes of a node did with the store while its daemon has been up: sums of what they report."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sized
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from gdsstore.node.messages import Refusal
from gdsstore.observe.activity import Activity, Moved, NodeShare
from gdsstore.service.refused import RefusedError

MOST_ROWS: Final = 8192  # of the sums: names that clients make up must not fill the memory
MOST_RUNS: Final = 512  # that are remembered, where no more are connected


@dataclass(frozen=True, slots=True)
class Reporting:
    """A process that is connected. `run`: which opening of the store it reports; `since`: when it connected, on the
    monotonic clock; `again`: an earlier report of this run may have been taken."""

    run: bytes
    pid: int
    name: str
    activity: Activity
    leases: Sized
    since: float
    again: bool = False


class NodeTotals:
    """Thread-safe.

    Of each report only what came since the one before is added, so that the sums never fall, whoever dies or begins anew; a
    process that was cut off and connects again goes on where it was. What a process did before the daemon was up is left out, and
    so is what one did until it came back after it was forgotten for others: nobody knows then how much of it was added before.
    Those that are connected are not forgotten.
    """

    def __init__(self, volumes: int) -> None:
        """`volumes`: how many the store has."""
        self.volumes = volumes
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._sum = Moved()
        self._last: OrderedDict[bytes, Activity] = (
            OrderedDict()
        )  # by run, the one that was silent longest first
        self._clients: dict[str, Reporting] = {}

    def take(self, session: str, client: Reporting) -> None:
        """Add a report that came over a session. Raises RefusedError where the sums would have too many rows."""
        activity, now = client.activity, time.monotonic()
        with self._lock:
            last = self._last.get(client.run)
            if last is not None and activity.age_s < last.age_s:
                return  # it was under way for long, and a newer one came over another connection
            if last is not None:
                self._add(activity.moved.since(last.moved))
            elif not client.again and activity.age_s <= now - self._started:
                self._add(activity.moved)
            self._last[client.run] = activity
            self._last.move_to_end(client.run)
            # The session that it had before may not have ended yet.
            for other in [name for name, each in self._clients.items() if each.run == client.run]:
                del self._clients[other]
            self._clients[session] = client
            self._forget()

    def leave(self, session: str) -> None:
        """The session is over."""
        with self._lock:
            self._clients.pop(session, None)
            self._forget()

    def share(self) -> NodeShare:
        """What others than the daemon itself did."""
        with self._lock:
            return NodeShare(self._sum, len(self._clients))

    def with_own(self, own: Activity) -> Activity:
        """All that was done on the node; `own`: by the daemon."""
        with self._lock:
            moved, clients = self._sum, list(self._clients.values())
        queues = {
            cls: reduce(
                lambda one, other: one.plus(other),
                [each.activity.queues[cls] for each in clients if cls in each.activity.queues],
                queue,
            )
            for cls, queue in own.queues.items()
        }
        return Activity(moved.plus(own.moved), queues, own.age_s)

    def clients(self) -> list[dict[str, Any]]:
        """For the status: the processes that report, what each did since it opened the store, the busiest first."""
        now = time.monotonic()
        with self._lock:
            clients = list(self._clients.values())
        rows = [
            {
                "pid": each.pid,
                "name": each.name,
                "read_bytes": each.activity.moved.bytes_of("read"),
                "written_bytes": each.activity.moved.bytes_of("write"),
                "leases": len(each.leases),
                "connected_s": now - each.since,
            }
            for each in clients
        ]
        return sorted(rows, key=lambda row: (-row["read_bytes"] - row["written_bytes"], row["pid"]))

    def _forget(self) -> None:
        """With the lock held: the runs that nobody reports any more, of those that are too many."""
        if len(self._last) > MOST_RUNS:
            connected = {each.run for each in self._clients.values()}
            gone = [run for run in self._last if run not in connected]
            for run in gone[: len(self._last) - MOST_RUNS]:
                del self._last[run]

    def _add(self, moved: Moved) -> None:
        found = self._sum.plus(moved)
        if found.rows > MOST_ROWS:
            raise RefusedError(Refusal.LIMIT, "the reports have too many engines")
        self._sum = found
