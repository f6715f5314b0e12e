"""The facts of a machine in a few lines, for people."""

from __future__ import annotations

from collections.abc import Iterator

from gdsstore.probe.derived import allows_compat, forces_compat, nearest, wants_p2pdma
from gdsstore.probe.facts import MachineFacts
from gdsstore.sizes import GiB

UNKNOWN = "not known"


def about(facts: MachineFacts) -> Iterator[tuple[str, str]]:
    """Name and value of each line."""
    nvidia, cufile, storage = facts.nvidia, facts.cufile, facts.storage
    for gpu in nvidia.gpus:
        sizes = "" if gpu.memory_bytes is None else f", {gpu.memory_bytes / GiB:.0f} GiB"
        window = "" if gpu.bar1_bytes is None else f", BAR1 {gpu.bar1_bytes / GiB:.3g} GiB"
        yield (
            "GPU",
            f"{gpu.name or UNKNOWN} ({gpu.pci_address or UNKNOWN}){sizes}{window}{_node(gpu.numa_node)}"
            f"{_static(gpu.p2pmem)}",
        )
    if not nvidia.gpus:
        yield "GPU", "none"
    if nvidia.driver:
        keys = f", RegistryDwords {nvidia.registry_dwords}" if nvidia.registry_dwords else ""
        yield (
            "NVIDIA driver",
            f"{nvidia.driver_version or UNKNOWN}, {nvidia.module or UNKNOWN} kernel module{keys}",
        )
    yield (
        "kernel",
        f"{facts.kernel.release or UNKNOWN}, P2PDMA {_said(facts.kernel.p2pdma)}, io_uring {_uring(facts)}",
    )
    yield "cuFile", _cufile(facts) if cufile.library else "not installed"
    nvfs = facts.nvidia_fs
    yield (
        "nvidia-fs",
        f"{nvfs.version or 'loaded'}, for {', '.join(nvfs.modules) or 'no drives'}"
        if nvfs.loaded
        else "not loaded",
    )
    packages = facts.packages
    yield "packages", f"kvikio {packages.kvikio or 'not installed'}, NIXL {packages.nixl or 'not installed'}"
    if facts.container.kind:
        yield (
            "container",
            f"{facts.container.kind}, /run/udev {'readable' if facts.container.udev else 'not readable'}",
        )
    yield "directory", f"{storage.path or UNKNOWN}"
    yield (
        "filesystem",
        f"{storage.fs_type or UNKNOWN} on {storage.source or UNKNOWN}, direct I/O {_said(storage.o_direct)}",
    )
    for layer in storage.layers:
        yield "on", f"{layer.name} ({layer.kind}{f', {layer.detail}' if layer.detail else ''})"
    for drive in storage.drives:
        model = f" {drive.model}" if drive.model else ""
        yield "drive", f"{drive.name}: {drive.kind}{model}{_node(drive.numa_node)}"
    if nvidia.gpus and storage.drives:
        yield "GPU and drive", nearest(facts).value


def _cufile(facts: MachineFacts) -> str:
    modes = [
        f"P2PDMA {'on' if wants_p2pdma(facts) else 'off'}",
        "fallback forced"
        if forces_compat(facts)
        else f"fallback {'allowed' if allows_compat(facts) else 'off'}",
    ]
    where = facts.cufile.config.path or "no cufile.json"
    return f"{facts.cufile.version or facts.cufile.library}, {where}: {', '.join(modes)}"


def _uring(facts: MachineFacts) -> str:
    kernel = facts.kernel
    if kernel.io_uring is not None:
        return kernel.io_uring
    return "forbidden" if kernel.io_uring_disabled else UNKNOWN


def _said(value: bool | None) -> str:
    return UNKNOWN if value is None else "yes" if value else "no"


def _static(p2pmem: bool | None) -> str:
    return "" if p2pmem is None else f", BAR1 {'' if p2pmem else 'not '}registered with P2PDMA"


def _node(node: int | None) -> str:
    return "" if node is None else f", NUMA node {node}"
