"""What is measured: the pages' form, how many of them, and how long the simulated forward takes beside the I/O."""

from __future__ import annotations

from dataclasses import dataclass

from gdsstore.sizes import MiB

# 16 tokens of half of an 8B model (a rank of two): 32 KiB a layer, in a piece for K and one for V; 1 MiB a page.
LAYERS, HEADS, HEAD_DIM, PAGE_TOKENS = 32, 4, 128, 16
PAGE_BYTES = LAYERS * 2 * PAGE_TOKENS * HEADS * HEAD_DIM * 2
SEGMENT_BYTES = 256 * MiB
NODE_PAGES = 64  # of a tree node that is stored


@dataclass(frozen=True, slots=True)
class Sizes:
    pages: tuple[int, ...]
    factors: tuple[float, ...]  # the forward's time by the I/O's
    rounds: int


FULL = Sizes((64, 256, 512, 1024, 2048), (1.0, 4.0), rounds=7)
QUICK = Sizes((64, 256), (1.0,), rounds=5)
TINY = Sizes((4,), (1.0,), rounds=1)
