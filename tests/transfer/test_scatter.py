"""Gather, scatter and sums on the simulated GPU equal a plain model, for every layout and both kinds of kernels."""

# ruff: noqa: F401, F811  # fixtures are imported, and then named as parameters

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from gdsstore.checksum.definition import reference_raw
from gdsstore.errors import ArgumentError, DeviceError
from gdsstore.transfer import scatter_copies, scatter_triton
from gdsstore.transfer.scatter import CopyKernels, PageKernels, Records, make_kernels
from tests.transfer.scatter_model import (
    BLOCK,
    SOON_S,
    Case,
    check_gather,
    check_scatter,
    check_sums,
    noise,
    odd_cases,
    place,
    pool_cases,
    seeds,
)
from tests.transfer.scatter_rig import SimulatedMemory, gpu, kernels, kind, kinds, make, memory, simulator

BOTH = pytest.mark.parametrize("kind", kinds(), indirect=True, scope="module")
few = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@BOTH
@few
@given(case=pool_cases(), seed=seeds)
def test_pages_of_every_layout_are_gathered_and_scattered_as_the_model_says(
    kernels: PageKernels, memory: SimulatedMemory, case: Case, seed: int
) -> None:
    check_gather(kernels, memory, case, noise(seed))
    check_scatter(kernels, memory, case, noise(seed + 1))


@BOTH
@few
@given(case=odd_cases(), seed=seeds)
def test_pieces_of_any_length_at_any_address_are_too(
    kernels: PageKernels, memory: SimulatedMemory, case: Case, seed: int
) -> None:
    check_gather(kernels, memory, case, noise(seed))
    check_scatter(kernels, memory, case, noise(seed + 1))


@BOTH
@pytest.mark.parametrize("only", [(1, 0, 1, 1), (0, 0, 0, 0), (0, 0, 1, 0)])
def test_a_scatter_of_some_records_leaves_the_others_alone(
    kernels: PageKernels, memory: SimulatedMemory, only: tuple[int, ...]
) -> None:
    case = place(np.full((4, 6), 272), seed=1)
    check_scatter(kernels, memory, case, noise(2), np.array(only, np.bool_))


@BOTH
@pytest.mark.parametrize("nbytes", [4096, 3000, 3001])
def test_a_part_of_a_record_is_summed_up_from_its_own_block_on(
    kernels: PageKernels, memory: SimulatedMemory, nbytes: int
) -> None:
    case, image = place(np.full((3, 5), nbytes), align=1 if nbytes % 16 else 16), noise(3)
    memory.put(image)
    pending = kernels.scatter(replace(case.at(memory), first_block=7))
    assert pending.wait(SOON_S)
    parts = [image[at : at + case.record_bytes].tobytes() for at in case.record]
    assert pending.sums.tolist() == [reference_raw(part, 7) for part in parts]


@BOTH
@few
@given(seed=seeds)
def test_pages_in_place_are_summed_up_whole(kernels: PageKernels, memory: SimulatedMemory, seed: int) -> None:
    check_sums(kernels, memory, noise(seed), seed)


@BOTH
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 40])
def test_any_number_of_pieces_finds_its_place(kernels: PageKernels, memory: SimulatedMemory, k: int) -> None:
    """Also where they differ, so that each byte's piece must be searched for."""
    lengths = np.arange(1, k + 1)[None, :] * 16
    for case in (place(lengths, seed=k), place(np.concatenate([lengths, lengths[:, ::-1]]), seed=k)):
        check_gather(kernels, memory, case, noise(k))
        check_scatter(kernels, memory, case, noise(k))


@BOTH
def test_what_is_scattered_is_what_was_gathered(kernels: PageKernels, memory: SimulatedMemory) -> None:
    """The whole way, out of slots and into others, each queued behind the one before, with equal sums."""
    case, image = place(np.full((3, 4), 1152), seed=1), noise(3)
    memory.put(image)
    records = case.at(memory)
    target = Records(
        records.record, case.record_bytes, records.piece[::-1] + np.uint64(1 << 20), records.length
    )
    gathered, scattered = kernels.gather(records), kernels.scatter(target)
    assert scattered.wait(SOON_S)
    assert gathered.done
    assert scattered.sums.tolist() == gathered.sums.tolist()
    found = memory.get()
    for at, to in zip(case.piece.ravel(), case.piece[::-1].ravel() + (1 << 20), strict=True):
        assert np.array_equal(image[at : at + 1152], found[to : to + 1152])


@BOTH
def test_no_pages_are_no_work(kernels: PageKernels, memory: SimulatedMemory) -> None:
    none = Records(np.zeros(0, np.uint64), BLOCK, np.zeros((0, 2), np.uint64), np.zeros((0, 2), np.int64))
    for pending in (
        kernels.gather(none),
        kernels.scatter(none),
        kernels.sums(none.piece, none.length, none.length),
    ):
        assert pending.wait(SOON_S)
        assert pending.sums.shape == (0,)


@BOTH
def test_what_cannot_be_summed_up_in_place_is_refused(kernels: PageKernels, memory: SimulatedMemory) -> None:
    good = np.array([[memory.address]], np.uint64), np.array([[BLOCK]]), np.array([[0]])
    for number, bad in (
        (0, good[0] + np.uint64(8)),
        (0, good[0] * np.uint64(0)),
        (1, good[1] - 1),
        (2, good[2] - 1),
    ):
        arguments = list(good)
        arguments[number] = bad
        with pytest.raises(ArgumentError, match="page=0"):
            kernels.sums(*arguments)
    with pytest.raises(ArgumentError, match="only must be bool"):
        kernels.scatter(place([[16]]).at(memory), only=np.ones(2, np.bool_))


