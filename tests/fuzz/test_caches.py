"""Fuzz: the files that only speed things up: the measured paths, and the heat stamps."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.fuzz.harness import fuzz, instrumented, quickly  # noqa: E402

with instrumented():
    from gdsstore.catalog.heat import HEADER_BYTES, MAGIC, Heat
    from gdsstore.engines import measured
    from gdsstore.engines.base import Op
    from gdsstore.engines.paths import Path as IoPath
    from gdsstore.engines.select import Measurement
    from gdsstore.errors import GdsStoreError
    from gdsstore.volume.format import MAX_SEGMENTS

import numpy as np  # noqa: E402

from tests.fuzz.inputs import Choices, damaged_json  # noqa: E402

FINGERPRINT = {"driver": "1", "gdsstore": "2"}
ROWS = tuple(Measurement(op, 4096, 1, path, 1e9) for op in Op for path in (IoPath.DIRECT, IoPath.BOUNCE))
SEGMENT_BYTES = 1 << 20
STRIDE = SEGMENT_BYTES // 4096
TABLE_BYTES = HEADER_BYTES + 4 * MAX_SEGMENTS
MOST_BYTES = TABLE_BYTES + 4 * STRIDE * MAX_SEGMENTS
SIZES = (0, 8, 4096, TABLE_BYTES - 1, TABLE_BYTES, TABLE_BYTES + 4 * STRIDE * 3 + 5, MOST_BYTES + 1)


def one_input(data: bytes) -> None:
    choices = Choices(data)
    root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="gdsstore-fuzz-"))
    try:
        (_paths, _heat)[choices.below(4) == 0](choices, root)
    finally:
        shutil.rmtree(root)


def _paths(choices: Choices, root: Path) -> None:
    measured.save(root, "gpu", 0, FINGERPRINT, ROWS)
    file = measured.file_of(root, "gpu", 0)
    right = json.loads(file.read_bytes())
    if choices.below(2):
        number = choices.below(len(right["bytes_per_s"]))
        row = right["bytes_per_s"][number]
        row[choices.below(len(row))] = choices.json()
        right["bytes_per_s"] = row if choices.below(8) == 7 else right["bytes_per_s"]
    file.write_bytes(damaged_json(choices, right))
    kept = measured.load(root, "gpu", 0, FINGERPRINT, (IoPath.DIRECT, IoPath.BOUNCE))
    assert kept.why
    for each in kept.measurements or ():
        assert math.isfinite(each.bytes_per_s)
        assert each.bytes_per_s > 0
        assert each.record_bytes > 0
        assert each.submitters > 0


def _heat(choices: Choices, root: Path) -> None:
    path = root / "heat"
    header = MAGIC + choices.one((STRIDE, STRIDE, STRIDE, 0, 1, STRIDE * 2)).to_bytes(8, "little")
    with path.open("wb") as file:
        file.write(bytearray(header) if choices.below(4) else choices.raw(16))
        file.truncate(choices.one(SIZES))
        if choices.below(2):
            file.seek(TABLE_BYTES)
            file.write(choices.raw(64))
    try:
        heat = Heat(path, SEGMENT_BYTES)
    except GdsStoreError:
        assert path.stat().st_size <= MOST_BYTES
        return
    try:
        assert heat.used_bytes <= MOST_BYTES, "blocks on the drive that no stamp needs"
        heat.touch(np.array([0, 2, 70], np.uint32), np.array([0, STRIDE - 1, 5], np.uint32))
        ages = heat.ages(2, STRIDE)
        assert (ages >= 0).all()
        assert ages[STRIDE - 1] < 10
        heat.protected(0, 30.0)
        heat.reset(2)
    finally:
        heat.close()


test_damaged_caches_are_made_anew = quickly(one_input, 200)

if __name__ == "__main__":
    fuzz(one_input)
