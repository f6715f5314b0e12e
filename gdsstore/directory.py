"""The store directory: `store.json`, the namespaces' descriptions, and the marks in the volumes. Small files only."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdsstore.config import MAX_SEGMENT_BYTES, MIN_SEGMENT_BYTES
from gdsstore.errors import ArgumentError, StoreDamagedError, StoreError, StoreVersionError, from_os_error
from gdsstore.files import locked, make_directory, make_own_directory, read_small, write_atomic
from gdsstore.namespace import Identity, digest_of
from gdsstore.sequence import LAST_SEQUENCE
from gdsstore.volume.format import FORMAT_VERSION

log = logging.getLogger("gdsstore.store")

# What json and the reading below raise on content that is not ours; deep nesting ends the recursion.
NOT_OURS = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
DIGEST_NAME = re.compile(r"[0-9a-f]{32}\.json")


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What `store.json` says; written once, when the store is made."""

    uuid: bytes
    segment_bytes: int
    volumes: tuple[Path, ...]


class StoreDirectory:
    """Paths and small files of one store. `root` is the first volume."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalog = root / "catalog"
        self.heat = root / "heat"
        self.state = root / "state.json"
        self._info = root / "store.json"
        self._namespaces = root / "namespaces"

    def exists(self) -> bool:
        return self._info.exists()

    def prepare(self) -> None:
        """Make the directory, for its owner only. Raises StoreError with what is in the way."""
        try:
            make_directory(self.root)
            if not self.root.is_dir():
                raise NotADirectoryError(20, "not a directory", str(self.root))
            for path in (self.catalog, self._namespaces):
                make_own_directory(path)
        except FileExistsError as error:
            raise StoreError("the store's path is a file; give a directory", path=str(self.root)) from error
        except OSError as error:
            raise from_os_error(error, "cannot use the store's directory", StoreError) from error

    def remove_half_written(self) -> None:
        """Remove what killed processes left of small files. Call it only where no other process uses the store."""
        for path in [*self.root.glob("*.new"), *self._namespaces.glob("*.new")]:
            with contextlib.suppress(OSError):
                path.unlink()

    # --- store.json ---

    def create(self, segment_bytes: int, volumes: Sequence[Path]) -> StoreInfo:
        info = StoreInfo(uuid.uuid4().bytes, segment_bytes, tuple(volumes))
        content = {
            "format_version": FORMAT_VERSION,
            "uuid": info.uuid.hex(),
            "segment_bytes": segment_bytes,
            # The first volume is where this file is, so that a store on one drive can be moved.
            "volumes": [".", *(str(path) for path in volumes[1:])],
        }
        try:
            # store.json last: with it there is a store, and one whose volumes lack their marks could never be opened.
            for number, volume in enumerate(volumes[1:], 1):
                mark = {"uuid": info.uuid.hex(), "volume": number}
                write_atomic(volume / "volume.json", json.dumps(mark).encode())
            write_atomic(self._info, json.dumps(content, indent=1).encode())
        except OSError as error:
            raise from_os_error(error, "cannot make the store", StoreError) from error
        return info

    def read(self) -> StoreInfo:
        """Raises StoreVersionError for a newer format, StoreDamagedError where the file cannot be read."""
        where = str(self._info)
        try:
            content = json.loads(read_small(self._info))
            version = _whole(content["format_version"])
            if version > FORMAT_VERSION:
                raise StoreVersionError(
                    f"the store has format version {version}, this program reads up to {FORMAT_VERSION}; use a newer gdsstore",
                    path=where,
                )
            segment_bytes = _whole(content["segment_bytes"])
            info = StoreInfo(bytes.fromhex(content["uuid"]), segment_bytes, self._volumes(content["volumes"]))
        except OSError as error:
            raise from_os_error(error, "cannot read store.json", StoreDamagedError) from error
        except NOT_OURS as error:
            raise StoreDamagedError(
                "store.json is damaged; restore it, or make a new store", path=where
            ) from error
        right_size = MIN_SEGMENT_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES
        if len(info.uuid) != 16 or not right_size or segment_bytes & (segment_bytes - 1):
            raise StoreDamagedError("store.json is damaged; restore it, or make a new store", path=where)
        return info

    def _volumes(self, names: Any) -> tuple[Path, ...]:
        """The first is this directory, the others are whole paths, each another one. Raises ValueError or TypeError."""
        if not isinstance(names, list) or names[:1] != ["."]:
            raise ValueError("the first volume is where store.json is")
        volumes = (self.root, *map(Path, names[1:]))
        whole = all(path.is_absolute() and "\0" not in str(path) for path in volumes[1:])
        if not whole or len(set(volumes)) != len(volumes):
            raise ValueError("a volume is no whole path, or is named twice")
        return volumes

    def check_volumes(self, info: StoreInfo, given: Sequence[Path]) -> None:
        """The given paths are the store's, and each further volume is the one that it was: mounted, not swapped."""
        if len(given) > 1 and [*map(os.path.realpath, given)] != [*map(os.path.realpath, info.volumes)]:
            raise ArgumentError(
                f"the store has the volumes {', '.join(map(str, info.volumes))}; give these in this order, or the first alone"
            )
        for number, volume in enumerate(info.volumes[1:], 1):
            try:
                mark = json.loads(read_small(volume / "volume.json"))
            except (OSError, ValueError, RecursionError) as error:
                raise StoreError(
                    "a volume of the store is not there; is its drive mounted?", path=str(volume)
                ) from error
            if mark != {"uuid": info.uuid.hex(), "volume": number}:
                raise StoreError("this directory is a volume of another store", path=str(volume))

    # --- namespaces ---

    def describe_namespace(self, namespace: Identity) -> None:
        """Keep what a digest stands for, for `inspect`. A file that is there and whole stays."""
        path = self._namespace_path(namespace.digest)
        there = self._read_namespace(path) if path.exists() else {}
        if there and _describes(there, path):
            return
        with self._changing_namespaces():
            kept = self._read_namespace(path) if path.exists() else {}
            cleared = kept.get("cleared_before", 0)
            self._write_namespace(path, {"describes": namespace.describe(), "cleared_before": cleared})

    def mark_cleared(self, digest: bytes, sequence: int) -> None:
        """Pages of this namespace that were written up to `sequence` must not come back in a rebuild."""
        path = self._namespace_path(digest)
        with self._changing_namespaces():
            kept = self._read_namespace(path)
            cleared = max(sequence, kept.get("cleared_before", 0))
            self._write_namespace(path, {**kept, "cleared_before": cleared})

    def namespaces(self) -> dict[bytes, dict[str, Any]]:
        """What each known digest stands for; a file that is damaged or lies is left out."""
        found = {}
        for path in sorted(self._namespaces.glob("*.json")):
            content = self._read_namespace(path)
            if content and _describes(content, path):
                found[bytes.fromhex(path.stem)] = content["describes"]
        return found

    def cleared(self) -> dict[bytes, int]:
        marks = {
            path.stem: self._read_namespace(path).get("cleared_before", 0)
            for path in self._namespaces.glob("*.json")
        }
        return {bytes.fromhex(stem): mark for stem, mark in marks.items() if mark}

    def _namespace_path(self, digest: bytes) -> Path:
        return self._namespaces / f"{digest.hex()}.json"

    def _read_namespace(self, path: Path) -> dict[str, Any]:
        try:
            content = json.loads(read_small(path))
            named = DIGEST_NAME.fullmatch(path.name) and isinstance(content["describes"], dict)
            if named and 0 <= _whole(content["cleared_before"]) < LAST_SEQUENCE:
                return dict(content)
        except (OSError, *NOT_OURS):
            pass
        log.warning("%s is damaged; the namespace's description is lost, its pages are not", path)
        return {}

    @contextlib.contextmanager
    def _changing_namespaces(self) -> Iterator[None]:
        """Two that read a file and write it anew at the same time would lose one's mark."""
        try:
            with locked(self._namespaces):
                yield
        except OSError as error:
            raise from_os_error(error, "cannot write a namespace's description", StoreError) from error

    def _write_namespace(self, path: Path, content: dict[str, Any]) -> None:
        try:
            write_atomic(path, json.dumps(content, indent=1).encode())
        except OSError as error:
            raise from_os_error(error, "cannot write a namespace's description", StoreError) from error


def _whole(value: Any) -> int:
    """Raises TypeError for what is no whole number, which `true` and 1.0 are not."""
    if type(value) is not int:
        raise TypeError(f"not a whole number: {value!r}")
    return value


def _describes(content: dict[str, Any], path: Path) -> bool:
    """Whether a namespace's file tells what the digest in its name stands for."""
    try:
        return digest_of(content["describes"]).hex() == path.stem
    except RecursionError:
        return False


def as_paths(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """One path or several as absolute paths. Raises ArgumentError for none, for one twice, and for a file."""
    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found = [Path(path).expanduser().absolute() for path in several]
    if not found:
        raise ArgumentError("a store needs at least one path")
    if len(set(found)) != len(found):
        raise ArgumentError("a volume is named twice")
    if any("\0" in str(path) for path in found):
        raise ArgumentError("a path has no NUL in it", path=repr(found))
    for path in found:
        try:
            is_file = path.exists() and not stat.S_ISDIR(path.stat().st_mode)
        except OSError as error:
            raise from_os_error(error, "cannot use the store's directory", StoreError) from error
        if is_file:
            raise ArgumentError("the store's path is a file; give a directory", path=str(path))
    return found
