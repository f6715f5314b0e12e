"""What follows from single facts: versions as numbers, settings that are in force, how near a GPU and a drive are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from gdsstore.probe.facts import Drive, Gpu, MachineFacts

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
LOCAL_FILESYSTEMS = ("ext4", "xfs")
TRANSLATED = ("DMA", "DMA-FQ")  # types of IOMMU domains in which addresses are translated


class Nearness(StrEnum):
    """Of a GPU and a drive, by the PCI bridges they share."""

    SWITCH = "under one PCIe switch"
    ROOT = "under one root complex"
    APART = "under different root complexes"
    UNKNOWN = "not known"


def numbers(version: str | None) -> tuple[int, ...] | None:
    """The leading numbers of a version, for comparing: "6.14.0-37-generic" is (6, 14, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in match[0].split(".")) if match else None


def nearness(gpu: Gpu, drive: Drive) -> Nearness:
    """Two devices that share a bridge below the host bridge are under one switch."""
    if not gpu.pci_path or not drive.pci_path:
        return Nearness.UNKNOWN
    if gpu.pci_path[0] != drive.pci_path[0]:
        return Nearness.APART
    return Nearness.SWITCH if gpu.pci_path[1:2] == drive.pci_path[1:2] else Nearness.ROOT


def nearest(facts: MachineFacts) -> Nearness:
    """Of every GPU and every drive under the path: the nearest pair of those that are known."""
    order = list(Nearness)
    found = [nearness(gpu, drive) for gpu in facts.nvidia.gpus for drive in facts.storage.drives]
    return min(found, key=order.index, default=Nearness.UNKNOWN)


def registry(dwords: str | None) -> Mapping[str, str]:
    """The NVIDIA driver's RegistryDwords, names in lower case."""
    pairs = (part.partition("=") for part in (dwords or "").split(";") if part.strip())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def switched(variable: str | None, config: bool | None, default: bool) -> bool:
    """A cuFile setting in force: the environment variable, else cufile.json, else cuFile's default."""
    text = (variable or "").strip().lower()
    if text in TRUE or text in FALSE:
        return text in TRUE
    return default if config is None else config


def allows_compat(facts: MachineFacts) -> bool:
    """Whether cuFile may fall back to host memory, silently."""
    environment, config = facts.environment, facts.cufile.config
    return switched(environment.cufile_allow_compat_mode, config.allow_compat_mode, True)


def forces_compat(facts: MachineFacts) -> bool:
    environment, config = facts.environment, facts.cufile.config
    return switched(environment.cufile_force_compat_mode, config.force_compat_mode, False)


def wants_p2pdma(facts: MachineFacts) -> bool:
    """Whether cuFile was told to use the kernel's P2PDMA."""
    environment, config = facts.environment, facts.cufile.config
    return switched(environment.cufile_use_pcip2pdma, config.use_pci_p2pdma, False)


def why_no_gpu(facts: MachineFacts) -> str | None:
    """Why no program here can use a GPU; None where one can."""
    nvidia = facts.nvidia
    if not nvidia.gpus:
        return "There is no usable GPU."
    if nvidia.cuda is not None and nvidia.cuda.error:
        return f"CUDA does not start: {nvidia.cuda.error}."
    if nvidia.cuda is not None and not nvidia.cuda.devices:
        return "CUDA offers no GPU."
    return None


def on_fabric(drive: Drive) -> bool:
    """Whether an NVMe drive is in another machine."""
    return drive.kind == "nvme" and drive.transport not in (None, "pcie")


def has_layer(facts: MachineFacts, kind: str) -> str | None:
    """The name of the first layer of a kind, with its detail."""
    for layer in facts.storage.layers:
        if layer.kind == kind:
            return f"{layer.name} ({layer.detail})" if layer.detail else layer.name
    return None
