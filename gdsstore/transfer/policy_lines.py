"""One flight a key: for each key a line of requests, of which the first one flies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from gdsstore.engines.base import Op
from gdsstore.transfer.policy_terms import Request


class KeyLines:
    """A request stands in the lines of all its keys at once, and may fly when it is the first in each.

    Since it entered all of them at the same time, the order is the same in every line: nothing can lock up, and nobody waits for
    ever. Reads and writes have lines of their own: a load must not wait for an offload of the same key.
    """

    def __init__(self) -> None:
        self._lines: dict[Op, dict[object, deque[Request]]] = {op: {} for op in Op}

    def __len__(self) -> int:
        """Keys with a line."""
        return sum(len(lines) for lines in self._lines.values())

    def leader_for(self, request: Request) -> Request | None:
        """The first one in line that moves all keys of `request`, and has not been told to stop."""
        key = next(iter(request.keys))
        for other in self._lines[request.op].get(key, ()):
            if request.keys <= other.keys and not other.stop:
                return other
        return None

    def enter(self, request: Request) -> bool:
        """Stand in line. True where it is the first everywhere."""
        lines = self._lines[request.op]
        request.behind = 0
        for key in request.keys:
            line = lines.get(key)
            if line is None:
                lines[key] = deque((request,))
            else:
                line.append(request)
                request.behind += 1
        return request.behind == 0

    def leave(self, request: Request) -> list[Request]:
        """Those who are the first everywhere now."""
        lines = self._lines[request.op]
        free = []
        for key in request.keys:
            line = lines[key]
            if line[0] is not request:
                line.remove(request)
                continue
            line.popleft()
            if not line:
                del lines[key]
                continue
            line[0].behind -= 1
            if line[0].behind == 0:
                free.append(line[0])
        return free

    def ahead_of(self, request: Request) -> Iterator[Request]:
        """Those who must fly before it can, and those who must fly before them."""
        lines = self._lines[request.op]
        seen = {request}
        todo = [request]
        while todo:
            one = todo.pop()
            if one.behind == 0:
                continue
            for key in one.keys:
                for other in lines[key]:
                    if other is one:
                        break
                    if other not in seen:
                        seen.add(other)
                        todo.append(other)
                        yield other
