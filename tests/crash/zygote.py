"""A process that has imported and compiled everything, and forks workers: a life then starts in milliseconds, not a second.

It never opens a store itself, so its children may. It reads one JSON object a line and answers with one:

    {"spawn": SPEC, "kind": "live", "stderr": FILE} -> {"pid": N}
    {"reap": PID} -> {"code": N or null}         as subprocess has it: negative for a signal, null while it lives
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from gdsstore.catalog.keys import index_keys
from gdsstore.checksum.crc import crc32_rows
from gdsstore.checksum.definition import finish, seeds
from gdsstore.checksum.host import raw_sums
from gdsstore.memory.copying import copy_ranges, zero_ranges
from gdsstore.replay.truth import count_wrong
from tests.crash import worker
from tests.crash.pages import PAGE_BYTES, keys_of, pages_of

KINDS: dict[str, Callable[[dict[str, Any]], int]] = {
    "live": lambda spec: worker.live(worker.Spec(**spec)),
}


def warm_up() -> None:
    """Have numba load what a worker calls, without opening a store: threads and locks do not survive a fork."""
    keys = keys_of(np.arange(2))
    for page_bytes in PAGE_BYTES:
        count_wrong(keys, pages_of(keys, page_bytes))
    memory = np.zeros(16384, np.uint8)
    at, size = np.array([memory.ctypes.data], np.uint64), np.array([4096], np.int64)
    raw_sums(at, size, np.zeros(1, np.int64))
    copy_ranges(at, at + np.uint64(8192), size)
    zero_ranges(at, size)
    crc32_rows(np.zeros((2, 124), np.uint8))
    index_keys(keys, bytes(16))
    finish(np.zeros(2, np.uint64), seeds(keys, bytes(16), np.zeros(2, np.uint64), np.full(2, 4096, np.int64)))


def spawn(kind: str, spec: dict[str, Any], stderr: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        for fd, path, flags in (
            (0, os.devnull, os.O_RDONLY),
            (1, os.devnull, os.O_WRONLY),
            (2, stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            os.dup2(os.open(path, flags, 0o600), fd)
        faulthandler.enable()
        faulthandler.dump_traceback_later(60, exit=True)
        code = KINDS[kind](spec)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def reap(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def main() -> None:
    with contextlib.suppress(ImportError):  # loading its libraries takes a second
        importlib.import_module("nixl")
    warm_up()
    gc.freeze()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "spawn" in request:
            answer: dict[str, Any] = {"pid": spawn(request["kind"], request["spawn"], request["stderr"])}
        else:
            answer = {"code": reap(request["reap"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
