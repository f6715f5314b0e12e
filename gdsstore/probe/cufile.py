"""libcufile, its cufile.json, the state of its driver, and nvidia-fs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from gdsstore.probe.child import ask
from gdsstore.probe.facts import CuFile, CuFileConfig, CuFileDriver, NvidiaFs
from gdsstore.probe.tree import Tree

DEFAULT_CONFIG = "/etc/cufile.json"
LIBRARY = "libcufile.so.0"
LIBRARY_FOLDERS = (
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/local/cuda/targets/sbsa-linux/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/lib64",
)
WHEELS = ("nvidia-cufile", "nvidia-cufile-cu12", "nvidia-cufile-cu13")
DRIVER_DEADLINE_S = 30.0

_VERSION = re.compile(r"libcufile\.so\.(\d+\.\d[\d.]*)$")
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def cufile(tree: Tree, environ: Mapping[str, str], *, ask_driver: bool) -> CuFile:
    """`ask_driver`: open cuFile's driver, in a process of its own: cuFile 1.20 never returns from it where there is no GPU."""
    library = _library(tree, environ)
    version = _version(tree, library)
    driver = _ask_driver(library) if library and ask_driver else None
    return CuFile(library, version, cufile_config(tree, environ), driver)


def cufile_config(tree: Tree, environ: Mapping[str, str]) -> CuFileConfig:
    """The cufile.json that cuFile would read: CUFILE_ENV_PATH_JSON's, else /etc/cufile.json. It may have comments."""
    path = environ.get("CUFILE_ENV_PATH_JSON") or DEFAULT_CONFIG
    text = tree.text(path)
    if text is None:
        gone = path != DEFAULT_CONFIG
        return CuFileConfig(path, f"{path} cannot be read") if gone else CuFileConfig()
    try:
        config = json.loads(_COMMENT.sub(lambda match: match[1] or " ", text))
    except ValueError as error:
        return CuFileConfig(path, str(error))
    return _known(path, config)


def _known(path: str, config: Any) -> CuFileConfig:
    def flag(*names: str) -> bool | None:
        value = _dig(config, *names)
        return value if isinstance(value, bool) else None

    def size(name: str) -> int | None:
        value = _dig(config, "properties", name)
        return value if type(value) is int else None

    return CuFileConfig(
        path=path,
        allow_compat_mode=flag("properties", "allow_compat_mode"),
        force_compat_mode=flag("properties", "force_compat_mode"),
        use_pci_p2pdma=flag("properties", "use_pci_p2pdma"),
        block_nvme=flag("block", "nvme", "use_pci_p2pdma"),
        block_nvmeof=flag("block", "nvmeof", "use_pci_p2pdma"),
        block_raid=flag("block", "raid", "use_pci_p2pdma"),
        block_inside_fs=_dig(config, "fs", "block") is not None,
        max_device_pinned_mem_size_kb=size("max_device_pinned_mem_size_kb"),
        max_device_cache_size_kb=size("max_device_cache_size_kb"),
        max_direct_io_size_kb=size("max_direct_io_size_kb"),
    )


def _dig(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def nvidia_fs(tree: Tree) -> NvidiaFs:
    """The kernel module, what registered with it, and its device nodes here."""
    proc = "/proc/driver/nvidia-fs"
    modules = tree.text("/proc/modules")
    loaded = tree.exists(proc) or any(line.startswith("nvidia_fs ") for line in (modules or "").splitlines())
    version = (tree.text(f"{proc}/version") or "").removeprefix("version:").strip()
    stats = tree.text(f"{proc}/stats") or ""
    found = re.search(r"^IO stats: (\w+)", stats, re.MULTILINE)
    return NvidiaFs(
        loaded=None if modules is None and not loaded else loaded,
        version=version or tree.text("/sys/module/nvidia_fs/version"),
        modules=tuple(
            line.partition(":")[0].strip() for line in (tree.text(f"{proc}/modules") or "").splitlines()
        ),
        io_stats=found[1] == "Enabled" if found else None,
        device_nodes=tuple(f"/dev/{name}" for name in tree.names("/dev") if name.startswith("nvidia-fs")),
    )


def _library(tree: Tree, environ: Mapping[str, str]) -> str | None:
    """The file that the dynamic linker would most likely take. Wheels come last: others preload theirs from there."""
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in (*folders, *LIBRARY_FOLDERS):
        if tree.exists(f"{folder}/{LIBRARY}"):
            return f"{folder}/{LIBRARY}"
    if not tree.live:
        return None
    wheels = (Path(folder) / "nvidia" for folder in sys.path if folder)
    found = (each for wheel in wheels for each in sorted(wheel.glob(f"*/lib/{LIBRARY}")))
    return next((str(each) for each in found), None)


def _version(tree: Tree, library: str | None) -> str | None:
    if library is None:
        return None
    match = _VERSION.search(tree.resolve(library))
    if match:
        return match[1]
    for wheel in WHEELS if "/nvidia/" in library and tree.live else ():
        try:
            return metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    return None


def _ask_driver(library: str) -> CuFileDriver:
    script = Path(__file__).with_name("cufile_driver.py")
    said = ask(["-I", str(script), library], DRIVER_DEADLINE_S)
    if said.exit_code is None:
        return CuFileDriver(
            error=f"cuFileDriverOpen did not return within {DRIVER_DEADLINE_S:.0f} s", hung=True
        )
    if said.answer is None:
        return CuFileDriver(
            error=f"the process that opened cuFile's driver died (exit code {said.exit_code})"
        )
    answer = dict(said.answer)
    routes = answer.pop("nvme_routes", None)
    return CuFileDriver(**answer, nvme_routes=None if routes is None else tuple(routes))
