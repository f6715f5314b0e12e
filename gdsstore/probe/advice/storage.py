"""Findings about the filesystem and the devices that the store lies on."""

from __future__ import annotations

from collections.abc import Iterator

from gdsstore.probe.advice.finding import Finding, IoPath, Severity
from gdsstore.probe.derived import LOCAL_FILESYSTEMS, has_layer, on_fabric
from gdsstore.probe.facts import MachineFacts
from gdsstore.sizes import GiB

IN_MEMORY = ("tmpfs", "ramfs")
NETWORK = (
    "nfs",
    "nfs4",
    "lustre",
    "beegfs",
    "gpfs",
    "wekafs",
    "ceph",
    "cifs",
    "fuse.sshfs",
    "9p",
    "virtiofs",
)
NVME = "Put the store on ext4 or xfs, straight on a local NVMe drive, and run doctor on that directory."
HOST_COPY = "Each byte goes through host memory instead of straight between drive and GPU."
EBS = "Elastic Block Store"


def filesystem(facts: MachineFacts) -> Iterator[Finding]:
    storage = facts.storage
    kind = storage.fs_type
    if kind is None or kind in LOCAL_FILESYSTEMS:
        return
    if kind == "overlay":
        yield _direct(
            "overlayfs", "The directory is in a container's own overlay filesystem.", HOST_COPY, dead_end=True
        )
        yield _host(
            "overlayfs-host",
            "The store would be in the container's own layer.",
            "It is gone with the container, writes are slower, and the host's disk may fill.",
            "Mount a directory of the host into the container (docker run -v /mnt/nvme:/kv; Kubernetes: a hostPath or "
            "local volume), and put the store there.",
            ("LMCache#795",),
        )
    elif kind in IN_MEMORY:
        yield _direct(
            "in-memory",
            f"The directory is in memory ({kind}).",
            "There is no drive to be direct with.",
            dead_end=True,
        )
        yield _host(
            "in-memory-host",
            f"The store would be in memory ({kind}).",
            "It takes the RAM that it should save, and does not survive a reboot.",
            NVME,
        )
    elif kind in NETWORK or kind.startswith("fuse"):
        yield Finding(
            "network-filesystem",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"The directory is on a network filesystem or one in user space ({kind}).",
            "A store is made for drives of this machine. Some network filesystems have a direct path of their own, over "
            "RDMA, which a store does not use.",
            NVME,
            dead_end=True,
        )
    else:
        yield _direct(
            "filesystem-not-supported",
            f"cuFile goes direct on ext4 and xfs, and this is {kind}.",
            HOST_COPY,
        )


def ext4_ordered(facts: MachineFacts) -> Iterator[Finding]:
    storage = facts.storage
    if storage.fs_type != "ext4" or "data=ordered" in storage.mount_options:
        return
    used = f" (the kernel uses data={storage.journal_mode} by itself)" if storage.journal_mode else ""
    yield Finding(
        "ext4-data-ordered",
        Severity.BLOCKS,
        IoPath.DIRECT,
        f"ext4 is not mounted with data=ordered written out{used}.",
        "cuFile looks for these very words in the mount table and refuses the file otherwise. " + HOST_COPY,
        f"sudo umount {storage.mount_point}; sudo mount -o data=ordered {storage.source} {storage.mount_point}, and add "
        "data=ordered to its line in /etc/fstab (for the root filesystem: rootflags=data=ordered on the kernel's command "
        "line). A remount is not enough. Or use xfs, which needs no option.",
        ("DALI#3972",),
    )


def layers(facts: MachineFacts) -> Iterator[Finding]:
    mapped, looped = has_layer(facts, "dm"), has_layer(facts, "loop")
    if mapped:
        crypt = "CRYPT" in mapped
        yield Finding(
            "device-mapper",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"The filesystem is on {'an encrypted' if crypt else 'an LVM or other mapped'} device: {mapped}.",
            "cuFile refuses device-mapper devices, or does not find what it needs about them. " + HOST_COPY,
            "Make the filesystem on a partition of the NVMe drive itself (/dev/nvme0n1p1), without LVM, and move the store.",
            ("gds-nvidia-fs#62", "LMCache#795"),
        )
    if looped or has_layer(facts, "ram"):
        yield _direct(
            "loop-device",
            f"The filesystem is in a file or in memory ({looped or has_layer(facts, 'ram')}).",
            HOST_COPY,
        )


