"""Pinning for CUDA, against a driver that keeps the driver's rules."""

# ruff: noqa: N802  (the names are the driver's)

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any

import pytest

from gdsstore.memory import pinning, syscalls
from gdsstore.memory.arena import Arena
from gdsstore.memory.cuda import load_driver

NOT_INITIALIZED, DEINITIALIZED, INVALID_CONTEXT, OUT_OF_MEMORY, SICK = 3, 4, 201, 2, 700


class Driver:
    """libcuda as far as pinning uses it: two devices, of which `active` have a primary context."""

    def __init__(self, active: tuple[int, ...] = (1,), initialised: bool = True) -> None:
        self.active, self.initialised = active, initialised
        self.retained: list[int] = []
        self.stack: list[int] = []
        self.registered: dict[int, int] = {}
        self.register_code = self.unregister_code = 0

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 2
        return 0 if self.initialised else NOT_INITIALIZED

    def cuDevicePrimaryCtxGetState(self, device: int, flags: Any, active: Any) -> int:
        active._obj.value = int(device in self.active)
        return 0

    def cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> int:
        assert device in self.active, "made a context where there was none"
        self.retained.append(device)
        out._obj.value = 1000 + device
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        self.retained.remove(device)
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.stack.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, out: Any) -> int:
        out._obj.value = self.stack.pop()
        return 0

    def cuMemHostRegister_v2(self, address: Any, length: Any, flags: Any) -> int:
        if not self.stack:
            return INVALID_CONTEXT
        if not self.register_code:
            self.registered[address.value] = length.value
        return self.register_code

    def cuMemHostUnregister(self, address: Any) -> int:
        if not self.stack:
            return INVALID_CONTEXT
        if self.unregister_code == 0:
            del self.registered[address.value]
        return self.unregister_code

    def cuGetErrorName(self, code: int, out: Any) -> int:
        out._obj.value = b"CUDA_ERROR_%d" % code
        return 0


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses that were unmapped."""
    addresses: list[int] = []
    real = syscalls.unmap

    def unmap(address: int, length: int) -> None:
        addresses.append(address)
        real(address, length)

    monkeypatch.setattr(syscalls, "unmap", unmap)
    return addresses


def test_an_arena_is_pinned_whole_and_unpinned_before_it_is_unmapped(
    monkeypatch: pytest.MonkeyPatch, unmapped: list[int]
) -> None:
    driver = Driver()
    arena = Arena(1 << 20, cuda_driver=driver)
    unmapped.clear()  # the ends that alignment cut off
    assert arena.grant.pinned
    assert driver.registered == {arena.address: 1 << 20}
    assert driver.retained == [1]
    seen = []
    unregister = driver.cuMemHostUnregister
    monkeypatch.setattr(
        driver, "cuMemHostUnregister", lambda address: (seen.append(list(unmapped)), unregister(address))[1]
    )
    assert arena.close(0)
    assert seen == [[]]
    assert unmapped == [arena.address]
    assert (driver.registered, driver.retained, driver.stack) == ({}, [], [])


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (Driver(initialised=False), "not initialised in this process"),
        (Driver(active=()), "no CUDA context"),
    ],
)
def test_cuda_is_never_started_for_pinning(driver: Driver, reason: str) -> None:
    with Arena(1 << 20, cuda_driver=driver) as arena:
        assert not arena.grant.pinned
        assert any(reason in note for note in arena.grant.notes)
        assert not driver.retained


def test_a_refused_registration_is_reported_by_name_and_leaves_nothing_behind() -> None:
    driver = Driver()
    driver.register_code = OUT_OF_MEMORY
    with Arena(1 << 20, cuda_driver=driver) as arena:
        assert not arena.grant.pinned
        assert "not pinned: cuMemHostRegister gave CUDA_ERROR_2" in arena.grant.notes
        assert (driver.retained, driver.stack) == ([], [])


def test_pin_off_asks_no_driver() -> None:
    driver = Driver()
    with Arena(1 << 20, pin="off", cuda_driver=driver) as arena:
        assert not arena.grant.pinned
        assert not driver.registered


@pytest.mark.parametrize("closed", [True, False])
def test_memory_that_the_driver_does_not_let_go_of_stays_mapped(unmapped: list[int], closed: bool) -> None:
    driver = Driver()
    arena = Arena(1 << 20, cuda_driver=driver)
    address = arena.address
    driver.unregister_code = SICK
    if closed:
        arena.close(0)
    del arena
    gc.collect()
    assert address not in unmapped
    syscalls.unmap(address, 1 << 20)


def test_a_driver_that_has_shut_down_holds_nothing(unmapped: list[int]) -> None:
    driver = Driver()
    arena = Arena(1 << 20, cuda_driver=driver)
    driver.unregister_code = DEINITIALIZED
    arena.close(0)
    assert arena.address in unmapped


def test_a_forked_child_leaves_the_parents_registration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    registration = pinning.register(4096, 4096, driver)
    assert isinstance(registration, pinning.Registration)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        assert registration.release()
    assert driver.registered == {4096: 4096}
    assert registration.release()
    assert driver.registered == {}


def test_a_missing_library_is_a_reason_and_not_an_error() -> None:
    assert load_driver("libnot-there.so.9") is None
    assert pinning.register(0, 4096, None) == "not pinned: the loader finds no libcuda.so.1"


def test_the_fake_driver_is_called_as_the_real_one_would_be() -> None:
    """ctypes passes a bare int as 32 bits; addresses and sizes must go as what they are."""
    seen: list[tuple[type, ...]] = []
    driver = Driver()
    register = driver.cuMemHostRegister_v2
    driver.cuMemHostRegister_v2 = lambda *a: (seen.append(tuple(map(type, a))), register(*a))[1]  # type: ignore[method-assign]
    pinning.register(1 << 40, 1 << 33, driver)
    assert seen == [(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)]
    assert driver.registered == {1 << 40: 1 << 33}
