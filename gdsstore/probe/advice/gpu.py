"""Findings about the GPU, its driver, and the slots that it and the drive are in."""

from __future__ import annotations

from collections.abc import Iterator

from gdsstore.memory.device_arena import DEFAULT_BYTES
from gdsstore.probe.advice.finding import Finding, IoPath, Route, Severity
from gdsstore.probe.cuda_driver import LIBRARY
from gdsstore.probe.derived import TRANSLATED, Nearness, nearest, nearness
from gdsstore.probe.facts import Drive, Gpu, MachineFacts
from gdsstore.sizes import MiB

OLDEST_FOR_P2PDMA = (8, 0)  # Ampere: NVIDIA's guide lists A100, A40, L4, L40S, H100 and later


def presence(facts: MachineFacts) -> Iterator[Finding]:
    nvidia = facts.nvidia
    if nvidia.gpus:
        return
    if nvidia.error:
        yield Finding(
            "gpu-error",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"The NVIDIA driver does not answer: {nvidia.error}",
            "No GPU can be used until it does; a store works from host memory.",
            "Run nvidia-smi and mend what it says; after a driver update, reboot. Then run doctor again.",
            dead_end=True,
        )
    elif nvidia.gpus_without_driver:
        yield Finding(
            "gpu-without-driver",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"An NVIDIA GPU is in slot {nvidia.gpus_without_driver[0]}, but its driver is not loaded.",
            "The GPU cannot be used at all; a store works from host memory.",
            "Install the driver with open kernel modules (Ubuntu: sudo apt-get install nvidia-open) and reboot.",
            dead_end=True,
        )
    else:
        inside = " In a container, start it with --gpus all." if facts.container.kind else ""
        yield Finding(
            "no-gpu",
            Severity.BLOCKS,
            IoPath.DIRECT,
            "There is no NVIDIA GPU here.",
            "Nothing is lost for host memory; there just is no GPU memory to move bytes to.",
            f"Run doctor on the machine that serves the model.{inside}",
            dead_end=True,
        )


def cuda(facts: MachineFacts) -> Iterator[Finding]:
    said = facts.nvidia.cuda
    if not facts.nvidia.gpus or said is None or (said.devices and said.error is None):
        return
    yield Finding(
        "cuda-does-not-start",
        Severity.BLOCKS,
        IoPath.DIRECT,
        f"There is a GPU, and CUDA cannot use it: {said.error or 'it offers none'}.",
        "No program here can use the GPU, a model server neither; a store works from host memory.",
        _cuda_step(facts, said.error or "CUDA_ERROR_NO_DEVICE"),
        dead_end=True,
    )


def _cuda_step(facts: MachineFacts, error: str) -> str:
    visible = facts.environment.cuda_visible_devices
    if error.startswith(LIBRARY):
        return (
            "Install the driver's compute part (Ubuntu: sudo apt-get install libnvidia-compute-570, with your driver's number); "
            "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility."
        )
    if error == "CUDA_ERROR_SYSTEM_NOT_READY":
        return "Start the fabric manager, of the driver's very version: sudo systemctl enable --now nvidia-fabricmanager."
    if error == "CUDA_ERROR_NO_DEVICE" and visible is not None:
        return f"Unset CUDA_VISIBLE_DEVICES ({visible!r}), or name a GPU in it that is there."
    if error == "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH":
        return "The libraries and the kernel's module are of different versions: reboot after the driver's update."
    return "Run nvidia-smi and look into sudo dmesg | grep NVRM for what it says; then run doctor again."


def kind(facts: MachineFacts) -> Iterator[Finding]:
    if facts.nvidia.gpus and facts.kernel.wsl:
        yield Finding(
            "wsl",
            Severity.BLOCKS,
            IoPath.DIRECT,
            "This is the Windows Subsystem for Linux.",
            "GPUDirect Storage does not exist there: every byte goes through host memory.",
            "Boot Linux itself for the direct path. The store works here without it.",
            dead_end=True,
        )
    consumer = [gpu.name for gpu in facts.nvidia.gpus if "GeForce" in (gpu.name or "")]
    if consumer and len(consumer) == len(facts.nvidia.gpus):
        yield Finding(
            "consumer-gpu",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"{consumer[0]} is a consumer GPU: NVIDIA's driver does not let other devices reach its memory.",
            "Every byte goes through host memory.",
            "Use a data-centre or workstation GPU for the direct path. The store works here without it.",
            ("gds-nvidia-fs#14",),
            dead_end=True,
        )


def flavour(facts: MachineFacts) -> Iterator[Finding]:
    if facts.nvidia.gpus and facts.nvidia.module == "proprietary":
        yield Finding(
            "proprietary-driver",
            Severity.BLOCKS,
            IoPath.DIRECT,
            "The NVIDIA driver's kernel modules are the proprietary ones.",
            "nvidia-fs does not build or load against them (nvidia_p2p_* symbols are missing) and P2PDMA is not in them.",
            "Install the open kernel modules of the same version (Ubuntu: sudo apt-get install nvidia-open; RHEL: "
            "sudo dnf module install nvidia-driver:open-dkms), reboot, and rebuild nvidia-fs if you use it.",
            ("gds-nvidia-fs#72", "gds-nvidia-fs#34"),
        )


