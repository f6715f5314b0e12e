"""Builds a tree like a machine's /proc and /sys in a folder."""

from __future__ import annotations

import os
from pathlib import Path

from gdsstore.probe.tree import Tree

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.51.03  Release Build  (dvs-builder)\nGCC version: 13"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024"
# BAR0, BAR1 (at number 2: both are 64-bit), BAR3, as on Hopper; 256 GiB.
RESOURCE = """0x0000028042000000 0x0000028042ffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000020000000000 0x0000023fffffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000028040000000 0x0000028041ffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000"""


class TreeBuilder:
    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def tree(self) -> Tree:
        return Tree(self.root)

    def file(self, path: str, text: str = "") -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def folder(self, path: str) -> None:
        (self.root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def link(self, path: str, target: str) -> None:
        """A relative link to another absolute path of the tree, as sysfs has them."""
        link = self.root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / target.lstrip("/"), link.parent))

    def pci(self, path: str, **files: str) -> None:
        """A PCI device at a sysfs path below /sys/devices, with files, and its link on the bus."""
        self.folder(f"/sys/devices/{path}")
        for name, text in files.items():
            self.file(f"/sys/devices/{path}/{name}", text)
        self.link(f"/sys/bus/pci/devices/{path.rpartition('/')[2]}", f"/sys/devices/{path}")

    def block(self, device: str, path: str, **files: str) -> None:
        """A block device "major:minor" at a path below /sys/devices."""
        self.folder(f"/sys/devices/{path}")
        for name, text in files.items():
            self.file(f"/sys/devices/{path}/{name.replace('__', '/')}", text)
        self.link(f"/sys/dev/block/{device}", f"/sys/devices/{path}")
        self.link(f"/sys/class/block/{path.rpartition('/')[2]}", f"/sys/devices/{path}")


def gpu_machine(built: TreeBuilder, banner: str = OPEN) -> None:
    built.file("/proc/driver/nvidia/version", banner)
    built.file(
        "/proc/driver/nvidia/params", 'EnableResizableBar: 0\nRegistryDwords: "RMForceStaticBar1=1;"\nFoo: ""'
    )
    built.file(
        "/proc/driver/nvidia/gpus/0000:1b:00.0/information",
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\nBus Type: PCIe",
    )
    built.pci("pci0000:15/0000:15:01.0/0000:1b:00.0", resource=RESOURCE, numa_node="1", vendor="0x10de")
    built.file("/sys/kernel/iommu_groups/7/type", "DMA-FQ")
    built.link("/sys/devices/pci0000:15/0000:15:01.0/0000:1b:00.0/iommu_group", "/sys/kernel/iommu_groups/7")
    built.folder("/sys/devices/pci0000:15/0000:15:01.0/0000:1b:00.0/p2pmem")


def nvme(built: TreeBuilder, number: int, device: str, transport: str = "pcie", hidden: str = "") -> str:
    """A namespace with its controller; returns its path below /sys/devices."""
    pci = f"pci0000:15/0000:15:0{number}.0/0000:1{number}:00.0"
    built.pci(pci, numa_node="0")
    controller = f"{pci}/nvme/nvme{number}"
    built.file(f"/sys/devices/{controller}/transport", transport)
    built.file(f"/sys/devices/{controller}/model", "SAMSUNG MZWLO7T6HBLA  ")
    path = f"{controller}/nvme{number}{hidden}n1"
    built.block(device, path, queue__scheduler="[none] mq-deadline", queue__rotational="0", dev=device)
    return path
