"""L2: real host pools in every layout; pages go to a backend and come back byte for byte."""

import ctypes
from pathlib import Path

import cpu_fixtures
import pytest
import torch
from cpu_fixtures import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    MHA,
    MLA,
    PAGE_SIZE,
    device_buffers,
    device_pool,
    host_pool,
)
from reference_backend import ReferenceBackend, page_segments
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName, PoolTransfer

PAGES = 4
KEYS = [f"{index:064x}" for index in range(PAGES)]
PAGE_BYTES = {
    MHA: 2 * LAYERS * PAGE_SIZE * HEADS * HEAD_DIM * 2,
    MLA: LAYERS * PAGE_SIZE * (cpu_fixtures.LATENT_RANK + cpu_fixtures.ROPE_DIM) * 2,
}
# (kind, layout, segments a page)
LAYOUTS = [
    (MHA, "layer_first", 2 * LAYERS),
    (MHA, "page_first", 2),
    (MHA, "page_first_direct", 2),
    (MHA, "page_head", 2),
    (MLA, "layer_first", LAYERS),
    (MLA, "page_first", 1),
    (MLA, "page_first_direct", 1),
]


class FilledPool:
    """A host pool full of random bytes, with four pages allocated."""

    def __init__(self, kind: str, layout: str):
        self.pool = host_pool(device_pool(kind), layout)
        self.pool.kv_buffer.copy_(torch.randn(self.pool.kv_buffer.shape).to(cpu_fixtures.DTYPE))
        # Pages that are not neighbours, to catch code that assumes one contiguous range.
        spread = self.pool.alloc(2 * PAGES * PAGE_SIZE)
        self.indices = spread.view(2 * PAGES, PAGE_SIZE)[::2].flatten().clone()
        self.expected = self.pages()

    def pages(self) -> list[torch.Tensor]:
        starts = self.indices[::PAGE_SIZE].tolist()
        return [self.pool.get_data_page(start).clone() for start in starts]

    def transfer(self) -> PoolTransfer:
        return PoolTransfer(name=PoolName.KV, host_indices=self.indices, keys=KEYS)

    def assert_restored(self) -> None:
        assert all(map(torch.equal, self.pages(), self.expected))


@pytest.fixture(params=LAYOUTS, ids=lambda param: f"{param[0]}-{param[1]}")
def filled(request: pytest.FixtureRequest) -> FilledPool:
    kind, layout, _ = request.param
    return FilledPool(kind, layout)


@pytest.fixture
def backend(tmp_path: Path, filled: FilledPool) -> ReferenceBackend:
    backend = ReferenceBackend(cpu_fixtures.storage_config(directory=str(tmp_path)), {})
    backend.register_mem_pool_host(filled.pool)
    backend.register_mem_host_pool_v2(filled.pool, PoolName.KV)
    return backend


@pytest.mark.parametrize(("kind", "layout", "segments"), LAYOUTS)
def test_page_buffer_meta_lists_all_bytes_of_each_page(kind: str, layout: str, segments: int) -> None:
    filled = FilledPool(kind, layout)
    addresses, sizes = filled.pool.get_page_buffer_meta(filled.indices)
    assert len(addresses) == len(sizes) == PAGES * segments
    assert len(set(addresses)) == len(addresses)
    assert len(set(sizes)) == 1
    assert sum(sizes) == PAGES * PAGE_BYTES[kind]


def test_v1_pages_come_back(filled: FilledPool, backend: ReferenceBackend) -> None:
    assert backend.batch_set_v1(KEYS, filled.indices) == [True] * PAGES
    filled.pool.kv_buffer.zero_()
    assert backend.batch_get_v1(KEYS, filled.indices) == [True] * PAGES
    filled.assert_restored()


def test_v2_pages_come_back(filled: FilledPool, backend: ReferenceBackend) -> None:
    assert backend.batch_set_v2([filled.transfer()]) == {PoolName.KV: [True] * PAGES}
    filled.pool.kv_buffer.zero_()
    assert backend.batch_get_v2([filled.transfer()]) == {PoolName.KV: [True] * PAGES}
    filled.assert_restored()


