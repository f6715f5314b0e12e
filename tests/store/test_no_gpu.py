"""GPU memory where there is no GPU: one clear error, at the call."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdsstore import DeviceError, DevicePieces
from tests.store.helpers import check, make_keys, opaque, save, small_store


def test_gpu_pages_without_a_driver_are_refused_and_the_store_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdsstore.memory.cuda.load_driver", lambda name="": None)
    keys = make_keys(4)
    with small_store(tmp_path / "s") as store:
        pages = opaque(store)
        with pytest.raises(DeviceError, match="needs an NVIDIA driver"):
            pages.save(keys, DevicePieces([1 << 40] * 4, 8192, 0))
        assert save(pages, keys).all_ok
        check(pages, keys)
