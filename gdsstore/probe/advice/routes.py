"""Findings about the two ways in which cuFile goes direct. A machine needs one of them, so each finding names its route."""

from __future__ import annotations

from collections.abc import Iterator

from gdsstore.probe.advice.finding import Finding, IoPath, Route, Severity
from gdsstore.probe.derived import has_layer, numbers, registry, wants_p2pdma
from gdsstore.probe.facts import MachineFacts

OLDEST_KERNEL = (6, 2)
OLDEST_DRIVER = (565,)
OLDEST_CUFILE = (1, 13)  # CUDA 12.8
KEYS = 'options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"'
REBOOT = "then sudo update-initramfs -u (RHEL, SLES: sudo dracut -f) and reboot"


def nvidia_fs(facts: MachineFacts) -> Iterator[Finding]:
    module = facts.nvidia_fs
    if not module.loaded:
        yield _nvfs(
            "nvidia-fs-not-loaded",
            "The kernel module nvidia-fs is not loaded.",
            "It is one of the two ways to go direct; P2PDMA, the other one, does not need it.",
            "sudo apt-get install nvidia-fs (with DKMS), then sudo modprobe nvidia_fs, on the host.",
        )
        return
    if "nvme" not in module.modules:
        yield _nvfs(
            "nvme-not-registered",
            f"nvidia-fs {module.version or ''} is loaded, but the NVMe driver did not register with it.".replace(
                "  ", " "
            ),
            "Without that, cuFile falls back on NVMe drives: the kernel's NVMe driver must be one that knows nvidia-fs.",
            "Install the NVMe driver of NVIDIA DOCA or MLNX_OFED with nvidia-fs support and reboot; or use P2PDMA, "
            "which works with the kernel's own.",
            ("gds-nvidia-fs#31", "gds-nvidia-fs#4"),
        )
    if facts.container.kind and not module.device_nodes:
        yield _nvfs(
            "no-nvidia-fs-nodes",
            "nvidia-fs is loaded on the host, but its device nodes /dev/nvidia-fs* are not in this container.",
            "cuFile cannot talk to nvidia-fs and falls back to host memory.",
            _nodes(facts.container.kind),
            ("nvidia-container-toolkit#567", "nvidia-container-toolkit#1150"),
        )


def p2pdma(facts: MachineFacts) -> Iterator[Finding]:
    yield from _kernel(facts)
    yield from _driver(facts)
    yield from _config(facts)
    raid = has_layer(facts, "md")
    if raid:
        yield _p2p(
            "p2pdma-on-raid",
            f"The store lies on a RAID: {raid}.",
            "P2PDMA does not work through the kernel's RAID.",
            "Take the RAID apart, put a filesystem on each drive, and give the store all of them: it stripes over its "
            "volumes itself (--store DIR1 --store DIR2).",
            ("gds-nvidia-fs#65",),
        )


def counters(facts: MachineFacts) -> Iterator[Finding]:
    if facts.nvidia_fs.loaded and facts.nvidia_fs.io_stats is False:
        yield Finding(
            "nvidia-fs-counts-nothing",
            Severity.HINT,
            IoPath.DIRECT,
            "nvidia-fs does not count bytes (its default): zeros in /proc/driver/nvidia-fs/stats prove nothing.",
            "Nobody can tell from outside whether nvidia-fs, P2PDMA or the fallback moved the bytes.",
            "echo 1 | sudo tee /sys/module/nvidia_fs/parameters/rw_stats_enabled, while you look; it costs on small reads.",
            ("gds-nvidia-fs#78",),
        )


def _kernel(facts: MachineFacts) -> Iterator[Finding]:
    kernel = facts.kernel
    version = numbers(kernel.release)
    if kernel.p2pdma is False or (version is not None and version < OLDEST_KERNEL):
        why = "is older than 6.2" if kernel.p2pdma is not False else "was built without CONFIG_PCI_P2PDMA"
        yield _p2p(
            "kernel-without-p2pdma",
            f"The kernel ({kernel.release}) {why}.",
            "P2PDMA is not in it, so that only nvidia-fs could go direct.",
            "Boot a kernel of 6.2 or later with CONFIG_PCI_P2PDMA=y (Ubuntu 24.04's has it), or use nvidia-fs.",
        )
    elif kernel.p2pdma is None:
        yield _p2p(
            "p2pdma-not-known",
            "Whether the kernel has P2PDMA cannot be read here.",
            "It may or may not go direct.",
            "On the host: grep CONFIG_PCI_P2PDMA /boot/config-$(uname -r) must say =y.",
            severity=Severity.MAY_BLOCK,
        )
    if kernel.nvme_multipath and kernel.machine in (None, "x86_64"):
        yield _p2p(
            "nvme-multipath",
            "The kernel's NVMe multipath is on.",
            "P2PDMA does not work through it.",
            f'echo "options nvme_core multipath=N" | sudo tee /etc/modprobe.d/nvme.conf, {REBOOT}.',
        )


