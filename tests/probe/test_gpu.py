"""GPUs are found with NVML and without, and only real trouble is an error."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest

from gdsstore.probe import gpu as gpu_module
from gdsstore.probe.child import Said
from gdsstore.probe.facts import Cuda, Gpu
from gdsstore.probe.gpu import nvidia
from gdsstore.probe.tree import LIVE, Tree
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


def cuda_says(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    monkeypatch.setattr(gpu_module, "ask", lambda *_: said)
    monkeypatch.setattr(gpu_module, "_nvml", gpu_module._Nvml)
    monkeypatch.setattr(gpu_module, "_from_proc", lambda tree: ())


def line(said: dict[str, Any]) -> Said:
    return Said((json.dumps(said),), 0)


def test_gpus_that_only_cuda_knows_of_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in WSL and in containers, which hide /proc/driver/nvidia, where pynvml is not installed."""
    cuda_says(
        monkeypatch,
        line({"devices": [{"name": "H200", "pci_address": "00000000:1B:00.0", "memory_bytes": 1 << 37}]}),
    )
    found = nvidia(Tree(LIVE))
    (gpu,) = found.gpus
    assert (gpu.name, gpu.pci_address, gpu.memory_bytes) == ("H200", "0000:1b:00.0", 1 << 37)
    assert (found.cuda, found.error) == (Cuda(devices=("0000:1b:00.0",)), None)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (line({"error": "libcuda.so.1 cannot be loaded: no such file"}), None),
        (line({"error": "CUDA_ERROR_NO_DEVICE"}), None),
        (line({"error": "CUDA_ERROR_UNKNOWN"}), "CUDA: CUDA_ERROR_UNKNOWN"),
        (Said((), None), "CUDA: the process that started CUDA did not return"),
        (Said((), -11), "CUDA: the process that started CUDA died (exit code -11)"),
    ],
)
def test_cuda_without_a_gpu_is_trouble_only_where_there_should_be_one(
    monkeypatch: pytest.MonkeyPatch, said: Said, error: str | None
) -> None:
    cuda_says(monkeypatch, said)
    found = nvidia(Tree(LIVE))
    assert (found.gpus, found.error, found.cuda) == ((), error, None)


def test_what_keeps_cuda_from_a_gpu_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_says(monkeypatch, line({"error": "CUDA_ERROR_SYSTEM_NOT_READY"}))
    monkeypatch.setattr(gpu_module, "_from_proc", lambda tree: (Gpu("H200"),))
    found = nvidia(Tree(LIVE))
    assert (found.cuda, found.error) == (Cuda("CUDA_ERROR_SYSTEM_NOT_READY"), None)
