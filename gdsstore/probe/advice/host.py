"""Findings about the path between the drive and host memory, which also serves compat and bounce."""

from __future__ import annotations

from collections.abc import Iterator

from gdsstore.probe.advice.finding import Finding, IoPath, Severity
from gdsstore.probe.facts import MachineFacts

SLOW_SCHEDULERS = ("bfq",)


def io_uring(facts: MachineFacts) -> Iterator[Finding]:
    kernel = facts.kernel
    if kernel.io_uring == "works" or (kernel.io_uring is None and not kernel.io_uring_disabled):
        return
    # In a container it may also be the seccomp profile that says so: podman's does.
    if kernel.io_uring == "ENOSYS" and facts.container.kind is None:
        step = "Boot a kernel of 5.10 or later that has io_uring."
    elif kernel.io_uring_disabled:
        step = "On the host: sudo sysctl kernel.io_uring_disabled=0 (and in /etc/sysctl.d to keep it)."
    elif facts.container.kind == "kubernetes":
        step = (
            "Give the pod a seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register "
            "(securityContext.seccompProfile)."
        )
    else:
        step = (
            "Start the container with a seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register "
            "(docker run --security-opt seccomp=FILE); the default profiles forbid them."
        )
    yield Finding(
        "io-uring-forbidden",
        Severity.COSTS,
        IoPath.HOST,
        f"io_uring cannot be used here ({kernel.io_uring or 'kernel.io_uring_disabled is set'}).",
        "The store falls back to system calls in threads (engine posix): the same bytes, more CPU, often slower.",
        step,
    )


def nixl(facts: MachineFacts) -> Iterator[Finding]:
    if facts.packages.nixl is None:
        yield Finding(
            "no-nixl",
            Severity.COSTS,
            IoPath.HOST,
            "NIXL is not installed.",
            "The store uses system calls in threads (engine posix): more CPU for the same bytes, often slower.",
            'pip install "gdsstore[nixl]".',
        )
    elif "POSIX" not in facts.packages.nixl_plugins:
        chosen = facts.environment.nixl_plugin_dir
        yield Finding(
            "no-nixl-posix-plugin",
            Severity.COSTS,
            IoPath.HOST,
            f"NIXL {facts.packages.nixl} is installed, but its POSIX plugin is not found.",
            "The store uses system calls in threads (engine posix).",
            f"Unset NIXL_PLUGIN_DIR ({chosen})."
            if chosen
            else 'pip install --force-reinstall "gdsstore[nixl]".',
        )


def drive_queue(facts: MachineFacts) -> Iterator[Finding]:
    for drive in facts.storage.drives:
        if drive.kind == "nvme" and drive.scheduler in SLOW_SCHEDULERS:
            yield Finding(
                "slow-scheduler",
                Severity.COSTS,
                IoPath.HOST,
                f"{drive.name} is scheduled by {drive.scheduler}.",
                "It is made for slow disks: on NVMe it costs CPU for each request and holds some back.",
                f"echo none | sudo tee /sys/block/{drive.name}/queue/scheduler",
            )
        # virtio's disks call themselves rotational whatever they are.
        if drive.kind == "scsi" and drive.rotational and not facts.kernel.virtual_machine:
            yield Finding(
                "spinning-disk",
                Severity.COSTS,
                IoPath.HOST,
                f"{drive.name} is a spinning disk.",
                "Loading pages from it is almost surely slower than computing them anew.",
                "Put the store on an NVMe drive.",
            )


def huge_pages(facts: MachineFacts) -> Iterator[Finding]:
    kernel = facts.kernel
    if (
        kernel.transparent_hugepages == "never"
        and not kernel.hugepages_2m_free
        and not kernel.hugepages_1g_free
    ):
        yield Finding(
            "no-huge-pages",
            Severity.COSTS,
            IoPath.HOST,
            "The kernel gives no huge pages (transparent_hugepage/enabled is never, and none are reserved).",
            "Direct I/O into small pages was measured at about half the bytes a second, with three times the CPU.",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )


RULES = (io_uring, nixl, drive_queue, huge_pages)
