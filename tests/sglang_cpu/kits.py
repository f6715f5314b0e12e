"""Runs SGLang's own cache fixtures against a storage backend or a linker.

The SGLang wheel ships the fixtures of its unit tests (``sglang.test.kits.unified_radix_cache``):
small trees of full attention, sliding window (SWA) and Mamba layers in several page sizes, with
the steps of the scheduler around them. The functions here return ``unittest`` classes, one for
each of those configurations. A test module binds them to a backend::

    globals().update(storage_test_cases(StorageUnderTest("my_module", "MyBackend", ...)))
"""

# pytest explains a plain assert only in test modules; these suites are built here and run elsewhere.
# ruff: noqa: PT009

import json
import math
import shutil
import tempfile
import time
import unittest
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.runtime_context import get_server_args
from sglang.test.kits.unified_radix_cache import mixins
from sglang.test.kits.unified_radix_cache.config import (
    CONFIGS,
    CacheConfig,
    config_attrs,
    requires,
    supports_hicache,
)
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

LARGEST_PAGE_SIZE = 64
"""The wheel's configurations with 128 token pages take long on CPU and test nothing else."""

OFFLOAD_TIMEOUT_S = 60.0
PYTHON_TREE = "python"


@dataclass(frozen=True)
class StorageUnderTest:
    """A ``HiCacheStorage`` class, and the host layout it is tested with.

    ``extra_config`` turns the folder of one test into the backend's configuration. A producer and
    a consumer with the same folder must see the same pages. With ``backend="file"`` SGLang's
    file backend is tested and the other fields about the class are not used.
    """

    module_path: str = ""
    class_name: str = ""
    extra_config: Callable[[Path], Mapping[str, Any]] = lambda folder: {"directory": str(folder)}
    interface_v1: bool = True
    backend: str = "dynamic"
    layout: str = "page_first"
    io_backend: str = "kernel"

    def server_settings(self, folder: Path, kit_config: Mapping[str, Any]) -> dict[str, Any]:
        """Server arguments that replace the file backend the kit asks for."""
        settings: dict[str, Any] = {"hicache_mem_layout": self.layout, "hicache_io_backend": self.io_backend}
        if self.backend == "dynamic":
            config = dict(kit_config)
            config.update(
                backend_name=self.class_name,
                module_path=self.module_path,
                class_name=self.class_name,
                **self.extra_config(folder),
            )
            if self.interface_v1:
                config["interface_v1"] = 1
            settings["hicache_storage_backend"] = "dynamic"
            settings["hicache_storage_backend_extra_config"] = json.dumps(config)
        return settings


class StorageRoundTrip(UnifiedRadixCacheStorageFixtures):
    """One tree stores pages, a second tree with empty pools reads them back.

    Subclasses set ``storage`` and ``cfg`` and also derive from ``unittest.TestCase``.
    """

    storage: ClassVar[StorageUnderTest]

    def _init_hicache(self, cache: Any, **kwargs: Any) -> None:
        # The kit builds ServerArgs for SGLang's file backend; only its arguments are replaced.
        real_server_args = mixins.ServerArgs
        folder = Path(kwargs["storage_dir"])

        def server_args(**arguments: Any) -> Any:
            kit_config = json.loads(arguments["hicache_storage_backend_extra_config"] or "{}")
            arguments.update(self.storage.server_settings(folder, kit_config))
            return real_server_args(**arguments)

        with mock.patch.object(mixins, "ServerArgs", server_args):
            super()._init_hicache(cache, **kwargs)

    def test_stored_pages_come_back_byte_for_byte(self) -> None:
        sequence, folder = _sequence(self), self._make_storage_dir()
        expected = self._l3_produce(folder, sequence, marker=5)
        consumer, allocator, requests = self._l3_consumer(folder)
        self._consume_prefetch(consumer, sequence, CacheRequestHandle("read", 0))
        self.assertEqual(match_prefix(consumer, sequence).host_hit_length, len(sequence))
        self._load_back_through_admission(consumer, requests, sequence)
        self._finish_pending_loads(consumer)
        self._release_ongoing_load_back_locks(consumer)
        self._assert_on_device(consumer, allocator, sequence, expected)

    @requires(lambda cfg: not cfg.has_mamba, "the kit's buffer-only steps do not cover Mamba")
    def test_stored_pages_come_back_without_a_host_tier(self) -> None:
        sequence, folder = self._buffer_swa_seq(), self._make_storage_dir()
        _, expected = self._produce_buffer_l3(folder, sequence, marker=9)
        consumer, allocator, _ = self._build_buffer_hicache_fixture(folder)
        handle = CacheRequestHandle("read", 0)
        self._consume_prefetch(consumer, sequence, handle)
        self._assert_on_device(consumer, allocator, sequence, expected)

    @requires(
        lambda cfg: cfg.components == (ComponentType.FULL,),
        "windows and states are stored only where the stored sequence ended",
    )
    def test_a_hit_ends_where_the_sequences_part(self) -> None:
        sequence, folder = _sequence(self), self._make_storage_dir()
        self._l3_produce(folder, sequence)
        shared = len(sequence) // 2 // self.cfg.page_size * self.cfg.page_size
        other = sequence[:shared] + self._make_seq(9000, 3)
        consumer, _, _ = self._l3_consumer(folder)
        self._consume_prefetch(consumer, other, CacheRequestHandle("read", 0))
        self.assertEqual(match_prefix(consumer, other).host_hit_length, shared)

    def test_a_request_of_another_namespace_finds_nothing(self) -> None:
        sequence, folder = _sequence(self), self._make_storage_dir()
        self._l3_produce(folder, sequence)
        consumer, _, _ = self._l3_consumer(folder)
        handle = CacheRequestHandle("read", 0)
        consumer.prefetch_from_storage(
            handle, consumer.root_node_handle(), array("q", sequence), extra_key="another"
        )
        self._run_prefetch_to_completion(consumer, handle)
        key = RadixKey(array("q", sequence), extra_key="another")
        self.assertEqual(consumer.match_prefix(MatchPrefixParams(key=key)).host_hit_length, 0)

    def _assert_on_device(
        self, cache: Any, allocator: Any, sequence: list[int], expected: tuple[Any, Any]
    ) -> None:
        match = match_prefix(cache, sequence)
        self.assertEqual(match.device_prefix_len, len(sequence))
        rows = cache.path_device_indices(match.last_device_node)
        keys, values = self._snapshot_full_kv(allocator, rows)
        self.assertTrue(torch.equal(keys, expected[0]))
        self.assertTrue(torch.equal(values, expected[1]))


