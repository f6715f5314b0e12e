"""What the scheduler hands out: the future of a call, and a chunk's grant."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from gdsstore.errors import DeadlineError, GdsStoreError, StoreClosedError, StoreError
from gdsstore.transfer.policy_terms import Ask, Request, State, TransferClass

T = TypeVar("T")


class Canceller(Protocol):
    def cancel(self, job: Job[T]) -> bool: ...


class Returner(Protocol):
    def give_back(self, ask: Ask, *, late: bool) -> None: ...


class Job(Future[T]):
    """The future of a call, which is also what the call's work gets to know itself by."""

    def __init__(self, canceller: Canceller) -> None:
        super().__init__()
        self._canceller = canceller
        self.request: Request  # set before anybody else sees the job

    @property
    def stopping(self) -> bool:
        """Whether the work shall end early: it was cancelled, and nobody needs its outcome."""
        return self.request.stop

    def cancel(self) -> bool:
        """Cancel: True where the work had not begun, so that it never will. Work under way is told to stop (`stopping`, and its
        chunks are granted no more), and the future holds what it returns."""
        return self._canceller.cancel(self)

    def settle_cancelled(self) -> None:
        if super().cancel():
            self.set_running_or_notify_cancel()

    def settle(self, result: T | BaseException) -> None:
        """End the future, unless it has ended."""
        try:
            if isinstance(result, BaseException):
                self.set_exception(result)
            else:
                self.set_result(result)
        except InvalidStateError:
            pass  # the scheduler was closed in the meantime, and said so


class Call(Generic[T]):
    """A job and its work. Not part of the job: a caller that keeps its future must not keep the work's memory with it."""

    __slots__ = ("job", "otherwise", "work")

    def __init__(
        self, job: Job[T], work: Callable[[Job[T]], T], otherwise: Callable[[State], T] | None
    ) -> None:
        self.job, self.work, self.otherwise = job, work, otherwise

    def carry_out(self) -> T | BaseException:
        """What the work returned or raised."""
        if self.job.done():
            return StoreClosedError("the store was closed before this transfer had begun")
        try:
            return self.work(self.job)
        except BaseException as error:  # as an executor does: it belongs to whoever waits for the future
            return error

    def settle_unstarted(self) -> None:
        """The request ended without having run."""
        state = self.job.request.state
        if state is State.CANCELLED:
            self.job.settle_cancelled()
        elif self.otherwise is None:
            self.job.settle(_error(self.job.request))
        else:
            try:
                result: T | BaseException = self.otherwise(state)
            except Exception as error:  # it too belongs to whoever waits
                result = error
            self.job.settle(result)


def _error(request: Request) -> GdsStoreError:
    name = request.cls.name.lower()
    if request.state is State.REFUSED:
        return StoreError("too many transfers of this class wait; send fewer at a time", transfer_class=name)
    why = {
        State.DROPPED: "an offload was dropped, since it waited longer than its budget",
        State.EXPIRED: "a transfer was not started by its deadline",
    }[request.state]
    return DeadlineError(f"{why}; the drives or the workers are too busy", transfer_class=name)


class Grant:
    """A chunk's share of its volumes. Give it back with `done`; leaving a `with` does."""

    __slots__ = ("_ask", "_returner")

    def __init__(self, returner: Returner, ask: Ask) -> None:
        self._returner, self._ask = returner, ask

    @property
    def cls(self) -> TransferClass:
        """The class that its call came in, and is counted under."""
        return self._ask.request.entered

    def moved(self) -> None:
        """The chunk has moved whole, at the first try. `done` follows when nothing is left to do for it."""
        self._ask.moved = True

    def done(self) -> None:
        """The chunk has ended. Idempotent."""
        self._returner.give_back(self._ask, late=False)

    def late(self) -> None:
        """The chunk ran into its deadline, and the engine has not let go of it. Call `done` when it has."""
        self._returner.give_back(self._ask, late=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done()
