"""What lies beside full attention comes back as well: the rows of a sliding window, and the state of Mamba layers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from kits import LARGEST_PAGE_SIZE, LinkerRoundTrip, LinkerUnderTest
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_server_args
from sglang.test.kits.unified_radix_cache.config import CONFIGS
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from sglang.test.test_utils import CustomTestCase

from tests.sglang_linker.linkers import extra_config


class SidecarRoundTrip(LinkerRoundTrip):
    linker = LinkerUnderTest("sglang_backend.linker", "GdsStoreLinker", extra_config=extra_config)
    core: ClassVar[str]

    def _linked_tree(self, folder: Path) -> tuple[Any, Any, Any]:
        # The kit's own tree is only there for its pools: it needs hooks that the wheel's Rust tree lacks.
        kit, allocator, requests = build_fixture(self.cfg, tree_core_backend="python")
        params = dataclasses.replace(kit.cache_init_params, tree_core_backend=self.core)
        cache = UnifiedRadixCache(params)
        assert cache._tree_core_backend == self.core
        linker = create_unified_cache_linker(
            get_server_args(),
            params,
            backend="dynamic",
            config=self.linker.config(folder),
            components=set(cache.components),
            forward_stream=None,
        )
        cache.init_cache_linker(linker)
        self.addCleanup(cache.release_host_resources)
        return cache, allocator, requests

    def _make_req(self, requests: Any) -> Any:
        self.newest = super()._make_req(requests)
        return self.newest

    def test_windows_and_states_come_back_byte_for_byte(self) -> None:
        cache, allocator, requests = self._linked_tree(self._folder())
        sidecars = self._sidecars(allocator, requests)
        for buffer in sidecars:
            buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
        sequence, full = self._store(cache, allocator, requests)
        rows = cache.path_device_indices(match_prefix(cache, sequence).last_device_node)
        slot = self.newest.kv.mamba_pool_idx.unsqueeze(0) if self.cfg.has_mamba else None
        windows, states = self._windows(allocator, rows), self._states(requests, slot)
        assert windows or states

        self._forget_device(cache, allocator)
        for buffer in sidecars:
            buffer.zero_()
        request, rows = self._load(cache, requests, sequence)
        assert request.host_hit_length == len(sequence)
        assert torch.equal(self._all_layers(allocator, rows), full)
        slot = request.kv.mamba_pool_idx.unsqueeze(0) if self.cfg.has_mamba else None
        assert all(map(torch.equal, self._windows(allocator, rows), windows))
        assert all(map(torch.equal, self._states(requests, slot), states))

    def _sidecars(self, allocator: Any, requests: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        if self.cfg.has_swa:
            pool = allocator.get_kvcache().swa_kv_pool
            found += [*pool.k_buffer, *pool.v_buffer]
        if self.cfg.has_mamba:
            cache = requests.mamba_pool.mamba_cache
            found += [cache.temporal, *cache.conv]
        return found

    def _windows(self, allocator: Any, rows: torch.Tensor) -> list[torch.Tensor]:
        """The last window of a sequence, in every layer that has one."""
        if not self.cfg.has_swa:
            return []
        window = math.ceil(self.cfg.sliding_window_size / self.cfg.page_size) * self.cfg.page_size
        rows = allocator.full_to_swa_index_mapping[rows[-window:]]
        pool = allocator.get_kvcache().swa_kv_pool
        return [buffer[rows].clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]

    def _states(self, requests: Any, slot: torch.Tensor | None) -> list[torch.Tensor]:
        if slot is None:
            return []
        cache = requests.mamba_pool.mamba_cache
        return [state[:, slot].clone() for state in (cache.temporal, *cache.conv)]


for cfg in CONFIGS:
    if (cfg.has_swa or cfg.has_mamba) and cfg.page_size <= LARGEST_PAGE_SIZE:
        inherited = {name: None for name in vars(LinkerRoundTrip) if name.startswith("test_")}
        for core in ("rust", "python"):
            name = f"TestSidecars_{core}_{cfg.label}"
            body = {"cfg": cfg, "core": core, **inherited}
            globals()[name] = type(name, (SidecarRoundTrip, CustomTestCase), body)
