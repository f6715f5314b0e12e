"""Traffic of the host's DRAM, where a counter can be read: the memory controllers' (uncore_imc), else resctrl's.

Both count the whole machine, so others' traffic too. The memory controllers see what drives and GPUs move by DMA; resctrl's MBM
sees the cores' misses only, which is a lower bound.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct
from pathlib import Path
from typing import Protocol

LIVE = Path("/")
PMUS = "sys/bus/event_source/devices"
RESCTRL = "sys/fs/resctrl/mon_data"
# Names of Intel's events: servers' (on newer ones one for each of two subchannels), and clients'.
_EVENT = re.compile(r"(cas_count_(read|write)(_sch\d)?|data_(reads|writes))$")
_UNITS = {"Bytes": 1, "KiB": 2**10, "MiB": 2**20, "64Bytes": 64}
_PERF_EVENT_OPEN = {"x86_64": 298}
_ATTR_BYTES = 64  # PERF_ATTR_SIZE_VER0
_libc = ctypes.CDLL(None, use_errno=True)


class NoCounterError(Exception):
    """Why there is no counter; becomes a sentence of the report."""


class DramTraffic(Protocol):
    source: str

    def read_bytes(self) -> float:
        """Bytes read and written since some time in the past."""


def open_dram(root: Path = LIVE) -> DramTraffic | str:
    """The best counter that can be read at `root`, or why there is none."""
    reasons = []
    for kind in (MemoryControllers, Resctrl):
        try:
            return kind(root)
        except NoCounterError as reason:
            reasons.append(str(reason))
    return "; ".join(reasons)


class Resctrl:
    source = "resctrl mbm_total_bytes: the cores' traffic, without DMA"

    def __init__(self, root: Path) -> None:
        self._files = sorted((root / RESCTRL).glob("mon_L3_*/mbm_total_bytes"))
        if not self._files:
            raise NoCounterError(f"no /{RESCTRL} with memory bandwidth (resctrl is not mounted, or not here)")
        try:
            self.read_bytes()
        except (OSError, ValueError) as error:
            raise NoCounterError(f"{self._files[0]} cannot be read: {error}") from error

    def read_bytes(self) -> float:
        return float(sum(int(file.read_text()) for file in self._files))


class MemoryControllers:
    """Read through perf_event_open(2), counters open for good: starting `perf` for each turn would take longer than the turn."""

    source = "memory controllers (uncore_imc)"

    def __init__(self, root: Path) -> None:
        pmus = [
            pmu
            for pmu in sorted((root / PMUS).glob("uncore_imc*"))
            if not pmu.name.startswith("uncore_imc_free_running")
        ]
        if not pmus:
            raise NoCounterError("no uncore_imc counters (not an Intel server, or a virtual machine)")
        self._counters: list[tuple[int, float]] = []  # descriptor, bytes a count
        for pmu in pmus:
            for event in sorted(path for path in (pmu / "events").glob("*") if _EVENT.match(path.name)):
                config, scale = event_config(pmu, event), bytes_a_count(event)
                for cpu in _cpus(pmu):
                    self._counters.append((_open_counter(int(_text(pmu / "type")), config, cpu), scale))
        if not self._counters:
            raise NoCounterError(f"{pmus[0].name} has no read and write events")

    def read_bytes(self) -> float:
        return sum(int.from_bytes(os.read(fd, 8), "little") * scale for fd, scale in self._counters)


def event_config(pmu: Path, event: Path) -> int:
    """The `config` of "event=0x04,umask=0x03", its fields put where `format/` says. Raises NoCounterError."""
    config = 0
    for term in _text(event).split(","):
        name, _, value = term.partition("=")
        place = re.fullmatch(r"config:(\d+)(?:-(\d+))?", _text(pmu / "format" / name.strip()))
        if place is None:
            raise NoCounterError(f"{pmu.name}: the field {name!r} lies where this program does not know")
        config |= int(value or "1", 0) << int(place[1])
    return config


def bytes_a_count(event: Path) -> float:
    """Of `NAME.scale` and `NAME.unit`. Raises NoCounterError."""
    scale, unit = (_text(event.with_name(event.name + end)) for end in (".scale", ".unit"))
    if unit not in _UNITS:
        raise NoCounterError(f"{event.name} counts in {unit}, which this program does not know")
    return float(scale) * _UNITS[unit]


def _cpus(pmu: Path) -> list[int]:
    """One CPU of each socket."""
    cpus: list[int] = []
    for part in _text(pmu / "cpumask").split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def _open_counter(kind: int, config: int, cpu: int) -> int:
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        raise NoCounterError(
            f"the number of perf_event_open on {platform.machine()} is not known to this program"
        )
    attr = struct.pack("<IIQ", kind, _ATTR_BYTES, config).ljust(_ATTR_BYTES, b"\0")
    fd = _libc.syscall(number, ctypes.create_string_buffer(attr, len(attr)), -1, cpu, -1, 0)
    if fd < 0:
        code = ctypes.get_errno()
        raise NoCounterError(
            f"the memory controllers' counters refuse ({errno.errorcode.get(code, code)}): "
            "run as root, or with kernel.perf_event_paranoid at 0"
        )
    return int(fd)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise NoCounterError(f"{path} cannot be read: {error.strerror}") from error
