"""What is installed, what the environment sets, and what kind of container this is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from gdsstore.probe.facts import Container, Environment, Packages
from gdsstore.probe.tree import Tree

KVIKIO = ("kvikio", "kvikio-cu12", "kvikio-cu13")
NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
PLUGIN = "libplugin_"

_CAP_SYS_ADMIN = 21


def packages(search_path: Iterable[str] | None, environ: Mapping[str, str]) -> Packages:
    """Versions from the metadata of what lies on a Python path (None: this process's). Nothing is imported."""
    folders = list(sys.path if search_path is None else search_path)
    versions: dict[str, str] = {}
    for each in metadata.distributions(path=folders):
        versions.setdefault(str(each.metadata["Name"]).lower().replace("_", "-"), each.version)
    plugins = {
        file.stem.removeprefix(PLUGIN)
        for folder in _plugin_folders(folders, environ)
        for file in folder.glob(f"{PLUGIN}*.so")
    }
    return Packages(_first(versions, KVIKIO), _first(versions, NIXL), tuple(sorted(plugins)))


def environment(environ: Mapping[str, str]) -> Environment:
    return Environment(
        pytorch_alloc_conf=environ.get("PYTORCH_CUDA_ALLOC_CONF", environ.get("PYTORCH_ALLOC_CONF")),
        cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        kvikio_compat_mode=environ.get("KVIKIO_COMPAT_MODE"),
        cufile_allow_compat_mode=environ.get("CUFILE_ALLOW_COMPAT_MODE"),
        cufile_force_compat_mode=environ.get("CUFILE_FORCE_COMPAT_MODE"),
        cufile_use_pcip2pdma=environ.get("CUFILE_USE_PCIP2PDMA"),
        nixl_plugin_dir=environ.get("NIXL_PLUGIN_DIR"),
    )


def container(tree: Tree, environ: Mapping[str, str]) -> Container:
    return Container(
        kind=_kind(tree, environ),
        privileged=_privileged(tree),
        udev=tree.exists("/run/udev/data") and tree.readable("/run/udev"),
    )


def _plugin_folders(folders: Iterable[str], environ: Mapping[str, str]) -> list[Path]:
    chosen = environ.get("NIXL_PLUGIN_DIR")
    if chosen:
        return [Path(chosen)]
    return [found for folder in folders for found in Path(folder).glob("nixl*.libs/nixl")]


def _first(versions: Mapping[str, str], names: Iterable[str]) -> str | None:
    return next((versions[name] for name in names if name in versions), None)


def _kind(tree: Tree, environ: Mapping[str, str]) -> str | None:
    cgroup = tree.text("/proc/1/cgroup") or ""
    if "KUBERNETES_SERVICE_HOST" in environ or "kubepods" in cgroup:
        return "kubernetes"
    if tree.exists("/.dockerenv") or "/docker/" in cgroup:
        return "docker"
    # podman mounts no marker into a read-only root, and like other managers says what it is to the first process.
    if tree.exists("/run/.containerenv") or environ.get("container") == "podman":
        return "podman"
    if environ.get("container"):
        return "other"
    return "other" if any(name in cgroup for name in ("containerd", "lxc", "crio")) else None


def _privileged(tree: Tree) -> bool | None:
    """Whether this process has CAP_SYS_ADMIN, which unprivileged containers never have."""
    for line in (tree.text("/proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return None
