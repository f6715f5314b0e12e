"""Findings about libcufile, its settings, and the packages that use it."""

from __future__ import annotations

from collections.abc import Iterator

from gdsstore.memory.device_arena import DEFAULT_BYTES
from gdsstore.probe.advice.finding import Finding, IoPath, Severity
from gdsstore.probe.derived import TRUE, allows_compat, forces_compat, wants_p2pdma
from gdsstore.probe.facts import MachineFacts
from gdsstore.sizes import KiB, MiB

GDS_PLUGIN = "GDS_MT"
HALF = "Each byte goes through host memory, copied once more, at the cost of CPU and memory bandwidth."


def library(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.nvidia.gpus:
        return
    if facts.cufile.library is None:
        yield Finding(
            "no-libcufile",
            Severity.BLOCKS,
            IoPath.DIRECT,
            "libcufile.so is not installed.",
            "It is what sets up the direct path. Without it there is neither direct nor compat, only bounce.",
            'pip install "gdsstore[cuda13]" (or cuda12), or the system\'s package (sudo apt-get install nvidia-gds).',
        )
    packages = facts.packages
    if packages.kvikio is None and GDS_PLUGIN not in packages.nixl_plugins:
        yield Finding(
            "no-device-engine",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"Neither kvikio nor NIXL's {GDS_PLUGIN} plugin is installed.",
            "These are what a store talks to cuFile through.",
            'pip install "gdsstore[cuda13]" (or cuda12).',
        )
    driver = facts.cufile.driver
    if driver is not None and not driver.opened:
        yield Finding(
            "cufile-driver-does-not-open",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"cuFile's driver does not open: {driver.error}",
            "Neither the direct path nor cuFile's own fallback works until it does.",
            "Look into cufile.log (in the folder the program ran in) and run /usr/local/cuda/gds/tools/gdscheck -p.",
        )
    elif driver is not None and driver.nvme_routes is not None and not driver.nvme_routes:
        yield Finding(
            "cufile-says-compat",
            Severity.MAY_BLOCK if driver.nvme_supported else Severity.BLOCKS,
            IoPath.DIRECT,
            "cuFile itself says that NVMe drives get no direct path here.",
            HALF,
            "Do what else is said here first. If it stays, run with CUFILE_LOGGING_LEVEL=TRACE: cufile.log says what "
            "cuFile tried.",
            ("gds-nvidia-fs#75",),
        )


def settings(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.nvidia.gpus:
        return
    config = facts.cufile.config
    if config.error:
        yield Finding(
            "cufile-json-damaged",
            Severity.MAY_BLOCK,
            IoPath.DIRECT,
            f"{config.path} cannot be used: {config.error}",
            "cuFile takes its defaults, or does not start.",
            "Mend the file (cuFile's example: /usr/local/cuda/gds/cufile.json) or unset CUFILE_ENV_PATH_JSON.",
        )
    if forces_compat(facts):
        yield Finding(
            "compat-forced",
            Severity.BLOCKS,
            IoPath.DIRECT,
            "cuFile is told to use its fallback always (force_compat_mode).",
            HALF,
            'Unset CUFILE_FORCE_COMPAT_MODE, and set "force_compat_mode": false under "properties" in cufile.json.',
        )
    if not allows_compat(facts):
        yield Finding(
            "compat-not-allowed",
            Severity.BLOCKS,
            IoPath.COMPAT,
            "cuFile's fallback is switched off (allow_compat_mode is false).",
            "What cannot go direct is an error instead of slow. That is what you want for proving that all bytes go "
            "direct, and else not.",
            'Set "allow_compat_mode": true under "properties" in cufile.json if errors are not what you want.',
        )
    elif facts.cufile.library is not None:
        yield Finding(
            "silent-fallback",
            Severity.HINT,
            IoPath.DIRECT,
            "cuFile may fall back to host memory without a word (allow_compat_mode is true, its default).",
            "A file that cannot go direct is read through host memory, and nothing fails.",
            "To prove that bytes go direct, run once with CUFILE_ALLOW_COMPAT_MODE=false: each fallback is an error then.",
            ("gds-nvidia-fs#78",),
        )
    limit = config.max_device_pinned_mem_size_kb
    if limit is not None and limit < DEFAULT_BYTES // KiB:
        yield Finding(
            "pinned-limit-small",
            Severity.BLOCKS,
            IoPath.DIRECT,
            f"cufile.json lets cuFile register only {limit // 1024} MiB of GPU memory (max_device_pinned_mem_size_kb).",
            f"A store registers {DEFAULT_BYTES // MiB} MiB by default, and that fails.",
            "Raise it (default: 33554432), or give the store a smaller gpu_staging_bytes.",
            ("gds-nvidia-fs#4",),
        )


def kvikio_mode(facts: MachineFacts) -> Iterator[Finding]:
    """kvikio has a fallback of its own on top of cuFile's, and its words mean something else to everyone."""
    mode = (facts.environment.kvikio_compat_mode or "").strip().lower()
    if not mode or not facts.nvidia.gpus or facts.packages.kvikio is None:
        return
    if mode in TRUE:
        yield Finding(
            "kvikio-compat-on",
            Severity.HINT,
            IoPath.DIRECT,
            "KVIKIO_COMPAT_MODE is ON: programs that leave the choice to it do not use cuFile at all.",
            "They read with plain system calls, through host memory. A store does not: it sets the mode itself.",
            "Unset KVIKIO_COMPAT_MODE.",
            ("kvikio#529",),
        )
    else:
        falls = (
            "errors where cuFile cannot be used" if mode != "auto" else "plain system calls where it cannot"
        )
        yield Finding(
            "kvikio-compat-set",
            Severity.HINT,
            IoPath.DIRECT,
            f"KVIKIO_COMPAT_MODE is {mode.upper()}: programs that leave the choice to it use cuFile, and {falls}.",
            "It says nothing about cuFile's own fallback, which works on below it: OFF does not mean direct. A store sets the "
            "mode itself.",
            "Leave it unset. cuFile's fallback is switched by allow_compat_mode.",
            ("kvikio#529",),
        )


def torch_memory(facts: MachineFacts) -> Iterator[Finding]:
    text = (facts.environment.pytorch_alloc_conf or "").lower().replace(" ", "")
    if "expandable_segments:true" in text and facts.nvidia.gpus:
        yield Finding(
            "expandable-segments",
            Severity.COSTS,
            IoPath.DIRECT,
            "PyTorch allocates GPU memory in expandable segments (PYTORCH_CUDA_ALLOC_CONF).",
            "Such memory cannot be registered with cuFile. A store's own staging memory does not come from PyTorch and is "
            "not concerned; reading straight into PyTorch tensors (in_place) is.",
            "Unset expandable_segments if you want in_place; else leave it.",
            ("Mooncake#2511",),
        )


def fabrics(facts: MachineFacts) -> Iterator[Finding]:
    """Whether the host has drives that suffer from what the store's drive needs."""
    config = facts.cufile.config
    remote = [each for each in facts.kernel.nvme_transports if each not in ("pcie", "loop")]
    if facts.nvidia.gpus and remote and wants_p2pdma(facts) and config.block_nvmeof is not False:
        yield Finding(
            "p2pdma-and-nvmeof",
            Severity.COSTS,
            IoPath.DIRECT,
            f"use_pci_p2pdma is on for the whole host, which also has NVMe drives over {remote[0]}.",
            "On those, cuFile's writes fail with an input/output error while it is on.",
            "Give the store a cufile.json of its own (CUFILE_ENV_PATH_JSON) and leave use_pci_p2pdma false in "
            '/etc/cufile.json; or set "block": {"nvmeof": {"use_pci_p2pdma": false}} in it.',
            ("nixl#1063",),
        )


RULES = (library, settings, kvikio_mode, torch_memory, fabrics)
