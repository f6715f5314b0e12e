"""Our streams and events against those of others: order is kept where it was asked for, and nowhere else."""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import pytest

from gdsstore.memory.arena import Arena
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_arena import DeviceArena
from gdsstore.memory.device_memory import DeviceView
from gdsstore.memory.device_views import describe_device
from gdsstore.memory.lease import Lease
from gdsstore.memory.streams import Event, Stream
from tests.cudasim.fixtures import gpu, simulator  # noqa: F401
from tests.gpu.need import PLACES, REAL, need

NBYTES = 1 << 20
TIMEOUT_S = 60.0
OLD, NEW = 17, 42


class Gate:
    """Holds a stream until it is opened: the driver calls a function of ours in the stream, which waits."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._open = threading.Event()
        self._wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._until_open)

    def hold(self, stream: int) -> None:
        self._device.do(
            "cuLaunchHostFunc", lambda cuda: cuda.cuLaunchHostFunc(ctypes.c_void_p(stream), self._wait, None)
        )

    def open(self) -> None:
        self._open.set()

    def _until_open(self, _: int | None) -> None:
        self._open.wait(TIMEOUT_S)


class Other(Protocol):
    """Somebody else's stream."""

    handle: int

    def fill(self, address: int, nbytes: int, value: int) -> None:
        """Queue it."""

    def wait_for(self, stream: Stream) -> None:
        """What is queued from now on begins after what `stream` has queued so far."""


class TorchStream:
    def __init__(self) -> None:
        torch: Any = importlib.import_module("torch")
        self._torch = torch
        self.stream = torch.cuda.Stream(device=0)
        self.handle = int(self.stream.cuda_stream)
        # A kernel is loaded by its first use, which may wait for all streams: also for one that a test holds.
        torch.zeros(1 << 16, dtype=torch.uint8, device="cuda:0").fill_(NEW)
        torch.cuda.synchronize()

    def fill(self, address: int, nbytes: int, value: int) -> None:
        tensor = self._torch.as_tensor(DeviceView(address, nbytes), device="cuda:0")
        assert tensor.data_ptr() == address
        with self._torch.cuda.stream(self.stream):
            tensor.fill_(value)

    def wait_for(self, stream: Stream) -> None:
        self.stream.wait_stream(self._torch.cuda.ExternalStream(stream.handle, device=0))


class SimulatedStream:
    """A stream of the driver's, filled by copies: the simulator has no kernels."""

    def __init__(self, device: CudaDevice) -> None:
        self._stream = Stream(device)
        self.handle = self._stream.handle
        self._sources: list[Arena] = []

    def fill(self, address: int, nbytes: int, value: int) -> None:
        self._sources.append(source := Arena(nbytes))
        source.array[:] = value
        self._stream.copy(address, source.address, nbytes)

    def wait_for(self, stream: Stream) -> None:
        self._stream.wait_for(stream.record())


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest) -> str:
    place = str(request.param)
    need(place, *(["torch"] if place == "real" else []))
    if place == "simulated":
        request.getfixturevalue("gpu")
    return place


@pytest.fixture
def device(where: str) -> Iterator[CudaDevice]:
    device = CudaDevice(0)
    yield device
    device.close()


@pytest.fixture
def gate(device: CudaDevice, memory: Lease, host: Arena, ours: Stream) -> Iterator[Gate]:
    """Opened whatever came of the test, and before memory and streams go, which would wait for it."""
    gate = Gate(device)
    yield gate
    gate.open()
    device.do("cuCtxSynchronize", lambda cuda: cuda.cuCtxSynchronize())


@pytest.fixture
def other(where: str, device: CudaDevice) -> Other:
    return TorchStream() if where == "real" else SimulatedStream(device)


@pytest.fixture
def ours(device: CudaDevice) -> Iterator[Stream]:
    stream = Stream(device)
    yield stream
    stream.close()


@pytest.fixture
def memory(device: CudaDevice) -> Iterator[Lease]:
    """Device memory full of OLD."""
    with DeviceArena(NBYTES) as arena, arena.lease(NBYTES, 0) as lease:
        old = np.full(NBYTES, OLD, np.uint8)
        device.copy(lease.address, old.ctypes.data, NBYTES)
        yield lease


@pytest.fixture
def host(device: CudaDevice) -> Iterator[Arena]:
    """Pinned zeros: copies to other memory make the driver wait, and the test with it."""
    with Arena(NBYTES) as arena:
        assert arena.grant.pinned, arena.grant.notes
        yield arena


