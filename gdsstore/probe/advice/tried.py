"""Findings from what was tried: bytes that were written, read back and compared here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gdsstore.probe.advice.finding import Finding, IoPath, Severity
from gdsstore.probe.facts import MachineFacts
from gdsstore.probe.trips import Outcome, Trip
from gdsstore.sizes import MiB

ENGINES_WITHOUT_CUFILE = ("bounce",)


def on_host(facts: MachineFacts) -> list[Trip]:
    return [each for each in facts.round_trips if each.device is None]


def by_cufile(facts: MachineFacts) -> list[Trip]:
    """Round trips with GPU memory through cuFile that were tried."""
    return [
        each
        for each in facts.round_trips
        if each.device is not None
        and each.engine not in ENGINES_WITHOUT_CUFILE
        and each.outcome is not Outcome.NOT_INSTALLED
    ]


def by_bounce(facts: MachineFacts) -> list[Trip]:
    return [each for each in facts.round_trips if each.engine in ENGINES_WITHOUT_CUFILE]


def proven_direct(facts: MachineFacts) -> Trip | None:
    """The first round trip of which every byte was direct."""
    return next((each for each in by_cufile(facts) if each.works and each.path is IoPath.DIRECT), None)


def moved(trips: Sequence[Trip]) -> str:
    """What was moved, in words, for a verdict."""
    first = trips[0]
    names = " and ".join(each.engine for each in trips)
    where = "" if first.device is None else f" with GPU {first.device}"
    return f"Tried: {names} wrote, read back and compared {first.nbytes // MiB} MiB{where}"


def host(facts: MachineFacts) -> Iterator[Finding]:
    """The posix engine works everywhere: where it fails, nothing else has a chance."""
    for each in on_host(facts):
        if each.engine == "posix" and each.outcome is Outcome.FAILED:
            yield Finding(
                "host-round-trip-failed",
                Severity.BLOCKS,
                IoPath.HOST,
                f"The round trip failed: {each.detail}.",
                "Bytes do not come back from this directory: no store can work here.",
                "Look into the kernel's log (sudo dmesg | tail) for errors of the drive or filesystem, and mend those or use "
                "another drive.",
            )


def fell_back(facts: MachineFacts) -> Iterator[Finding]:
    fallen = [each for each in by_cufile(facts) if each.works and each.path is not IoPath.DIRECT]
    if fallen and proven_direct(facts) is None:
        why = fallen[0].detail or "nothing said why"
        yield Finding(
            "direct-fell-back",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"It was tried, and the bytes went through host memory ({' and '.join(each.engine for each in fallen)}): {why}.",
            "Each byte goes through host memory, copied once more, at the cost of CPU and memory bandwidth.",
            _ask_cufile(facts),
            ("gds-nvidia-fs#78",),
        )


def failed(facts: MachineFacts) -> Iterator[Finding]:
    alone = not any(each.works for each in by_cufile(facts))
    for each in by_cufile(facts):
        if each.outcome is Outcome.FAILED:
            yield Finding(
                "device-round-trip-failed",
                Severity.BLOCKS if alone else Severity.COSTS,
                IoPath.DIRECT,
                f"The round trip of {each.engine} failed: {each.detail}.",
                "This engine moves no bytes here: neither direct nor by cuFile's own fallback."
                if alone
                else "A store does without this engine here, and uses another one, which may be slower.",
                _ask_cufile(facts),
                ("dynamo#6032", "dynamo#5012"),
            )
    for each in by_bounce(facts):
        if each.outcome is Outcome.FAILED:
            yield Finding(
                "bounce-round-trip-failed",
                Severity.BLOCKS,
                IoPath.BOUNCE,
                f"The round trip through pinned host memory failed: {each.detail}.",
                "The store's own fallback does not work: without a direct path, nothing moves GPU memory here.",
                "Look for free GPU memory (nvidia-smi) and for errors of the GPU (sudo dmesg | grep NVRM), then run doctor "
                "again.",
            )


def _ask_cufile(facts: MachineFacts) -> str:
    return (
        "Do what else is said here first. If it stays: CUFILE_LOGGING_LEVEL=TRACE CUFILE_ALLOW_COMPAT_MODE=false "
        f"/usr/local/cuda/gds/tools/gdsio -D {facts.storage.path} -d 0 -w 1 -s 16M -i 1M -x 0 -I 1; the cufile.log that it "
        "leaves says what cuFile refused."
    )


CODES = ("direct-fell-back", "device-round-trip-failed")
RULES = (host, fell_back, failed)
