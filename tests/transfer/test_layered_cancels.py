"""Layer-wise calls that are cancelled at any time, beside others, on a store that is too small for them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.transfer.pipeline import LayersComputed
from tests.store.helpers import WAIT_S, make_keys, small_store, truth
from tests.transfer.layered_rig import LAYOUT, PieceMemory, bind
from tests.transfer.test_save_truth import assert_nothing_is_taken

SECONDS = 2.0
PROMPTS = [make_keys(30, f"prompt {number}") for number in range(8)]


@pytest.mark.parametrize("host_cache", [0, "4MiB"])
def test_nothing_is_wrong_and_nothing_is_left(tmp_path: Path, host_cache: object) -> None:
    outcomes: Counter[str] = Counter()
    errors: list[str] = []
    end = time.monotonic() + SECONDS
    with small_store(
        [tmp_path / "s", tmp_path / "t"],
        capacity="12MiB",
        host_cache=host_cache,
        workers=6,
        chunk_bytes="64KiB",
        staging_bytes="1MiB",
    ) as store:

        def call(rng: random.Random) -> None:
            keys = rng.choice(PROMPTS)[: rng.randrange(1, 31)]
            memory, told = PieceMemory(len(keys), LAYOUT.page_bytes, [5000], rng.choice((0, 16))), [0]
            computed = LayersComputed()
            saves = rng.random() < 0.5
            future: Future[Any]
            if saves:
                source = truth(keys, LAYOUT.page_bytes)
                future = bind(store).save_layers(keys, source, computed, deadline_s=rng.choice((0.1, 5)))
            else:
                future = bind(store).load_layers(
                    keys,
                    memory.pieces(),
                    lambda first, last, ok: told.append(last if first == told[-1] else -1),
                    deadline_s=rng.choice((0.1, 5)),
                )
            ends = rng.randrange(LAYOUT.layers // 2, LAYOUT.layers + 2)
            for layer in range(min(ends, LAYOUT.layers)):
                computed.computed(layer + 1)
            if ends < LAYOUT.layers or rng.random() < 0.3:
                time.sleep(rng.random() * 0.01)
                future.cancel()
            try:
                result = future.result(WAIT_S)
            except CancelledError:
                return
            outcomes.update(result.reasons())
            if not saves:
                wrong = result.ok & (memory.pages() != truth(keys, LAYOUT.page_bytes)).any(axis=1)
                if wrong.any() or told[-1] != LAYOUT.layers or -1 in told:
                    errors.append(f"wrong {np.flatnonzero(wrong).tolist()}, told {told}")

        def missing() -> bool:
            return not (outcomes["SAVED"] and outcomes["LOADED"])

        def calls(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < end or (missing() and time.monotonic() < end + WAIT_S):
                call(rng)

        threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * WAIT_S)
        assert errors == []
        assert outcomes["SAVED"]
        assert outcomes["LOADED"]
        assert_nothing_is_taken(store)
