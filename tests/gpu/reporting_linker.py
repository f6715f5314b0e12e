"""The linker that the server of test_linker_gpu.py loads: it writes down which way its bytes went."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sglang_backend.linker import GdsStoreLinker
from tests.gpu.linker_server import PATHS


class ReportingLinker(GdsStoreLinker):
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        landed = super().finish_layer_wise_loading(counter_index)
        rows = [[row.path, row.engine, row.direction, row.nbytes] for row in self._store.path_report()]
        Path(os.environ[PATHS]).write_text(json.dumps(rows))
        return landed
