"""Load on a daemon's socket and HTTP side, from a process of its own: it works between `go` and `rest` on its standard input.

    python bench/daemon_parts/burden.py DIRECTORY ADDRESS NAMESPACE LOOKUPS_PER_S HTTP_PER_S < commands

`rest` is answered with a line of JSON: how long each request took, in seconds.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from gdsstore.node.client import NodeClient  # noqa: E402
from gdsstore.waiting import Deadline  # noqa: E402

LONGEST_S = 60.0  # of one stretch of work
PATIENCE_S = 10.0


class Paced:
    """A thread that makes one request at a time, so many a second at most, while it is told to."""

    def __init__(self, request: Callable[[], None], per_s: float) -> None:
        self._request, self._interval_s = request, 1 / per_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.seconds: list[float] = []

    def go(self) -> None:
        self._over.clear()
        self.seconds = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def rest(self) -> list[float]:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        return self.seconds

    def _run(self) -> None:
        end, due = time.monotonic() + LONGEST_S, time.monotonic()
        while not self._over.is_set() and time.monotonic() < end:
            start = time.perf_counter()
            self._request()
            self.seconds.append(time.perf_counter() - start)
            due += self._interval_s
            self._over.wait(max(0.0, due - time.monotonic()))


def main() -> None:
    directory, address, digest, lookups_per_s, http_per_s = sys.argv[1:]
    client = NodeClient(Path(directory))
    keys = np.random.default_rng(1).integers(0, 256, (128, 32), np.uint8)
    paths = ["/api/status", "/metrics", "/healthz"]

    def lookup() -> None:
        client.lookup(bytes.fromhex(digest), keys, Deadline(PATIENCE_S))

    def get() -> None:
        paths.append(paths.pop(0))
        with urllib.request.urlopen(f"http://{address}{paths[0]}", timeout=PATIENCE_S) as answer:
            answer.read()

    paced = [Paced(lookup, float(lookups_per_s)), Paced(get, float(http_per_s))]
    for line in sys.stdin:
        if line.strip() == "go":
            for each in paced:
                each.go()
        else:
            print(json.dumps([each.rest() for each in paced]), flush=True)


if __name__ == "__main__":
    main()
