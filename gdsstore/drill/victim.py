"""The process that is killed: saves prompt after prompt, and tells of each when the store has said that it is saved.

A program: `python -m gdsstore.drill.victim STORE FIRST` writes the number of each saved prompt, a line each.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np

import gdsstore
from gdsstore.drill.plan import MODEL, PAGE_BYTES, PROMPT_PAGES, store_config
from gdsstore.drill.traffic import random_keys
from gdsstore.replay.truth import U8, fill_pages

SAVE_DEADLINE_S = 30.0
AT_ONCE = 2  # so that one is under way whenever the process dies


def prompt_keys(number: int) -> U8:
    """The keys of a prompt, by its number: uint8 (PROMPT_PAGES, 32)."""
    return random_keys(np.random.default_rng([1, number]), PROMPT_PAGES)


def save_for_ever(path: Path, first: int) -> None:
    """Save prompts from number `first` on, until somebody ends this process. Raises what the store raises."""
    told = os.dup(1)
    os.dup2(2, 1)  # what a C library prints there is no answer
    memory = np.zeros((AT_ONCE, PROMPT_PAGES, PAGE_BYTES), np.uint8)
    with gdsstore.open(path, config=store_config()) as store:
        pages = store.namespace(model=MODEL, layout=gdsstore.PageLayout.opaque(PAGE_BYTES))
        futures: dict[int, Future[gdsstore.SaveResult]] = {}
        number = first
        while True:
            if len(futures) == AT_ONCE:
                oldest = min(futures)
                if futures.pop(oldest).result(2 * SAVE_DEADLINE_S).all_ok:
                    os.write(told, f"{oldest}\n".encode())  # ends this process where its parent is gone
            keys, into = prompt_keys(number), memory[number % AT_ONCE]
            fill_pages(keys, into)
            futures[number] = pages.save(keys, into, deadline_s=SAVE_DEADLINE_S)
            number += 1


if __name__ == "__main__":
    save_for_ever(Path(sys.argv[1]), int(sys.argv[2]))
