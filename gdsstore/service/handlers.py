"""What the daemon does for each request of a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gdsstore.costing import leading
from gdsstore.errors import ArgumentError, GdsStoreError
from gdsstore.node import messages
from gdsstore.node.errors import ProtocolError
from gdsstore.node.messages import Answer, Refusal, Request
from gdsstore.service.leases import Leases
from gdsstore.service.namespaces import Namespaces
from gdsstore.service.node_totals import NodeTotals, Reporting
from gdsstore.service.prefetches import Prefetches
from gdsstore.service.refused import RefusedError
from gdsstore.service.reports import checked

DIRECT_KEYS = 2048  # with more, a call takes milliseconds, which nobody else shall wait for

T = TypeVar("T")
StatusOf = Callable[[], Awaitable[dict[str, Any]]]


class Office:
    """What all clients share: the store's namespaces, and threads for calls that take a while."""

    def __init__(
        self,
        namespaces: Namespaces,
        executor: Executor,
        status: StatusOf,
        node: NodeTotals,
        *,
        has_cache: bool,
    ) -> None:
        self.namespaces, self.executor, self.status, self.node = namespaces, executor, status, node
        self.has_cache = has_cache
        self.draining = False

    async def call(self, keys: int, work: Callable[[], T]) -> T:
        """Do it here, or, where so many keys take long, in a thread."""
        if keys <= DIRECT_KEYS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)


class Client:
    """One client's requests, one after the other, and what it holds. For the event loop's thread."""

    def __init__(self, office: Office, name: str) -> None:
        """`name`: who borrows, for the limit of one process."""
        self._office, self._name = office, name
        self._since = time.monotonic()
        self.takes_part = False  # it asked for more than the status
        self.leases = Leases()
        self.prefetches = Prefetches()

    async def answer(self, request: Request) -> Answer | None:
        """None: there is none to this request. Raises ProtocolError for one that makes no sense."""
        self.takes_part |= not isinstance(request, messages.Status | messages.Ping)
        try:
            match request:
                case messages.Release():
                    for number in request.leases:
                        self.leases.release(number)
                    return None
                case messages.Lookup():
                    return await self._lookup(request)
                case messages.Lease():
                    return await self._lease(request)
                case messages.Prefetch():
                    return await self._prefetch(request)
                case messages.PrefetchStatus():
                    return self.prefetches.progress(request.prefetch)
                case messages.PrefetchCancel():
                    self.prefetches.cancel(request.prefetch)
                    return self.prefetches.progress(request.prefetch)
                case messages.Status():
                    return messages.StatusIs(await self._office.status())
                case messages.Report():
                    return self._report(request)
                case messages.Ping():
                    return messages.Pong()
        except ProtocolError:
            raise
        except RefusedError as error:
            return error.answer
        except GdsStoreError as error:
            code = Refusal.ARGUMENT if isinstance(error, ArgumentError) else Refusal.FAILED
            return RefusedError(code, str(error)).answer

    def close(self) -> None:
        """It is gone: what it held is free, and no more is brought of what it asked for."""
        self._office.node.leave(self._name)
        self.leases.release_all()
        self.prefetches.cancel_all()

    async def _lookup(self, request: messages.Lookup) -> messages.Found:
        keys = messages.key_array(request.keys)
        bound = self._office.namespaces.find(request.namespace)
        found = await self._office.call(len(keys), lambda: bound.contains(keys))
        return messages.Found(leading(found), messages.pack_mask(found))

    async def _lease(self, request: messages.Lease) -> messages.Leased:
        keys = messages.key_array(request.keys)
        self._check_cache()
        self.leases.check_room()
        bound = self._office.namespaces.find(request.namespace)
        lent = [bound.hold(keys[:DIRECT_KEYS], self._name)]

        def release() -> None:
            for part in lent:
                part.release()

        try:
            # Not in a thread: a client that goes meanwhile would leave what the thread has just lent lent for ever.
            for first in range(DIRECT_KEYS, len(keys), DIRECT_KEYS):
                await asyncio.sleep(0)
                lent.append(bound.hold(keys[first : first + DIRECT_KEYS], self._name))
        except BaseException:
            release()
            raise
        found = np.concatenate([part.found for part in lent])
        pages = int(np.count_nonzero(found))
        number = self.leases.add(release, pages) if pages else 0
        offset: npt.NDArray[np.uint64] = np.concatenate([part.offset for part in lent])[found].astype("<u8")
        return messages.Leased(number, lent[0].record_bytes, messages.pack_mask(found), offset.tobytes())

    async def _prefetch(self, request: messages.Prefetch) -> messages.Started:
        keys = messages.key_array(request.keys)
        self._check_cache()
        bound = self._office.namespaces.find(request.namespace)
        self.prefetches.make_room()
        deadline_s, priority = request.deadline_s, request.priority
        handle = await self._office.call(
            len(keys), lambda: bound.prefetch(keys, deadline_s=deadline_s, priority=priority)
        )
        if self._office.draining:  # meanwhile: the others were cancelled already
            handle.cancel()
        return messages.Started(self.prefetches.add(handle))

    def _report(self, report: messages.Report) -> messages.Counted:
        node = self._office.node
        activity = checked(report, node.volumes)
        client = Reporting(
            report.run,
            report.pid,
            report.process,
            activity,
            self.leases,
            self._since,
            again=report.again,
        )
        node.take(self._name, client)
        return messages.Counted()

    def _check_cache(self) -> None:
        if self._office.draining:
            raise RefusedError(Refusal.CLOSING, "the daemon is about to end")
        if not self._office.has_cache:
            raise RefusedError(Refusal.NO_CACHE, "the daemon has no host cache; start it with --host-cache")
