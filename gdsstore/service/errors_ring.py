"""The last warnings and errors of the library, for those who look at the daemon from outside."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

KEPT = 50
MAX_MESSAGE = 400  # characters


@dataclass(slots=True)
class LoggedError:
    """`count` messages in a row that were the same; `time_s` (Unix time) is that of the last one."""

    time_s: float
    level: str
    logger: str
    message: str
    count: int


class ErrorRing(logging.Handler):
    """Keeps the last few records from WARNING up. Thread-safe. No tracebacks: the log has them."""

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[LoggedError] = deque(maxlen=kept)
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage() + _cause(record)
        except Exception:  # a record that does not fit its own format must not stop who logs it
            self.handleError(record)
            return
        if len(message) > MAX_MESSAGE:
            message = message[: MAX_MESSAGE - 1] + "…"
        entry = LoggedError(record.created, record.levelname.lower(), record.name, message, 1)
        with self._guard:
            last = self._kept[-1] if self._kept else None
            if last is not None and (last.level, last.logger, last.message) == (
                entry.level,
                entry.logger,
                entry.message,
            ):
                last.count += 1
                last.time_s = entry.time_s
            else:
                self._kept.append(entry)

    def entries(self) -> list[dict[str, Any]]:
        """Newest first."""
        with self._guard:
            return [asdict(each) for each in reversed(self._kept)]

    @contextlib.contextmanager
    def installed(self) -> Iterator[ErrorRing]:
        """Listen to the library's logger for the length of a `with`. For the daemon: a library process keeps its logging."""
        logger = logging.getLogger("gdsstore")
        logger.addHandler(self)
        try:
            yield self
        finally:
            logger.removeHandler(self)


def _cause(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return "" if error is None else f": {type(error).__name__}: {error}"
