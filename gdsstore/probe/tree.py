"""Reading /proc, /sys and the like below a root, so that trees recorded on other machines can be read too. Never raises."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENXIO)
LIVE = Path("/")

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


class Tree:
    """`notes` collects what is there and could not be read, one line each."""

    def __init__(self, root: Path = LIVE) -> None:
        self.root = Path(os.path.realpath(root))
        self.live = self.root == LIVE
        self.notes: list[str] = []

    def at(self, path: str) -> Path:
        """Where an absolute path lies in this tree."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """A file's text, stripped; None where it is not there or cannot be read."""
        try:
            return self.at(path).read_text(errors="replace").strip()
        except OSError as error:
            self._note(path, error)
            return None

    def integer(self, path: str) -> int | None:
        text = self.text(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            self.notes.append(f"{path}: {text[:40] if text else text!r} is not a number")
            return None

    def lines(self, path: str) -> Iterator[str]:
        """A file line by line, for files of many megabytes."""
        try:
            with self.at(path).open(errors="replace") as file:
                yield from file
        except OSError as error:
            self._note(path, error)

    def names(self, path: str) -> tuple[str, ...]:
        """Names in a directory, sorted; none where it is not there."""
        try:
            return tuple(sorted(os.listdir(self.at(path))))
        except OSError as error:
            self._note(path, error)
            return ()

    def exists(self, path: str) -> bool:
        return self.at(path).exists()

    def readable(self, path: str) -> bool:
        return os.access(self.at(path), os.R_OK | os.X_OK)

    def resolve(self, path: str) -> str:
        """Where links lead, as an absolute path of this tree."""
        real = os.path.realpath(self.at(path))
        return "/" + os.path.relpath(real, self.root) if not self.live else real

    def pci_path(self, sysfs_path: str) -> tuple[str, ...]:
        """Host bridge, bridges and device on the way to something in sysfs; empty where it hangs on no PCI bus."""
        parts = self.resolve(sysfs_path).split("/")
        return tuple(part for part in parts if _HOST_BRIDGE.fullmatch(part) or _PCI.fullmatch(part))

    def iommu(self, pci_address: str | None) -> str | None:
        """Type of a PCI device's IOMMU domain ("identity", "DMA", "DMA-FQ"); None where no IOMMU is in use."""
        return self.text(f"/sys/bus/pci/devices/{pci_address}/iommu_group/type") if pci_address else None

    def numa_node(self, pci_address: str | None) -> int | None:
        node = self.integer(f"/sys/bus/pci/devices/{pci_address}/numa_node") if pci_address else None
        return None if node is None or node < 0 else node

    def _note(self, path: str, error: OSError) -> None:
        if error.errno not in NOT_THERE:
            self.notes.append(f"{path}: {error.strerror}")


def last_pci_address(pci_path: tuple[str, ...]) -> str | None:
    """The device at the end of a PCI path; None where there is only a host bridge or nothing."""
    return pci_path[-1] if pci_path and _PCI.fullmatch(pci_path[-1]) else None
