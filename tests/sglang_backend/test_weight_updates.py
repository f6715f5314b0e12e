"""A server whose weights are changed while it runs neither finds what the old ones made, nor stores what the new ones make."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from cpu_fixtures import MHA, single_rank_context

from gdsstore import ConfigError
from sglang_backend.weight_updates import METHODS
from tests.sglang_backend.backends import KV, FilledPool, saved
from tests.sglang_backend.conftest import Attach
from tests.sglang_backend.updates import update_weights

MISSES = [False] * 8


@pytest.mark.parametrize("method", METHODS)
def test_pages_of_the_old_weights_are_misses(
    method: str, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = FilledPool(MHA, "page_first")
    backend = attach(filled)
    saved(backend, filled)
    assert backend.batch_exists(filled.keys) == 8
    update_weights(monkeypatch, method)
    assert backend.batch_exists(filled.keys) == backend.batch_exists_v2(filled.keys).kv_hit_pages == 0
    assert not backend.exists(filled.keys[0])
    assert backend.batch_get_v1(filled.keys, filled.indices()) == MISSES
    assert backend.batch_get_v2([filled.transfer(KV)]) == {KV: MISSES}


def test_pages_of_the_new_weights_are_not_stored_as_those_of_the_old(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = FilledPool(MHA, "page_first")
    backend = attach(filled)
    with monkeypatch.context() as patch:
        update_weights(patch)
        assert backend.batch_set_v1(filled.keys, filled.indices()) == MISSES
        assert backend.batch_set_v2([filled.transfer(KV)]) == {KV: MISSES}
    assert backend.batch_exists(filled.keys) == 0


def test_a_read_that_an_update_overtakes_is_a_miss(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = FilledPool(MHA, "page_first")
    backend = attach(filled)
    saved(backend, filled)
    load = backend._traffic.load

    def overtaken(orders: Any) -> Any:
        update_weights(monkeypatch)
        return load(orders)

    monkeypatch.setattr(backend._traffic, "load", overtaken)
    assert backend.batch_get_v1(filled.keys, filled.indices()) == MISSES


def test_it_says_once_what_to_do(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled = FilledPool(MHA, "page_first")
    backend = attach(filled)
    update_weights(monkeypatch)
    for _ in range(3):
        backend.batch_exists(filled.keys)
    (said,) = [record.message for record in caplog.records if "weights" in record.message]
    assert "Detach the backend and attach it" in said


def test_a_backend_attached_after_it_wants_to_be_told_the_weights(
    attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with single_rank_context(model_path=str(model)):
        attach(FilledPool(MHA, "page_first"), weights=None)
        update_weights(monkeypatch)
        with pytest.raises(ConfigError, match=r'changed since it started.*"weights"'):
            attach(weights=None)
        filled = FilledPool(MHA, "page_first")
        backend = attach(filled, weights="step 2")
    saved(backend, filled)
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [True] * 8
