"""What a drill does, where, and what it must not touch."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType

import gdsstore
from gdsstore.errors import ArgumentError, StoreError, from_os_error
from gdsstore.sizes import GiB, KiB, MiB, format_size
from gdsstore.transfer.cost import CostSetting

MODEL = "drill"
PAGE_BYTES = 256 * KiB
PROMPT_PAGES = 16  # one call: a prompt of 4 MiB
PROMPTS = 24  # that are there all the time
CAPACITY_BYTES = 768 * MiB  # never filled, so that a page which is gone was lost and not reclaimed
SEGMENT_BYTES = 16 * MiB
NEEDED_BYTES = 3 * GiB // 2  # of free space: twice the capacity, so that others on the drive keep some
DEADLINE_S = 2.0  # of each call
SLACK_S = 1.0  # by which a call may be late on a machine that is busy
MARKS = ("store.json", "volume.json")  # what the directories of stores have


class DrillFault(StrEnum):
    """What is done to the scratch store."""

    HANG = "hang"
    ERRORS = "errors"
    CRAWL = "crawl"
    CORRUPT = "corrupt"
    FULL = "full"
    KILL = "kill"

    @property
    def meaning(self) -> str:
        return MEANING[self]


MEANING = {
    DrillFault.HANG: "one of two drives does not answer",
    DrillFault.ERRORS: "one of two drives answers with errors (EIO)",
    DrillFault.CRAWL: "one of two drives takes 0.5 s longer for each request",
    DrillFault.CORRUPT: "one of two drives flips bits, and reads and writes the wrong place",
    DrillFault.FULL: "both drives say that they are full (ENOSPC)",
    DrillFault.KILL: "a process that saves is killed (SIGKILL), again and again",
}


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """One drill: in a new folder in `directory`, each of `faults` for `seconds` seconds."""

    directory: Path
    seconds: float
    faults: tuple[DrillFault, ...]


def store_config() -> gdsstore.Config:
    """The user's settings, but for what the drill measures by. Raises ConfigError."""
    return gdsstore.Config.load(
        capacity=CAPACITY_BYTES,
        segment_bytes=SEGMENT_BYTES,
        host_cache=0,  # what came from memory would say nothing of the drive
        cost_model=CostSetting.OFF,
        io_deadline_s=DEADLINE_S,
    )


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A new folder in `directory`, removed afterwards, whatever ends the `with`.

    Raises ArgumentError where there is no such directory or it belongs to a store, StoreError without the space.
    """
    check_place(directory)
    with _terminated_as_interrupted():
        try:
            made = tempfile.TemporaryDirectory(prefix=".gdsstore-drill-", dir=directory)
        except OSError as error:
            raise from_os_error(error, "the drill cannot make its folder", ArgumentError) from error
        with made as name:
            yield Path(name)


def check_place(directory: Path) -> None:
    """Raises ArgumentError and StoreError, as `scratch` does."""
    if not directory.is_dir():
        raise ArgumentError(
            "there is no such directory; give one on the drive to be tried, which must be mounted",
            path=str(directory),
        )
    where = directory.resolve()
    for path in (where, *where.parents):
        if any((path / mark).exists() for mark in MARKS):
            raise ArgumentError(
                "a store lies here; a drill needs a directory of its own, beside it on the same drive",
                path=str(path),
            )
    free_bytes = shutil.disk_usage(where).free
    if free_bytes < NEEDED_BYTES:
        raise StoreError(
            f"a drill needs {format_size(NEEDED_BYTES)} of free space", path=str(where), free_bytes=free_bytes
        )


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends a `with` as Ctrl-C does: what was made is removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread, whose matter it is then
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
