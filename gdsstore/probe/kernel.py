"""The kernel: P2PDMA, io_uring, memory limits, and whether it runs in a virtual machine or WSL."""

from __future__ import annotations

import ctypes
import errno
import gzip
import os
import platform

from gdsstore.probe.facts import Kernel
from gdsstore.probe.tree import Tree

P2PDMA_SYMBOL = "p2pdma_pgmap_ops"  # what NVIDIA's troubleshooting guide looks for
P2PDMA_OPTION = "CONFIG_PCI_P2PDMA"
UNLIMITED = -1

_SYS_IO_URING_SETUP = 425  # the same on every architecture
_IO_URING_PARAMS_BYTES = 120
_libc = ctypes.CDLL(None, use_errno=True)


def kernel(tree: Tree) -> Kernel:
    release = tree.text("/proc/sys/kernel/osrelease")
    return Kernel(
        release=release,
        machine=platform.machine() if tree.live else None,
        wsl=None if release is None else "microsoft" in release.lower(),
        virtual_machine=_virtual(tree),
        p2pdma=p2pdma(tree, release),
        nvme_multipath=_multipath(tree),
        nvme_transports=_transports(tree),
        io_uring=try_io_uring() if tree.live else None,
        io_uring_disabled=tree.integer("/proc/sys/kernel/io_uring_disabled"),
        memlock_bytes=_memlock(tree),
        transparent_hugepages=_chosen(tree.text("/sys/kernel/mm/transparent_hugepage/enabled")),
        hugepages_2m_free=tree.integer("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"),
        hugepages_1g_free=tree.integer("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages"),
    )


def p2pdma(tree: Tree, release: str | None) -> bool | None:
    """Whether the kernel was built with PCI peer-to-peer DMA. None where neither its options nor its symbols can be read."""
    options = _options(tree, release)
    if options is not None:
        return f"{P2PDMA_OPTION}=y" in options.splitlines()
    symbols = 0
    for line in tree.lines("/proc/kallsyms"):
        if P2PDMA_SYMBOL in line:
            return True
        symbols += 1
    return False if symbols else None


def try_io_uring() -> str:
    """ "works", or the errno's name: EPERM where a sysctl or a seccomp filter forbids it, ENOSYS where the kernel lacks it."""
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    fd = _libc.syscall(_SYS_IO_URING_SETUP, 1, params)
    if fd < 0:
        code = ctypes.get_errno()
        return errno.errorcode.get(code, str(code))
    os.close(fd)
    return "works"


def _options(tree: Tree, release: str | None) -> str | None:
    if tree.exists("/proc/config.gz"):
        try:
            return gzip.decompress(tree.at("/proc/config.gz").read_bytes()).decode(errors="replace")
        except (OSError, EOFError) as error:
            tree.notes.append(f"/proc/config.gz: {error}")
    return None if release is None else tree.text(f"/boot/config-{release}")


def _virtual(tree: Tree) -> bool | None:
    for line in tree.lines("/proc/cpuinfo"):
        if line.startswith("flags"):
            return "hypervisor" in line.split()
    return None  # not x86: cpuinfo does not say


def _multipath(tree: Tree) -> bool | None:
    text = tree.text("/sys/module/nvme_core/parameters/multipath")
    return None if text is None else text == "Y"


def _transports(tree: Tree) -> tuple[str, ...]:
    controllers = tree.names("/sys/class/nvme")
    found = (tree.text(f"/sys/class/nvme/{name}/transport") for name in controllers)
    return tuple(sorted({each for each in found if each}))


def _memlock(tree: Tree) -> int | None:
    for line in (tree.text("/proc/self/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return UNLIMITED if soft == "unlimited" else int(soft)
    return None


def _chosen(text: str | None) -> str | None:
    """The word in brackets of a sysfs choice."""
    if text is None or "[" not in text:
        return text
    return text[text.index("[") + 1 : text.index("]")]
