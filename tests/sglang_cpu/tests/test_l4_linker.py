"""L4: SGLang's radix tree and linker wrapper drive a linker, including a load that fails."""

import array
import inspect
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_fixtures import (
    DEVICE_TOKENS,
    LAYERS,
    MHA,
    MLA,
    PAGE_SIZE,
    LinkedCache,
    device_buffers,
    linked_cache,
    linker_request,
)
from kits import wait_for_offloads
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

PAGES = 20
TOKENS = PAGES * PAGE_SIZE
OFFLOAD_TIMEOUT_S = 60.0


class Tree:
    """The scheduler's steps on a tree with the reference linker."""

    def __init__(self, linked: LinkedCache):
        self.cache, self.linker = linked.cache, linked.linker
        self.device, self.allocator = linked.device, linked.allocator

    def rows_of_every_layer(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[rows].clone() for buffer in device_buffers(self.device)]

    def insert(self, key: RadixKey, rows: torch.Tensor) -> None:
        self.cache.insert(InsertParams(key=key, value=rows.to(torch.int64)))
        wait_for_offloads(self.cache, OFFLOAD_TIMEOUT_S)

    def compute_and_insert(self, key: RadixKey) -> list[torch.Tensor]:
        """Stand-in for a prefill: new rows with whatever the pool holds. Returns their KV."""
        rows = self.allocator.alloc(len(key))
        expected = self.rows_of_every_layer(rows)
        self.insert(key, rows)
        return expected

    def match(self, key: RadixKey, request: SimpleNamespace | None = None) -> MatchResult:
        result = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
        if request is not None:
            request.last_node = result.last_device_node
        return result

    def flush(self) -> None:
        self.cache.reset()
        self.allocator.clear()
        for buffer in device_buffers(self.device):
            buffer.zero_()

    def queue_load(self, key: RadixKey) -> tuple[SimpleNamespace, torch.Tensor]:
        """Match and admit a request. Returns it and the private rows its pages will go to."""
        request = linker_request()
        match = self.match(key, request)
        self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=match.best_match_node,
                host_hit_length=match.host_hit_length,
                req=request,
            )
        )
        return request, self.cache.linker.private_load_indices[request.rid]

    def run_batch(self, *requests: SimpleNamespace) -> list[Any]:
        """Start the queued loads, wait layer by layer as a forward does, return the failed."""
        index = self.cache.ready_to_load_host_cache()
        counter = self.cache.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
        failed: list[Any] = self.cache.finish_external_linker_loads(list(requests))
        return failed


def key_of(first: int, tokens: int = TOKENS) -> RadixKey:
    return RadixKey(array.array("q", range(first, first + tokens)), None)


def linker_config(folder: Path) -> dict[str, Any]:
    return {
        "linker": "ReferenceLinker",
        "linker_module_path": "reference_linker",
        "linker_extra_config": {"directory": str(folder)},
    }


@pytest.fixture(params=["rust", "python"])
def tree_core(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[MHA, MLA])
def tree(request: pytest.FixtureRequest, tree_core: str, tmp_path: Path) -> Iterator[Tree]:
    with linked_cache(request.param, tree_core, linker_config(tmp_path)) as linked:
        yield Tree(linked)


def test_an_insert_is_offloaded_without_being_asked(tree: Tree) -> None:
    tree.compute_and_insert(key_of(5000))
    assert tree.linker.pages_written == PAGES
    assert tree.match(key_of(5000)).device_prefix_len == TOKENS


def test_evicted_pages_are_loaded_byte_for_byte(tree: Tree) -> None:
    expected = tree.compute_and_insert(key_of(5000))
    tree.cache.evict(EvictParams(num_tokens=TOKENS))
    assert tree.allocator.available_size() == DEVICE_TOKENS
    for buffer in device_buffers(tree.device):
        buffer.zero_()

    match = tree.match(key_of(5000), linker_request())
    assert (match.device_prefix_len, match.host_hit_length) == (0, TOKENS)
    request, rows = tree.queue_load(key_of(5000))
    assert tree.run_batch(request) == []
    assert all(map(torch.equal, tree.rows_of_every_layer(rows), expected))


def test_a_flush_keeps_the_store(tree: Tree) -> None:
    expected = tree.compute_and_insert(key_of(5000))
    tree.flush()
    request, rows = tree.queue_load(key_of(5000))
    assert tree.run_batch(request) == []
    assert all(map(torch.equal, tree.rows_of_every_layer(rows), expected))


def test_loaded_pages_join_the_tree_only_when_inserted(tree: Tree) -> None:
    tree.compute_and_insert(key_of(5000))
    tree.flush()
    request, rows = tree.queue_load(key_of(5000))
    rows = rows.clone()
    assert tree.run_batch(request) == []
    assert tree.match(key_of(5000)).device_prefix_len == 0
    tree.insert(key_of(5000), rows)
    assert tree.match(key_of(5000)).device_prefix_len == TOKENS


def test_loaded_pages_are_offered_for_offload_again(tree: Tree) -> None:
    """The tree does not remember where pages came from (contracts.md, trap 12)."""
    tree.compute_and_insert(key_of(5000))
    tree.flush()
    request, rows = tree.queue_load(key_of(5000))
    rows = rows.clone()
    assert tree.run_batch(request) == []
    offloads = tree.linker.calls["offload"]
    tree.insert(key_of(5000), rows)
    assert tree.linker.calls["offload"] == offloads + 1
    assert tree.linker.pages_written == PAGES


