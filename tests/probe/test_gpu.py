"""GPUs are found with NVML and without, and only real trouble is an error."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from gdsstore.probe import gpu as gpu_module
from gdsstore.probe.gpu import nvidia
from tests.probe.tree_builder import PROPRIETARY, TreeBuilder, gpu_machine


def test_a_gpu_is_found_without_nvml(built: TreeBuilder) -> None:
    gpu_machine(built)
    found = nvidia(built.tree)
    assert (found.driver, found.driver_version, found.module) == (True, "575.51.03", "open")
    assert found.registry_dwords == "RMForceStaticBar1=1;"
    (gpu,) = found.gpus
    assert (gpu.name, gpu.pci_address, gpu.numa_node) == ("NVIDIA H200", "0000:1b:00.0", 1)
    assert gpu.bar1_bytes == 256 << 30
    assert gpu.pci_path == ("pci0000:15", "0000:15:01.0", "0000:1b:00.0")
    assert (gpu.iommu, gpu.p2pmem) == ("DMA-FQ", True)


def test_the_proprietary_module_is_told_from_the_open_one(built: TreeBuilder) -> None:
    gpu_machine(built, PROPRIETARY)
    found = nvidia(built.tree)
    assert (found.driver_version, found.module) == ("550.90.07", "proprietary")


def test_a_gpu_without_a_driver_is_seen_on_the_bus(built: TreeBuilder) -> None:
    built.pci("pci0000:00/0000:01:00.0", vendor="0x10de", **{"class": "0x030200"})
    built.pci("pci0000:00/0000:01:00.1", vendor="0x10de", **{"class": "0x040300"})  # its sound
    found = nvidia(built.tree)
    assert (found.driver, found.gpus, found.gpus_without_driver) == (False, (), ("0000:01:00.0",))


def fake_nvml(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    module = types.ModuleType("pynvml")
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", module)


class NVMLError(Exception):
    pass


class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801, N818
    pass


def raising(error: Exception) -> Any:
    def call(*_: object) -> None:
        raise error

    return call


def test_nvml_without_a_driver_is_no_gpu_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(
        monkeypatch, nvmlInit=raising(NVMLError_DriverNotLoaded("Driver Not Loaded")), NVMLError=NVMLError
    )
    assert gpu_module._nvml() == gpu_module._Nvml()


def test_any_other_trouble_of_nvml_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(
        monkeypatch, nvmlInit=raising(NVMLError("Driver/library version mismatch")), NVMLError=NVMLError
    )
    assert gpu_module._nvml().error == "NVML: Driver/library version mismatch"


def test_nvml_s_gpus_are_taken_as_it_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    space = types.SimpleNamespace
    fake_nvml(
        monkeypatch,
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda handle: space(busId=b"00000000:1B:00.0"),
        nvmlDeviceGetBAR1MemoryInfo=lambda handle: space(bar1Total=1 << 37, bar1Used=4096),
        nvmlDeviceGetMemoryInfo=raising(NVMLError("Not Supported")),
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlSystemGetDriverVersion=lambda: b"575.51.03",
    )
    said = gpu_module._nvml()
    assert (said.version, said.error) == ("575.51.03", None)
    assert said.gpus is not None
    (gpu,) = said.gpus
    assert (gpu.pci_address, gpu.bar1_bytes, gpu.memory_bytes) == ("0000:1b:00.0", 1 << 37, None)
    assert gpu.compute_capability == "9.0"
