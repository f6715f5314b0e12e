"""What lies under a path: filesystem, mount options, block devices, and the drives at the bottom."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gdsstore.errors import VolumeError
from gdsstore.probe.drives import block
from gdsstore.probe.facts import Storage
from gdsstore.probe.tree import Tree
from gdsstore.volume.direct import probe_direct

_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo (proc_pid_mountinfo(5)): the mount's options, then the filesystem's."""

    device: str
    point: str
    fs_type: str
    source: str
    options: tuple[str, ...]


def storage(tree: Tree, path: str) -> Storage:
    """`path`: absolute. Only on the machine itself is it tried whether the directory can be written, with O_DIRECT."""
    real = os.path.realpath(path) if tree.live else path
    mount = mount_of(tree, real)
    found = Storage(path=real)
    if mount is not None:
        layers, drives = block(tree, mount.device, mount.source)
        found = replace(
            found,
            mount_point=mount.point,
            source=mount.source,
            device=mount.device,
            fs_type=mount.fs_type,
            mount_options=mount.options,
            journal_mode=_journal_mode(tree, mount),
            udev_usage=_udev_usage(tree, mount.device),
            layers=layers,
            drives=drives,
        )
    return _tried(found, tree.notes) if tree.live else found


def mount_of(tree: Tree, path: str) -> Mount | None:
    """The mount that a path is in: the longest mount point above it, and of equal ones the last, which hides the others."""
    best: Mount | None = None
    for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = _unescaped(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            options = dict.fromkeys(f"{fields[5]},{rest[2]}".split(","))
            best = Mount(fields[2], point, rest[0], _unescaped(rest[1]), tuple(options))
    return best


def _journal_mode(tree: Tree, mount: Mount) -> str | None:
    """ext4's, which the kernel lists only there where it was not asked for at mount."""
    if mount.fs_type != "ext4":
        return None
    name = tree.resolve(f"/sys/dev/block/{mount.device}").rpartition("/")[2]
    options = (tree.text(f"/proc/fs/ext4/{name}/options") or "").split()
    chosen = [each for each in (*options, *mount.options) if each.startswith("data=")]
    return chosen[0].removeprefix("data=") if chosen else None


def _udev_usage(tree: Tree, device: str) -> str | None:
    for line in (tree.text(f"/run/udev/data/b{device}") or "").splitlines():
        if line.startswith("E:ID_FS_USAGE="):
            return line.partition("=")[2]
    return None


def _tried(found: Storage, notes: list[str]) -> Storage:
    path = Path(str(found.path))
    try:
        room = os.statvfs(path)
        with _without_warnings():
            direct = probe_direct(path)
    except (OSError, VolumeError) as error:
        notes.append(f"{path}: {error}")
        return replace(found, writable=False)
    return replace(
        found,
        free_bytes=room.f_bavail * room.f_frsize,
        writable=True,
        o_direct=direct.direct,
        memory_alignment=direct.memory_alignment if direct.direct else None,
    )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The warning that a volume without O_DIRECT logs would come before the advice that says the same."""
    logger = logging.getLogger("gdsstore.volume")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
