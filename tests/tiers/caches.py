"""What the tests of the host cache share: a small cache, a drive that can refuse, hang and be slow, and a check of its books."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gdsstore.checksum.host import raw_sums
from gdsstore.memory.arena import Arena
from gdsstore.memory.views import PageMemory, describe
from gdsstore.tiers.cached import CachedNamespace
from gdsstore.tiers.host import HostCache
from gdsstore.tiers.policy import Standing
from gdsstore.tiers.rows import State
from gdsstore.tiers.writing import DirtyRecords
from gdsstore.waiting import Deadline

BLOCK = 4096
REGION = 4 * BLOCK
SOON_S = 60.0  # for what must happen; a test that waits this long has failed
ONE, TWO = b"1" * 16, b"2" * 16  # namespace digests


@dataclass
class Result:
    ok: npt.NDArray[np.bool_]
    damaged: npt.NDArray[np.bool_]
    in_use: bool = False

    @property
    def memory_in_use(self) -> bool:
        return self.in_use


@dataclass
class Drive:
    """Keeps what is written back. `refuses`: how many records fail from now on."""

    pages: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    calls: list[list[bytes]] = field(default_factory=list)  # the keys of each
    refuses: int = 0
    may_be_damaged: bool = False
    hangs: bool = False  # what fails is still in use afterwards
    results: list[Result] = field(default_factory=list)
    gate: threading.Event | None = None  # writes wait for it
    entered: threading.Event = field(default_factory=threading.Event)
    written: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, records: DirtyRecords, deadline: Deadline) -> Result:
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(deadline.left_s)
        sums = record_sums(records.address, records.record_bytes)
        damaged = sums != records.raw
        assert self.may_be_damaged or not damaged.any(), "the bytes of a dirty record changed"
        with self.lock:
            keys = [key.tobytes() for key in records.keys]
            self.calls.append(keys)
            result = Result(~damaged, damaged)
            refused = min(self.refuses, len(keys))
            if self.gate is not None and not self.gate.is_set():
                refused = len(keys)
            self.refuses -= min(self.refuses, refused)
            result.ok[:refused] = False
            result.in_use = self.hangs and refused > 0
            self.results.append(result)
            for i in np.flatnonzero(result.ok).tolist():
                page = bytes_at(records.address[i], int(records.payload_bytes[i]))
                self.pages[records.namespace_digest, keys[i]] = page
            self.written += int(result.ok.sum())
        return result


def small_cache(drive: Drive, regions: int = 4) -> HostCache:
    arena = lambda: Arena(regions * REGION, BLOCK, huge_pages="off", pin="off")  # noqa: E731
    return HostCache(arena, drive, region_bytes=REGION)


def keys_of(*numbers: int) -> npt.NDArray[np.uint8]:
    keys = np.zeros((len(numbers), 32), np.uint8)
    keys[:, :8] = np.asarray(numbers, np.uint64).reshape(-1, 1).view(np.uint8)
    return keys


def page_of(number: int, page_bytes: int = BLOCK, version: int = 0) -> bytes:
    return np.random.default_rng([number, version]).bytes(page_bytes)


def pages_of(*numbers: int, page_bytes: int = BLOCK, version: int = 0) -> PageMemory:
    joined = b"".join(page_of(number, page_bytes, version) for number in numbers)
    array = np.frombuffer(joined, np.uint8).reshape(len(numbers), page_bytes)
    return describe(array, len(numbers), page_bytes, writable=False)


def put(namespace: CachedNamespace, *numbers: int, standing: Standing = Standing.CLEAN) -> list[int]:
    """Put pages; their `Room` values."""
    result = namespace.put(keys_of(*numbers), pages_of(*numbers), standing, soon())
    return result.room.tolist()


def present(namespace: CachedNamespace, *numbers: int) -> list[int]:
    """Which of these are there; in this order they become the hottest, so ask the ones that may be evicted last."""
    there = namespace.contains(keys_of(*numbers)).tolist()
    return [number for number, is_there in zip(numbers, there, strict=True) if is_there]


def soon() -> Deadline:
    return Deadline(SOON_S)


def bytes_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(int(address), nbytes)


def write_at(address: int, data: bytes) -> None:
    ctypes.memmove(int(address), data, len(data))


def record_sums(address: npt.NDArray[np.uint64], record_bytes: int) -> npt.NDArray[np.uint64]:
    n = len(address)
    return raw_sums(address, np.full(n, record_bytes, np.int64), np.zeros(n, np.int64))


def check_books(cache: HostCache) -> None:
    """The counts of a cache, against its rows one by one."""
    core = cache._core
    owned = np.zeros(core.regions, np.int64)
    for shelf in core.shelves.values():
        owned += shelf.owned
        state = shelf.rows["state"]
        ready = state == State.READY
        used = int((state != State.FREE).sum())
        assert shelf.free_count + used == int(shelf.owned.sum()) * shelf.per_region
        assert shelf.ready == int(ready.sum())
        assert shelf.dirty == int((ready & (shelf.rows["standing"] == Standing.DIRTY)).sum())
        assert shelf.pins == int(shelf.rows["pins"].sum())
        assert not shelf.rows["pins"][state == State.FREE].any()
        free = shelf._free[: shelf.free_count]
        assert len(set(free.tolist())) == shelf.free_count
        assert not state[free].any()
        order, row = [], int(shelf._ends[0])
        while row >= 0:
            order.append(row)
            row = int(shelf.rows["newer"][row])
        assert sorted(order) == np.flatnonzero(ready).tolist()
        assert int((shelf._table != 0).sum()) == int(
            ((state == State.READY) | (state == State.FILLING)).sum()
        )
        for region in np.flatnonzero(shelf.owned).tolist():
            assert shelf._region_used[region] == len(shelf.region_rows(region))
    assert owned.max() <= 1
    assert int(owned.sum()) + len(core._free_regions) == core.regions
