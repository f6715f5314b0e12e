"""Measurements outlive the process, count only on the machine and mount they were made on, and never hinder a start."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path as FilePath
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.engines.base import Op
from gdsstore.engines.fingerprint import device_id, fingerprint
from gdsstore.engines.measured import file_of, load, save
from gdsstore.engines.paths import Path
from gdsstore.engines.select import Measurement
from gdsstore.memory.cuda import CudaDevice

GPU = "GPU A 0123"
FACTS = {"kernel": "6.8.0", "NVIDIA driver": "570"}
PATHS = (Path.DIRECT, Path.BOUNCE)
FOUND = tuple(
    Measurement(op, size, 8, path, 1e9 + size) for op in Op for size in (4096, 1 << 20) for path in PATHS
)


@pytest.fixture
def root(tmp_path: FilePath) -> FilePath:
    save(tmp_path, GPU, 0, FACTS, FOUND)
    return tmp_path


def test_what_was_measured_comes_back(root: FilePath) -> None:
    kept = load(root, GPU, 0, FACTS, PATHS)
    assert kept.measurements == FOUND
    assert stat.S_IMODE(file_of(root, GPU, 0).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({**FACTS, "NVIDIA driver": "580"}, "NVIDIA driver (570 -> 580)"),
        ({"kernel": "6.8.0"}, "NVIDIA driver (570 -> )"),
        ({**FACTS, "kvikio": "26.10"}, "kvikio ( -> 26.10)"),
    ],
)
def test_what_has_changed_is_told_and_the_measurement_counts_no_more(
    root: FilePath, now: dict[str, str], told: str
) -> None:
    kept = load(root, GPU, 0, now, PATHS)
    assert kept.measurements is None
    assert told in kept.why
    assert "kernel" not in kept.why


def test_each_device_and_volume_has_its_own(root: FilePath) -> None:
    other = (
        Measurement(Op.READ, 4096, 1, Path.DIRECT, 5.0),
        Measurement(Op.WRITE, 4096, 1, Path.DIRECT, 6.0),
    )
    save(root, "GPU B", 0, FACTS, other)
    save(root, GPU, 1, FACTS, other)
    assert load(root, GPU, 0, FACTS, PATHS).measurements == FOUND
    assert load(root, "GPU B", 0, FACTS, PATHS[:1]).measurements == other
    assert load(root, "GPU C", 0, FACTS, PATHS).measurements is None


def test_a_path_that_was_not_measured_in_both_directions_is_measured_again(tmp_path: FilePath) -> None:
    save(tmp_path, GPU, 0, FACTS, [each for each in FOUND if each[0] is Op.READ or each.path is Path.DIRECT])
    assert load(tmp_path, GPU, 0, FACTS, PATHS) == (None, "no measurement of bounce")
    assert load(tmp_path, GPU, 0, FACTS, [Path.DIRECT]).measurements is not None


def test_a_file_of_another_device_under_this_name_does_not_count(root: FilePath) -> None:
    os.rename(file_of(root, GPU, 0), file_of(root, GPU, 1))
    assert load(root, GPU, 1, FACTS, PATHS).measurements is None


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("version",), 2),
        (("fingerprint",), []),
        (("bytes_per_s",), {"a": 1}),
        (("bytes_per_s", 0), ["read", 4096, 8, "direct"]),
        (("bytes_per_s", 0, 0), "append"),
        (("bytes_per_s", 0, 1), 0),
        (("bytes_per_s", 0, 1), 4096.5),
        (("bytes_per_s", 0, 2), True),
        (("bytes_per_s", 0, 3), "sideways"),
        (("bytes_per_s", 0, 4), 0),
        (("bytes_per_s", 0, 4), float("nan")),
        (("bytes_per_s", 0, 4), float("inf")),
        (("bytes_per_s", 0, 4), 10**400),
        (("bytes_per_s", 0, 4), None),
    ],
)
def test_a_value_that_makes_no_sense_is_as_good_as_no_file(
    root: FilePath, at: tuple[Any, ...], value: object
) -> None:
    content: Any = json.loads(file_of(root, GPU, 0).read_bytes())
    inner = content
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    file_of(root, GPU, 0).write_text(json.dumps(content))
    assert load(root, GPU, 0, FACTS, PATHS).measurements is None


@given(cut=st.integers(0, 2000), junk=st.binary(max_size=40))
def test_damage_never_raises(tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes) -> None:
    root = tmp_path_factory.getbasetemp()
    save(root, GPU, 0, FACTS, FOUND)
    path = file_of(root, GPU, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] + junk + whole[cut + len(junk) :])
    kept = load(root, GPU, 0, FACTS, PATHS)
    assert kept.measurements is None or len(kept.measurements) == len(FOUND)


def test_what_is_no_file_of_ours_never_raises(tmp_path: FilePath) -> None:
    path = file_of(tmp_path, GPU, 0)

    def refused() -> bool:
        return load(tmp_path, GPU, 0, FACTS, PATHS).measurements is None

    assert refused()
    path.write_bytes(b"[" * 200_000)
    assert refused()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert refused()
    path.unlink()
    path.mkdir()
    assert refused()
    save(tmp_path, GPU, 0, FACTS, FOUND)  # cannot replace a directory: logged, not raised
    assert path.is_dir()
    path.rmdir()
    os.mkfifo(path)
    assert refused()


@pytest.mark.own_process
class TestFingerprint:
    @pytest.fixture
    def device(self, gpu: ModuleType) -> Iterator[CudaDevice]:
        device = CudaDevice(0)
        yield device
        device.close()

    def machine(self, root: FilePath, *, driver: str = "570", options: str = "rw,noatime") -> FilePath:
        for name, text in {
            "driver/nvidia/version": f"NVRM version: {driver}\nGCC version: 13",
            "sys/kernel/osrelease": "6.8.0",
            "self/mountinfo": f"20 1 259:1 / / {options} - ext4 /dev/nvme0n1p1 rw",
        }.items():
            (root / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "proc" / name).write_text(text)
        return root

    def test_it_names_the_device_whatever_its_ordinal(self, device: CudaDevice) -> None:
        assert device_id(device).startswith("Simulated GPU 0 ")
        assert device_id(device).endswith(b"simulated-gpu-\0\0".hex())

    def test_it_is_the_same_until_something_changes(self, device: CudaDevice, tmp_path: FilePath) -> None:
        engines = {Path.DIRECT: "kvikio", Path.BOUNCE: "bounce"}
        first = fingerprint(device, tmp_path, engines, self.machine(tmp_path))
        assert first == fingerprint(device, tmp_path, dict(reversed(engines.items())), tmp_path)
        assert (first["filesystem"], first["kernel"]) == ("ext4", "6.8.0")
        for changed, change in {
            "NVIDIA driver": {"driver": "580"},
            "mount options": {"options": "rw,relatime"},
        }.items():
            now = fingerprint(device, tmp_path, engines, self.machine(tmp_path, **change))
            assert [name for name in first if first[name] != now[name]] == [changed]
            self.machine(tmp_path)
        now = fingerprint(device, tmp_path, {**engines, Path.DIRECT: "nixl-gds-mt"}, tmp_path)
        assert [name for name in first if first[name] != now[name]] == ["engine of direct"]
