"""NVIDIA's driver and GPUs: through NVML where pynvml is installed, else through /proc and /sys, else as CUDA tells them."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdsstore.probe.child import ask
from gdsstore.probe.cuda_driver import LIBRARY
from gdsstore.probe.facts import Cuda, Gpu, Nvidia
from gdsstore.probe.tree import Tree

NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
CUDA_DEADLINE_S = 30.0

_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+[\d.]+)")
# NVML's codes for "there is none": not initialised by a driver, and the library itself missing.
_NO_DRIVER = ("NVMLError_DriverNotLoaded", "NVMLError_LibraryNotFound")
_NO_CUDA = (LIBRARY, "CUDA_ERROR_NO_DEVICE")


@dataclass(frozen=True, slots=True)
class _Nvml:
    version: str | None = None
    gpus: tuple[Gpu, ...] | None = None  # None: NVML did not say
    error: str | None = None


def nvidia(tree: Tree) -> Nvidia:
    """Driver, flavour of its kernel module, registry keys and GPUs. No driver and no NVML is simply no GPU."""
    banner = tree.text("/proc/driver/nvidia/version")
    nvml = _nvml() if tree.live else _Nvml()
    cuda, offered = _ask_cuda() if tree.live else (None, ())
    gpus = nvml.gpus if nvml.gpus is not None else _from_proc(tree) or offered
    match = _VERSION.search(banner or "")
    return Nvidia(
        driver=banner is not None or bool(gpus),
        driver_version=nvml.version or (match[1] if match else None),
        module=None if banner is None else "open" if "Open Kernel Module" in banner else "proprietary",
        registry_dwords=_registry(tree),
        gpus=tuple(_with_sysfs(tree, gpu) for gpu in gpus),
        gpus_without_driver=() if gpus or banner else _on_the_bus(tree),
        error=nvml.error or _trouble(cuda, gpus),
        cuda=cuda if gpus else None,
    )


def _registry(tree: Tree) -> str | None:
    for line in (tree.text("/proc/driver/nvidia/params") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "RegistryDwords":
            return value.strip().strip('"')
    return None


def _from_proc(tree: Tree) -> tuple[Gpu, ...]:
    found = []
    for address in tree.names("/proc/driver/nvidia/gpus"):
        about = tree.text(f"/proc/driver/nvidia/gpus/{address}/information") or ""
        lines = (line.partition(":") for line in about.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in lines}
        found.append(Gpu(name=fields.get("Model"), pci_address=address.lower()))
    return tuple(found)


def _on_the_bus(tree: Tree) -> tuple[str, ...]:
    found = []
    for address in tree.names("/sys/bus/pci/devices"):
        device = f"/sys/bus/pci/devices/{address}"
        if tree.text(f"{device}/vendor") == NVIDIA_VENDOR:
            code = tree.text(f"{device}/class") or ""
            found += [address] if code.startswith(DISPLAY_CLASSES) else []
    return tuple(found)


def _with_sysfs(tree: Tree, gpu: Gpu) -> Gpu:
    """What sysfs knows of a GPU that was found."""
    if gpu.pci_address is None:
        return gpu
    device = f"/sys/bus/pci/devices/{gpu.pci_address}"
    return replace(
        gpu,
        pci_path=tree.pci_path(device) if tree.exists(device) else (),
        numa_node=tree.numa_node(gpu.pci_address),
        bar1_bytes=gpu.bar1_bytes or _largest_bar(tree.text(f"{device}/resource")),
        iommu=tree.iommu(gpu.pci_address),
        p2pmem=tree.exists(f"{device}/p2pmem") if tree.exists(device) else None,
    )


def _largest_bar(resource: str | None) -> int | None:
    """BAR1 is the largest one; its number differs between generations (64-bit BARs take two)."""
    sizes = []
    for line in (resource or "").splitlines()[:6]:
        first, last, *_ = (int(part, 16) for part in line.split())
        sizes.append(last - first + 1 if last > first else 0)
    return max(sizes, default=0) or None


def _nvml() -> _Nvml:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return _Nvml()
    try:
        nvml.nvmlInit()
    except Exception as error:  # its errors are made at run time and have no types of their own to name here
        if type(error).__name__ in _NO_DRIVER:
            return _Nvml()
        return _Nvml(error=f"NVML: {error}")
    try:
        count = range(nvml.nvmlDeviceGetCount())
        gpus = tuple(_ask(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in count)
        return _Nvml(_text(nvml.nvmlSystemGetDriverVersion()), gpus)
    except Exception as error:
        return _Nvml(error=f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()


def _ask(nvml: Any, handle: Any) -> Gpu:
    bar1 = _or_none(nvml, nvml.nvmlDeviceGetBAR1MemoryInfo, handle)
    memory = _or_none(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _or_none(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        pci_address=_sysfs_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        memory_bytes=None if memory is None else int(memory.total),
        bar1_bytes=None if bar1 is None else int(bar1.bar1Total),
        bar1_used_bytes=None if bar1 is None else int(bar1.bar1Used),
        compute_capability=None if capability is None else ".".join(map(str, capability)),
    )


def _ask_cuda() -> tuple[Cuda, tuple[Gpu, ...]]:
    """What CUDA says, and its GPUs. In a process of its own: where it does not start it may hang, and it is not needed here."""
    said = ask(["-I", str(Path(__file__).with_name("cuda_driver.py"))], CUDA_DEADLINE_S)
    if said.answer is None:
        ended = "did not return" if said.exit_code is None else f"died (exit code {said.exit_code})"
        return Cuda(error=f"the process that started CUDA {ended}"), ()
    gpus = tuple(Gpu(**each) for each in said.answer.get("devices", ()))
    gpus = tuple(replace(gpu, pci_address=_sysfs_address(gpu.pci_address or "")) for gpu in gpus)
    return Cuda(said.answer.get("error"), tuple(str(gpu.pci_address) for gpu in gpus)), gpus


def _trouble(cuda: Cuda | None, gpus: tuple[Gpu, ...]) -> str | None:
    """What keeps CUDA from starting where nobody knows of a GPU, unless it is simply that there is none."""
    if gpus or cuda is None or cuda.error is None or cuda.error.startswith(_NO_CUDA):
        return None
    return f"CUDA: {cuda.error}"


def _sysfs_address(address: str) -> str:
    """NVML writes domains with eight digits, sysfs with four."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _or_none(nvml: Any, call: Any, handle: Any) -> Any:
    """GPUs that are parts of others, or too old, do not know everything."""
    try:
        return call(handle)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
