"""The linker between simulated GPU memory and the drive: every byte on the direct path, layers in order, no race with others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gdsstore import Store
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.streams import Stream
from sglang_backend.linker_prefetch import Prefetched
from tests.sglang_linker.simulated.rig import LAYERS, MHA, MLA, Ready, Rig
from tests.store.device_helpers import WAIT_S, report
from tests.store.helpers import make_keys, truth
from tests.transfer.layered_rig import groups_of

# Each operation on a stream comes 2 ms late: whoever does not wait for it sees 0xEE, or what was there before.
pytestmark = [
    pytest.mark.own_process(
        CUDASIM_POISON=0xEE,
        CUDASIM_HOST_VISIBLE=1,
        TRITON_INTERPRET=1,
        KVIKIO_COMPAT_MODE="OFF",
        CUDASIM_STREAM_DELAY_US=2000,
    ),
    pytest.mark.usefixtures("kvikio"),
]

COUNT = 8
SHUFFLED = np.random.default_rng(5).permutation(2 * COUNT).tolist()
HERE, THERE = SHUFFLED[:COUNT], SHUFFLED[COUNT:]
KEYS = make_keys(COUNT)
Make = Callable[..., Rig]


@pytest.fixture
def theirs(gpu: ModuleType) -> Iterator[Stream]:
    """The stream of SGLang's forward."""
    device = CudaDevice(0)
    stream = Stream(device)
    yield stream
    assert stream.record().wait(WAIT_S)
    stream.close()
    device.close()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of a few KiB would come in one group."""

    def load_layers(bound: Any, keys: Any, pages: Any, on_layers: Any, deadline_s: float) -> Any:
        sizes = groups_of([1, 2, 3])
        return bound.load_layers(keys, pages, on_layers, groups=sizes, deadline_s=deadline_s)

    monkeypatch.setattr("sglang_backend.linker_loads.load_layers", load_layers)


def layers(seen: list[tuple[int, Any]]) -> Any:
    """The pages as the forward saw them, each layer at the time when it was handed out."""
    assert [layer for layer, _ in seen] == list(range(LAYERS)), "layers out of order, or not all"
    return np.concatenate([content for _, content in seen], axis=1)


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("kind", [MHA, MLA])
def test_pages_go_directly_and_each_layer_is_there_when_it_is_handed_out(
    kind: str,
    rig: Make,
    device_store: Callable[..., Store],
) -> None:
    store = device_store(path="direct", strict=True)
    pool = rig(kind, store, 2 * COUNT)
    want = truth(KEYS, pool.layout.page_bytes)
    pool.put(HERE, want)
    assert pool.offload(KEYS, HERE)
    assert pool.load(KEYS, THERE)
    assert (layers(pool.layers_seen) == want).all()
    assert (pool.pages(THERE) == want).all()
    assert (pool.pages(HERE) == want).all()
    nbytes = COUNT * pool.layout.record_bytes
    assert report(store) == {("direct", "kvikio", way): nbytes for way in ("read", "write")}
    assert store.device_moving(0).arena.stats().leased_bytes == 0


@pytest.mark.parametrize("path", ["direct", "bounce"])
def test_an_offload_waits_for_the_forward_that_fills_its_rows(
    path: str,
    rig: Make,
    device_store: Callable[..., Store],
    theirs: Stream,
) -> None:
    store = device_store(path=path)
    source, pool = rig(MHA, store, COUNT), rig(MHA, store, COUNT)
    want = truth(KEYS, pool.layout.page_bytes)
    source.put(range(COUNT), want)
    assert pool.offload(
        make_keys(1, "first"), [0]
    )  # the first call takes seconds, in which all of it would be over
    pool.fill_late(theirs, source)
    assert pool.offload(KEYS, range(COUNT), [Ready(theirs.record())])
    other = rig(MHA, store, COUNT)
    assert other.load(KEYS, range(COUNT))
    assert (other.pages(range(COUNT)) == want).all()


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("path", ["direct", "bounce"])
def test_a_load_waits_for_those_who_still_read_its_rows(
    path: str,
    rig: Make,
    device_store: Callable[..., Store],
    theirs: Stream,
) -> None:
    store = device_store(path=path)
    source, pool, reader = (rig(MHA, store, COUNT) for _ in range(3))
    want = truth(KEYS, pool.layout.page_bytes)
    old = truth(make_keys(COUNT, "old"), pool.layout.page_bytes)
    source.put(range(COUNT), want)
    assert source.offload(KEYS, range(COUNT))
    pool.put(range(COUNT), old)
    assert reader.load(KEYS, range(COUNT))  # the first call takes seconds, in which all of it would be over
    reader.fill_late(theirs, pool)
    assert pool.load(KEYS, range(COUNT), [Ready(theirs.record())])
    assert (layers(pool.layers_seen) == want).all()
    assert theirs.record().wait(WAIT_S)
    assert (reader.pages(range(COUNT)) == old).all(), "the load came before the reader"
    assert (pool.pages(range(COUNT)) == want).all()


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("path", ["direct", "bounce"])
def test_a_load_comes_after_the_forward_before_it_which_still_writes_to_rows_that_are_free(
    path: str,
    rig: Make,
    device_store: Callable[..., Store],
    theirs: Stream,
) -> None:
    store = device_store(path=path)
    source, pool, ended = (rig(MHA, store, COUNT) for _ in range(3))
    want = truth(KEYS, pool.layout.page_bytes)
    source.put(range(COUNT), want)
    assert source.offload(KEYS, range(COUNT))
    ended.put(range(COUNT), truth(make_keys(COUNT, "ended"), pool.layout.page_bytes))
    pool.forwards_run_on(theirs)
    assert pool.load(KEYS, range(COUNT))  # the first call takes seconds, in which all of it would be over
    pool.fill_late(theirs, ended)
    assert pool.load(KEYS, range(COUNT))
    assert theirs.record().wait(WAIT_S)
    assert (layers(pool.layers_seen) == want).all()
    assert (pool.pages(range(COUNT)) == want).all(), "the forward's writes came after the load's"


@pytest.mark.usefixtures("groups")
def test_a_damaged_page_fails_the_load_and_no_other_rows_are_touched(
    rig: Make,
    device_store: Callable[..., Store],
    tmp_path: Path,
) -> None:
    store = device_store(path="direct")
    pool = rig(MLA, store, 2 * COUNT)
    want = truth(KEYS, pool.layout.page_bytes)
    pool.put(HERE, want)
    assert pool.offload(KEYS, HERE)
    (file,) = (tmp_path / "s" / "segments").glob("*.seg")
    raw = bytearray(file.read_bytes())
    raw[raw.index(want[3].tobytes()) + pool.layout.page_bytes - 1] ^= 1  # in the last layer
    file.write_bytes(raw)
    assert not pool.load(KEYS, THERE)
    assert "MISS_CHECKSUM" in str(pool.counter.error)
    assert (pool.pages(HERE) == want).all()
    assert pool.pools[0].bound.contains(KEYS).tolist() == [number != 3 for number in range(COUNT)]


def test_what_was_prefetched_comes_from_host_memory(
    rig: Make,
    device_store: Callable[..., Store],
) -> None:
    store = device_store(path="direct", host_cache="8MiB")
    pool = rig(MHA, store, 2 * COUNT)
    want = truth(KEYS, pool.layout.page_bytes)
    pool.put(HERE, want)
    assert pool.offload(KEYS, HERE)
    prefetched = Prefetched([(pool.pools[0], [key.tobytes().hex() for key in KEYS])])
    ended: list[Any] = []
    assert prefetched.begin(WAIT_S, lambda _, __, future: ended.append(future)) == COUNT
    prefetched._brought[0][2].wait(WAIT_S)
    before = {row: nbytes for row, nbytes in report(store).items() if row[2] == "read"}
    assert pool.load(KEYS, THERE, prefetched=prefetched)
    assert (layers(pool.layers_seen) == want).all()
    assert pool.loads.pages_warm == COUNT
    assert {row: nbytes for row, nbytes in report(store).items() if row[2] == "read"} == before
