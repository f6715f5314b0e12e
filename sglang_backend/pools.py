"""SGLang's host pools as gdsstore sees them: where the bytes of a page lie, and what makes two pages interchangeable.

Every pool whose pages can be moved in place says where with `get_page_buffer_meta`: one Python list entry a piece, 160 a page with
`layer_first` and 80 layers. All of them are regular: piece j of page p lies at base[j] + p * stride[j]. We ask for three pages when
the pool is registered, check that rule, and compute addresses with numpy from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore import ArgumentError, Pieces

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

# Attributes of host pools that say how the bytes of a page are arranged. What a pool does not have is left out.
FACTS = (
    "layout",
    "dtype",
    "page_size",
    "layer_num",
    "target_layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "indexer_page_stride_size",
    "indexer_dtype",
    "conv_dtype",
    "temporal_dtype",
    "storage_format_tag",
    "dcp_size",
)


@dataclass(frozen=True, slots=True)
class HostPool:
    """A host pool of `pages` pages of `page_tokens` tokens (or state slots), each in k pieces."""

    name: str
    pool: Any  # kept alive; `layout` and friends are read from it
    page_tokens: int
    pages: int
    base: I64  # addresses of page 0's pieces, shape (k,)
    stride: I64  # bytes from a page to the next, shape (k,)
    length: I64  # bytes, shape (k,)

    @property
    def page_bytes(self) -> int:
        return int(self.length.sum())

    @property
    def pinned(self) -> bool:
        return bool(getattr(self.pool, "pin_memory", False))

    def pieces(self, host_indices: Any, count: int) -> Pieces:
        """The memory of `count` pages. `host_indices`: int64 tensor, `page_tokens` entries a page.

        Raises ArgumentError where the indices are not those of `count` whole pages of this pool.
        """
        if host_indices is None or host_indices.numel() != count * self.page_tokens:
            have = 0 if host_indices is None else host_indices.numel()
            raise ArgumentError(
                f"pool {self.name}: {count} keys need {count * self.page_tokens} indices, not {have}"
            )
        first = np.asarray(host_indices.numpy(), np.int64).reshape(-1)[:: self.page_tokens]
        page, odd = np.divmod(first, self.page_tokens)
        if odd.any() or (page < 0).any() or (page >= self.pages).any():
            raise ArgumentError(
                f"pool {self.name}: an index is not the start of a page, or lies outside the pool"
            )
        address = self.base + page[:, None] * self.stride
        return Pieces(address.astype(np.uint64), self.length, owner=self.pool)

    def facts(self) -> tuple[tuple[str, str], ...]:
        """What makes two pages' bytes interchangeable, as far as the pool knows, as pairs of names and values."""
        known = [
            (f"pool_{fact}", str(getattr(self.pool, fact)))
            for fact in FACTS
            if getattr(self.pool, fact, None) is not None
        ]
        return (
            ("pool_class", type(self.pool).__name__),
            ("pieces", ",".join(map(str, self.length.tolist()))),
            *known,
        )

    def layers(self) -> tuple[int, int] | None:
        """First and last (not included) layer of the whole model that the pool holds."""
        first, last = getattr(self.pool, "start_layer", None), getattr(self.pool, "end_layer", None)
        return (first, last) if isinstance(first, int) and isinstance(last, int) and first < last else None


def describe_pool(pool: Any, name: str) -> HostPool:
    """Raises ArgumentError for a pool whose pages have no pieces that can be moved in place."""
    anchor = (
        pool.anchor_entry.host_pool if hasattr(pool, "anchor_entry") else pool
    )  # a group speaks for its KV pool
    page_tokens = int(getattr(anchor, "page_size", 1) or 1)
    pages = int(anchor.size) // page_tokens
    samples = sorted({0, 1, pages - 1} & set(range(pages)))
    try:
        met = {page: _meta(anchor, page, page_tokens) for page in samples}
    except (NotImplementedError, ValueError, AttributeError, RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"gdsstore cannot move the pages of pool {name!r} ({type(anchor).__name__}, layout "
            f"{getattr(anchor, 'layout', '?')}): {error or type(error).__name__}; try --hicache-mem-layout page_first"
        ) from error
    base, length = met[0]
    stride = met[1][0] - base if 1 in met else np.zeros_like(base)
    for page, (address, sizes) in met.items():
        if not (np.array_equal(address, base + page * stride) and np.array_equal(sizes, length)):
            raise ArgumentError(
                f"gdsstore does not know the memory of pool {name!r} ({type(anchor).__name__}): its pages are not evenly spaced"
            )
    if len(length) == 0 or (length <= 0).any():
        raise ArgumentError(f"the pages of pool {name!r} ({type(anchor).__name__}) hold no bytes")
    return HostPool(name, anchor, page_tokens, pages, base, stride, length)


def _meta(pool: Any, page: int, page_tokens: int) -> tuple[I64, I64]:
    import torch  # SGLang's environment has it; here only, so that the rest of the module can be read without

    addresses, sizes = pool.get_page_buffer_meta(torch.arange(page * page_tokens, (page + 1) * page_tokens))
    return np.array(addresses, np.int64), np.array(sizes, np.int64)