def test_the_tail_after_a_device_hit_is_loaded(tree: Tree) -> None:
    expected = tree.compute_and_insert(key_of(5000))
    tree.flush()
    head = key_of(5000, 4 * PAGE_SIZE)
    tree.compute_and_insert(head)
    match = tree.match(key_of(5000), linker_request())
    assert match.device_prefix_len == len(head)
    assert match.host_hit_length == TOKENS - len(head)
    request, rows = tree.queue_load(key_of(5000))
    assert tree.run_batch(request) == []
    tail = [rows_of_layer[len(head) :] for rows_of_layer in expected]
    assert all(map(torch.equal, tree.rows_of_every_layer(rows), tail))


def test_every_match_of_a_waiting_request_asks_the_linker(tree: Tree) -> None:
    """The scheduler matches a waiting request again and again (contracts.md, trap 9)."""
    request = linker_request()
    for _ in range(3):
        tree.match(key_of(5000), request)
    assert tree.linker.calls["lookup"] == 3
    tree.match(key_of(5000))
    assert tree.linker.calls["lookup"] == 3, "a match without a request must not ask"


def test_a_failed_load_aborts_its_requests_and_leaves_the_tree_alone(tree: Tree) -> None:
    tree.compute_and_insert(key_of(5000))
    tree.flush()
    tree.linker.fail_loads = True
    request, _ = tree.queue_load(key_of(5000))
    assert tree.run_batch(request) == [request]
    assert request.skip_radix_cache_insert
    assert request.discard_output_reason.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert tree.match(key_of(5000)).device_prefix_len == 0


def test_one_bad_page_fails_every_request_of_the_batch(tree: Tree) -> None:
    """SGLang gets one verdict a batch (contracts.md, trap 11)."""
    good, bad = key_of(5000, 4 * PAGE_SIZE), key_of(9000, 4 * PAGE_SIZE)
    tree.compute_and_insert(good)
    before = {path.name for path in tree.linker.directory.iterdir()}
    tree.compute_and_insert(bad)
    stored = {path.name for path in tree.linker.directory.iterdir()}
    (tree.linker.directory / min(stored - before)).write_bytes(b"short")
    tree.flush()
    first, _ = tree.queue_load(good)
    second, _ = tree.queue_load(bad)
    assert tree.run_batch(first, second) == [first, second]


def test_a_failed_load_is_hit_again_unless_the_linker_forgets_the_page(tree: Tree) -> None:
    tree.compute_and_insert(key_of(5000))
    tree.flush()
    tree.linker.fail_loads = True
    request, rows = tree.queue_load(key_of(5000))
    assert tree.run_batch(request) == [request]
    tree.allocator.free(rows)
    retry = linker_request()
    assert tree.match(key_of(5000), retry).host_hit_length == TOKENS


def test_a_request_that_leaves_the_queue_cancels_its_load(tree: Tree) -> None:
    tree.compute_and_insert(key_of(5000))
    tree.flush()
    request, _ = tree.queue_load(key_of(5000))
    tree.cache.linker.release_request(request.rid)
    assert request.rid not in tree.cache.linker.private_load_indices
    assert tree.cache.ready_to_load_host_cache() == -1


def test_rows_stay_locked_until_their_offload_has_completed(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow store takes the device pool away from the cache (contracts.md, trap 14)."""
    release, run_offload = Event(), tree.linker._run_offload

    def slow_offload(offload: Any) -> None:
        release.wait(OFFLOAD_TIMEOUT_S)
        run_offload(offload)

    monkeypatch.setattr(tree.linker, "_run_offload", slow_offload)
    rows = tree.allocator.alloc(TOKENS)
    tree.cache.insert(InsertParams(key=key_of(5000), value=rows.to(torch.int64)))
    tree.cache.evict(EvictParams(num_tokens=TOKENS))
    assert tree.allocator.available_size() == DEVICE_TOKENS - TOKENS
    release.set()
    wait_for_offloads(tree.cache, OFFLOAD_TIMEOUT_S)
    tree.cache.evict(EvictParams(num_tokens=TOKENS))
    assert tree.allocator.available_size() == DEVICE_TOKENS


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"linker": "ReferenceLinker"}, "linker_module_path"),
        ({"linker": "LinkerOptions", "linker_module_path": "server"}, "subclass"),
        (
            {"linker": "ReferenceLinker", "linker_module_path": "reference_linker", "x": 1},
            "unknown",
        ),
    ],
)
def test_a_wrong_linker_config_is_refused_with_a_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_unified_cache_linker(
            None, None, backend="dynamic", config=config, components=set(), forward_stream=None
        )


def test_the_linker_interface_is_the_documented_one() -> None:
    methods = {
        "lookup": ["self", "rid", "transfers"],
        "load": ["self", "rid", "transfers"],
        "start_layer_wise_loading": ["self"],
        "finish_layer_wise_loading": ["self", "counter_index"],
        "cancel_queued_load": ["self", "rid"],
        "offload": ["self", "transfers", "session_id"],
        "num_completed_offloads": ["self"],
        "pop_completed_offload": ["self"],
        "reset": ["self"],
        "close": ["self"],
    }
    assert UnifiedCacheLinker.__abstractmethods__ == set(methods)
    for name, parameters in methods.items():
        signature = inspect.signature(getattr(UnifiedCacheLinker, name))
        assert list(signature.parameters) == parameters
