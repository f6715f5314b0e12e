"""What a measurement of paths depends on: where any of it has changed, the measurement counts no more. Cheap to read."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path as FilePath

from gdsstore.engines.paths import Path
from gdsstore.memory.cuda import CudaDevice
from gdsstore.probe.software import KVIKIO, NIXL
from gdsstore.probe.storage import mount_of
from gdsstore.probe.tree import LIVE, Tree

NAME_BYTES = 256


def device_id(device: CudaDevice) -> str:
    """A GPU's (or its MIG instance's) name and UUID, which stay the same when ordinals do not. Raises DeviceError."""
    uuid = (ctypes.c_ubyte * 16)()
    device.do("cuDeviceGetUuid", lambda driver: driver.cuDeviceGetUuid_v2(uuid, device.ordinal))
    return f"{_name(device)} {bytes(uuid).hex()}"


def fingerprint(
    device: CudaDevice, directory: FilePath, engines: Mapping[Path, str], root: FilePath = LIVE
) -> dict[str, str]:
    """The facts by name, as text; "" where one is not to be had. `directory`: of the volume. `engines`: the name of each path's
    engine. `root`: where /proc is looked for. Raises DeviceError.
    """
    tree = Tree(root)
    version = ctypes.c_int()
    device.do("cuDriverGetVersion", lambda driver: driver.cuDriverGetVersion(ctypes.byref(version)))
    mount = mount_of(tree, os.path.realpath(directory))
    return {
        "GPU": _name(device),
        "NVIDIA driver": (tree.text("/proc/driver/nvidia/version") or "").partition("\n")[0],
        "CUDA": str(version.value),
        "nvidia-fs": tree.text("/proc/driver/nvidia-fs/version") or "",
        "kernel": tree.text("/proc/sys/kernel/osrelease") or "",
        "kvikio": _version(KVIKIO),
        "nixl": _version(NIXL),
        "filesystem": mount.fs_type if mount else "",
        "device of the filesystem": f"{mount.source} {mount.device}" if mount else "",
        "mount options": ",".join(sorted(mount.options)) if mount else "",
        **{f"engine of {path}": name for path, name in sorted(engines.items())},
    }


def _name(device: CudaDevice) -> str:
    name = ctypes.create_string_buffer(NAME_BYTES)
    device.do("cuDeviceGetName", lambda driver: driver.cuDeviceGetName(name, NAME_BYTES, device.ordinal))
    return name.value.decode(errors="replace")


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
