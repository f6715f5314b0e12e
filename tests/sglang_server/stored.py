"""What lies in a store: asked with the command line tools, and damaged behind the server's back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from server import PAGE_SIZE

from gdsstore.errors import VolumeError
from gdsstore.volume.format import FLAG_STORED, SUPERBLOCK_BYTES, Superblock
from gdsstore.volume.volume import read_entries
from tests.sglang_server.launch import REPO

TOOL_TIMEOUT_S = 120.0


def tool(command: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `gdsstore COMMAND --store FOLDER`."""
    done = subprocess.run(
        [sys.executable, "-m", "gdsstore.cli.main", command, "--store", str(folder), "--json", "-", *options],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=TOOL_TIMEOUT_S,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def pages(folder: Path) -> int:
    """Pages in the store's catalog."""
    status, stats = tool("stats", folder)
    assert status == 0
    found: int = stats["catalog"]["pages"]
    return found


def namespaces(folder: Path) -> list[dict[str, Any]]:
    """The namespaces that have pages."""
    status, found = tool("inspect", folder)
    assert status == 0
    return [each for each in found["namespaces"] if each["pages"]]


def page_keys(tokens: Sequence[int]) -> list[str]:
    """SGLang's keys (tests/sglang_cpu/contracts.md) of the whole pages of a prompt without salt, except its last token."""
    keys, digest = [], b""
    for start in range(0, (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE):
        page = np.array(tokens[start : start + PAGE_SIZE], "<u4").tobytes()
        digest = hashlib.sha256(digest + page).digest()
        keys.append(digest.hex())
    return keys


def segment_files(folder: Path) -> list[Path]:
    return sorted((folder / "segments").glob("*.seg"))


def damage(folder: Path, keys: Collection[str]) -> int:
    """Flip one byte in the middle of the payload of each of these pages. Returns how many were found."""
    wanted = {bytes.fromhex(key) for key in keys}
    flipped = 0
    for path in segment_files(folder):
        with path.open("r+b") as file:
            geometry = Superblock.decode(file.read(SUPERBLOCK_BYTES), str(path)).geometry
            for slot, entry in enumerate(read_entries(file.fileno(), geometry)):
                if not entry["flags"] & FLAG_STORED or entry["key"].tobytes() not in wanted:
                    continue
                at = geometry.data_offset + slot * geometry.slot_bytes + int(entry["payload_bytes"]) // 2
                (byte,) = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte ^ 0xFF]), at)
                flipped += 1
            os.fsync(file.fileno())
    return flipped


def generations(folder: Path) -> dict[int, int]:
    """Of each segment file, by its number. A segment that was reclaimed and is filled again has a new one.

    The store may be in use: a file that goes, or whose first block is being written, is left out.
    """
    found = {}
    for path in segment_files(folder):
        with contextlib.suppress(FileNotFoundError, VolumeError):
            superblock = Superblock.decode(path.read_bytes()[:SUPERBLOCK_BYTES], str(path))
            found[superblock.segment_id] = superblock.generation
    return found
