"""An engine as a contender: it moves the same records, at new random places of the file in each turn, and is timed."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections import Counter

import numpy as np

from gds_parts.dram import DramTraffic
from gds_parts.places import CLOSE_S, Place
from gds_parts.sizes import Cell
from gds_parts.target import Target
from gds_parts.turns import F64, HOST, LatencyOf, Memory, Turn, WrongBytesError
from gdsstore.engines.base import Engine, Op, RangePlan
from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import DeadlineError, EngineError
from gdsstore.memory.arena import Arena
from gdsstore.sizes import MiB
from gdsstore.waiting import Deadline

DEADLINE_S = 120.0  # of one turn; what a hanging drive or driver takes is no number
CHECK_BYTES = 16 * MiB
CHECK_THREADS = 8


class EngineContender:
    """Owns `engine`, `place` and a descriptor of its own until `close`.

    Throughput: one plan of all the turn's records, which the engine was made to have at most `submitters` of in flight, as fio
    does with its queue depth. Latency: plans of `submitters` records, one after the other, from the submission until all of it
    is there. Threads that submit single records would measure Python.
    """

    latency_of: LatencyOf = "plan"
    turns: int | None = None

    def __init__(
        self,
        name: str,
        memory: Memory,
        engine: Engine,
        place: Place,
        target: Target,
        dram: DramTraffic | None,
        *,
        seed: int = 0,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.name, self.memory = name, memory
        self._engine, self._place, self._dram = engine, place, dram
        self._rng = np.random.default_rng(seed)
        self._deadline_s, self._hung = deadline_s, False
        self._file_bytes = target.size_bytes
        self._fd = target.open()
        try:
            engine.attach(self._fd, target.size_bytes)
            self._fill(place.size_bytes)
        except BaseException:
            os.close(self._fd)
            raise

    def turn(self, cell: Cell) -> Turn:
        deadline = Deadline(self._deadline_s)
        plan = self._plan(cell)
        before = self._moved()
        dram = None if self._dram is None else self._dram.read_bytes()
        cpu, start = _cpu_s(), time.perf_counter()
        self._move(cell.op, plan, deadline)
        seconds, cpu = time.perf_counter() - start, _cpu_s() - cpu
        through_dram = None if dram is None or self._dram is None else self._dram.read_bytes() - dram
        latencies = self._latencies(cell, plan, deadline)
        return Turn(
            gbps=cell.nbytes / seconds / 1e9,
            cpu_s_per_gb=cpu / (cell.nbytes / 1e9),
            paths=self._paths(cell, before),
            latencies_us=latencies * 1e6,
            dram_bytes_per_byte=None if through_dram is None else through_dram / cell.nbytes,
        )

    def prove(self, cell: Cell) -> None:
        """Compares every byte, through another engine."""
        plan = self._plan(cell)
        if cell.op is Op.WRITE:
            self._fill(cell.nbytes)
        else:
            self._blank(cell.nbytes)
        self._move(cell.op, plan, Deadline(self._deadline_s))
        step = max(1, CHECK_BYTES // cell.record_bytes)
        with Arena(2 * step * cell.record_bytes) as arena, PosixEngine(CHECK_THREADS) as reader:
            reader.attach(self._fd, self._file_bytes)
            for first in range(0, cell.count, step):
                part = plan.take(slice(first, first + step))
                address = part.address - part.address[0] + np.uint64(arena.address)
                self._check(reader, RangePlan(part.fd, part.file_offset, address, part.length))
                offset = int(part.address[0]) - self._place.address
                on_drive, in_memory = arena.array[: part.nbytes], arena.array[-part.nbytes :]
                self._place.get(offset, in_memory)
                if not np.array_equal(on_drive, in_memory):
                    raise WrongBytesError(
                        "memory and file differ after a transfer that was reported as done", cell=str(cell)
                    )

    def close(self) -> None:
        self._engine.close(CLOSE_S)
        self._place.close()
        if not self._hung:  # else its number may become another file's, under a call that still hangs
            os.close(self._fd)

    def _check(self, reader: PosixEngine, plan: RangePlan) -> None:
        if not reader.submit(Op.READ, plan).wait(self._deadline_s).complete(plan).all():
            raise EngineError("the file cannot be read back")

    def _plan(self, cell: Cell) -> RangePlan:
        slots = self._rng.permutation(self._file_bytes // cell.record_bytes)[: cell.count]
        memory = np.arange(cell.count, dtype=np.uint64) * np.uint64(cell.record_bytes)
        return RangePlan(
            np.full(cell.count, self._fd, np.int32),
            slots.astype(np.int64) * cell.record_bytes,
            np.uint64(self._place.address) + memory,
            np.full(cell.count, cell.record_bytes, np.int64),
        )

    def _move(self, op: Op, plan: RangePlan, deadline: Deadline) -> None:
        results = self._engine.submit(op, plan).wait(deadline.left_s)
        left = np.flatnonzero(~results.complete(plan))
        if len(left) == 0:
            return
        codes = set(results.errno[left].tolist())
        if errno.ETIMEDOUT in codes:
            self._hung = True
            raise DeadlineError(
                f"{len(left)} of {len(plan)} records had not moved after {self._deadline_s} s"
            )
        names = ", ".join(errno.errorcode.get(code, str(code)) if code else "short" for code in sorted(codes))
        raise EngineError(f"{len(left)} of {len(plan)} records did not move whole: {names}")

    def _latencies(self, cell: Cell, plan: RangePlan, deadline: Deadline) -> F64:
        """Seconds of each of the cell's plans."""
        seconds = np.empty(cell.plans)
        for number in range(cell.plans):
            part = plan.take(slice(number * cell.submitters, (number + 1) * cell.submitters))
            start = time.perf_counter()
            self._move(cell.op, part, deadline)
            seconds[number] = time.perf_counter() - start
        return seconds

    def _moved(self) -> Counter[tuple[Op, str]]:
        if isinstance(self._engine, DeviceEngine):
            return Counter({(op, str(path)): n for (op, path), n in self._engine.moved.bytes_by().items()})
        return Counter()

    def _paths(self, cell: Cell, before: Counter[tuple[Op, str]]) -> dict[str, int]:
        if not isinstance(self._engine, DeviceEngine):
            return {HOST: cell.nbytes + cell.plans * cell.submitters * cell.record_bytes}
        return {path: n for (op, path), n in (self._moved() - before).items() if op is cell.op}

    def _fill(self, nbytes: int) -> None:
        """New random bytes: what is written must not be what was there."""
        for offset in range(0, nbytes, CHECK_BYTES):
            words = min(CHECK_BYTES, nbytes - offset) // 8
            data = self._rng.integers(0, 1 << 64, words, dtype=np.uint64).view(np.uint8)
            self._place.put(offset, data)

    def _blank(self, nbytes: int) -> None:
        zeros = np.zeros(min(CHECK_BYTES, nbytes), np.uint8)
        for offset in range(0, nbytes, len(zeros)):
            self._place.put(offset, zeros[: nbytes - offset])


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
