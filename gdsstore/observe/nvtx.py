"""NVTX ranges: what a store does, on the time line of NVIDIA's profilers (`nsys profile`).

They are there where the package `nvtx` is installed and a profiler runs the process. Elsewhere each is an empty `with`, of 0.1 to
0.2 us where it was measured; a chunk of up to `chunk_bytes` has five. NVTX_DISABLE=1 in the environment, which `nvtx` itself reads,
keeps them from the profiler too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from gdsstore.engines.base import Op, RangePlan

DOMAIN: Final = "gdsstore"


class Ranges:
    """`plan`, `verify` and `scatter` are for `with`, each around that work on one chunk, in the thread that does it; any number
    of threads may use them at the same time."""

    def __init__(self, package: Any | None) -> None:
        """`package`: the module `nvtx`, where there is one."""
        self._package = package
        domain = None if package is None else package.get_domain(DOMAIN)
        # Without a profiler, the package hands out one that only looks like a domain.
        self._domain = domain if package is not None and isinstance(domain, package.Domain) else None
        self.plan, self.verify = self.around("plan"), self.around("verify")
        self.scatter = self.around("scatter")

    def around(self, message: str) -> AbstractContextManager[object]:
        """A range for `with`, again and again."""
        if self._package is None or self._domain is None:
            return nullcontext()
        found: AbstractContextManager[object] = self._package.annotate(message, domain=DOMAIN)
        return found

    def io(self, op: Op, plan: RangePlan) -> Callable[[], None]:
        """Begin the range of a chunk's I/O, named by its direction and class, with its bytes as payload. Call what is returned when
        it has ended, once or more often, from any thread."""
        if self._domain is None:
            return _nothing
        domain = self._domain
        message = f"{op.value} {plan.label}".rstrip()
        handles = [domain.start_range(domain.get_event_attributes(message, payload=plan.nbytes))]

        def end() -> None:
            if handles:
                domain.end_range(handles.pop())

        return end


def _nothing() -> None:
    pass


def _installed() -> Any | None:
    try:
        return importlib.import_module("nvtx")
    except ImportError:
        return None


RANGES: Final = Ranges(_installed())
"""Those of this process."""
