"""The host pool's memory comes from gdsstore where the backend's config asks for it, and from SGLang everywhere else."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator

from gdsstore import Config, StoreError
from sglang_backend import host_allocator
from sglang_backend.host_allocator import is_wanted, make_allocator

OURS = {"class_name": "GdsStoreHiCache", "path": "/somewhere"}


@pytest.mark.parametrize(
    ("extra_config", "environment", "wanted"),
    [
        (OURS | {"host_allocator": True}, {}, True),
        (OURS | {"host_allocator": False}, {"SGLANG_GDSSTORE_HOST_ALLOCATOR": "1"}, False),
        (OURS, {}, False),
        (
            {"class_name": "AnotherBackend", "host_allocator": True},
            {"SGLANG_GDSSTORE_HOST_ALLOCATOR": "1"},
            False,
        ),
        ({}, {"SGLANG_GDSSTORE_HOST_ALLOCATOR": "1"}, True),  # a backend that is attached later
        ({}, {"SGLANG_GDSSTORE_HOST_ALLOCATOR": "0"}, False),
        ({}, {}, False),
    ],
)
def test_it_is_used_only_where_it_is_asked_for(
    extra_config: dict[str, Any], environment: dict[str, str], wanted: bool
) -> None:
    assert is_wanted(extra_config, environment) is wanted


def test_sglang_finds_it_and_gets_its_own_allocator_back_when_nobody_asked() -> None:
    (entry,) = (
        entry
        for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")
        if entry.value.startswith("sglang_backend.")
    )
    assert entry.load() is host_allocator.register
    given: list[str] = []
    sglangs = HostTensorAllocator()

    def original(kind: str) -> HostTensorAllocator:
        given.append(kind)
        return sglangs

    assert host_allocator.choose_allocator(original, "dynamic") is sglangs
    assert given == ["dynamic"]


def refuse(kind: str) -> Any:
    raise AssertionError(f"SGLang's allocator was asked for {kind}")


def test_its_tensors_are_aligned_touched_and_live_as_long_as_they_are_used() -> None:
    allocator = make_allocator("/tmp", None, refuse, "dynamic")
    assert isinstance(allocator, HostTensorAllocator)
    tensor = allocator.allocate((3, 1000, 64), torch.bfloat16, "cpu")
    assert tensor.shape == (3, 1000, 64)
    assert tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    tensor.fill_(1.5)
    part = tensor[2]
    del tensor, allocator
    gc.collect()
    assert bool((part == 1.5).all()), "the memory went with the allocator"


def test_a_pool_that_gets_no_arena_gets_sglangs_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*args: Any, **options: Any) -> Any:
        raise StoreError("not enough memory")

    monkeypatch.setattr(host_allocator, "Arena", no_memory)
    allocator = make_allocator(None, None, lambda kind: HostTensorAllocator(), "dynamic")
    with caplog.at_level(logging.ERROR, "gdsstore.sglang"):
        tensor = allocator.allocate((16, 4096), torch.uint8, "cpu")
    assert tensor.shape == (16, 4096)
    assert "not enough memory" in caplog.text


def test_memory_other_than_the_cpus_is_refused() -> None:
    with pytest.raises(ValueError, match="cuda"):
        make_allocator(None, None, refuse, "dynamic").allocate((1,), torch.uint8, "cuda")


def test_a_forked_child_does_not_inherit_it() -> None:
    tensor = make_allocator(None, None, refuse, "dynamic").allocate((1 << 21,), torch.uint8, "cpu")
    flags = ""
    with open("/proc/self/smaps") as maps:
        inside = False
        for line in maps:
            if "-" in line.split()[0] and ":" not in line.split()[0]:
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                inside = low <= tensor.data_ptr() < high
            elif inside and line.startswith("VmFlags"):
                flags = line
    assert " dc" in flags, "the range is not marked as not to be copied at fork"
    assert np.asarray(tensor).nbytes == 1 << 21


def test_its_switch_is_no_setting_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_allocator.ENVIRONMENT, "1")
    Config.load()  # refuses GDSSTORE_* that it does not know
