"""A catalog of plain dictionaries, to compare the real one with, and runs of pages to put into both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gdsstore.catalog.lookup import Places
from gdsstore.catalog.records import Locations, Run

Place = tuple[int, int, int, int, int]  # segment, slot, generation, checksum, payload bytes


class Model:
    """What look-ups must answer, page number by page number."""

    def __init__(self) -> None:
        self.pages: dict[int, Place] = {}

    def commit(self, numbers: Sequence[int], segment: int, first: int, generation: int) -> None:
        for i, number in enumerate(numbers):
            self.pages[number] = (
                segment,
                first + i,
                generation,
                checksum_of(number, segment),
                100 + number % 7,
            )

    def drop_segment(self, segment: int) -> int:
        doomed = [number for number, place in self.pages.items() if place[0] == segment]
        for number in doomed:
            del self.pages[number]
        return len(doomed)

    def answers(self, numbers: Iterable[int], *, prefix: bool) -> list[Place | None]:
        found = [self.pages.get(number) for number in numbers]
        if prefix and None in found:
            gap = found.index(None)
            found[gap:] = [None] * (len(found) - gap)
        return found


def checksum_of(number: int, segment: int) -> int:
    return number << 16 | segment


def names(numbers: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """Index and tag of page numbers, spread over the tree as hashes are."""
    numbers = np.array(list(numbers), np.uint64)
    return (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15), numbers * np.uint64(3)


def run_of(numbers: Sequence[int], segment: int, first: int, generation: int) -> Run:
    index, tag = names(numbers)
    checksums = np.array([checksum_of(number, segment) for number in numbers], np.uint64)
    payload = np.array([100 + number % 7 for number in numbers], np.uint32)
    return Run(segment, first, generation, index, tag, checksums, payload)


def places(where: Locations) -> list[Place | None]:
    rows = zip(
        where.segment.tolist(),
        where.slot.tolist(),
        where.generation.tolist(),
        where.checksum.tolist(),
        where.payload_bytes.tolist(),
        strict=True,
    )
    return [row if found else None for found, row in zip(where.found.tolist(), rows, strict=True)]


def slots(where: Places) -> list[tuple[int, int] | None]:
    rows = zip(where.segment.tolist(), where.slot.tolist(), strict=True)
    return [row if found else None for found, row in zip(where.found.tolist(), rows, strict=True)]
