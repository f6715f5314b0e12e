"""L3: SGLang's controllers move pages device -> host -> storage -> host -> device unchanged."""

import array
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cpu_fixtures import MHA, MLA, PAGE_SIZE, ControllerStack, controller_stack, device_buffers
from reference_backend import ReferenceBackend
from sglang.srt.managers.cache_controller import CacheOperation
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.observability.metrics_collector import StorageMetricsCollector

PAGES = 24
TIMEOUT_S = 60.0

LAYOUTS = [
    (MHA, "layer_first", "kernel"),
    (MHA, "layer_first", "direct"),
    (MHA, "page_first", "kernel"),
    (MHA, "page_first_direct", "direct"),
    (MHA, "page_head", "kernel"),
    (MLA, "layer_first", "kernel"),
    (MLA, "layer_first", "direct"),
    (MLA, "page_first", "kernel"),
    (MLA, "page_first_direct", "direct"),
]
BACKENDS = ["file", "reference_v1", "reference_flat"]


def storage_arguments(backend: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The backend's registered name and its extra_config."""
    if backend == "file":
        return "file", {"file_storage_path": str(folder)}
    names = {
        "backend_name": "reference",
        "module_path": "reference_backend",
        "class_name": "ReferenceBackend",
        "directory": str(folder),
    }
    return "dynamic", {**names, "interface_v1": 1} if backend == "reference_v1" else names


class RoundTrip:
    """The steps the scheduler takes, one after the other, on one controller."""

    def __init__(self, stack: ControllerStack, *, hybrid: bool, pages: int = PAGES):
        self.stack, self.controller, self.hybrid = stack, stack.controller, hybrid
        self.tokens = array.array("q", range(1000, 1000 + pages * PAGE_SIZE))
        self.key = RadixKey(self.tokens, None)
        self.keys = get_storage_hash_str(self.key, None, page_size=PAGE_SIZE)

    def rows_of_every_layer(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[rows].clone() for buffer in device_buffers(self.stack.device)]

    def back_up(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Copy new device rows to host and on to storage.

        Returns device rows, host rows, and the number of tokens the controller counts as stored.
        """
        device_rows = self.stack.allocator.alloc(len(self.tokens))
        host_rows = self.controller.write(device_rows)
        if self.hybrid:
            # The hybrid controller only queues; the tree starts the copy once a step.
            self.controller.start_writing()
        self.controller.ack_write_queue.pop(0).finish_event.synchronize()
        self.controller.write_storage(host_rows, self.tokens, hash_value=self.keys)
        done = self.controller.ack_backup_queue.get(timeout=TIMEOUT_S)
        return device_rows, host_rows, done.completed_tokens

    def store(self) -> list[torch.Tensor]:
        """Back the tokens up to storage, then wipe both pools. Returns the rows' KV."""
        device_rows, host_rows, stored = self.back_up()
        assert stored == len(self.tokens)
        expected = self.rows_of_every_layer(device_rows)
        self.controller.mem_pool_host.free(host_rows)
        self.stack.allocator.free(device_rows)
        self.stack.host.kv_buffer.zero_()
        for buffer in device_buffers(self.stack.device):
            buffer.zero_()
        return expected

    def prefetch(self) -> tuple[torch.Tensor, int]:
        """Query storage and read what it has. Returns host rows and tokens that were read."""
        handle = CacheRequestHandle("request", 0) if self.hybrid else "request"
        self.controller.prefetch(handle, self.key)
        operation = self.controller.prefetch_hit_queue.get(timeout=TIMEOUT_S)
        operation.host_indices = self.controller.alloc_prefetch_host_buffers(
            operation, operation.storage_hit_count
        )
        self.controller.prefetch_buffer.put(operation)
        completed = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=TIMEOUT_S)
            if ack.completed_tokens is not None:
                completed = ack.completed_tokens
            if ack.completed_req:
                return operation.host_indices, completed

    def load(self, host_rows: torch.Tensor) -> torch.Tensor:
        """Copy host rows to newly allocated device rows."""
        device_rows = self.stack.allocator.alloc(len(host_rows))
        self.controller.load_queue.append(CacheOperation(host_rows, device_rows, 0))
        self.controller.start_loading()
        self.controller.ack_load_queue.pop(0).finish_event.synchronize()
        return device_rows


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "layout", "io_backend"), LAYOUTS)
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "base"])
def test_pages_survive_the_trip_through_storage(
    kind: str, layout: str, io_backend: str, backend: str, hybrid: bool, tmp_path: Path
) -> None:
    name, extra_config = storage_arguments(backend, tmp_path)
    with controller_stack(kind, layout, io_backend, name, extra_config, hybrid=hybrid) as stack:
        trip = RoundTrip(stack, hybrid=hybrid)
        expected = trip.store()
        host_rows, completed = trip.prefetch()
        assert completed == len(trip.tokens)
        assert all(map(torch.equal, trip.rows_of_every_layer(trip.load(host_rows)), expected))


@pytest.mark.parametrize("interface", ["reference_v1", "reference_flat"])
def test_the_controller_calls_the_interface_extra_config_asks_for(interface: str, tmp_path: Path) -> None:
    name, extra_config = storage_arguments(interface, tmp_path)
    with controller_stack(MHA, "page_first", "kernel", name, extra_config, hybrid=True) as stack:
        backend = stack.controller.storage_backend
        trip = RoundTrip(stack, hybrid=True)
        trip.store()
        trip.prefetch()
    assert isinstance(backend, ReferenceBackend)
    suffix = "_v1" if interface == "reference_v1" else ""
    expected = {f"batch_set{suffix}", f"batch_get{suffix}", "batch_exists"}
    assert set(backend.calls) - {"on_host_pools_registered", "close"} == expected