def storage_test_cases(
    storage: StorageUnderTest, *, name: str = "", configs: Iterable[CacheConfig] = CONFIGS
) -> dict[str, type[unittest.TestCase]]:
    """A test class for each configuration HiCache supports, by class name.

    ``name`` tells the classes of several backends in one module apart.
    """
    return {
        f"Test{name}_{cfg.label}": _test_class(
            f"Test{name}_{cfg.label}", StorageRoundTrip, cfg, storage=storage
        )
        for cfg in configs
        if supports_hicache(cfg) and cfg.page_size <= LARGEST_PAGE_SIZE
    }


@dataclass(frozen=True)
class LinkerUnderTest:
    """A ``UnifiedCacheLinker`` class and the tree components it supports."""

    module_path: str
    class_name: str
    extra_config: Callable[[Path], Mapping[str, Any]] = lambda folder: {"directory": str(folder)}
    components: frozenset[ComponentType] = field(default_factory=lambda: frozenset({ComponentType.FULL}))

    def config(self, folder: Path) -> dict[str, Any]:
        return {
            "linker": self.class_name,
            "linker_module_path": self.module_path,
            "linker_extra_config": dict(self.extra_config(folder)),
        }


class LinkerRoundTrip(UnifiedRadixCacheFixtures):
    """A tree offloads pages through a linker, loses them, and loads them back.

    Subclasses set ``linker`` and ``cfg`` and also derive from ``unittest.TestCase``.

    The tree is SGLang's Python one: the kit's fixtures need a build of the Rust tree with
    inspection hooks, which is not in the wheel. tests/test_l4_linker.py covers the Rust tree.
    """

    linker: ClassVar[LinkerUnderTest]

    def _linked_tree(self, folder: Path) -> tuple[Any, Any, Any]:
        cache, allocator, requests = build_fixture(self.cfg, tree_core_backend=PYTHON_TREE)
        linker = create_unified_cache_linker(
            get_server_args(),
            cache.cache_init_params,
            backend="dynamic",
            config=self.linker.config(folder),
            components=set(cache.components),
            forward_stream=None,
        )
        cache.init_cache_linker(linker)
        self.addCleanup(cache.release_host_resources)
        return cache, allocator, requests

    def _folder(self) -> Path:
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _store(self, cache: Any, allocator: Any, requests: Any) -> tuple[list[int], Any]:
        """Insert a sequence with known KV and wait until it is stored."""
        sequence = _sequence(self)
        # Write-through offloads at insert, so the KV must be there before: the first rows an
        # empty pool hands out are filled, as a forward would have.
        kv_pool = self._get_full_kv_pool(allocator)
        for layer in range(kv_pool.start_layer, kv_pool.start_layer + kv_pool.layer_num):
            for buffer in (kv_pool.get_key_buffer(layer), kv_pool.get_value_buffer(layer)):
                buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
        self._insert(cache, allocator, requests, sequence)
        wait_for_offloads(cache, OFFLOAD_TIMEOUT_S)
        rows = cache.path_device_indices(match_prefix(cache, sequence).last_device_node)
        return sequence, self._all_layers(allocator, rows)

    def _all_layers(self, allocator: Any, rows: torch.Tensor) -> torch.Tensor:
        kv_pool = self._get_full_kv_pool(allocator)
        layers = range(kv_pool.start_layer, kv_pool.start_layer + kv_pool.layer_num)
        return torch.stack(
            [kv_pool.get_key_buffer(layer)[rows] for layer in layers]
            + [kv_pool.get_value_buffer(layer)[rows] for layer in layers]
        )

    def _load(self, cache: Any, requests: Any, sequence: list[int]) -> tuple[Any, torch.Tensor]:
        """Match and load as the scheduler does. Returns the request and its private rows."""
        request = self._load_back_through_admission(cache, requests, sequence)
        rows = cache.linker.private_load_indices[request.rid].clone()
        cache.ready_to_load_host_cache()
        self.assertEqual(cache.finish_external_linker_loads([request]), [])
        return request, rows

    def _forget_device(self, cache: Any, allocator: Any) -> None:
        """What ``/flush_cache`` does: the tree and the pools are emptied, the store is not."""
        cache.reset()
        allocator.clear()
        kv_pool = self._get_full_kv_pool(allocator)
        for layer in range(kv_pool.start_layer, kv_pool.start_layer + kv_pool.layer_num):
            kv_pool.get_key_buffer(layer).zero_()
            kv_pool.get_value_buffer(layer).zero_()

    def test_offloaded_pages_come_back_byte_for_byte(self) -> None:
        cache, allocator, requests = self._linked_tree(self._folder())
        sequence, expected = self._store(cache, allocator, requests)
        self._forget_device(cache, allocator)
        request, rows = self._load(cache, requests, sequence)
        self.assertEqual(request.host_hit_length, len(sequence))
        self.assertTrue(torch.equal(self._all_layers(allocator, rows), expected))

    def test_a_second_tree_finds_what_the_first_one_stored(self) -> None:
        folder = self._folder()
        cache, allocator, requests = self._linked_tree(folder)
        sequence, expected = self._store(cache, allocator, requests)
        other_cache, other_allocator, other_requests = self._linked_tree(folder)
        _, rows = self._load(other_cache, other_requests, sequence)
        self.assertTrue(torch.equal(self._all_layers(other_allocator, rows), expected))

    def test_lookup_counts_pages_from_the_first_uncached_one(self) -> None:
        folder = self._folder()
        cache, allocator, requests = self._linked_tree(folder)
        sequence, _ = self._store(cache, allocator, requests)
        self._forget_device(cache, allocator)
        head = sequence[: self.cfg.page_size]
        self._insert(cache, allocator, requests, head)
        request = self._load_back_through_admission(cache, requests, sequence)
        self.assertEqual(request.prefix_len, len(head))
        self.assertEqual(request.host_hit_length, len(sequence) - len(head))

    def test_an_unknown_sequence_is_a_miss(self) -> None:
        cache, allocator, requests = self._linked_tree(self._folder())
        self._store(cache, allocator, requests)
        request = self._load_back_through_admission(cache, requests, self._make_seq(9000, 4))
        self.assertEqual(request.host_hit_length, 0)


