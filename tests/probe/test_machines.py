"""What doctor tells on recorded machines: every public report of GPUDirect Storage gone wrong, and what works."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gdsstore.probe.advice
from gdsstore.probe.advice import Finding, IoPath, Severity, State, findings, verdicts
from gdsstore.probe.facts import Cuda, CuFileDriver, Gpu, Layer, MachineFacts
from gdsstore.probe.trips import Outcome, Trip
from tests.probe.machines import NAMES, machine

DIRECT = (State.WORKS, State.NOT_DIRECT, State.NOT_DIRECT, State.WORKS)
SHOULD = (State.SHOULD, State.NOT_DIRECT, State.NOT_DIRECT, State.WORKS)
FALLBACK = (State.DOES_NOT, State.NOT_DIRECT, State.NOT_DIRECT, State.WORKS)
UNSURE = (State.NOT_KNOWN, State.NOT_DIRECT, State.NOT_DIRECT, State.WORKS)
HOST_ONLY = (State.DOES_NOT, State.DOES_NOT, State.DOES_NOT, State.WORKS)
NOTHING = (State.DOES_NOT,) * 4

# Of each machine: the verdicts (direct, compat, bounce, host), and every finding that is more than a hint.
EXPECTED: dict[str, tuple[tuple[State, ...], set[str]]] = {
    "bar1-too-small": (FALLBACK, {"bar1-too-small"}),
    "block-inside-fs": (FALLBACK, {"p2pdma-not-for-nvme", "cufile-says-compat"}),
    "different-root-complexes": (UNSURE, {"different-root-complexes", "different-numa-nodes"}),
    "cufile-hangs": (
        (State.DOES_NOT, State.DOES_NOT, State.NOT_DIRECT, State.WORKS),
        {"cufile-driver-does-not-open", "device-round-trip-failed"},
    ),
    "docker-without-udev": (FALLBACK, {"no-udev"}),
    "ext4-without-data-ordered": (FALLBACK, {"ext4-data-ordered"}),
    "fallback-everywhere": (FALLBACK, {"compat-forced", "expandable-segments"}),
    "fabric-manager-stopped": (HOST_ONLY, {"cuda-does-not-start"}),
    "gpu-in-virtio-vm": (FALLBACK, {"not-nvme"}),
    "grace": (UNSURE, {"not-x86"}),
    "h200-static-bar1-off": (FALLBACK, {"static-bar1-off"}),
    "io-uring-forbidden": (SHOULD, {"io-uring-forbidden"}),
    "iommu-translates": (UNSURE, {"iommu-translates"}),
    "lvm": (FALLBACK, {"device-mapper", "udev-does-not-know"}),
    "never-set-up": (FALLBACK, {"static-bar1-off", "p2pdma-not-enabled"}),
    "nvidia-fs-healthy": (DIRECT, set()),
    "nvme-not-registered": (FALLBACK, {"nvme-not-registered"}),
    "nvmeof-on-the-host": (SHOULD, {"p2pdma-and-nvmeof"}),
    "o-direct-refused": (FALLBACK, {"filesystem-not-supported", "no-o-direct", "no-o-direct-host"}),
    "overlayfs": (FALLBACK, {"overlayfs", "overlayfs-host"}),
    "p2pdma-healthy": (DIRECT, set()),
    "pod-without-nvidia-fs-nodes": (FALLBACK, {"no-nvidia-fs-nodes"}),
    "proprietary-driver": (
        FALLBACK,
        {"proprietary-driver", "driver-too-old-for-p2pdma", "static-bar1-off", "p2pdma-not-enabled"},
    ),
    "raid0": (FALLBACK, {"p2pdma-on-raid"}),
    "read-only": (NOTHING, {"no-gpu", "not-nvme", "not-writable"}),
    "silent-fallback": (FALLBACK, {"direct-fell-back"}),
    "slow-host": (
        HOST_ONLY,
        {
            "no-gpu",
            "network-drive",
            "drive-full",
            "io-uring-forbidden",
            "no-nixl",
            "slow-scheduler",
            "no-huge-pages",
        },
    ),
    "store-on-nvmeof": (FALLBACK, {"nvmeof-drive", "p2pdma-and-nvmeof"}),
    "strict-no-packages": (
        (State.DOES_NOT, State.DOES_NOT, State.NOT_DIRECT, State.WORKS),
        {"no-libcufile", "no-device-engine", "compat-not-allowed", "no-nixl"},
    ),
    "tmpfs": (FALLBACK, {"in-memory", "in-memory-host", "no-o-direct-host"}),
    "virtio-vm": (HOST_ONLY, {"no-gpu", "not-nvme"}),
    "wsl": (FALLBACK, {"wsl", "not-nvme"}),
    "xfs-healthy": (SHOULD, set()),
}

# The exact next step of each public report: words without which the advice would be of no use.
STEPS = {
    ("lvm", "device-mapper"): ("/dev/nvme0n1p1", "without LVM"),
    ("lvm", "udev-does-not-know"): ("udevadm trigger", "252:0"),
    ("raid0", "p2pdma-on-raid"): ("--store DIR1 --store DIR2",),
    ("ext4-without-data-ordered", "ext4-data-ordered"): (
        "mount -o data=ordered /dev/nvme0n1 /mnt/nvme",
        "/etc/fstab",
    ),
    ("h200-static-bar1-off", "static-bar1-off"): (
        "RMForceStaticBar1=1;RmForceDisableIomapWC=1",
        "update-initramfs",
    ),
    ("proprietary-driver", "proprietary-driver"): ("nvidia-open", "reboot"),
    ("different-root-complexes", "different-root-complexes"): ("nvidia-smi topo -m",),
    ("nvidia-fs-healthy", "nvidia-fs-counts-nothing"): ("rw_stats_enabled",),
    ("p2pdma-healthy", "silent-fallback"): ("CUFILE_ALLOW_COMPAT_MODE=false",),
    ("silent-fallback", "direct-fell-back"): (
        "CUFILE_ALLOW_COMPAT_MODE=false",
        "gdsio -D /mnt/nvme",
        "cufile.log",
    ),
    ("fabric-manager-stopped", "cuda-does-not-start"): ("systemctl enable --now nvidia-fabricmanager",),
    ("bar1-too-small", "bar1-too-small"): ("Above 4G decoding", "gpu_staging_bytes"),
    ("nvmeof-on-the-host", "p2pdma-and-nvmeof"): ("CUFILE_ENV_PATH_JSON", "nvmeof"),
    ("docker-without-udev", "no-udev"): ("-v /run/udev:/run/udev:ro",),
    ("pod-without-nvidia-fs-nodes", "no-nvidia-fs-nodes"): ("NVIDIA_GDS=enabled", "gds.enabled=true"),
    ("fallback-everywhere", "kvikio-compat-on"): ("Unset KVIKIO_COMPAT_MODE",),
    ("fallback-everywhere", "expandable-segments"): ("Unset expandable_segments",),
    ("o-direct-refused", "no-o-direct-host"): ("ext4 or xfs",),
    ("overlayfs", "overlayfs-host"): ("docker run -v",),
    ("never-set-up", "p2pdma-not-enabled"): (
        '"block": {"nvme": {"use_pci_p2pdma": true}}',
        "/etc/cufile.json",
    ),
    ("io-uring-forbidden", "io-uring-forbidden"): ("seccomp",),
    ("slow-host", "io-uring-forbidden"): ("sysctl kernel.io_uring_disabled=0",),
}

# "GPUDirect Storage in practice": reports of users of the peers.
REPORTS = {
    *("LMCache#795", "gds-nvidia-fs#62", "gds-nvidia-fs#65", "DALI#3972", "gds-nvidia-fs#75", "gds-nvidia-fs#72"),
    *("gds-nvidia-fs#70", "gds-nvidia-fs#78", "gds-nvidia-fs#4", "nixl#1063", "kvikio#33", "kvikio#283"),
    *("nvidia-container-toolkit#567", "nvidia-container-toolkit#1150", "kvikio#529", "Mooncake#2511"),
    *("LMCache#1522", "LMCache#1570", "LMCache#1824", "dynamo#6032", "dynamo#5012"),
}  # fmt: skip


def changed(facts: MachineFacts, part: str, **fields: Any) -> MachineFacts:
    return replace(facts, **{part: replace(getattr(facts, part), **fields)})


def with_gpu(facts: MachineFacts, **fields: Any) -> MachineFacts:
    return changed(facts, "nvidia", gpus=tuple(replace(gpu, **fields) for gpu in facts.nvidia.gpus))


def with_drive(facts: MachineFacts, **fields: Any) -> MachineFacts:
    return changed(facts, "storage", drives=tuple(replace(each, **fields) for each in facts.storage.drives))


def with_config(facts: MachineFacts, **fields: Any) -> MachineFacts:
    return changed(facts, "cufile", config=replace(facts.cufile.config, **fields))


def untried(name: str) -> MachineFacts:
    return replace(machine(name), round_trips=())


def tried(facts: MachineFacts, *trips: Trip) -> MachineFacts:
    return replace(facts, round_trips=trips)


P2P, NVFS, VM = untried("p2pdma-healthy"), untried("nvidia-fs-healthy"), untried("virtio-vm")
NEAR = P2P.nvidia.gpus[0]
FAR = replace(NEAR, pci_address="0000:c1:00.0", pci_path=("pci0000:c0", "0000:c0:01.0", "0000:c1:00.0"))

# One change to a machine, and the finding that it must bring.
CHANGES: dict[str, MachineFacts] = {
    "gpu-error": changed(VM, "nvidia", error="NVML: Driver/library version mismatch"),
    "gpu-without-driver": changed(VM, "nvidia", gpus_without_driver=("0000:01:00.0",)),
    "cuda-does-not-start": changed(P2P, "nvidia", cuda=Cuda("CUDA_ERROR_UNKNOWN")),
    "consumer-gpu": with_gpu(P2P, name="NVIDIA GeForce RTX 4090"),
    "gpu-too-old-for-p2pdma": with_gpu(P2P, compute_capability="7.0"),
    "some-gpus-far": changed(P2P, "nvidia", gpus=(NEAR, FAR)),
    "bar1-not-registered": with_gpu(P2P, p2pmem=False),
    "bar1-smaller-than-memory": with_gpu(P2P, bar1_bytes=32 << 30),
    "nvme-multipath": changed(P2P, "kernel", nvme_multipath=True),
    "kernel-without-p2pdma": changed(P2P, "kernel", p2pdma=False),
    "p2pdma-not-known": changed(P2P, "kernel", p2pdma=None),
    "cufile-too-old-for-p2pdma": changed(P2P, "cufile", version="1.9.1.3"),
    "cufile-driver-does-not-open": changed(P2P, "cufile", driver=CuFileDriver(error="error 5033")),
    "cufile-json-damaged": with_config(P2P, error="Expecting value"),
    "pinned-limit-small": with_config(P2P, max_device_pinned_mem_size_kb=131072),
    "kvikio-compat-set": changed(P2P, "environment", kvikio_compat_mode="OFF"),
    "network-filesystem": changed(P2P, "storage", fs_type="nfs4"),
    "loop-device": changed(P2P, "storage", layers=(Layer("loop3", "loop", "/var/kv.img"),)),
    "no-nixl-posix-plugin": changed(P2P, "packages", nixl_plugins=("GDS_MT",)),
    "spinning-disk": changed(with_drive(VM, name="sda", kind="scsi", rotational=True), "kernel", virtual_machine=False),
    "host-round-trip-failed": tried(P2P, Trip("posix", Outcome.FAILED, "Input/output error")),
    "device-round-trip-failed": tried(P2P, Trip("kvikio", Outcome.FAILED, "Input/output error", device=0)),
    "bounce-round-trip-failed": tried(P2P, Trip("bounce", Outcome.FAILED, "Input/output error", device=0)),
    "nvidia-fs-not-loaded": with_config(changed(P2P, "kernel", p2pdma=False), use_pci_p2pdma=False),
}  # fmt: skip


def weighty(facts: MachineFacts) -> set[str]:
    return {each.code for each in findings(facts) if each.severity is not Severity.HINT}


def all_findings() -> list[Finding]:
    known = [machine(name) for name in NAMES] + list(CHANGES.values())
    return [each for facts in known for each in findings(facts)]


def test_there_are_at_least_fifteen_machines_and_each_has_its_expectation() -> None:
    assert len(NAMES) >= 15
    assert set(NAMES) == set(EXPECTED)


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_gets_its_verdicts(name: str) -> None:
    found = verdicts(machine(name))
    assert [each.path for each in found] == list(IoPath)
    assert tuple(each.state for each in found) == EXPECTED[name][0]
    assert all(each.reason for each in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_gets_its_findings_and_no_others(name: str) -> None:
    assert weighty(machine(name)) == EXPECTED[name][1]


@pytest.mark.parametrize(("name", "code"), STEPS, ids=["-".join(each) for each in STEPS])
def test_the_next_step_is_exact(name: str, code: str) -> None:
    (found,) = [each for each in findings(machine(name)) if each.code == code]
    for words in STEPS[name, code]:
        assert words in found.next_step


@pytest.mark.parametrize("code", CHANGES)
def test_one_change_brings_its_finding(code: str) -> None:
    assert code in {each.code for each in findings(CHANGES[code])}


def test_every_public_report_is_answered_by_a_finding() -> None:
    assert {report for each in all_findings() for report in each.see} >= REPORTS


def test_every_finding_that_can_be_made_is_made_here() -> None:
    folder = Path(str(gdsstore.probe.advice.__file__)).parent
    source = "".join(file.read_text() for file in folder.glob("*.py"))
    codes = set(re.findall(r'(?:Finding|_p2p|_nvfs|_host|_direct)\(\s*"([a-z0-9-]+)"', source))
    assert len(codes) > 50
    assert codes == {each.code for each in all_findings()}


def test_findings_speak_in_whole_sentences() -> None:
    for each in all_findings():
        assert each.title.endswith((".", "?")) or ":" in each.title, each.code
        assert len(each.cost) > 20, each.code
        assert len(each.next_step) > 15, each.code


def test_the_gravest_finding_comes_first() -> None:
    order = list(Severity)
    for name in NAMES:
        ranks = [order.index(each.severity) for each in findings(machine(name))]
        assert ranks == sorted(ranks)


def test_what_one_route_lacks_is_no_matter_where_the_other_works() -> None:
    both = changed(NVFS, "nvidia_fs", modules=())  # its NVMe driver is not registered any more ...
    assert verdicts(both)[0].state is State.DOES_NOT
    mended = replace(
        both, kernel=P2P.kernel, nvidia=P2P.nvidia, cufile=P2P.cufile
    )  # ... but P2PDMA is set up
    assert verdicts(mended)[0].state is State.SHOULD
    assert "P2PDMA" in verdicts(mended)[0].reason
    assert weighty(mended) == set()


def test_the_missing_part_of_the_other_route_is_a_hint() -> None:
    (other,) = [
        each for each in findings(machine("h200-static-bar1-off")) if each.code == "nvme-not-registered"
    ]
    assert other.severity is Severity.HINT


def test_what_cufile_says_of_itself_outweighs_what_we_conclude() -> None:
    driver = CuFileDriver(opened=True, nvme_supported=True, nvme_routes=("p2pdma",))
    doubtful = changed(changed(P2P, "kernel", p2pdma=None), "cufile", driver=driver)
    assert verdicts(doubtful)[0].state is State.SHOULD
    none = changed(P2P, "cufile", driver=replace(driver, nvme_supported=False, nvme_routes=()))
    assert verdicts(none)[0].state is State.DOES_NOT


def test_an_environment_variable_outweighs_cufile_json() -> None:
    off = changed(P2P, "environment", cufile_use_pcip2pdma="false")
    assert "p2pdma-not-enabled" in weighty(off)
    strict = changed(P2P, "environment", cufile_allow_compat_mode="0")
    assert verdicts(strict)[1].state is State.DOES_NOT


def test_nothing_known_is_no_promise() -> None:
    judged = verdicts(MachineFacts())
    assert not {State.WORKS, State.SHOULD} & {each.state for each in judged}
    with_gpu_only = changed(P2P, "storage", fs_type=None, drives=(), mount_options=(), udev_usage=None)
    assert verdicts(with_gpu_only)[0].state is State.NOT_KNOWN
    assert weighty(
        changed(MachineFacts(), "nvidia", gpus=(Gpu(),))
    )  # never silent about a GPU of which nothing is known


def test_podmans_seccomp_profile_is_not_taken_for_an_old_kernel() -> None:
    """It answers ENOSYS to what it forbids, where Docker's says EPERM."""
    found = machine("io-uring-forbidden")
    assert found.container.kind is not None
    forbidden = replace(found, kernel=replace(found.kernel, io_uring="ENOSYS"))
    (finding,) = (each for each in findings(forbidden) if each.code == "io-uring-forbidden")
    assert "seccomp" in finding.next_step
