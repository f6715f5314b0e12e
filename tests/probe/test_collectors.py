"""What is read from a recorded /proc and /sys, and that nothing there makes a collector raise."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from gdsstore.probe import cufile as cufile_module
from gdsstore.probe.cufile import cufile, cufile_config, nvidia_fs
from gdsstore.probe.facts import CuFile, MachineFacts, Nvidia, NvidiaFs, Packages
from gdsstore.probe.gather import gather
from gdsstore.probe.kernel import kernel, p2pdma, try_io_uring
from gdsstore.probe.software import container, packages
from gdsstore.probe.tree import Tree
from tests.probe.tree_builder import TreeBuilder, gpu_machine, nvme


def test_cufile_json_may_have_comments(built: TreeBuilder) -> None:
    built.file(
        "/etc/cufile.json",
        """{ // allow what is needed
        "logging": {"dir": "//var/log"}, /* "properties": {} */
        "properties": {"allow_compat_mode": false, "use_pci_p2pdma": true, "max_device_pinned_mem_size_kb": 1024},
        "block": {"nvme": {"use_pci_p2pdma": true}, "raid": {"use_pci_p2pdma": false}}}""",
    )
    found = cufile_config(built.tree, {})
    assert (found.path, found.error) == ("/etc/cufile.json", None)
    assert (found.allow_compat_mode, found.use_pci_p2pdma, found.force_compat_mode) == (False, True, None)
    assert (found.block_nvme, found.block_nvmeof, found.block_raid) == (True, None, False)
    assert (found.block_inside_fs, found.max_device_pinned_mem_size_kb) == (False, 1024)


def test_a_block_section_in_the_wrong_place_is_noticed(built: TreeBuilder) -> None:
    built.file("/my.json", '{"fs": {"block": {"nvme": {"use_pci_p2pdma": true}}}}')
    found = cufile_config(built.tree, {"CUFILE_ENV_PATH_JSON": "/my.json"})
    assert (found.path, found.block_nvme, found.block_inside_fs) == ("/my.json", None, True)


@pytest.mark.parametrize("text", ["{", '{"properties": []}', "[]", "7"])
def test_a_damaged_cufile_json_is_an_error_and_not_a_crash(built: TreeBuilder, text: str) -> None:
    built.file("/etc/cufile.json", text)
    found = cufile_config(built.tree, {})
    assert found.path == "/etc/cufile.json"
    assert (found.error is not None) == (text == "{")


def test_a_named_cufile_json_that_is_gone_is_an_error(built: TreeBuilder) -> None:
    assert cufile_config(built.tree, {"CUFILE_ENV_PATH_JSON": "/gone.json"}).error is not None
    assert cufile_config(built.tree, {}).error is None


def test_the_library_is_found_with_its_version(built: TreeBuilder) -> None:
    built.file("/usr/local/cuda-13.0/lib64/libcufile.so.1.15.1.6")
    built.link(
        "/usr/local/cuda-13.0/lib64/libcufile.so.0", "/usr/local/cuda-13.0/lib64/libcufile.so.1.15.1.6"
    )
    built.link("/usr/local/cuda", "/usr/local/cuda-13.0")
    found = cufile(built.tree, {}, ask_driver=False)
    assert (found.library, found.version) == ("/usr/local/cuda/lib64/libcufile.so.0", "1.15.1.6")
    assert cufile(Tree(built.root / "usr"), {}, ask_driver=False) == CuFile()


def test_a_library_that_is_none_does_not_open(tmp_path: Path) -> None:
    (tmp_path / "libcufile.so.0").write_text("no library")
    said = cufile_module._ask_driver(str(tmp_path / "libcufile.so.0"))
    assert said.opened is False
    assert said.error


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("sleep 60", "did not return within"),
        ("kill -9 $$", "died (exit code -9)"),
        ("echo hello", "died (exit code 0)"),
    ],
)
def test_a_driver_that_hangs_or_crashes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    script = tmp_path / "python"
    script.write_text(
        f"#!/bin/sh\nexec {program}\n" if program.startswith("sleep") else f"#!/bin/sh\n{program}\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(cufile_module.sys, "executable", str(script))
    monkeypatch.setattr(cufile_module, "DRIVER_DEADLINE_S", 0.5)
    driver = cufile_module._ask_driver("libcufile.so.0")
    assert driver.opened is False
    assert said in str(driver.error)


def test_nvidia_fs_tells_its_version_drivers_and_nodes(built: TreeBuilder) -> None:
    built.file("/proc/modules", "nvidia_fs 253952 0 - Live 0x0\nnvme 45056 4 - Live 0x0\n")
    built.file("/proc/driver/nvidia-fs/version", "version: 2.26\n")
    built.file("/proc/driver/nvidia-fs/modules", "nvme: proprietary\nnvme_rdma: 1.0\n")
    built.file(
        "/proc/driver/nvidia-fs/stats", "GDS Version: 1.15\nIO stats: Disabled, peer IO stats: Disabled\n"
    )
    built.file("/dev/nvidia-fs0")
    built.file("/dev/nvidia0")
    found = nvidia_fs(built.tree)
    assert found == NvidiaFs(True, "2.26", ("nvme", "nvme_rdma"), False, ("/dev/nvidia-fs0",))


def test_a_machine_without_nvidia_fs_says_so(built: TreeBuilder) -> None:
    built.file("/proc/modules", "nvme 45056 4 - Live 0x0\n")
    assert nvidia_fs(built.tree).loaded is False


def test_p2pdma_is_read_from_the_options_or_the_symbols_of_the_kernel(built: TreeBuilder) -> None:
    assert p2pdma(built.tree, "6.8.0") is None
    built.file("/proc/kallsyms", "0 t a\n0000000000000000 d p2pdma_pgmap_ops\n")
    assert p2pdma(built.tree, "6.8.0") is True
    built.file("/proc/kallsyms", "0 t a\n0 t b\n")
    assert p2pdma(built.tree, "6.8.0") is False
    built.file("/boot/config-6.8.0", "CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\n")
    assert p2pdma(built.tree, "6.8.0") is True
    (built.root / "proc/config.gz").write_bytes(gzip.compress(b"# CONFIG_PCI_P2PDMA is not set\n"))
    assert p2pdma(built.tree, "6.8.0") is False
    (built.root / "proc/config.gz").write_bytes(b"not gzip")
    assert p2pdma(built.tree, "6.8.0") is True  # the next source counts


def test_the_kernel_s_limits_are_read(built: TreeBuilder) -> None:
    built.file("/proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n")
    built.file("/proc/sys/kernel/io_uring_disabled", "2\n")
    built.file(
        "/proc/self/limits", "Max locked memory         8388608              unlimited            bytes\n"
    )
    built.file("/proc/cpuinfo", "processor : 0\nflags\t\t: fpu vme hypervisor lahf_lm\n")
    built.file("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    built.file("/sys/module/nvme_core/parameters/multipath", "Y\n")
    built.file("/sys/class/nvme/nvme0/transport", "pcie\n")
    built.file("/sys/class/nvme/nvme1/transport", "rdma\n")
    found = kernel(built.tree)
    assert (found.wsl, found.virtual_machine, found.io_uring_disabled) == (True, True, 2)
    assert (found.io_uring, found.machine) == (None, None)  # those can only be had on the machine itself
    assert (found.memlock_bytes, found.transparent_hugepages) == (8388608, "never")
    assert (found.nvme_multipath, found.nvme_transports) == (True, ("pcie", "rdma"))


def test_io_uring_is_tried_here() -> None:
    said = try_io_uring()
    assert said == "works" or said.startswith("E")


def test_containers_are_told_apart(built: TreeBuilder) -> None:
    assert container(built.tree, {}).kind is None
    assert container(built.tree, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).kind == "kubernetes"
    assert (
        container(built.tree, {"container": "podman"}).kind == "podman"
    )  # with a read-only root that is all there is
    assert container(built.tree, {"container": "systemd-nspawn"}).kind == "other"
    built.file("/proc/self/status", "Name: python\nCapEff:\t00000000a80425fb\n")
    built.file("/.dockerenv")
    found = container(built.tree, {})
    assert (found.kind, found.privileged, found.udev) == ("docker", False, False)
    built.folder("/run/udev/data")
    built.file("/proc/self/status", "Name: python\nCapEff:\t000001ffffffffff\n")
    assert (container(built.tree, {}).privileged, container(built.tree, {}).udev) == (True, True)


def test_packages_are_found_without_importing_them(tmp_path: Path) -> None:
    for name, version in (("kvikio_cu13", "26.10.0"), ("nixl", "1.5.1")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        )
    plugins = tmp_path / "nixl_cu13.libs" / "nixl"
    plugins.mkdir(parents=True)
    (plugins / "libplugin_GDS_MT.so").touch()
    (plugins / "libother.so").touch()
    assert packages([str(tmp_path)], {}) == Packages("26.10.0", "1.5.1", ("GDS_MT",))
    assert packages([str(tmp_path)], {"NIXL_PLUGIN_DIR": str(tmp_path)}).nixl_plugins == ()
    assert packages([], {}) == Packages()


def test_an_empty_machine_is_no_reason_to_raise(tmp_path: Path) -> None:
    facts = gather("/kv", root=tmp_path, environ={})
    assert facts.nvidia == Nvidia(driver=False)
    assert facts.storage.path == "/kv"
    assert facts.notes == ()


def test_what_cannot_be_read_is_a_note(built: TreeBuilder) -> None:
    """Directories where files should be, and files full of anything."""
    for path in ("/proc/modules", "/proc/sys/kernel/osrelease", "/etc/cufile.json", "/proc/self/mountinfo"):
        built.folder(path)
    built.file("/proc/sys/kernel/io_uring_disabled", "many")
    facts = gather("/kv", root=built.root, environ={})
    assert (facts.kernel.release, facts.kernel.io_uring_disabled) == (None, None)
    assert len(facts.notes) >= 5
    assert MachineFacts.from_dict(facts.to_dict()) == facts


@pytest.mark.parametrize("junk", ["", "\n\n", "a b c - d", ":::", "\x00\xff - - -", "0x1 0x2"])
def test_junk_everywhere_is_survived(built: TreeBuilder, junk: str) -> None:
    gpu_machine(built)
    nvme(built, 1, "259:0")
    for file in [file for file in built.root.rglob("*") if file.is_file() and not file.is_symlink()]:
        file.write_text(junk)
    for path in (
        "/proc/self/mountinfo",
        "/proc/self/limits",
        "/proc/self/status",
        "/proc/cpuinfo",
        "/proc/modules",
    ):
        built.file(path, junk)
    facts = gather("/mnt/nvme", root=built.root, environ={})
    assert MachineFacts.from_dict(facts.to_dict()) == facts


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    facts = gather(tmp_path)
    assert facts.storage.writable is True
    assert facts.storage.fs_type is not None
    assert facts.kernel.io_uring is not None
    assert list(tmp_path.iterdir()) == []