@BOTH
def test_closed_kernels_refuse_work_and_gave_all_memory_back(
    kind: str,
    memory: SimulatedMemory,
    gpu: ModuleType,
) -> None:
    before = gpu.usage()
    pinned = [gpu.cuda_calls(call) for call in ("cuMemHostAlloc", "cuMemFreeHost")]
    kernels = make(kind, memory)
    check_gather(kernels, memory, place([[16, 48]]), noise(1))
    assert kernels.close(SOON_S)
    assert kernels.close(SOON_S)
    assert gpu.usage() == before
    made, freed = (
        gpu.cuda_calls(call) - count
        for call, count in zip(("cuMemHostAlloc", "cuMemFreeHost"), pinned, strict=True)
    )
    assert made == freed > 0
    with pytest.raises(DeviceError, match="closed"):
        kernels.gather(place([[16]]).at(memory))


def test_records_that_do_not_fit_together_are_refused() -> None:
    record, piece, length = (
        np.full(2, BLOCK, np.uint64),
        np.full((2, 3), 64, np.uint64),
        np.full((2, 3), 1000),
    )
    Records(record, BLOCK, piece, length)
    for bad in (
        (record + np.uint64(512), BLOCK, piece, length),
        (record * np.uint64(0), BLOCK, piece, length),
        (record[:1], BLOCK, piece, length),
        (record.astype(np.int64), BLOCK, piece, length),
        (record, BLOCK - 1, piece, length),
        (record, 0, piece, length),
        (record, 2 << 30, piece, length),
        (record, BLOCK, piece[:, :0], length[:, :0]),
        (record, BLOCK, piece, length[:, :2]),
        (record, BLOCK, piece, length + 500),
        (record, BLOCK, piece, length - 1001),
        (record, BLOCK, piece * np.uint64(0), length),
        (record, BLOCK, piece, length.astype(np.int32)),
    ):
        with pytest.raises(ArgumentError):
            Records(*bad)  # type: ignore[arg-type]


@pytest.mark.own_process(CUDASIM_HOST_VISIBLE=1, TRITON_INTERPRET=1, CUDASIM_POISON=0xEE)
def test_kernels_are_chosen_where_they_work(memory: SimulatedMemory) -> None:
    pytest.importorskip("triton")
    kernels = make_kernels(memory.device)
    assert kernels.name == "triton"
    assert kernels.close()


@pytest.mark.own_process(CUDASIM_POISON=0xEE)
def test_without_triton_there_are_copies_and_nobody_imported_torch(
    memory: SimulatedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "torch" not in sys.modules
    monkeypatch.setitem(sys.modules, "triton", None)  # makes `import triton` raise ImportError
    kernels = make_kernels(memory.device)
    assert kernels.name == "copies"
    assert kernels.close()


@pytest.mark.own_process(TRITON_INTERPRET=1)
def test_memory_that_the_interpreter_cannot_touch_means_copies_and_no_crash(
    memory: SimulatedMemory, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = make_kernels(memory.device)
    assert kernels.name == "copies"
    assert "by single copies" in caplog.text
    check_gather(kernels, memory, place([[16, 48]]), noise(1))
    assert kernels.close()


@pytest.mark.own_process(CUDASIM_POISON=0xEE)
def test_copies_that_touch_are_one_call_unless_an_allocation_ends_between(
    memory: SimulatedMemory,
    gpu: ModuleType,
) -> None:
    size = 2 << 20
    first, second = gpu.DeviceBuffer(size), gpu.DeviceBuffer(size)
    low, high = sorted((first.ptr, second.ptr))
    assert high == low + size, "the simulator's allocations are no longer neighbours"
    kernels = CopyKernels(memory.device)
    for start, calls in ((low, 1), (high - BLOCK, 2)):
        piece = np.array([[start, start + BLOCK]], np.uint64)
        records = Records(np.array([memory.address], np.uint64), 2 * BLOCK, piece, np.full((1, 2), BLOCK))
        before = gpu.cuda_calls("cuMemcpyAsync")
        pending = kernels.gather(records)
        assert gpu.cuda_calls("cuMemcpyAsync") - before == calls + 1  # and one for the sums
        assert pending.wait(SOON_S)
        assert len(pending.sums) == 1
    assert kernels.close()
    first.free()
    second.free()


def test_runs_are_found_where_both_sides_touch() -> None:
    to, at, length = (np.array(x, np.uint64) for x in ([0, 4, 8, 20], [100, 104, 300, 312], [4, 4, 12, 1]))
    assert scatter_copies.runs(to, at, length.astype(np.int64)) == [0, 2, 4]


@pytest.mark.parametrize(
    ("address", "ends", "unit"),
    [
        ([16, 4096 + 32], [4096, 8192], 4096),
        ([16, 32], [4096, 8192 + 16], 16),
        ([16, 40], [4096, 8192], None),
        ([16, 32], [4096, 8192 + 8], None),
    ],
)
def test_vectors_are_used_only_where_everything_is_a_multiple_of_them(
    address: list[int], ends: list[int], unit: int | None
) -> None:
    """A GPU faults on vectors at other addresses; the interpreter does not mind."""
    assert scatter_triton._unit(np.array(address, np.uint64), np.array([ends], np.int64)) == unit