def test_query_reads_and_backup_run_on_three_threads(tmp_path: Path) -> None:
    name, extra_config = storage_arguments("reference_v1", tmp_path)
    with controller_stack(MHA, "page_first", "kernel", name, extra_config, hybrid=True) as stack:
        backend = stack.controller.storage_backend
        trip = RoundTrip(stack, hybrid=True)
        trip.store()
        trip.prefetch()
    for method, function in {
        "batch_exists": "prefetch_thread_func",
        "batch_get_v1": "prefetch_io_aux_func",
        "batch_set_v1": "backup_thread_func",
    }.items():
        (thread,) = backend.threads[method]
        assert function in thread


@pytest.mark.parametrize(("hybrid", "queries"), [(True, 1), (False, 2)], ids=["hybrid", "base"])
def test_reads_and_writes_carry_at_most_128_pages(hybrid: bool, queries: int, tmp_path: Path) -> None:
    """The hybrid controller, the one the server uses, does not cut its query into batches."""
    pages = STORAGE_BATCH_SIZE + 1
    name, extra_config = storage_arguments("reference_v1", tmp_path)
    with controller_stack(
        MHA,
        "page_first",
        "kernel",
        name,
        extra_config,
        hybrid=hybrid,
        device_tokens=2 * pages * PAGE_SIZE,
    ) as stack:
        backend = stack.controller.storage_backend
        trip = RoundTrip(stack, hybrid=hybrid, pages=pages)
        trip.store()
        trip.prefetch()
    assert backend.calls["batch_set_v1"] == 2
    assert backend.calls["batch_get_v1"] == 2
    assert backend.calls["batch_exists"] == queries


def test_a_page_lost_after_the_query_ends_the_prefetch_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = 10
    name, extra_config = storage_arguments("reference_v1", tmp_path)
    with controller_stack(MHA, "page_first", "kernel", name, extra_config, hybrid=True) as stack:
        backend = stack.controller.storage_backend
        trip = RoundTrip(stack, hybrid=True)
        expected = trip.store()
        backend.path(trip.keys[lost]).unlink()
        monkeypatch.setattr(backend, "batch_exists", lambda keys, extra_info=None: len(keys))
        host_rows, completed = trip.prefetch()
        assert completed == lost * PAGE_SIZE
        device_rows = trip.load(host_rows[:completed])
        restored = trip.rows_of_every_layer(device_rows)
    assert all(torch.equal(rows, want[:completed]) for rows, want in zip(restored, expected, strict=True))


def test_an_exception_in_the_backend_is_a_failed_page_not_a_dead_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> list[bool]:
        raise OSError("drive gone")

    name, extra_config = storage_arguments("reference_v1", tmp_path)
    with controller_stack(MHA, "page_first", "kernel", name, extra_config, hybrid=True) as stack:
        backend = stack.controller.storage_backend
        trip = RoundTrip(stack, hybrid=True)
        trip.store()
        with monkeypatch.context() as patch:
            patch.setattr(backend, "batch_get_v1", broken)
            host_rows, completed = trip.prefetch()
            assert completed == 0
        trip.controller.mem_pool_host.free(host_rows)
        _, completed = trip.prefetch()
        assert completed == len(trip.tokens)


def test_v1_without_its_methods_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base class returns None (contracts.md, trap 1)."""
    monkeypatch.delattr(ReferenceBackend, "batch_set_v1")
    name, extra_config = storage_arguments("reference_v1", tmp_path)
    with controller_stack(MHA, "page_first", "kernel", name, extra_config, hybrid=True) as stack:
        _, _, stored = RoundTrip(stack, hybrid=True).back_up()
    assert stored == 0


def test_one_page_that_is_not_written_ends_the_whole_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch counts as not stored and later batches are not sent (contracts.md, trap 3)."""
    calls: list[int] = []

    def all_but_one(keys: list[str], host_indices: torch.Tensor, extra_info: Any) -> list[bool]:
        calls.append(len(keys))
        return [False] + [True] * (len(keys) - 1)

    pages = STORAGE_BATCH_SIZE + 1
    name, extra_config = storage_arguments("reference_v1", tmp_path)
    with controller_stack(
        MHA,
        "page_first",
        "kernel",
        name,
        extra_config,
        hybrid=True,
        device_tokens=2 * pages * PAGE_SIZE,
    ) as stack:
        monkeypatch.setattr(stack.controller.storage_backend, "batch_set_v1", all_but_one)
        _, _, stored = RoundTrip(stack, hybrid=True, pages=pages).back_up()
    assert (stored, calls) == (0, [STORAGE_BATCH_SIZE])


def test_stats_of_another_type_are_an_assertion_error() -> None:
    """The scheduler's step does not catch it (contracts.md, trap 6)."""
    with pytest.raises(AssertionError):
        StorageMetricsCollector.log_storage_metrics(Mock(), {"hits": 1})


@pytest.mark.slow
def test_a_call_that_hangs_makes_a_flush_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread is given ten seconds (contracts.md, trap 7)."""
    hanging, release = Event(), Event()

    def hang(keys: list[str], extra_info: Any = None) -> int:
        hanging.set()
        release.wait(60)
        return 0

    name, extra_config = storage_arguments("reference_v1", tmp_path)
    with controller_stack(MHA, "page_first", "kernel", name, extra_config, hybrid=True) as stack:
        monkeypatch.setattr(stack.controller.storage_backend, "batch_exists", hang)
        trip = RoundTrip(stack, hybrid=True)
        stack.controller.prefetch(CacheRequestHandle("request", 0), trip.key)
        assert hanging.wait(TIMEOUT_S)
        try:
            with pytest.raises(RuntimeError, match="storage threads"):
                stack.controller.reset()
        finally:
            release.set()
