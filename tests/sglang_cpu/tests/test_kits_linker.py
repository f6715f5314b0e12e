"""SGLang's own fixtures against a linker, and what SGLang passes to a linker for each pool."""

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits import LARGEST_PAGE_SIZE, LinkerUnderTest, linker_test_cases
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)
from sglang.test.kits.unified_radix_cache.config import CONFIGS, CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures

globals().update(linker_test_cases(LinkerUnderTest("reference_linker", "ReferenceLinker"), name="Reference"))


class RecordingLinker(UnifiedCacheLinker):
    """Accepts every offload, never has a hit, and keeps what it was given."""

    def __init__(self) -> None:
        self.layer_done_counter = LayerWiseLoadCounter(1)
        self.pools = {PoolName.KV: None, PoolName.SWA: None, PoolName.MAMBA: None}
        self.offloads: list[list[PoolTransfer]] = []
        self.lookups: list[list[PoolTransfer]] = []
        self.completed = 0

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        self.lookups.append(transfers)
        return []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        return False

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        self.offloads.append(transfers)
        self.completed += 1
        return True

    def num_completed_offloads(self) -> int:
        return self.completed

    def pop_completed_offload(self) -> bool:
        self.completed -= 1
        return True

    def reset(self) -> None:
        self.completed = 0

    def close(self) -> None:
        pass


class Recording(UnifiedRadixCacheFixtures):
    """Inserts a sequence of ``pages`` pages, then matches it with ``TAIL_PAGES`` unknown ones."""

    TAIL_PAGES = 3

    def __init__(self, cfg: CacheConfig):
        self.cfg = cfg
        self.linker = RecordingLinker()
        self.window_pages = -(-cfg.sliding_window_size // cfg.page_size) if cfg.has_swa else 0
        self.pages = max(6, self.window_pages + 2)
        self.cache, self.allocator, self.requests = build_fixture(cfg, tree_core_backend="python")
        self.cache.init_cache_linker(self.linker)
        sequence = self._make_seq(1, self.pages)
        self._insert(self.cache, self.allocator, self.requests, sequence)
        self.cache.check_hicache_events()
        request: Any = SimpleNamespace(
            rid="x",
            session=None,
            session_id=None,
            kv=None,
            swa_branching_seqlen=None,
            mamba_pool_idx=None,
        )
        key = RadixKey(array("q", sequence + self._make_seq(90000, self.TAIL_PAGES)))
        self.cache.match_prefix(MatchPrefixParams(key=key, req=request))

    def offloaded(self, pool: PoolName) -> list[PoolTransfer]:
        transfers = [transfer for call in self.linker.offloads for transfer in call]
        return [transfer for transfer in transfers if transfer.name == pool]


@pytest.fixture(
    params=[cfg for cfg in CONFIGS if cfg.page_size <= LARGEST_PAGE_SIZE],
    ids=lambda cfg: cfg.label,
)
def recording(request: pytest.FixtureRequest) -> Iterator[Recording]:
    recording = Recording(request.param)
    yield recording
    recording.cache.release_host_resources()


def test_offload_passes_every_kv_page_with_its_device_rows(recording: Recording) -> None:
    transfers = recording.offloaded(PoolName.KV)
    assert sum(len(transfer.keys or ()) for transfer in transfers) == recording.pages
    for transfer in transfers:
        assert transfer.hit_policy == PoolHitPolicy.ALL_PAGES
        assert transfer.host_indices is None
        assert transfer.device_indices is not None
        assert transfer.keys is not None
        assert transfer.device_indices.dtype == torch.int64
        assert transfer.device_indices.numel() == len(transfer.keys) * recording.cfg.page_size


def test_offload_passes_a_mamba_state_as_one_row_under_the_last_key(recording: Recording) -> None:
    transfers = recording.offloaded(PoolName.MAMBA)
    assert bool(transfers) == recording.cfg.has_mamba
    kv_keys = [transfer.keys for transfer in recording.offloaded(PoolName.KV)]
    for transfer in transfers:
        assert transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
        assert transfer.device_indices is not None
        assert transfer.device_indices.numel() == 1
        assert transfer.keys is not None
        assert len(transfer.keys) == 1
        assert transfer.keys[0] in [keys[-1] for keys in kv_keys if keys]


def test_lookup_asks_for_the_tail_of_every_pool(recording: Recording) -> None:
    ((*transfers,),) = recording.linker.lookups
    by_pool = {transfer.name: transfer for transfer in transfers}
    kv_keys = by_pool[PoolName.KV].keys
    assert kv_keys is not None
    # Mamba trees match only up to a stored state, others up to the last equal page.
    assert len(kv_keys) in (Recording.TAIL_PAGES, Recording.TAIL_PAGES + recording.pages)
    assert all(transfer.device_indices is None for transfer in transfers)
    if recording.cfg.has_swa:
        assert by_pool[PoolName.SWA].hit_policy == PoolHitPolicy.TRAILING_PAGES
        assert by_pool[PoolName.SWA].keys == kv_keys[-recording.window_pages :]
    if recording.cfg.has_mamba:
        assert by_pool[PoolName.MAMBA].hit_policy == PoolHitPolicy.TRAILING_PAGES
        assert by_pool[PoolName.MAMBA].keys == kv_keys[-1:]
