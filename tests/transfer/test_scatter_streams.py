"""Gather and scatter on slow streams and failing drivers: nothing runs too early, is freed too early, or lies."""

# ruff: noqa: F401, F811  # fixtures are imported, and then named as parameters

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from gdsstore.errors import DeviceError
from gdsstore.memory.streams import Event, Stream
from gdsstore.transfer.scatter import PageKernels, Pending
from tests.transfer.scatter_model import BLOCK, BYTES, SOON_S, Case, Image, noise, place, same
from tests.transfer.scatter_rig import SimulatedMemory, gpu, kernels, kind, kinds, make, memory, simulator

DELAY_US = 3000  # before each operation of a stream
BOTH = pytest.mark.parametrize("kind", kinds(CUDASIM_STREAM_DELAY_US=DELAY_US), indirect=True, scope="module")

CASE = place([[16, 48, 1024], [16, 48, 1024]], seed=1)


def overwrite(memory: SimulatedMemory, image: Image) -> tuple[Stream, Event]:
    """Somebody's stream that writes an image, long after it was asked to, and the event behind that."""
    memory.put(image, BYTES)
    stream = Stream(memory.device)
    for _ in range(20):
        stream.copy(memory.spare, memory.spare + 1, 1)
    memory.put(image[:2], BYTES)
    stream.copy(memory.address, memory.spare, BYTES)
    return stream, stream.record()


@BOTH
def test_work_begins_after_the_event_of_another_stream(kernels: PageKernels, memory: SimulatedMemory) -> None:
    image = noise(1)
    image[:2] = 7  # what the other stream plays with
    memory.put(noise(2))
    stream, event = overwrite(memory, image)
    kernels.after(event)
    del event  # the stream that waits for it does not mind
    pending = kernels.gather(CASE.at(memory))
    assert pending.wait(SOON_S)
    expected = CASE.gathered(image)
    assert same(memory.get(), expected)
    assert pending.sums.tolist() == CASE.sums(expected)
    stream.close()


@BOTH
def test_a_call_does_not_wait_and_a_wait_ends_by_its_deadline(
    kernels: PageKernels, memory: SimulatedMemory
) -> None:
    memory.put(noise(1))
    pending = kernels.scatter(CASE.at(memory))
    assert not pending.done
    assert not pending.wait(0.0)
    with pytest.raises(DeviceError, match="still at work"):
        _ = pending.sums
    assert pending.wait(SOON_S)
    assert pending.sums.tolist() == CASE.sums(noise(1))


@BOTH
def test_calls_under_way_at_once_do_not_share_memory(kernels: PageKernels, memory: SimulatedMemory) -> None:
    image = noise(1)
    memory.put(image)
    cases = [Case(CASE.record[[i]], CASE.record_bytes, CASE.piece[[i]], CASE.length[[i]]) for i in (0, 1, 0)]
    pending = [kernels.scatter(case.at(memory)) for case in cases]
    assert all(work.wait(SOON_S) for work in reversed(pending))
    assert [work.sums.tolist() for work in pending] == [case.sums(image) for case in cases]


@BOTH
def test_work_that_everybody_forgot_is_done_in_memory_that_is_still_there(
    kernels: PageKernels,
    memory: SimulatedMemory,
    gpu: ModuleType,
) -> None:
    image = noise(1)
    memory.put(image)
    forgotten = type(kernels)(memory.device)
    freed = gpu.cuda_calls("cuMemFreeHost")
    forgotten.gather(CASE.at(memory))
    stream = forgotten._stream
    del forgotten
    gc.collect()
    assert not stream.record().done
    assert gpu.cuda_calls("cuMemFreeHost") == freed
    assert stream.record().wait(SOON_S)
    assert same(memory.get(), CASE.gathered(image))
    stream.close()


@BOTH
def test_closing_frees_nothing_that_is_in_use(
    kind: str,
    memory: SimulatedMemory,
    gpu: ModuleType,
) -> None:
    kernels = make(kind, memory)
    memory.put(noise(1))
    freed = [gpu.cuda_calls(name) for name in ("cuMemFreeHost", "cuMemFree", "cuStreamDestroy")]
    pending = kernels.scatter(CASE.at(memory))
    assert not kernels.close(0.0)
    assert [gpu.cuda_calls(name) for name in ("cuMemFreeHost", "cuMemFree", "cuStreamDestroy")] == freed
    assert kernels.close(SOON_S)
    assert gpu.cuda_calls("cuStreamDestroy") > freed[2]
    kept = gpu.cuda_calls("cuMemFreeHost")
    assert pending.done
    assert pending.sums.tolist() == CASE.sums(noise(1))
    assert gpu.cuda_calls("cuMemFreeHost") == kept + 1  # the memory that the sums were in


