"""What a writer left uncommitted when it died is gone once another one takes its segment over.

Else a later rebuild could choose such an entry, whose slot meanwhile holds half of another page, over a good older copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import gdsstore
from gdsstore import Config
from tests.crash.pages import PAGE_BYTES, keys_of, namespaces, pages_of
from tests.crash.stores import LARGE

CONFIG = Config(**LARGE | {"engine": "posix", "capacity": 8 << 20})


def test_entries_without_a_commit_do_not_outlive_their_segments_next_owner(tmp_path: Path) -> None:
    left, kept = keys_of(np.arange(0, 20, 2)), keys_of(np.arange(100, 106, 2))
    with gdsstore.open(tmp_path, config=CONFIG) as store:

        def die(*_: Any) -> None:
            raise RuntimeError("killed")

        store.moving().saver.commits.commit = die  # type: ignore[method-assign,assignment]
        result = namespaces(store)[0].save(left, pages_of(left, PAGE_BYTES[0])).result()
        assert result.reasons() == {"FAILED_IO": len(left)}
    with gdsstore.open(tmp_path, config=CONFIG) as store:
        assert namespaces(store)[0].save(kept, pages_of(kept, PAGE_BYTES[0])).result().all_ok
    (tmp_path / "catalog" / "data.mdb").unlink()
    with gdsstore.open(tmp_path, config=CONFIG) as store:
        assert namespaces(store)[0].contains(kept).all()
        assert not namespaces(store)[0].contains(left).any()
