"""Which NUMA node a drive or GPU hangs on, and how memory gets there.

Every function that reads sysfs takes its root, so that trees recorded on other machines can be read too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gdsstore.memory import syscalls

SYSFS = Path("/sys")

_UNKNOWN = -1  # what firmware that does not say gives
_MPOL_PREFERRED = 1
_MPOL_BIND = 2
_MASK_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def online_nodes(sysfs: Path = SYSFS) -> tuple[int, ...]:
    """The nodes of this machine, ascending; empty where the kernel knows none."""
    text = _read(sysfs / "devices/system/node/online")
    nodes: list[int] = []
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return tuple(sorted(nodes))


def node_of_pci(bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """The node of a PCI device such as a GPU ("0000:1b:00.0", or CUDA's form with eight digits and capitals)."""
    domain, _, rest = bus_id.lower().partition(":")
    return _numa_node(sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}")


def node_of_path(path: Path, sysfs: Path = SYSFS) -> int | None:
    """The node of the drive under a file or directory; None where it is not one drive, or lies on several nodes.

    Raises OSError if `path` is not there.
    """
    device = os.stat(path).st_dev
    return node_of_block(os.major(device), os.minor(device), sysfs)


def node_of_block(major: int, minor: int, sysfs: Path = SYSFS) -> int | None:
    """The node of a block device, seen through partitions, device mapper, RAID and NVMe multipath."""
    link = sysfs / "dev/block" / f"{major}:{minor}"
    if not link.exists():
        return None
    nodes = set(_block_nodes(link.resolve(), sysfs.resolve()))
    return nodes.pop() if len(nodes) == 1 and _UNKNOWN not in nodes else None


def place(address: int, length: int, node: int, *, strict: bool) -> None:
    """Ask for the pages of a range that are not there yet to come from `node`.

    `strict` lets a fault fail where the node has none left; else another node helps out. Raises OSError (EPERM in
    containers without CAP_SYS_NICE, EINVAL for a node outside the cpuset).
    """
    words = node // _MASK_WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _MASK_WORD_BITS] = 1 << (node % _MASK_WORD_BITS)
    policy = _MPOL_BIND if strict else _MPOL_PREFERRED
    # One more than the mask's bits: the kernel looks at `maxnode - 1` bits (mbind(2), BUGS of get_mempolicy).
    syscalls.call("mbind", address, length, policy, ctypes.addressof(mask), words * _MASK_WORD_BITS + 1, 0)


def nodes_of_memory(address: int, length: int, samples: int = 64) -> npt.NDArray[np.int32]:
    """The node of up to `samples` pages spread over a range, int32[n]; below 0 (-errno) where no page is. OSError."""
    n = max(1, min(samples, length // 4096))
    pages = (np.uint64(address) + np.linspace(0, length - 1, n).astype(np.uint64)).astype(np.uint64)
    pages &= ~np.uint64(4095)
    status = np.full(n, -1, dtype=np.int32)
    # No target nodes: move_pages then only tells where the pages are (move_pages(2)).
    syscalls.call("move_pages", 0, n, pages.ctypes.data, 0, status.ctypes.data, 0)
    return status


def _block_nodes(device: Path, sysfs: Path) -> Iterator[int]:
    """The node of each drive below a block device, or _UNKNOWN."""
    if (device / "partition").exists():
        device = device.parent
    slaves = sorted(device.glob("slaves/*"))
    if slaves:
        for slave in slaves:
            yield from _block_nodes(slave.resolve(), sysfs)
        return
    # With native multipath the block device is virtual; the controllers are links beside it.
    controllers = [link for link in sorted(device.parent.glob("nvme*")) if link.is_symlink()]
    if controllers:
        for controller in controllers:
            yield _nearest(controller.resolve(), sysfs)
        return
    yield _nearest(device, sysfs)


def _nearest(device: Path, sysfs: Path) -> int:
    """The node of the nearest ancestor that has one."""
    while device != sysfs and device != device.parent:
        node = _numa_node(device)
        if node is not None:
            return node
        device = device.parent
    return _UNKNOWN


def _numa_node(device: Path) -> int | None:
    text = _read(device / "numa_node")
    return int(text) if text and int(text) != _UNKNOWN else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
