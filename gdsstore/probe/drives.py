"""A block device seen down to its drives: through partitions, device mapper, RAID, loop devices and NVMe multipath."""

from __future__ import annotations

from gdsstore.probe.facts import Drive, Layer
from gdsstore.probe.tree import Tree, last_pci_address

DEPTH = 8  # no sane stack is deeper; a broken sysfs must not loop us

Found = tuple[tuple[Layer, ...], tuple[Drive, ...]]


def block(tree: Tree, device: str, source: str) -> Found:
    """Layers, top to bottom, and drives under "major:minor". Where that is no block device (btrfs), under `source`."""
    link = f"/sys/dev/block/{device}"
    if not tree.exists(link):
        link = (
            f"/sys/class/block/{tree.resolve(source).rpartition('/')[2]}"
            if source.startswith("/dev/")
            else ""
        )
    if not link or not tree.exists(link):
        return (), ()
    layers: dict[str, Layer] = {}
    drives: dict[str, Drive] = {}
    _down(tree, tree.resolve(link), layers, drives, 0)
    return tuple(layers.values()), tuple(drives.values())


def _down(tree: Tree, device: str, layers: dict[str, Layer], drives: dict[str, Drive], depth: int) -> None:
    if tree.exists(f"{device}/partition"):
        device = device.rpartition("/")[0]
    name = device.rpartition("/")[2]
    layer = _layer(tree, device, name)
    if layer is None:
        drives[name] = _drive(tree, device, name)
        return
    layers[name] = layer
    for below in tree.names(f"{device}/slaves") if depth < DEPTH else ():
        _down(tree, tree.resolve(f"{device}/slaves/{below}"), layers, drives, depth + 1)


def _layer(tree: Tree, device: str, name: str) -> Layer | None:
    if name.startswith("dm-"):
        return Layer(name, "dm", tree.text(f"{device}/dm/uuid") or tree.text(f"{device}/dm/name"))
    if name.startswith("md"):
        return Layer(name, "md", tree.text(f"{device}/md/level"))
    if name.startswith("loop"):
        return Layer(name, "loop", tree.text(f"{device}/loop/backing_file"))
    if name.startswith(("zram", "ram", "brd")):
        return Layer(name, "ram")
    return None


def _drive(tree: Tree, device: str, name: str) -> Drive:
    controller = _controller(tree, device) if name.startswith("nvme") else f"{device}/device"
    path = tree.pci_path(controller if tree.exists(controller) else device)
    address = last_pci_address(path)
    rotational = tree.text(f"{device}/queue/rotational")
    return Drive(
        name=name,
        kind=_kind(name),
        model=tree.text(f"{controller}/model"),
        transport=tree.text(f"{controller}/transport") if name.startswith("nvme") else None,
        pci_address=address,
        pci_path=path,
        numa_node=tree.numa_node(address),
        iommu=tree.iommu(address),
        scheduler=_scheduler(tree.text(f"{device}/queue/scheduler")),
        rotational=None if rotational is None else rotational == "1",
    )


def _controller(tree: Tree, device: str) -> str:
    """A namespace lies in its controller; with native multipath, in a subsystem that has links to its controllers."""
    parent = device.rpartition("/")[0]
    if tree.exists(f"{parent}/transport"):
        return parent
    links = [
        name for name in tree.names(parent) if name.startswith("nvme") and name.removeprefix("nvme").isdigit()
    ]
    return tree.resolve(f"{parent}/{links[0]}") if links else parent


def _kind(name: str) -> str:
    for prefix, kind in (("nvme", "nvme"), ("vd", "virtio"), ("sd", "scsi")):
        if name.startswith(prefix):
            return kind
    return "other"


def _scheduler(text: str | None) -> str | None:
    if text is None or "[" not in text:
        return text
    return text[text.index("[") + 1 : text.index("]")]
