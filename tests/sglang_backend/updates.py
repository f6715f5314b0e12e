"""An update of a running server's weights, as far as a backend can tell one."""

from __future__ import annotations

import contextlib

import pytest
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from sglang_backend import weight_updates


def update_weights(patch: pytest.MonkeyPatch, method: str = "update_weights_from_disk") -> None:
    """SGLang calls the method; it fails, on a model that is none. Until the end of the test."""
    # The tests after this one share the process.
    patch.setattr(weight_updates, "_updates", weight_updates.updates())
    arguments = {"update_weights_from_disk": ("/nowhere", "auto"), "begin_weight_update": ()}
    with contextlib.suppress(AttributeError):
        getattr(WeightUpdater, method)(object(), *arguments.get(method, (None,)))
