"""A path is seen down to its mount, its block devices and its drives."""

from __future__ import annotations

import pytest

from gdsstore.probe.storage import mount_of, storage
from tests.probe.tree_builder import TreeBuilder, nvme

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
40 27 259:2 / /mnt/nvme rw,noatime shared:5 - ext4 /dev/nvme0n1p1 rw,data=ordered
41 27 9:0 / /mnt/nvme2 ro,relatime - xfs /dev/md0 rw,attr2
42 27 0:60 / /mnt/with\040space rw - tmpfs tmpfs rw
43 40 0:61 / /mnt/nvme/hidden rw - tmpfs first rw
44 40 0:62 / /mnt/nvme/hidden rw - overlay overlay rw,lowerdir=/a"""


@pytest.mark.parametrize(
    ("path", "fs_type", "source"),
    [
        ("/mnt/nvme/kv", "ext4", "/dev/nvme0n1p1"),
        ("/mnt/nvme", "ext4", "/dev/nvme0n1p1"),
        ("/mnt/nvmex", "ext4", "/dev/vda"),
        ("/mnt/nvme2/a", "xfs", "/dev/md0"),
        ("/mnt/with space/kv", "tmpfs", "tmpfs"),
        ("/mnt/nvme/hidden/kv", "overlay", "overlay"),
        ("/proc/1", "proc", "proc"),
        ("/", "ext4", "/dev/vda"),
    ],
)
def test_the_mount_of_a_path_is_the_innermost_and_the_last(
    built: TreeBuilder, path: str, fs_type: str, source: str
) -> None:
    built.file("/proc/self/mountinfo", MOUNTS)
    found = mount_of(built.tree, path)
    assert found is not None
    assert (found.fs_type, found.source) == (fs_type, source)


def test_a_partition_leads_to_its_drive(built: TreeBuilder) -> None:
    drive = nvme(built, 1, "259:0")
    built.block("259:2", f"{drive}/nvme1n1p1", partition="1")
    built.file("/proc/self/mountinfo", MOUNTS)
    built.file("/proc/fs/ext4/nvme1n1p1/options", "rw\ndata=ordered\n")
    built.file("/run/udev/data/b259:2", "S:disk/by-id/x\nE:ID_FS_USAGE=filesystem\n")
    found = storage(built.tree, "/mnt/nvme/kv")
    assert (found.mount_point, found.device, found.fs_type) == ("/mnt/nvme", "259:2", "ext4")
    assert "data=ordered" in found.mount_options
    assert (found.journal_mode, found.udev_usage, found.layers) == ("ordered", "filesystem", ())
    (each,) = found.drives
    assert (each.name, each.kind, each.transport, each.scheduler) == ("nvme1n1", "nvme", "pcie", "none")
    assert (each.model, each.rotational, each.numa_node) == ("SAMSUNG MZWLO7T6HBLA", False, 0)
    assert (each.pci_address, each.pci_path) == (
        "0000:11:00.0",
        ("pci0000:15", "0000:15:01.0", "0000:11:00.0"),
    )
    assert (found.writable, found.o_direct) == (None, None)  # nothing is tried on a recorded tree


def test_lvm_on_a_raid_is_seen_down_to_its_drives(built: TreeBuilder) -> None:
    first, second = nvme(built, 1, "259:0"), nvme(built, 2, "259:1")
    built.block("9:0", "virtual/block/md0", md__level="raid0")
    built.block("252:0", "virtual/block/dm-0", dm__uuid="LVM-abc", dm__name="vg-kv")
    for name, path in (("nvme1n1", first), ("nvme2n1", second)):
        built.link(f"/sys/devices/virtual/block/md0/slaves/{name}", f"/sys/devices/{path}")
    built.link("/sys/devices/virtual/block/dm-0/slaves/md0", "/sys/devices/virtual/block/md0")
    built.file("/proc/self/mountinfo", "1 0 252:0 / / rw - xfs /dev/mapper/vg-kv rw")
    found = storage(built.tree, "/kv")
    assert [(each.name, each.kind, each.detail) for each in found.layers] == [
        ("dm-0", "dm", "LVM-abc"),
        ("md0", "md", "raid0"),
    ]
    assert [each.name for each in found.drives] == ["nvme1n1", "nvme2n1"]


def test_native_multipath_leads_to_a_controller(built: TreeBuilder) -> None:
    nvme(built, 1, "259:9", "rdma", hidden="c1")
    built.block("259:0", "virtual/nvme-subsystem/nvme-subsys1/nvme1n1", queue__rotational="0")
    controller = "/sys/devices/pci0000:15/0000:15:01.0/0000:11:00.0/nvme/nvme1"
    built.link("/sys/devices/virtual/nvme-subsystem/nvme-subsys1/nvme1", controller)
    built.file("/proc/self/mountinfo", "1 0 259:0 / / rw - xfs /dev/nvme1n1 rw")
    (each,) = storage(built.tree, "/kv").drives
    assert (each.transport, each.pci_address) == ("rdma", "0000:11:00.0")


def test_a_virtual_disk_is_told_from_a_drive(built: TreeBuilder) -> None:
    built.pci("pci0000:00/0000:00:02.0")
    built.block("254:0", "pci0000:00/0000:00:02.0/virtio1/block/vda", queue__rotational="1")
    built.file("/proc/self/mountinfo", MOUNTS)
    (each,) = storage(built.tree, "/srv").drives
    assert (each.name, each.kind, each.pci_address, each.numa_node) == ("vda", "virtio", "0000:00:02.0", None)


def test_a_filesystem_with_a_number_of_its_own_leads_to_its_source(built: TreeBuilder) -> None:
    nvme(built, 1, "259:0")
    built.file("/dev/nvme1n1")
    built.file("/proc/self/mountinfo", "1 0 0:33 /sub / rw - btrfs /dev/nvme1n1 rw")
    assert [each.name for each in storage(built.tree, "/kv").drives] == ["nvme1n1"]
