"""Filesystems that tests mount, where they may."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(directory: Path, *arguments: str) -> Iterator[Path]:
    """`mount ARGUMENTS directory` for the length of a `with`. Skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    directory.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(directory)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextlib.contextmanager
def small_ext4(tmp_path: Path, mebibytes: int) -> Iterator[Path]:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(mebibytes << 20)
    made = subprocess.run(
        ["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"mkfs.ext4: {made.stderr.strip()}")
    with mounted(tmp_path / "ext4", "-o", "loop", str(image)) as directory:
        yield directory


@contextlib.contextmanager
def small_tmpfs(tmp_path: Path, mebibytes: int) -> Iterator[Path]:
    with mounted(tmp_path / "tmpfs", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs") as directory:
        yield directory


@contextlib.contextmanager
def overlay(tmp_path: Path) -> Iterator[Path]:
    """An overlayfs with its upper layer on the filesystem of the tests, or in memory where that one cannot hold it."""
    with contextlib.ExitStack() as stack:
        for base in (tmp_path, stack.enter_context(small_tmpfs(tmp_path, 200))):
            layers = [base / name for name in ("lower", "upper", "work")]
            for layer in layers:
                layer.mkdir()
            lower, upper, work = layers
            target = tmp_path / "overlay"
            target.mkdir(exist_ok=True)
            options = f"lowerdir={lower},upperdir={upper},workdir={work}"
            probe = ["mount", "-t", "overlay", "overlay", "-o", options, str(target)]
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                stack.callback(subprocess.run, ["umount", "--lazy", str(target)], check=True)
                yield target
                return
        pytest.skip("overlayfs cannot be mounted here")


def fill_up(directory: Path, leave_bytes: int = 0) -> Path:
    """Take all room that is left but so much; delete the returned file to give it back."""
    ballast = directory / "ballast"
    with ballast.open("wb") as file:
        taken = 0
        for step in (1 << 20, 1 << 14, 1 << 12):
            with contextlib.suppress(OSError):
                while os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize - leave_bytes >= step:
                    os.posix_fallocate(file.fileno(), taken, step)
                    taken += step
    return ballast
