"""What is on a page's stream when a call is made comes before the call, and nothing of a call comes after its future is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest

from gdsstore import PageStatus, Store
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.streams import Stream
from tests.engines.bounce_rig import held
from tests.store.device_helpers import (
    COUNT,
    LAYOUTS,
    WAIT_S,
    Cache,
    bind,
)
from tests.store.helpers import make_keys, truth

# Each operation on a stream comes 4 ms late: whoever does not wait for it sees 0xEE, or what was there before.
pytestmark = pytest.mark.own_process(
    CUDASIM_POISON=0xEE,
    CUDASIM_HOST_VISIBLE=1,
    TRITON_INTERPRET=1,
    KVIKIO_COMPAT_MODE="OFF",
    CUDASIM_STREAM_DELAY_US=4000,
)

LAYOUT = LAYOUTS["mla"]


@pytest.fixture
def theirs(gpu: ModuleType) -> Iterator[Stream]:
    device = CudaDevice(0)
    stream = Stream(device)
    yield stream
    assert stream.record().wait(WAIT_S)
    stream.close()
    device.close()


@pytest.mark.parametrize("path", ["direct", "bounce"])
def test_a_save_waits_for_those_who_fill_the_pages(
    device_store: Callable[..., Store],
    gpu: ModuleType,
    theirs: Stream,
    path: str,
) -> None:
    pages, keys = bind(device_store(path=path), LAYOUT), make_keys(COUNT)
    want = truth(keys, LAYOUT.page_bytes)
    source, cache = Cache(gpu, LAYOUT, COUNT), Cache(gpu, LAYOUT, COUNT)
    source.put(range(COUNT), want)
    for to, at in zip(cache.buffers, source.buffers, strict=True):
        theirs.copy(to.ptr, at.ptr, at.nbytes)
    future = pages.save(keys, cache.pages(range(COUNT), streams=(theirs.handle,)))
    assert future.result(WAIT_S).count(PageStatus.SAVED) == COUNT
    loaded = np.zeros_like(want)
    assert pages.load(keys, loaded).result(WAIT_S).all_ok
    assert (loaded == want).all()


@pytest.mark.parametrize("path", ["direct", "bounce"])
def test_a_load_waits_for_those_who_still_read_the_slots(
    device_store: Callable[..., Store],
    gpu: ModuleType,
    theirs: Stream,
    path: str,
) -> None:
    pages, keys = bind(device_store(path=path), LAYOUT), make_keys(COUNT)
    want = truth(keys, LAYOUT.page_bytes)
    assert pages.save(keys, want).result(WAIT_S).all_ok
    old = truth(make_keys(COUNT, "old"), LAYOUT.page_bytes)
    cache, reader = Cache(gpu, LAYOUT, COUNT), Cache(gpu, LAYOUT, COUNT)
    cache.put(range(COUNT), old)
    for to, at in zip(reader.buffers, cache.buffers, strict=True):
        theirs.copy(to.ptr, at.ptr, at.nbytes)
    assert pages.load(keys, cache.pages(range(COUNT), streams=(theirs.handle,))).result(WAIT_S).all_ok
    assert theirs.record().wait(WAIT_S)
    assert (reader.get(range(COUNT)) == old).all(), "the load came before the reader"
    assert (cache.get(range(COUNT)) == want).all()


def test_registered_memory_is_not_written_before_its_readers_are_done(
    device_store: Callable[..., Store],
    gpu: ModuleType,
    theirs: Stream,
) -> None:
    layout = LAYOUTS["opaque"].opaque(128 << 10)
    store = device_store(path="direct")
    pages, keys = bind(store, layout), make_keys(2)
    want, old = truth(keys, layout.page_bytes), truth(make_keys(2, "old"), layout.page_bytes)
    assert pages.save(keys, want).result(WAIT_S).all_ok
    cache, reader = Cache(gpu, layout, 2), Cache(gpu, layout, 2)
    cache.put(range(2), old)
    with store.register(cache.buffers[0]):
        theirs.copy(reader.buffers[0].ptr, cache.buffers[0].ptr, cache.buffers[0].nbytes)
        memory = cache.pages(range(2), streams=(theirs.handle,))
        assert pages.in_place(memory, 2).all()
        assert pages.load(keys, memory).result(WAIT_S).all_ok
    assert theirs.record().wait(WAIT_S)
    assert (reader.get(range(2)) == old).all()
    assert (cache.get(range(2)) == want).all()


def test_a_stream_that_does_not_come_to_an_end_costs_the_deadline_and_no_more(
    device_store: Callable[..., Store],
    gpu: ModuleType,
    theirs: Stream,
) -> None:
    store = device_store(path="direct")
    pages, keys = bind(store, LAYOUT), make_keys(COUNT)
    store.device_moving(0)  # takes a while the first time
    assert pages.save(keys, truth(keys, LAYOUT.page_bytes)).result(WAIT_S).all_ok
    cache = Cache(gpu, LAYOUT, COUNT)
    memory = cache.pages(range(COUNT), streams=(theirs.handle,))
    with held(gpu, theirs.handle):
        result = pages.load(keys, memory, deadline_s=0.2).result(WAIT_S)
        assert result.count(PageStatus.MISS_DEADLINE) == COUNT
        assert not result.memory_in_use
        others = truth(make_keys(COUNT, "others"), LAYOUT.page_bytes)
        late = pages.save(make_keys(COUNT, "late"), memory, deadline_s=0.2).result(WAIT_S)
        assert late.count(PageStatus.FAILED_DEADLINE) == COUNT
        assert pages.save(make_keys(COUNT, "others"), others).result(WAIT_S).all_ok
        assert not theirs.record().done, "a call waited for the stream after all"
