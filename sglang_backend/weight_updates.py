"""Whether the weights of the running server were changed since a backend was made: from disk, or by a trainer.

A page's identity holds the weights that the server started with. SGLang empties its own tiers after an update and tells a storage
backend or a linker nothing: it would go on to load what the old weights made, and to store as theirs what the new ones make. So the
methods that every update goes through are wrapped, in this process, where the model is as well. An update that fails counts too: it
may have changed half of the weights.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("gdsstore.sglang")

# Of SGLang's WeightUpdater, one a model runner. The scheduler looks them up anew for each update.
METHODS = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "load_weights_from_distributed",
    "begin_weight_update",  # what comes after it may write to the weights past SGLang
)

_lock = threading.Lock()
_updates = 0


def updates() -> int:
    """How many there were in this process since the first backend was made."""
    return _updates


class Weights:
    """The weights as they are when this is made. `remedy`: what to do once they are others, for the log."""

    def __init__(self, remedy: str) -> None:
        _watch()
        self._seen, self._remedy, self._said = _updates, remedy, False

    @property
    def changed(self) -> bool:
        if _updates == self._seen:
            return False
        if not self._said:
            self._said = True
            log.error(
                "the weights of this server were changed while it runs: pages are told apart by the weights of before, so that "
                "gdsstore finds and stores none any more. %s",
                self._remedy,
            )
        return True


def _watch() -> None:
    """Count updates from now on. Idempotent."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    with _lock:
        for name in METHODS:
            method = getattr(WeightUpdater, name)
            if not hasattr(method, "counts_updates"):
                setattr(WeightUpdater, name, _counted(method))


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(*arguments: Any, **more: Any) -> Any:
        global _updates
        with _lock:
            _updates += 1  # before the first weight is another
        return method(*arguments, **more)

    counted.counts_updates = True  # type: ignore[attr-defined]
    return counted
