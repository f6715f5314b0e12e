"""A process's report to the daemon, as a message. Needs msgspec."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from gdsstore.node import messages
from gdsstore.node.messages import MOST_ROWS, WORD_CHARS, Report
from gdsstore.observe.activity import Activity

_INTERPRETER = "python"


def report_of(run: bytes, activity: Activity, *, again: bool = False) -> Report:
    """`run`: 16 bytes that no other opening of a store has. `again`: one of it was sent before. What is 0 still is left out."""
    moved = activity.moved
    io = [
        messages.IoRow(path, word(engine), volume, direction, cls, *map(int, numbers))
        for (path, engine, volume, direction, cls), numbers in moved.io.items()
    ]
    times = [
        messages.TimesRow(*key, [int(count) for count in counts], sum_s)
        for key, (*counts, sum_s) in moved.times.items()
        if any(counts)
    ]
    calls = [
        messages.CallsRow(cls, *queue, [int(count) for count in moved.calls[cls]])
        for cls, queue in activity.queues.items()
    ]
    pages = {name: int(count) for name, (count,) in moved.pages.items() if count}
    return Report(
        run,
        activity.age_s,
        os.getpid(),
        process_name(),
        io[:MOST_ROWS],
        pages,
        times[:MOST_ROWS],
        calls,
        again,
    )


def process_name() -> str:
    """What people know this process by: the title that it gave itself, as SGLang's do, or the name of its script."""
    title = ""
    with contextlib.suppress(OSError):
        title = Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    name = Path(title).name
    if not name or name.startswith(_INTERPRETER):
        name = Path(sys.argv[0] if sys.argv else "").name
    return word(name.strip() or _INTERPRETER)


def word(text: str) -> str:
    """A name as messages have them: not empty, not too long, printable."""
    return "".join(char if char.isprintable() else "?" for char in text[:WORD_CHARS]) or "?"
