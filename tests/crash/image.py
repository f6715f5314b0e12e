"""Writing down what a power cut may leave of a store: the synced bytes, and any part of what was written since."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from gdsstore.catalog.state import catalog_mark
from tests.crash.recorder import Recorder, listing

BLOCK_BYTES = 4096
SECTOR_BYTES = 512  # drives write at least these whole


def write_image(recorder: Recorder, out: Path, rng: random.Random) -> None:
    """The store of `recorder` as a new directory `out`, as it may look after the next boot."""
    current = {
        ino: path for path in recorder.root.rglob("*") if path.is_file() for ino in [path.stat().st_ino]
    }
    for directory, known in recorder.directories.items():
        names = rng.choice([*known.listings, listing(directory)])
        target = out / directory.relative_to(recorder.root)
        target.mkdir(parents=True, exist_ok=True)
        for name, inode in names.items():
            if name == "heat" or name.endswith(".lock"):
                continue
            synced = recorder.files.get(inode)
            old = synced.content if synced is not None else b""
            new = current[inode].read_bytes() if inode in current else old
            (target / name).write_bytes(_some_of(old, new, rng))
    (out / "catalog").mkdir(exist_ok=True)
    _write_state(recorder, out, rng)
    _write_heat(recorder.root / "heat", out / "heat", rng)


def _some_of(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """Each block that was written since the sync is there, not there, or there in part."""
    if old == new:
        return old
    if len(old) != len(new) and rng.random() < 0.5:
        new = new[: rng.randrange(len(new) + 1)]  # the size did not reach the drive
    size = -(-max(len(old), len(new)) // BLOCK_BYTES) * BLOCK_BYTES
    generator = np.random.default_rng(rng.randrange(1 << 32))
    a, b = (
        np.frombuffer(part.ljust(size, b"\0"), np.uint8).reshape(
            -1, BLOCK_BYTES // SECTOR_BYTES, SECTOR_BYTES
        )
        for part in (old, new)
    )
    kept_share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    kind = generator.choice(3, size=(len(a), 1), p=(kept_share * 0.8, (1 - kept_share) * 0.8, 0.2))
    torn = generator.random((len(a), BLOCK_BYTES // SECTOR_BYTES)) < generator.random((len(a), 1))
    take = np.where(kind == 2, torn, kind == 0)
    return np.where(take[:, :, None], b, a).tobytes()[: max(len(old), len(new))]


def _write_state(recorder: Recorder, out: Path, rng: random.Random) -> None:
    """The boot is another one; the catalog is anything, but where the store was closed it had been synced before."""
    path = out / "state.json"
    catalog = recorder.root / "catalog" / "data.mdb"
    state = json.loads(path.read_text()) if path.exists() and path.stat().st_size else {}
    if state.get("clean"):
        _copy_sparsely(catalog.read_bytes(), out / "catalog" / "data.mdb")
        state["catalog_mark"] = catalog_mark(out / "catalog")
    elif catalog.exists():
        _mess_up(recorder.old_catalog, catalog.read_bytes(), out / "catalog", rng)
    if state:
        path.write_text(json.dumps(state | {"boot_id": "before the power cut"}))


def _mess_up(old: bytes, new: bytes, out: Path, rng: random.Random) -> None:
    """A catalog that nobody synced: it may also be whole and merely old, so that no check of its own can tell."""
    used = len(new.rstrip(b"\0"))
    old = old.ljust(len(new), b"\0")
    file = bytearray(new)
    match rng.randrange(7):
        case 0:
            return  # it is not there
        case 1:
            file = file[: rng.randrange(used + 1)]
        case 2:
            file[:used] = rng.randbytes(used)
        case 3:
            for at in range(0, used, BLOCK_BYTES):
                if rng.random() < 0.5:
                    file[at : at + BLOCK_BYTES] = old[at : at + BLOCK_BYTES]
        case 4:
            file[: 2 * BLOCK_BYTES] = rng.randbytes(2 * BLOCK_BYTES)
        case 5:
            file = bytearray(old)
        case _:
            pass
    _copy_sparsely(bytes(file), out / "data.mdb")
    if rng.random() < 0.5:
        (out / "lock.mdb").write_bytes(rng.randbytes(rng.randrange(20000)))


def _copy_sparsely(content: bytes, path: Path) -> None:
    with path.open("wb") as file:
        file.write(content.rstrip(b"\0"))
        file.truncate(len(content))


def _write_heat(heat: Path, out: Path, rng: random.Random) -> None:
    content = heat.read_bytes() if heat.exists() else b""
    match rng.randrange(6):
        case 0:
            return
        case 1:
            out.write_bytes(b"")
        case 2:
            out.write_bytes(content[: rng.randrange(len(content) + 1)])
        case 3:
            out.write_bytes(rng.randbytes(rng.randrange(1, 1 << 21)))
        case 4:  # its header, and then anything
            out.write_bytes(content[:4096] + rng.randbytes(max(0, len(content) - 4096)))
        case _:
            out.write_bytes(content)