def _driver(facts: MachineFacts) -> Iterator[Finding]:
    nvidia = facts.nvidia
    version = numbers(nvidia.driver_version)
    if version is not None and version < OLDEST_DRIVER:
        yield _p2p(
            "driver-too-old-for-p2pdma",
            f"The NVIDIA driver is {nvidia.driver_version}.",
            "P2PDMA needs 565 or later.",
            "Install a newer driver with open kernel modules (sudo apt-get install nvidia-open) and reboot.",
        )
    if facts.kernel.machine not in (None, "x86_64"):
        yield _p2p(
            "not-x86",
            f"The processor is {facts.kernel.machine}.",
            "On Grace, cuFile reaches GPU memory over NVLink-C2C with other requirements, which are not checked here.",
            "Run /usr/local/cuda/gds/tools/gdscheck -p: NVMe must say c2c, p2pdma or nvfs.",
            severity=Severity.MAY_BLOCK,
        )
        return
    keys = registry(nvidia.registry_dwords)
    missing = [
        name
        for name, wanted in (("RMForceStaticBar1", ("1", "2")), ("RmForceDisableIomapWC", ("1",)))
        if keys.get(name.lower()) not in wanted
    ]
    small = next(
        (g for g in nvidia.gpus if g.bar1_bytes and g.memory_bytes and g.bar1_bytes < g.memory_bytes), None
    )
    if missing and not any(gpu.p2pmem for gpu in nvidia.gpus):
        state = (
            f"RegistryDwords is {nvidia.registry_dwords!r}"
            if nvidia.registry_dwords
            else "RegistryDwords is empty"
        )
        yield _p2p(
            "static-bar1-off",
            f"The NVIDIA driver does not map GPU memory for other devices: {' and '.join(missing)} not set ({state}).",
            "CUDA then answers P2PDMA with error 801 (not supported), and cuFile falls back to host memory.",
            f"echo '{KEYS}' | sudo tee /etc/modprobe.d/nvidia-p2pdma.conf, {REBOOT}. Check: "
            "grep RegistryDwords /proc/driver/nvidia/params (the file under /sys shows nothing).",
            ("gds-nvidia-fs#75",),
        )
    elif not missing and nvidia.gpus and all(gpu.p2pmem is False for gpu in nvidia.gpus):
        yield _p2p(
            "bar1-not-registered",
            "The driver's keys for P2PDMA are set, but no GPU is registered with the kernel's P2PDMA yet.",
            "It registers when a program first uses a GPU; if it stays so, CUDA answers with error 801.",
            "Run nvidia-smi or any CUDA program and look again: ls /sys/bus/pci/devices/*/p2pmem.",
            ("gds-nvidia-fs#75",),
            severity=Severity.MAY_BLOCK,
        )
    if small is not None:
        yield _p2p(
            "bar1-smaller-than-memory",
            f"{small.name or 'The GPU'} has {_gib(small.memory_bytes)} GiB of memory and a BAR1 of "
            f"{_gib(small.bar1_bytes)} GiB.",
            "P2PDMA maps all of a GPU's memory into BAR1, which must be as large.",
            'Switch on "Above 4G decoding" and "Resizable BAR" in the BIOS, or use nvidia-fs.',
            ("gds-nvidia-fs#75",),
        )


def _config(facts: MachineFacts) -> Iterator[Finding]:
    config = facts.cufile.config
    version = numbers(facts.cufile.version)
    if version is not None and version < OLDEST_CUFILE:
        yield _p2p(
            "cufile-too-old-for-p2pdma",
            f"libcufile is {facts.cufile.version}.",
            "P2PDMA needs 1.13 (CUDA 12.8) or later.",
            'pip install "gdsstore[cuda13]", or a newer CUDA toolkit.',
        )
    where = config.path or "/etc/cufile.json"
    both = '{"properties": {"use_pci_p2pdma": true}, "block": {"nvme": {"use_pci_p2pdma": true}}}'
    if not wants_p2pdma(facts):
        yield _p2p(
            "p2pdma-not-enabled",
            "cuFile is not told to use P2PDMA (use_pci_p2pdma is false, its default).",
            "It does not try, and falls back to host memory unless nvidia-fs works.",
            f"Put {both} into {where}, or into a file of its own that CUFILE_ENV_PATH_JSON names.",
        )
    elif config.block_nvme is False or (config.block_nvme is None and config.block_inside_fs):
        inside = config.block_inside_fs and config.block_nvme is None
        yield _p2p(
            "p2pdma-not-for-nvme",
            'In cufile.json, "block" lies inside "fs", where cuFile ignores it.'
            if inside
            else "cufile.json has use_pci_p2pdma on, but off for NVMe drives.",
            "P2PDMA is on in general and off for this drive: cuFile falls back without a word.",
            f"Beside each other, at the top level of {where}: {both}.",
        )


def _nodes(kind: str) -> str:
    if kind == "kubernetes":
        return (
            "Set NVIDIA_GDS=enabled in the pod's environment with a current NVIDIA container toolkit (releases before "
            "mid-2025 found the nodes in privileged pods only) and gds.enabled=true in the GPU operator."
        )
    return (
        "Start the container with -e NVIDIA_GDS=enabled (NVIDIA container toolkit), or with one --device /dev/nvidia-fsN "
        "for each node that the host has."
    )


def _nvfs(code: str, title: str, cost: str, next_step: str, see: tuple[str, ...] = ()) -> Finding:
    return Finding(code, Severity.BLOCKS, IoPath.DIRECT, title, cost, next_step, see, route=Route.NVIDIA_FS)


def _p2p(
    code: str,
    title: str,
    cost: str,
    next_step: str,
    see: tuple[str, ...] = (),
    *,
    severity: Severity = Severity.BLOCKS,
) -> Finding:
    return Finding(code, severity, IoPath.DIRECT, title, cost, next_step, see, route=Route.P2PDMA)


def _gib(nbytes: int | None) -> str:
    return f"{(nbytes or 0) / (1 << 30):.0f}"


RULES = (nvidia_fs, p2pdma, counters)
