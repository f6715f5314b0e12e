"""A save that a closing store leaves behind writes nothing any more: its descriptors' numbers may be somebody else's by then."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from gdsstore.engines.base import Op
from gdsstore.engines.faulty import FaultKind
from gdsstore.transfer.pipeline import LayersComputed
from tests.store.helpers import make_keys, small_store, truth
from tests.transfer.faults import fault, faulty
from tests.transfer.layered_rig import LAYOUT, bind

FILE = b"\xaa" * (64 << 10)


def workers() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("gdsstore-worker")}


@pytest.mark.parametrize("layered", [False, True])
def test_files_that_were_opened_after_the_close_stay_as_they_are(tmp_path: Path, layered: bool) -> None:
    keys = make_keys(12)
    pages = truth(keys, LAYOUT.page_bytes)
    others = workers()  # that other tests have left behind
    hangs = () if layered else (fault(FaultKind.HANG, op=Op.WRITE),)
    store = small_store(tmp_path / "s", own_engine=faulty(*hangs))
    if layered:
        bind(store).save_layers(keys, pages, LayersComputed(), deadline_s=1.5)  # of a forward that never ends
    else:
        bind(store).save(keys, pages, deadline_s=1.5)
    time.sleep(0.3)
    store.close(0.1)
    files = [(tmp_path / f"mine {i}").open("w+b", buffering=0) for i in range(64)]
    for file in files:
        file.write(FILE)
    end = time.monotonic() + 60
    while workers() - others and time.monotonic() < end:
        time.sleep(0.01)
    assert not workers() - others
    for file in files:
        file.seek(0)
        assert np.array_equal(np.frombuffer(file.read(), np.uint8), np.frombuffer(FILE, np.uint8))
        file.close()
