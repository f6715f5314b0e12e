"""Fuzz: reading store.json, volume.json, state.json and the namespaces' descriptions when they hold something else."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.fuzz.harness import fuzz, instrumented, quickly  # noqa: E402

with instrumented():
    from gdsstore.catalog.state import State, read_state
    from gdsstore.directory import StoreDirectory, StoreInfo
    from gdsstore.errors import GdsStoreError
    from gdsstore.layout import PageLayout
    from gdsstore.namespace import Namespace
    from gdsstore.sequence import Sequencer

from tests.fuzz.inputs import Choices, damaged_json  # noqa: E402

UUID = bytes(range(16))
NAMESPACE = Namespace(model="fuzz", layout=PageLayout.opaque(4096))
STORE = {
    "format_version": 1,
    "uuid": UUID.hex(),
    "segment_bytes": 1 << 20,
    "volumes": [".", "/absent/volume"],
}
STATE = {"boot_id": "b", "clean": True, "capacity_bytes": 1 << 26, "catalog_mark": "1-2-3-4"}
DESCRIPTION = {"describes": NAMESPACE.describe(), "cleared_before": 7}
STEMS = (NAMESPACE.digest.hex(), "00" * 16, "zz", "", "ab cd", "f" * 31, "ab" * 100, "\u0660" * 32)


def one_input(data: bytes) -> None:
    choices = Choices(data)
    root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="gdsstore-fuzz-"))
    try:
        directory = StoreDirectory(root)
        directory.prepare()
        (_store, _volume, _state, _namespaces)[choices.below(4)](choices, directory)
    finally:
        shutil.rmtree(root)


def _store(choices: Choices, directory: StoreDirectory) -> None:
    (directory.root / "store.json").write_bytes(damaged_json(choices, STORE))
    try:
        info = directory.read()
    except GdsStoreError:
        return
    assert len(info.uuid) == 16
    assert info.segment_bytes >= 1 << 20
    assert info.segment_bytes & (info.segment_bytes - 1) == 0
    assert info.volumes[0] == directory.root, "the first volume is where store.json is"
    assert all(path.is_absolute() and "\0" not in str(path) for path in info.volumes)
    assert len(set(info.volumes)) == len(info.volumes)


def _volume(choices: Choices, directory: StoreDirectory) -> None:
    volume = directory.root / "second"
    volume.mkdir()
    (volume / "volume.json").write_bytes(damaged_json(choices, {"uuid": UUID.hex(), "volume": 1}))
    try:
        directory.check_volumes(StoreInfo(UUID, 1 << 20, (directory.root, volume)), ())
    except GdsStoreError:
        return


def _state(choices: Choices, directory: StoreDirectory) -> None:
    directory.state.write_bytes(damaged_json(choices, STATE))
    state = read_state(directory.state)
    assert type(state.clean) is bool
    assert 0 <= state.capacity_bytes < 1 << 63
    assert state == State() or state.boot_id is not None


def _namespaces(choices: Choices, directory: StoreDirectory) -> None:
    path = directory.root / "namespaces" / f"{choices.one(STEMS)}.json"
    path.write_bytes(damaged_json(choices, DESCRIPTION))
    for digest in directory.namespaces():
        assert len(digest) == 16
    cleared = directory.cleared()
    assert all(len(digest) == 16 for digest in cleared)
    first = Sequencer(max(cleared.values(), default=0)).take(1000)
    assert 0 < first < 1 << 63, "no entry has room for this sequence"
    directory.describe_namespace(NAMESPACE)
    directory.mark_cleared(NAMESPACE.digest, 9)
    assert directory.namespaces()[NAMESPACE.digest] == NAMESPACE.describe()
    assert directory.cleared()[NAMESPACE.digest] == 9


test_damaged_small_files_are_told_and_not_believed = quickly(one_input, 300)

if __name__ == "__main__":
    fuzz(one_input)