def test_flat_pages_come_back(filled: FilledPool, backend: ReferenceBackend) -> None:
    assert backend.batch_set(KEYS, filled.expected)
    filled.pool.kv_buffer.zero_()
    targets = [filled.pool.get_dummy_flat_data_page() for _ in KEYS]
    pages = backend.batch_get(KEYS, targets)
    for start, page in zip(filled.indices[::PAGE_SIZE].tolist(), pages, strict=True):
        assert page is not None
        filled.pool.set_from_flat_data_page(start, page)
    filled.assert_restored()


@pytest.mark.parametrize(("kind", "layout", "segments"), LAYOUTS)
def test_segments_joined_are_the_flat_page_except_in_mha_layer_first(
    kind: str, layout: str, segments: int
) -> None:
    """There the segments alternate K and V layer by layer (contracts.md, trap 5)."""
    filled = FilledPool(kind, layout)
    for (_, pieces), page in zip(
        page_segments(KEYS, filled.indices, filled.pool), filled.expected, strict=True
    ):
        joined = b"".join(ctypes.string_at(address, size) for address, size in pieces)
        same = joined == page.view(torch.uint8).numpy().tobytes()
        assert same == ((kind, layout) != (MHA, "layer_first"))


def test_sglangs_file_backend_brings_v2_pages_back(
    filled: FilledPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)
    backend = HiCacheFile(cpu_fixtures.storage_config(file_storage_path=str(tmp_path)))
    backend.register_mem_host_pool_v2(filled.pool, PoolName.KV)
    assert backend.batch_set_v2([filled.transfer()]) == {PoolName.KV: [True] * PAGES}
    filled.pool.kv_buffer.zero_()
    assert backend.batch_get_v2([filled.transfer()]) == {PoolName.KV: [True] * PAGES}
    filled.assert_restored()


def test_a_missing_page_is_reported_and_left_alone(filled: FilledPool, backend: ReferenceBackend) -> None:
    backend.batch_set_v1(KEYS, filled.indices)
    backend.path(KEYS[2]).unlink()
    assert backend.batch_exists(KEYS) == 2
    filled.pool.kv_buffer.zero_()
    assert backend.batch_get_v1(KEYS, filled.indices) == [True, True, False, True]
    assert not filled.pages()[2].any()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(MHA, "page_first_kv_split"), (MLA, "page_head")],
)
def test_layouts_the_pool_cannot_have_are_refused(kind: str, layout: str) -> None:
    with pytest.raises(ValueError, match="Unsupported layout"):
        host_pool(device_pool(kind), layout)


def backed_up_page(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One MHA page copied from device to host, as [K/V, layer, token, head, dim] and flat."""
    device = device_pool(MHA)
    pool = host_pool(device, layout)
    host_rows, device_rows = pool.alloc(PAGE_SIZE), torch.arange(3, 3 + PAGE_SIZE)
    io_backend = "direct" if layout == "page_first_direct" else "kernel"
    pool.backup_from_device_all_layer(device, host_rows, device_rows, io_backend)
    computed = torch.stack([buffer[device_rows] for buffer in device_buffers(device)])
    page = pool.get_data_page(int(host_rows[0]))
    return computed.unflatten(0, (2, LAYERS)), page


# The order of a page's axes, as positions in (K/V, layer, token, head, dim).
PAGE_AXES = {
    "layer_first": (0, 1, 2, 3, 4),
    "page_first_direct": (0, 1, 2, 3, 4),
    "page_first": (0, 2, 1, 3, 4),
    "page_head": (0, 3, 2, 1, 4),
}


@pytest.mark.parametrize("layout", PAGE_AXES)
def test_a_flat_page_has_the_layouts_order(layout: str) -> None:
    """A page's bytes depend on the layout but its key does not (contracts.md, trap 4)."""
    computed, page = backed_up_page(layout)
    assert torch.equal(page, computed.permute(PAGE_AXES[layout]).flatten())


def test_the_shim_keeps_host_pools_from_pinning() -> None:
    pool = host_pool(device_pool(MHA), "page_first", pin_memory=True)
    assert not pool.pin_memory
    assert not pool.kv_buffer.is_pinned()
