"""Asking for memory of one NUMA node, and telling whether it came."""

from __future__ import annotations

from pathlib import Path

from gdsstore.errors import ArgumentError
from gdsstore.memory import numa
from gdsstore.memory.syscalls import errno_name

ANY_NODE = -1


class Placement:
    """The wish for `node` (ANY_NODE: none). Raises ArgumentError for a node that this machine lacks."""

    def __init__(self, node: int, sysfs: Path = numa.SYSFS) -> None:
        self.notes: list[str] = []
        nodes = numa.online_nodes(sysfs)
        if node < ANY_NODE or (nodes and node != ANY_NODE and node not in nodes):
            raise ArgumentError("this machine has no such NUMA node", numa_node=node, nodes=nodes)
        self._node = node
        self._only = node if nodes == (node,) else None
        # On a machine with one node, or none that the kernel tells of, there is nothing to choose.
        self._wanted = node != ANY_NODE and len(nodes) > 1
        self._placed = False
        if node != ANY_NODE and not nodes:
            self.notes.append(f"NUMA node {node}: the kernel tells of no nodes")

    def place(self, address: int, length: int, strict: bool) -> None:
        """Put the wish on a fresh mapping; a refusal becomes a note."""
        if not self._wanted:
            return
        try:
            numa.place(address, length, self._node, strict=strict)
            self._placed = True
        except OSError as error:
            self._placed = False
            self._note(f"NUMA node {self._node}: mbind gave {errno_name(error)}")

    def node_of(self, address: int, length: int, *, touched: bool) -> int | None:
        """The node on which a mapping lies as wished; None where nothing was wished, or it lies elsewhere."""
        if not self._placed:
            return self._only
        if not touched:
            return self._node
        try:
            found = numa.nodes_of_memory(address, length)
        except OSError as error:
            self._note(
                f"NUMA node {self._node}: bound, but move_pages gave {errno_name(error)} to the question"
            )
            return self._node
        here = int((found == self._node).sum())
        if here < len(found):
            self._note(f"NUMA node {self._node}: only {here} of {len(found)} sampled pages came from it")
            return None
        return self._node

    def _note(self, note: str) -> None:
        # Each step of the ladder asks anew and is refused alike.
        if note not in self.notes:
            self.notes.append(note)
