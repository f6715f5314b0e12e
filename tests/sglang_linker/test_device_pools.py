"""SGLang's device pools: where their pages lie, what tells them apart, and which are refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_fixtures import (
    DEVICE_TOKENS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    MHA,
    MLA,
    PAGE_SIZE,
    device_buffers,
    device_pool,
)
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from gdsstore import ArgumentError, ConfigError, DevicePieces, Pieces
from gdsstore.memory.views import describe
from sglang_backend.device_pools import host_indices
from sglang_backend.device_pools_resolve import DevicePools, resolve

FULL = {ComponentType.FULL}


def params(pool: Any, **more: Any) -> SimpleNamespace:
    facts = {
        "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=lambda: pool),
        "page_size": PAGE_SIZE,
        "mtp_draft_device_pools": (),
        "sidecar_draft_device_pools": (),
        "mtp_draft_mamba_pools": (),
        "req_to_token_pool": None,
    }
    return SimpleNamespace(**{**facts, **more})


def resolved(pool: Any, **more: Any) -> DevicePools:
    return resolve(params(pool, **more), FULL)


def mha_pool(cls: type = MHATokenToKVPool, **more: Any) -> Any:
    facts = {
        "size": DEVICE_TOKENS,
        "page_size": PAGE_SIZE,
        "dtype": torch.bfloat16,
        "head_num": HEADS,
        "head_dim": HEAD_DIM,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return cls(**{**facts, **more})


def stored_bytes(pieces: Pieces, pages: int) -> list[bytes]:
    """What a store would write for each page."""
    import ctypes

    where = describe(
        pieces,
        pages,
        int(np.sum(np.broadcast_to(pieces.length, np.shape(pieces.address))[0])),
        writable=False,
    )
    return [
        b"".join(ctypes.string_at(int(a), int(n)) for a, n in zip(address, length, strict=True))
        for address, length in zip(where.address, where.length, strict=True)
    ]


def expected_bytes(pool: Any, rows: torch.Tensor) -> list[bytes]:
    """[layer][K, V][token] of each page."""
    buffers = device_buffers(pool)
    if isinstance(pool, MHATokenToKVPool):
        buffers = [buffer for layer in range(LAYERS) for buffer in (buffers[layer], buffers[LAYERS + layer])]
    return [
        b"".join(buffer[page].view(torch.uint8).numpy().tobytes() for buffer in buffers)
        for page in rows.split(PAGE_SIZE)
    ]


@pytest.mark.parametrize("kind", [MHA, MLA])
@pytest.mark.parametrize("rows", ["pages in any order", "pages off their grid", "tokens in any order"])
def test_a_page_is_stored_layer_by_layer_wherever_its_tokens_lie(kind: str, rows: str) -> None:
    pool = device_pool(kind)
    starts = torch.tensor([7, 0, 3]) * PAGE_SIZE + (5 if rows == "pages off their grid" else 0)
    indices = (starts[:, None] + torch.arange(PAGE_SIZE)).flatten()
    if rows == "tokens in any order":
        indices = torch.randperm(DEVICE_TOKENS)[: 3 * PAGE_SIZE]
    (found,) = resolved(pool).pools
    pages = found.pages(host_indices([indices]))
    assert isinstance(pages, Pieces)
    assert stored_bytes(pages, 3) == expected_bytes(pool, indices)


def test_pages_that_lie_together_have_a_piece_a_buffer() -> None:
    (found,) = resolved(device_pool(MHA)).pools
    pages = found.pages(np.arange(4 * PAGE_SIZE))
    assert np.shape(pages.address) == (4, 2 * LAYERS)


@given(st.lists(st.integers(0, DEVICE_TOKENS // PAGE_SIZE - 1), max_size=6))
def test_addresses_are_those_of_the_tensors_rows(pages: list[int]) -> None:
    pool = device_pool(MLA)
    (found,) = resolved(pool).pools
    first = np.array(pages, np.int64) * PAGE_SIZE
    address = np.asarray(found.pages((first[:, None] + np.arange(PAGE_SIZE)).reshape(-1)).address)
    assert address.tolist() == [
        [buffer[row].data_ptr() for buffer in pool.kv_buffer] for row in first.tolist()
    ]


def test_pages_of_a_gpu_are_described_as_such() -> None:
    (found,) = resolved(device_pool(MHA)).pools
    on_gpu = dataclasses.replace(found, buffers=dataclasses.replace(found.buffers, device=1))
    pages = on_gpu.pages(np.arange(PAGE_SIZE))
    assert isinstance(pages, DevicePieces)
    assert (pages.device, pages.streams) == (1, ())


@pytest.mark.parametrize(
    "indices",
    [[0] * (PAGE_SIZE - 1), range(-1, PAGE_SIZE - 1), range(DEVICE_TOKENS, DEVICE_TOKENS + 2 * PAGE_SIZE)],
)
def test_indices_that_are_no_pages_are_refused(indices: Any) -> None:
    (found,) = resolved(device_pool(MHA)).pools
    with pytest.raises(ArgumentError):
        found.pages(np.array(indices, np.int64))


def test_both_kinds_of_fp8_are_told_apart() -> None:
    layouts = {
        resolved(mha_pool(dtype=dtype)).pools[0].layout for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    }
    assert {layout.dtype for layout in layouts} == {"fp8_e4m3", "fp8_e5m2"}
    assert {layout.page_bytes for layout in layouts} == {2 * LAYERS * PAGE_SIZE * HEADS * HEAD_DIM}


def test_keys_and_values_may_differ_in_width() -> None:
    (found,) = resolved(mha_pool(v_head_dim=HEAD_DIM * 2)).pools
    assert found.layout.page_bytes == 3 * LAYERS * PAGE_SIZE * HEADS * HEAD_DIM * 2
    assert len(np.unique(found.buffers.row_bytes)) == 2


class Derived(MHATokenToKVPool):
    pass


class DerivedMla(MLATokenToKVPool):
    pass


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (lambda: mha_pool(Derived), "Derived.*HiCache"),
        (lambda: mha_pool(dtype=torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
        (lambda: SimpleNamespace(layer_num=1), "SimpleNamespace"),
        (lambda: _with(mha_pool(), kv_cache_layout="hnd"), "hnd"),
        (lambda: _with(mha_pool(), k_buffer=[b[::2] for b in mha_pool().k_buffer]), "contiguous"),
        (lambda: _with(mha_pool(), k_buffer=[b[:, :1] for b in mha_pool().k_buffer]), "shape"),
        (lambda: _with(mha_pool(), layer_shard_enabled=True), "sharded"),
    ],
)
def test_a_pool_that_is_not_known_is_refused_at_start(pool: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(pool())


def test_components_without_their_pools_are_refused() -> None:
    with pytest.raises(ConfigError, match="FULL, SWA"):
        resolve(params(device_pool(MHA)), {ComponentType.FULL, ComponentType.SWA})


def _with(pool: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(pool, name, value)
    return pool
