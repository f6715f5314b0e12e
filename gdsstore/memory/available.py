"""How much memory this process can still touch before the kernel kills something."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int | None:
    """The least of the machine's MemAvailable and what this process's cgroups (v2) leave; None where unknown."""
    rooms = [room for room in (_machine(root), *_cgroups(root)) if room is not None]
    return max(0, min(rooms)) if rooms else None


def _machine(root: Path) -> int | None:
    kib = _table(root / "proc/meminfo").get("MemAvailable:")
    return None if kib is None else kib * 1024


def _cgroups(root: Path) -> list[int | None]:
    """The room in the process's cgroup and in each above it: the tightest limit counts."""
    own = next(
        (line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/"
    )
    mount = root / "sys/fs/cgroup"
    group = mount / own.strip("/")
    # Without a cgroup namespace a container sees its host's path, which is not mounted; its own root is then the mount.
    groups = [group, *group.parents] if group.is_dir() else [mount]
    return [_cgroup(path) for path in groups if path == mount or mount in path.parents]


def _cgroup(group: Path) -> int | None:
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if not limit.isdigit() or not used.isdigit():
        return None
    # The page cache is charged to the cgroup too, but gives way.
    cache = _table(group / "memory.stat")
    return int(limit) - int(used) + cache.get("inactive_file", 0) + cache.get("active_file", 0)


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