def drives(facts: MachineFacts) -> Iterator[Finding]:
    for drive in facts.storage.drives:
        if drive.kind != "nvme":
            virtual = "a virtual disk of the hypervisor" if drive.kind == "virtio" else "not an NVMe drive"
            mend = (
                "Give the virtual machine an NVMe drive by PCI pass-through; then "
                if facts.kernel.virtual_machine
                else ""
            )
            step = mend + (NVME[0].lower() + NVME[1:] if mend else NVME)
            yield Finding(
                "not-nvme",
                Severity.BLOCKS,
                IoPath.DIRECT,
                f"The drive under the directory ({drive.name}) is {virtual}.",
                "Only NVMe drives can read and write GPU memory. " + HOST_COPY,
                step,
                dead_end=True,
            )
        elif on_fabric(drive):
            yield Finding(
                "nvmeof-drive",
                Severity.BLOCKS,
                IoPath.DIRECT,
                f"The drive ({drive.name}) is in another machine: NVMe over {drive.transport}.",
                "A store is made for drives of this machine; direct I/O over fabrics has other requirements, which are "
                "not checked here, and use_pci_p2pdma breaks it.",
                NVME,
                ("nixl#1063",),
                dead_end=True,
            )
        if EBS in (drive.model or ""):
            yield _host(
                "network-drive",
                f"{drive.name} looks like NVMe, but is a network volume ({drive.model}).",
                "It has the bandwidth of the network share you pay for, often less than 1 GB/s.",
                "Use the instance's local NVMe drives (their model is Instance Storage).",
            )


def udev(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.nvidia.gpus:
        return
    inside = facts.container.kind is not None
    if facts.container.udev is False:
        yield Finding(
            "no-udev",
            Severity.BLOCKS,
            IoPath.DIRECT,
            "/run/udev cannot be read here.",
            "cuFile then knows nothing about the drive, and kvikio does not even try: both fall back to host memory.",
            "Start the container with -v /run/udev:/run/udev:ro (Kubernetes: a read-only hostPath volume)."
            if inside
            else "Start udev (sudo systemctl start systemd-udevd).",
            ("kvikio#33", "kvikio#283"),
        )
    elif facts.container.udev and facts.storage.drives and facts.storage.udev_usage is None:
        yield Finding(
            "udev-does-not-know",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"udev does not know that there is a filesystem on the device ({facts.storage.source}): ID_FS_USAGE is missing.",
            "cuFile asks udev for it, and falls back to host memory without it.",
            "On the host: sudo udevadm trigger --action=change /sys/dev/block/"
            f"{facts.storage.device}; udevadm info {facts.storage.source} must then show ID_FS_USAGE=filesystem.",
            ("LMCache#795",),
        )


def direct_io(facts: MachineFacts) -> Iterator[Finding]:
    storage = facts.storage
    if storage.writable is False or ("ro" in storage.mount_options and storage.writable is None):
        yield Finding(
            "not-writable",
            Severity.BLOCKS,
            IoPath.HOST,
            f"{storage.path} cannot be written.",
            "No store can be made there.",
            "Give a directory that this user may write to, on a filesystem that is not read-only.",
        )
    if storage.o_direct is False:
        title = f"{storage.fs_type or 'The filesystem'} refuses direct I/O (O_DIRECT)."
        yield _direct("no-o-direct", title, "cuFile needs it for the direct path.")
        yield _host(
            "no-o-direct-host",
            title,
            "Each byte goes through the page cache: copied once more, and memory taken from the model server.",
            "Put the store on ext4 or xfs.",
            ("LMCache#1522", "LMCache#1570", "LMCache#1824"),
        )
    if storage.free_bytes is not None and storage.free_bytes < GiB:
        yield _host(
            "drive-full",
            f"Only {storage.free_bytes / GiB:.2f} GiB are free.",
            "A store needs room for its whole capacity from the start.",
            "Free some, or use another drive.",
        )


def _direct(code: str, title: str, cost: str, *, dead_end: bool = False) -> Finding:
    return Finding(code, Severity.BLOCKS, IoPath.DIRECT, title, cost, NVME, dead_end=dead_end)


def _host(code: str, title: str, cost: str, next_step: str, see: tuple[str, ...] = ()) -> Finding:
    return Finding(code, Severity.COSTS, IoPath.HOST, title, cost, next_step, see)


RULES = (filesystem, ext4_ordered, layers, drives, udev, direct_io)
