"""What is measured: numbers of pages, and how long the simulated forward takes beside the I/O."""

from __future__ import annotations

from dataclasses import dataclass

from gdsstore.layout import PageLayout
from gdsstore.sizes import MiB

# 16 tokens of half of an 8B model (a rank of two): 32 KiB a layer, 1 MiB a page.
LAYOUT = PageLayout.mha(layers=32, kv_heads=4, head_dim=128, page_tokens=16, dtype="bfloat16")
SEGMENT_BYTES = 256 * MiB


@dataclass(frozen=True, slots=True)
class Sizes:
    pages: tuple[int, ...]
    factors: tuple[float, ...]  # the forward's time by the I/O's
    rounds: int
    bounce_pages: tuple[int, ...]  # by the bounce to the GPU, which takes as long again


FULL = Sizes((64, 256, 1024, 2048), (0.25, 1.0, 4.0), rounds=5, bounce_pages=(64, 256))
QUICK = Sizes((64, 256), (0.25, 1.0, 4.0), rounds=5, bounce_pages=(64, 256))
TINY = Sizes((4,), (1.0,), rounds=1, bounce_pages=(4,))