def bar1(facts: MachineFacts) -> Iterator[Finding]:
    for gpu in facts.nvidia.gpus:
        free = None if gpu.bar1_bytes is None else gpu.bar1_bytes - (gpu.bar1_used_bytes or 0)
        if gpu.bar1_bytes is not None and free is not None and free < DEFAULT_BYTES:
            yield Finding(
                "bar1-too-small",
                Severity.BLOCKS,
                IoPath.DIRECT,
                f"{_which(gpu)}: the window through which drives reach GPU memory (BAR1) has {free // MiB} MiB free of "
                f"{gpu.bar1_bytes // MiB} MiB.",
                f"A store registers {DEFAULT_BYTES // MiB} MiB of GPU memory in it by default; registering more than "
                "is free fails, or falls back to host memory.",
                'Switch on "Above 4G decoding" and "Resizable BAR" in the BIOS; end other programs that register GPU '
                "memory; or give the store a smaller gpu_staging_bytes.",
                ("gds-nvidia-fs#4",),
            )


def topology(facts: MachineFacts) -> Iterator[Finding]:
    gpus, drives = facts.nvidia.gpus, facts.storage.drives
    if not gpus or not drives:
        return
    if nearest(facts) is Nearness.APART:
        yield Finding(
            "different-root-complexes",
            Severity.MAY_BLOCK,
            IoPath.DIRECT,
            "The GPU and the drive hang on different PCIe root complexes.",
            "Each byte crosses the processor. Some processors do not forward it at all, and cuFile then refuses the "
            "file or falls back; others do it at a fraction of the speed.",
            "Put the store on a drive under the same root complex or switch as the GPU (nvidia-smi topo -m; lspci -tv), "
            "or move the drive to such a slot. If you cannot, measure direct against bounce.",
            ("gds-nvidia-fs#70", "gds-nvidia-fs#57"),
        )
    else:
        far = [_which(gpu) for gpu in gpus if all(nearness(gpu, each) is Nearness.APART for each in drives)]
        if far:
            yield Finding(
                "some-gpus-far",
                Severity.COSTS,
                IoPath.DIRECT,
                f"{', '.join(far)}: on another PCIe root complex than the drive.",
                "These GPUs may be slower on the direct path, or not get it.",
                "Give each group of GPUs a store on a drive of its own root complex.",
                ("gds-nvidia-fs#70",),
            )
    nodes = {gpu.numa_node for gpu in gpus if gpu.numa_node is not None}
    homes = {drive.numa_node for drive in drives if drive.numa_node is not None}
    if nodes and homes and not nodes & homes:
        yield Finding(
            "different-numa-nodes",
            Severity.COSTS,
            IoPath.BOUNCE,
            "No GPU is on the drive's NUMA node.",
            "Bytes that go through host memory cross between the processors once more.",
            f"Put the store on a drive of NUMA node {', '.join(map(str, sorted(nodes)))}.",
        )


def iommu(facts: MachineFacts) -> Iterator[Finding]:
    devices: tuple[Gpu | Drive, ...] = (*facts.nvidia.gpus, *facts.storage.drives)
    translated = next((each for each in devices if each.iommu in TRANSLATED), None)
    if facts.nvidia.gpus and translated is not None and facts.kernel.machine in (None, "x86_64"):
        yield Finding(
            "iommu-translates",
            Severity.MAY_BLOCK,
            IoPath.DIRECT,
            f"The IOMMU translates addresses (domain type {translated.iommu} for {translated.pci_address}).",
            "Traffic between GPU and drive then goes up to the processor and may be refused; NVIDIA supports off and "
            "pass-through only.",
            "Boot with iommu=pt (add it to GRUB_CMDLINE_LINUX, run update-grub, reboot), or with intel_iommu=off or "
            "amd_iommu=off on a machine that nobody shares.",
            ("gds-nvidia-fs#57",),
        )


def generation(facts: MachineFacts) -> Iterator[Finding]:
    known = [gpu for gpu in facts.nvidia.gpus if gpu.compute_capability]
    old = [gpu for gpu in known if _capability(gpu) < OLDEST_FOR_P2PDMA]
    if old and len(old) == len(facts.nvidia.gpus):
        yield Finding(
            "gpu-too-old-for-p2pdma",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"{_which(old[0])} is older than Ampere.",
            "P2PDMA needs Ampere or later; nvidia-fs works with older GPUs.",
            "Use nvidia-fs on this machine (sudo apt-get install nvidia-fs; sudo modprobe nvidia_fs).",
            route=Route.P2PDMA,
        )


def _capability(gpu: Gpu) -> tuple[int, ...]:
    return tuple(int(part) for part in str(gpu.compute_capability).split(".") if part.isdigit())


def _which(gpu: Gpu) -> str:
    return f"{gpu.name or 'GPU'} ({gpu.pci_address})" if gpu.pci_address else gpu.name or "GPU"


RULES = (presence, cuda, kind, flavour, bar1, topology, iommu, generation)
