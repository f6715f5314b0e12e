"""The linker on a drive on which things go wrong: what the server of test_clients.py loads in the place of the linker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gdsstore import Config, Store
from gdsstore.engines.faulty import FaultyEngine, parse_faults
from gdsstore.engines.posix import PosixEngine
from sglang_backend import stores
from sglang_backend.linker import GdsStoreLinker

# 5 % of the ranges that the drive is asked for.
FAULTS = "errno:0.015,short:0.01,corrupt:0.01,misdirect:0.005,delay:0.01:0.05"
COUNTS = "LINKER_TEST_COUNTS"  # names the file that the counters go to


class FaultyLinker(GdsStoreLinker):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        engine = FaultyEngine(PosixEngine(4), parse_faults(FAULTS), seed=7)

        def open_store(paths: Any, *, config: Config) -> Store:
            return Store(paths, config, engine)

        stores.open_store = open_store  # this process runs one server and nothing else
        self._engine = engine
        super().__init__(*arguments, **more)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed = super().finish_layer_wise_loading(counter_index)
        self._tell()
        return landed

    def _tell(self) -> None:
        counts = {
            **self._engine.injected,
            "loaded": self.loads.pages_loaded,
            "failed": self.loads.pages_failed,
            "warm": self.loads.pages_warm,
            "saved": self.offloads.pages_saved,
            "prefetched": 0 if self.prefetches is None else self.prefetches.pages_brought,
        }
        path = Path(os.environ[COUNTS])
        path.with_suffix(".new").write_text(json.dumps(counts))
        path.with_suffix(".new").replace(path)
