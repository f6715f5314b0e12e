"""NUMA nodes as sysfs tells them; the trees are cut down from real machines."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gdsstore.errors import ArgumentError
from gdsstore.memory import numa, syscalls
from gdsstore.memory.placement import Placement

PCI = "devices/pci0000:80/0000:80:03.1/0000:81:00.0"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def _drive(sysfs: Path, node: int, number: str = "259:0", name: str = "nvme0", pci: str = PCI) -> Path:
    """An NVMe drive's block device under its PCI device."""
    _write(sysfs / pci / "numa_node", f"{node}\n")
    block = sysfs / pci / "nvme" / name / f"{name}n1"
    block.mkdir(parents=True)
    _link(sysfs / "dev/block" / number, block)
    return block


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", (0,)), ("0-1\n", (0, 1)), ("0,2-3,8\n", (0, 2, 3, 8)), ("\n", ())]
)
def test_online_nodes_are_read(tmp_path: Path, text: str, nodes: tuple[int, ...]) -> None:
    _write(tmp_path / "devices/system/node/online", text)
    assert numa.online_nodes(tmp_path) == nodes


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    assert numa.online_nodes(tmp_path) == ()


@pytest.mark.parametrize("bus_id", ["0000:81:00.0", "00000000:81:00.0"])
def test_a_gpu_is_found_by_its_bus_id(tmp_path: Path, bus_id: str) -> None:
    _write(tmp_path / "bus/pci/devices/0000:81:00.0/numa_node", "1\n")
    assert numa.node_of_pci(bus_id, tmp_path) == 1
    assert numa.node_of_pci("0000:99:00.0", tmp_path) is None


def test_capitals_in_a_bus_id_do_not_matter(tmp_path: Path) -> None:
    _write(tmp_path / "bus/pci/devices/0000:ca:00.0/numa_node", "1\n")
    assert numa.node_of_pci("00000000:CA:00.0", tmp_path) == 1


def test_firmware_that_does_not_say_gives_no_node(tmp_path: Path) -> None:
    _drive(tmp_path, -1)
    assert numa.node_of_block(259, 0, tmp_path) is None


def test_a_drive_and_its_partition_have_the_controllers_node(tmp_path: Path) -> None:
    block = _drive(tmp_path, 1)
    _write(block / "nvme0n1p1/partition", "1\n")
    _link(tmp_path / "dev/block/259:1", block / "nvme0n1p1")
    assert numa.node_of_block(259, 0, tmp_path) == 1
    assert numa.node_of_block(259, 1, tmp_path) == 1


def test_a_multipath_drive_and_its_partition_have_the_controllers_node(tmp_path: Path) -> None:
    _write(tmp_path / PCI / "numa_node", "1\n")
    controller = tmp_path / PCI / "nvme/nvme0"
    controller.mkdir(parents=True)
    subsystem = tmp_path / "devices/virtual/nvme-subsystem/nvme-subsys0"
    _write(subsystem / "nvme0n1/nvme0n1p1/partition", "1\n")
    _link(subsystem / "nvme0", controller)
    _link(tmp_path / "dev/block/259:0", subsystem / "nvme0n1")
    _link(tmp_path / "dev/block/259:1", subsystem / "nvme0n1/nvme0n1p1")
    assert numa.node_of_block(259, 0, tmp_path) == 1
    assert numa.node_of_block(259, 1, tmp_path) == 1


@pytest.mark.parametrize(("other", "expected"), [(1, 1), (0, None), (-1, None)])
def test_a_raid_has_a_node_only_if_all_its_drives_do(
    tmp_path: Path, other: int, expected: int | None
) -> None:
    drives = [
        _drive(tmp_path, 1),
        _drive(tmp_path, other, "259:9", "nvme1", "devices/pci0000:00/0000:01:00.0"),
    ]
    raid = tmp_path / "devices/virtual/block/md0"
    for drive in drives:
        _link(raid / "slaves" / drive.name, drive)
    _link(tmp_path / "dev/block/9:0", raid)
    assert numa.node_of_block(9, 0, tmp_path) == expected


def test_a_path_is_looked_up_by_its_filesystems_device(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    _drive(tmp_path, 1, f"{os.major(device)}:{os.minor(device)}")
    assert numa.node_of_path(tmp_path, tmp_path) == 1
    assert numa.node_of_path(Path("/proc"), tmp_path) is None


def _nodes(sysfs: Path, text: str) -> Path:
    _write(sysfs / "devices/system/node/online", text)
    return sysfs


class _Calls:
    """Stands in for the kernel: remembers calls, and fails or answers as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.names: list[str] = []
        self._error = error
        monkeypatch.setattr(syscalls, "call", self)

    def __call__(self, name: str, *arguments: int) -> int:
        self.names.append(name)
        if self._error:
            raise OSError(self._error, os.strerror(self._error))
        return 0


def test_one_node_means_no_call_and_memory_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch)
    placement = Placement(0, _nodes(tmp_path, "0\n"))
    placement.place(4096, 4096, False)
    assert placement.node_of(4096, 4096, touched=True) == 0
    assert not calls.names
    assert not placement.notes


def test_no_wish_means_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch)
    placement = Placement(-1, _nodes(tmp_path, "0-1\n"))
    placement.place(4096, 4096, False)
    assert placement.node_of(4096, 4096, touched=True) is None
    assert not calls.names


@pytest.mark.parametrize("node", [2, -2])
def test_a_node_that_is_not_there_is_refused(tmp_path: Path, node: int) -> None:
    with pytest.raises(ArgumentError):
        Placement(node, _nodes(tmp_path, "0-1\n"))


def test_a_refused_binding_is_reported_once_and_not_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Calls(monkeypatch, errno.EPERM)
    placement = Placement(1, _nodes(tmp_path, "0-1\n"))
    placement.place(4096, 4096, True)
    placement.place(4096, 4096, False)
    assert placement.node_of(4096, 4096, touched=True) is None
    assert placement.notes == ["NUMA node 1: mbind gave EPERM"]


def test_memory_that_came_from_elsewhere_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _Calls(monkeypatch)  # a move_pages that fills nothing in leaves no page on any node
    placement = Placement(1, _nodes(tmp_path, "0-1\n"))
    placement.place(4096, 8192, False)
    assert placement.node_of(4096, 8192, touched=True) is None
    assert placement.notes == ["NUMA node 1: only 0 of 2 sampled pages came from it"]


@pytest.mark.skipif(0 not in numa.online_nodes(), reason="the kernel tells of no NUMA nodes")
def test_the_kernel_takes_the_binding_and_tells_the_node(tmp_path: Path) -> None:
    placement = Placement(0, _nodes(tmp_path, "0-1\n"))
    length = 1 << 20
    address = syscalls.map_anonymous(length)
    try:
        placement.place(address, length, False)
        if placement.notes:
            pytest.skip(placement.notes[0])  # a container without CAP_SYS_NICE
        syscalls.advise(address, length, syscalls.MADV_POPULATE_WRITE)
        assert placement.node_of(address, length, touched=True) == 0
        assert placement.notes == []
    finally:
        syscalls.unmap(address, length)