def linker_test_cases(
    linker: LinkerUnderTest, *, name: str = "", configs: Iterable[CacheConfig] = CONFIGS
) -> dict[str, type[unittest.TestCase]]:
    """A test class for each configuration whose components the linker supports, by class name."""
    return {
        f"Test{name}_{cfg.label}": _test_class(f"Test{name}_{cfg.label}", LinkerRoundTrip, cfg, linker=linker)
        for cfg in configs
        if set(cfg.components) <= linker.components and cfg.page_size <= LARGEST_PAGE_SIZE
    }


def wait_for_offloads(cache: Any, timeout_s: float) -> None:
    """Pump the tree's events, as each scheduler step does, until no offload is pending."""
    deadline = time.monotonic() + timeout_s
    while cache.linker.pending_offloads:
        if time.monotonic() > deadline:
            raise TimeoutError(f"offloads did not complete in {timeout_s} s")
        cache.check_hicache_events()
        time.sleep(0.005)


def _sequence(fixtures: UnifiedRadixCacheFixtures) -> list[int]:
    """Token ids of some pages, more than a sliding window holds."""
    cfg = fixtures.cfg
    pages = max(6, _window_pages(cfg) + 2) if cfg.has_swa else 6
    tokens: list[int] = fixtures._make_seq(1, pages)
    return tokens


def _window_pages(cfg: CacheConfig) -> int:
    pages: int = math.ceil(cfg.sliding_window_size / cfg.page_size)
    return pages


def _test_class(name: str, suite: type, cfg: CacheConfig, **attributes: Any) -> type[unittest.TestCase]:
    # config_attrs sets cfg and hides the tests whose requirements the configuration fails.
    body = {**config_attrs(suite, cfg), **attributes}
    test_class: type[unittest.TestCase] = type(name, (suite, CustomTestCase), body)
    return test_class
