"""Writing record tables while others wait, or do not: a drive that hangs keeps its segments, not the save."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from gdsstore.catalog.allocate import SegmentPool
from gdsstore.catalog.late_calls import result_by
from gdsstore.catalog.owned import SlotRun
from gdsstore.errors import DeadlineError, GdsStoreError, from_os_error
from gdsstore.waiting import Deadline


@dataclass(slots=True)
class TableWrite:
    """The entries of a run. `write` is given the descriptor of its table. `error`: None once they are written."""

    run: SlotRun
    write: Callable[[int], None]
    error: GdsStoreError | None = field(
        default_factory=lambda: DeadlineError("the drive did not write it in time")
    )


@dataclass(slots=True)
class _Group:
    """Those on one volume: one call, one behind the other."""

    writes: list[TableWrite]
    call: Future[None] | None = None  # None where no thread could be started
    left: bool = False  # nobody waits any more: what has not begun does not begin


class TableWrites:
    """Some writes under way, from its making on. Until the drive has let go of them their segments stay this process's, so that
    nothing lands in slots that have another user; one that failed or was late gets its segment retired."""

    def __init__(self, pool: SegmentPool, writes: Sequence[TableWrite]) -> None:
        self._pool, self.writes = pool, writes
        self._since = time.monotonic()
        groups: dict[int, _Group] = defaultdict(lambda: _Group([]))
        for write in writes:
            groups[write.run.owned.volume.index].writes.append(write)
        self._groups = list(groups.values())
        for group in self._groups:
            self._begin(group)

    def _begin(self, group: _Group) -> None:
        for write in group.writes:
            self._pool.hold(write.run)
        try:
            group.call = self._pool.calls.start(partial(self._carry_out, group))
        except GdsStoreError as error:
            for write in group.writes:
                write.error = error
                self._pool.finish(write.run, failed=False)

    def _carry_out(self, group: _Group) -> None:
        try:
            for write in group.writes:
                if group.left:
                    return
                try:
                    with self._pool.writing(write.run) as table_fd:
                        write.write(table_fd)
                    write.error = None
                except OSError as error:
                    write.error = from_os_error(error, "the drive refused it")
        finally:
            for write in group.writes:
                self._pool.finish(write.run, failed=write.error is not None)

    @property
    def done(self) -> bool:
        return all(group.call is None or group.call.done() for group in self._groups)

    def wait(self, deadline: Deadline) -> Sequence[TableWrite]:
        """The writes. Those that have not ended by then keep their DeadlineError, or lose it: what they write, nobody looks at."""
        for group in self._groups:
            if group.call is None:
                continue
            try:
                result_by(group.call, deadline)
            except DeadlineError:
                group.left = True
                self._pool.late(group.writes[0].run.owned.volume.index, "write a record table", self._since)
        return self.writes
