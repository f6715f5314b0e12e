"""How far the scrub of a store has come, in a small file of the store's directory: a daemon that is restarted goes on there."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Final

from gdsstore.directory import NOT_OURS
from gdsstore.files import read_small, write_atomic

log = logging.getLogger("gdsstore.service")

NAME: Final = "scrub.json"
EVERY_S: Final = (
    10.0  # it is written at most so often: of what a daemon that is killed has read, so much is read again
)
MOST_SEGMENTS: Final = 1 << 32


class ScrubPlace:
    """For one thread. Where the file is missing, damaged or cannot be written, the scrub begins at segment 0, which is no error."""

    def __init__(self, directory: Path) -> None:
        """`directory`: of the store."""
        self._path = directory / NAME
        self.segment = 0  # the one to begin with
        self.last_pass_s: float | None = None  # when all segments had been read the last time, as Unix time
        self._written = -math.inf
        try:
            content = json.loads(read_small(self._path))
            segment, last = content["segment"], content["last_pass_s"]
            if type(segment) is int and 0 <= segment < MOST_SEGMENTS:
                self.segment = segment
            if type(last) in (int, float) and 0 <= last < math.inf:
                self.last_pass_s = float(last)
        except FileNotFoundError:
            pass
        except (OSError, *NOT_OURS) as error:
            log.warning("it is not known how far the scrub was: %s: %s", self._path, error)

    def enter(self, segment: int) -> None:
        """A segment is about to be read. Writes the file now and then."""
        self.segment = segment
        if time.monotonic() - self._written >= EVERY_S:
            self.keep()

    def passed(self) -> None:
        """All segments have been read."""
        self.segment, self.last_pass_s = 0, time.time()
        self.keep()

    def keep(self) -> None:
        """Write the file."""
        self._written = time.monotonic()
        content = {"segment": self.segment, "last_pass_s": self.last_pass_s}
        try:
            write_atomic(self._path, json.dumps(content).encode())
        except OSError as error:
            log.warning("how far the scrub is cannot be kept: %s", error)
