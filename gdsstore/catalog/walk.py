"""Walk a whole catalog, in a process of its own: LMDB trusts its file, so a damaged page can abort the process that reads it.

`check` starts that process and says how it ended. It runs this file as a script, which imports nothing of gdsstore: with the
whole library it would start ten times slower, and every open after a kill waits for it.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import lmdb


def check(directory: Path, sizes: Mapping[str, Collection[int]], timeout_s: float) -> str:
    """What is wrong with the catalog in `directory`; "" if nothing is.

    `sizes`: for each database the sizes in bytes that its values may have. Raises nothing: what cannot be checked is wrong.
    """
    command = [
        sys.executable,
        "-P",
        __file__,
        str(directory),
        json.dumps({name: list(of) for name, of in sizes.items()}),
    ]
    found_here = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=found_here,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"its check did not run: {error}"
    if done.returncode == 0:
        return ""
    return f"its check ended with {done.returncode}: {done.stderr.decode(errors='replace')[-500:]}"


HEADER = struct.Struct(
    "<QHHHH"
)  # of LMDB's pages: number, padding, flags, and where their free space begins and ends
BRANCH_OR_LEAF = (1, 2)


def walk(directory: str, sizes: Mapping[str, Collection[int]]) -> int:
    """How many values of a wrong size, and pages in a wrong place, there are; raises lmdb.Error, or kills the process, on a damaged
    tree."""
    with lmdb.open(directory, readonly=True, lock=False, max_dbs=4) as env:
        wrong = _misplaced(os.path.join(directory, "data.mdb"), env.stat()["psize"], env.info()["last_pgno"])
        for name, right in sizes.items():
            database = env.open_db(name.encode(), integerkey=name == "pages", create=False)
            with env.begin(db=database) as txn, txn.cursor() as cursor:
                entries = 0
                for _, value in cursor:
                    entries += 1
                    wrong += len(value) not in right
                wrong += entries != txn.stat(database)["entries"]
    return wrong


def _misplaced(path: str, page_bytes: int, last: int) -> int:
    """How many pages of trees say that they are others. A tree with two leaves in each other's place can be read to its end, but a
    write to it aborts the process, or destroys more."""
    wrong = 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        for number in range(2, min(last + 1, len(view) // page_bytes)):
            page, _, flags, lower, upper = HEADER.unpack_from(view, number * page_bytes)
            # What is inside of a value of several pages has no header; such a value hardly looks like one.
            is_tree = flags in BRANCH_OR_LEAF and HEADER.size <= lower <= upper <= page_bytes
            wrong += is_tree and page != number
    return wrong


if __name__ == "__main__":
    sys.exit(min(walk(sys.argv[1], {name: set(of) for name, of in json.loads(sys.argv[2]).items()}), 1))