def test_a_copy_waits_for_the_stream_that_fills_the_memory(
    gate: Gate, other: Other, ours: Stream, memory: Lease, host: Arena, device: CudaDevice
) -> None:
    gate.hold(other.handle)
    other.fill(memory.address, NBYTES, NEW)
    ours.wait_for(Event(device, other.handle))
    ours.copy(host.address, memory.address, NBYTES)
    end = ours.record()
    assert not end.wait(0.05)
    assert not host.array.any()
    gate.open()
    assert end.wait(TIMEOUT_S)
    assert (host.array == NEW).all()


def test_another_stream_waits_for_our_copy(
    gate: Gate, other: Other, ours: Stream, memory: Lease, host: Arena, device: CudaDevice
) -> None:
    host.array[:] = NEW
    gate.hold(ours.handle)
    ours.copy(memory.address, host.address, NBYTES)
    other.wait_for(ours)
    other.fill(memory.address, NBYTES // 2, OLD)
    end = Event(device, other.handle)
    assert not end.wait(0.05)
    gate.open()
    assert end.wait(TIMEOUT_S)
    found = np.zeros(NBYTES, np.uint8)
    device.copy(found.ctypes.data, memory.address, NBYTES)
    assert (found[: NBYTES // 2] == OLD).all()
    assert (found[NBYTES // 2 :] == NEW).all()


@pytest.mark.parametrize("stream", ["other's", "default"])
def test_our_stream_waits_for_no_other_unless_told(
    stream: str, gate: Gate, other: Other, ours: Stream, memory: Lease, host: Arena, device: CudaDevice
) -> None:
    held = other.handle if stream == "other's" else 0
    gate.hold(held)
    behind = Event(device, held)
    ours.copy(host.address, memory.address, NBYTES)
    assert ours.record().wait(TIMEOUT_S)
    assert (host.array == OLD).all()
    assert not behind.done
    # Copies that are waited for go their own way too.
    found = np.zeros(16, np.uint8)
    device.copy(found.ctypes.data, memory.address, 16)
    assert (found == OLD).all()
    assert not behind.done


def test_zeros_come_in_their_turn(ours: Stream, memory: Lease, host: Arena) -> None:
    ours.zero(memory.address, NBYTES // 2)
    ours.copy(host.address, memory.address, NBYTES)
    assert ours.record().wait(TIMEOUT_S)
    assert not host.array[: NBYTES // 2].any()
    assert (host.array[NBYTES // 2 :] == OLD).all()


@pytest.mark.parametrize("where", [pytest.param("real", marks=REAL)], indirect=True)
def test_what_a_closed_stream_has_queued_still_runs(
    where: str, gate: Gate, device: CudaDevice, memory: Lease, host: Arena
) -> None:
    """The simulated driver waits at the end of a stream for what is in it."""
    stream = Stream(device)
    gate.hold(stream.handle)
    stream.copy(host.address, memory.address, NBYTES)
    end = stream.record()
    stream.close()
    assert not end.done
    gate.open()
    assert end.wait(TIMEOUT_S)
    assert (host.array == OLD).all()


@pytest.mark.parametrize("where", [pytest.param("real", marks=REAL)], indirect=True)
def test_a_long_kernel_of_torch_delays_our_copy(
    where: str, ours: Stream, memory: Lease, host: Arena, device: CudaDevice
) -> None:
    """As in a model server: the forward still writes the KV pages when we are asked to store them."""
    torch: Any = importlib.import_module("torch")
    other = TorchStream()
    with torch.cuda.stream(other.stream):
        torch.cuda._sleep(1_000_000_000)  # about half a second
    other.fill(memory.address, NBYTES, NEW)
    ours.wait_for(Event(device, other.handle))
    ours.copy(host.address, memory.address, NBYTES)
    assert ours.record().wait(TIMEOUT_S)
    assert (host.array == NEW).all()


@pytest.mark.parametrize("where", [pytest.param("real", marks=REAL)], indirect=True)
@pytest.mark.parametrize(
    "make", [lambda torch: torch.cuda.default_stream(0), lambda torch: torch.cuda.Stream(device=0)]
)
def test_a_kernel_in_the_caller_s_current_stream_is_waited_for(
    make: Callable[[Any], Any], where: str, ours: Stream, host: Arena, device: CudaDevice
) -> None:
    """Tensors are described together with that stream."""
    torch: Any = importlib.import_module("torch")
    with torch.cuda.stream(make(torch)):
        tensor = torch.full((NBYTES,), OLD, dtype=torch.uint8, device="cuda:0")
        torch.cuda._sleep(1_000_000_000)
        tensor.fill_(NEW)
        pages = describe_device(tensor.view(1, NBYTES), 1, NBYTES, writable=False)
        for stream in pages.streams:
            ours.wait_for(Event(device, stream))
    ours.copy(host.address, tensor.data_ptr(), NBYTES)
    assert ours.record().wait(TIMEOUT_S)
    assert (host.array == NEW).all()