@BOTH
def test_threads_get_their_own_results(kernels: PageKernels, memory: SimulatedMemory) -> None:
    image = noise(1)
    memory.put(image)
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        case = Case(CASE.record[[i]], CASE.record_bytes, CASE.piece[[i]], CASE.length[[i]])
        pending = kernels.scatter(case.at(memory))
        if pending.wait(SOON_S):
            found[i] = pending.sums.tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    expected = CASE.sums(image)
    assert found == {i: [expected[i]] for i in range(2)}


def submissions(kernels: PageKernels, memory: SimulatedMemory) -> list[Callable[[], Pending]]:
    records = CASE.at(memory)
    whole = np.full((2, 1), BLOCK)
    return [
        lambda: kernels.gather(records),
        lambda: kernels.scatter(records),
        lambda: kernels.sums(records.record[:, None], whole, whole * 0),
    ]


def spare_scratch(kernels: PageKernels) -> list[object]:
    """All that earlier work left, so that the next must allocate."""
    pool = kernels._pool  # type: ignore[attr-defined]
    return [pool.take(size) for size, blocks in pool._free.items() for _ in range(len(blocks))]


@BOTH
@pytest.mark.parametrize(
    "call",
    ["cuMemcpyAsync", "cuMemHostAlloc", "cuMemAlloc", "cuMemsetD8Async", "cuEventCreate", "cuEventRecord"],
)
def test_a_failing_driver_never_gives_sums(
    kernels: PageKernels,
    memory: SimulatedMemory,
    gpu: ModuleType,
    call: str,
) -> None:
    """Each of its calls fails once, in every kind of work; and the work after that is as good as ever."""
    image = CASE.gathered(noise(1))  # gathering it again changes nothing
    memory.put(image)
    hits = 0
    for submit in submissions(kernels, memory):
        for number in range(1, 12):
            held = spare_scratch(kernels)
            before = gpu.cuda_calls(call)
            gpu.cuda_faults(f"{call}@{number}=cu:700")
            pending = submit()
            hit = gpu.cuda_calls(call) - before >= number
            gpu.cuda_faults("")
            assert pending.wait(SOON_S)
            if not hit:
                break
            hits += 1
            with pytest.raises(DeviceError, match="failed"):
                _ = pending.sums
        good = submit()
        assert good.wait(SOON_S)
        assert good.sums.tolist() == CASE.sums(image)
        del held
    assert same(memory.get(), CASE.scattered(image))
    assert hits > 0 or (kernels.name, call) in UNUSED


UNUSED = {("copies", "cuMemAlloc"), ("triton", "cuMemsetD8Async")}


@BOTH
def test_work_without_an_event_is_done_when_its_stream_is(
    kernels: PageKernels,
    memory: SimulatedMemory,
    gpu: ModuleType,
) -> None:
    memory.put(noise(1))
    waits = 1 if kernels.name == "triton" else 0  # the interpreter's own
    gpu.cuda_faults(f"cuEventRecord@{waits + 1}=cu:2")
    pending = kernels.scatter(CASE.at(memory))
    gpu.cuda_faults("")
    assert not pending.done
    assert pending.wait(SOON_S)
    assert same(memory.get(), CASE.scattered(noise(1)))
    with pytest.raises(DeviceError):
        _ = pending.sums


@BOTH
def test_memory_of_work_that_nobody_can_ask_about_is_not_used_again(
    kernels: PageKernels,
    memory: SimulatedMemory,
    gpu: ModuleType,
) -> None:
    memory.put(noise(1))
    pending = kernels.scatter(CASE.at(memory))
    gpu.cuda_faults("cuEventQuery@1+1=cu:700")
    assert not pending.done, "a single error says nothing"
    assert pending.wait(SOON_S)
    gpu.cuda_faults("")
    with pytest.raises(DeviceError):
        _ = pending.sums
    used = {scratch.host for scratch in pending._scratch}
    del pending
    gc.collect()
    again = kernels.scatter(CASE.at(memory))
    assert used.isdisjoint(scratch.host for scratch in again._scratch)
    assert again.wait(SOON_S)
    assert again.sums.tolist() == CASE.sums(noise(1))
