"""What is measured: the cells of the grid, and how many bytes a turn moves in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gdsstore.engines.base import Op
from gdsstore.sizes import GiB, KiB, MiB

OPS = (Op.READ, Op.WRITE)


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid. A turn moves `count` records as one plan, and then `plans` plans of `submitters` records."""

    record_bytes: int
    submitters: int  # records that the engine has in flight at the most
    op: Op
    count: int
    plans: int

    @property
    def nbytes(self) -> int:
        return self.count * self.record_bytes

    def __str__(self) -> str:
        return f"{self.op.value} {self.record_bytes >> 10} KiB x {self.submitters}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """`records_each`: records a turn for each submitter at the most, so that turns of small records end soon as well."""

    records: tuple[int, ...]  # bytes
    submitters: tuple[int, ...]
    rounds: int
    turn_bytes: int
    records_each: int
    plans: int
    file_bytes: int

    def count(self, record_bytes: int, submitters: int) -> int:
        """Records a turn: whole plans of `submitters` records, at least one."""
        wanted = min(self.turn_bytes // record_bytes, self.records_each * submitters)
        return max(1, wanted // submitters) * submitters

    def cells(self, submitters: int) -> Iterator[Cell]:
        for record in self.records:
            count = self.count(record, submitters)
            for op in OPS:
                yield Cell(record, submitters, op, count, min(self.plans, count // submitters))

    def memory_bytes(self, submitters: int) -> int:
        """What a contender's memory must hold: the largest turn."""
        return max(cell.nbytes for cell in self.cells(submitters))


FULL = Sizes(
    records=(16 * KiB, 64 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB),
    submitters=(1, 4, 16, 64),
    rounds=7,
    turn_bytes=128 * MiB,
    records_each=1024,
    plans=16,
    file_bytes=2 * GiB,
)
QUICK = Sizes(
    records=(16 * KiB, 256 * KiB, 4 * MiB),
    submitters=(1, 16),
    rounds=5,
    turn_bytes=64 * MiB,
    records_each=128,
    plans=16,
    file_bytes=512 * MiB,
)
TINY = Sizes(
    records=(16 * KiB, 256 * KiB),
    submitters=(2,),
    rounds=2,
    turn_bytes=MiB,
    records_each=16,
    plans=2,
    file_bytes=4 * MiB,
)
