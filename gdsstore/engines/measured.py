"""Measurements of paths, kept with the store: one small file for each device and volume, good for one fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from gdsstore.engines.base import Op
from gdsstore.engines.paths import Path
from gdsstore.engines.select import Measurement
from gdsstore.files import read_small, write_atomic

log = logging.getLogger("gdsstore.engines")

VERSION = 1
# What json and the reading below raise on content that is not ours; deep nesting ends the recursion.
_NOT_OURS = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


class Kept(NamedTuple):
    """`measurements`: None where there are none that count. `why`: what has changed, or when they were made; for the log."""

    measurements: tuple[Measurement, ...] | None
    why: str


def file_of(root: FilePath, device: str, volume: int) -> FilePath:
    """Where in the store directory `root` the measurements of a device and a volume lie.

    A file each: processes of several GPUs that start at the same time do not overwrite each other's.
    """
    digest = hashlib.sha256(f"{device}\n{volume}".encode()).hexdigest()
    return root / f"paths-{digest[:16]}.json"


def save(
    root: FilePath,
    device: str,
    volume: int,
    fingerprint: Mapping[str, str],
    measurements: Iterable[Measurement],
) -> None:
    """Replace what was kept. Where that fails, it is logged, and measured again at the next start.

    `device`: see `fingerprint.device_id`. `volume`: its number in the store.
    """
    content = {
        "version": VERSION,
        "device": device,
        "volume": volume,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": dict(fingerprint),
        "bytes_per_s": [
            [each.op.value, each.record_bytes, each.submitters, each.path.value, each.bytes_per_s]
            for each in measurements
        ],
    }
    path = file_of(root, device, volume)
    try:
        write_atomic(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        log.warning("the measurement of the paths is not kept: %s: %s", path, error.strerror)


def load(
    root: FilePath, device: str, volume: int, fingerprint: Mapping[str, str], paths: Sequence[Path]
) -> Kept:
    """What was kept for this device and volume, if it was made under this fingerprint and with each of `paths` in both
    directions. Never raises: a file that is damaged, or not ours, is as good as none."""
    path = file_of(root, device, volume)
    try:
        raw = read_small(path)
    except FileNotFoundError:
        return Kept(None, "not measured yet")
    except OSError as error:
        return Kept(None, f"{path} cannot be read: {error.strerror}")
    try:
        content = json.loads(raw)
        if content["version"] != VERSION:
            return Kept(None, f"{path} is of another version of gdsstore")
        known = content["fingerprint"], content["device"], content["volume"]
        found = tuple(_measurement(row) for row in content["bytes_per_s"])
        when = str(content["measured_at"])
    except _NOT_OURS:
        return Kept(None, f"{path} is damaged")
    if not isinstance(known[0], dict) or known[1:] != (device, volume):
        return Kept(None, f"{path} is damaged")
    changed = [
        f"{name} ({known[0].get(name, '')} -> {fingerprint.get(name, '')})"
        for name in sorted(known[0].keys() | fingerprint.keys())
        if known[0].get(name) != fingerprint.get(name)
    ]
    if changed:
        return Kept(None, f"changed since {when}: {', '.join(changed)}")
    measured = {(each.op, each.path) for each in found}
    lacking = [wanted.value for wanted in paths if any((op, wanted) not in measured for op in Op)]
    if lacking:
        return Kept(None, f"no measurement of {', '.join(lacking)}")
    return Kept(found, f"measured at {when}")


def _measurement(row: Any) -> Measurement:
    """Raises one of _NOT_OURS."""
    op, record_bytes, submitters, path, bytes_per_s = row
    if type(record_bytes) is not int or type(submitters) is not int or min(record_bytes, submitters) < 1:
        raise ValueError("sizes are whole and positive")
    speed = float(bytes_per_s)
    if not (math.isfinite(speed) and speed > 0):
        raise ValueError("a speed is positive")
    return Measurement(Op(op), record_bytes, submitters, Path(path), speed)
