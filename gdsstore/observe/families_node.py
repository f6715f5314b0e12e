"""The metrics of a node: what all processes did with the store while its daemon has been up. Only the daemon has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gdsstore.observe.families import Look, Samples, Section, counter, gauge
from gdsstore.transfer.results import PageStatus

IO: Final = ("direction", "path", "engine", "volume", "class")
BYTES, OPERATIONS = 0, 1


def _io(number: int) -> Callable[[Look], Samples]:
    def read(look: Look) -> Samples:
        volumes = [path for path, *_ in look.drives]
        return [
            ((direction, path, engine, volumes[volume], cls), int(numbers[number]))
            for (path, engine, volume, direction, cls), numbers in sorted(look.node.moved.io.items())
        ]

    return read


def _pages(look: Look) -> Samples:
    moved = look.node.moved
    return [
        ((status.name.lower(),), moved.count(f"pages_{status.name.lower()}"))
        for status in PageStatus
        if status is not PageStatus.PENDING
    ]


NODE: Final = (
    Section(
        "The node",
        (
            counter(
                "gdsstore_node_bytes_total",
                "Bytes of pages that moved between memory and a volume, in all processes of the node, the daemon included.",
                "the processes' reports and `Store.activity()`",
                _io(BYTES),
                *IO,
            ),
            counter(
                "gdsstore_node_operations_total",
                "Requests that moved these bytes.",
                "the same",
                _io(OPERATIONS),
                *IO,
            ),
            counter(
                "gdsstore_node_pages_total",
                "Pages of all processes' calls, by outcome.",
                "the same",
                _pages,
                "outcome",
            ),
            gauge(
                "gdsstore_node_clients",
                "Processes that report to the daemon now.",
                "the processes that are connected",
                lambda look: [((), look.node.clients)],
            ),
        ),
    ),
)
