"""How the bytes of a page lie inside a record, and so which byte range holds which layers."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from gdsstore.errors import ArgumentError

ALIGNMENT = 4096  # bytes: the unit of direct I/O, of records and of checksum blocks
MAX_PAGE_BYTES = 1 << 30

DTYPE_BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "int8": 8,
    "uint8": 8,
    "fp4_e2m1": 4,
    "int4": 4,
}


class PageKind(StrEnum):
    MHA = "mha"  # keys and values for each KV head (MHA, GQA, MQA)
    MLA = "mla"  # one latent vector a token, equal on every tensor-parallel rank
    OPAQUE = "opaque"  # bytes that nobody here looks into


class ByteOrder(StrEnum):
    """The axes of a page, outermost first. Pages of equal shape and unequal order are not interchangeable."""

    LAYER_KV_TOKEN = "layer_kv_token"  # [layer][K, V][token][head, dim]: a layer range is one slice
    KV_LAYER_TOKEN = "kv_layer_token"  # [K, V][layer][token][head, dim]: one slice for K and one for V
    LAYER_TOKEN = "layer_token"  # MLA: [layer][token][dim]
    TOKEN_LAYER = "token_layer"  # MLA: [token][layer][dim]: no slices
    OPAQUE = "opaque"


class ByteRange(NamedTuple):
    """`length` bytes from `offset`, both inside a record."""

    offset: int
    length: int


def align_up(nbytes: int, to: int = ALIGNMENT) -> int:
    return (nbytes + to - 1) // to * to


def dtype_bits(dtype: str) -> int:
    """Bits of an element of a logical KV dtype. Raises ArgumentError for a name that is not known."""
    if dtype not in DTYPE_BITS:
        near = difflib.get_close_matches(dtype, DTYPE_BITS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(DTYPE_BITS)}"
        raise ArgumentError(f"unknown KV dtype {dtype!r}; {hint}")
    return DTYPE_BITS[dtype]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of one pool's pages. Make one with `mha`, `mla` or `opaque`.

    `layer_bytes` is what one layer of a page takes, K and V together.
    """

    kind: PageKind
    order: ByteOrder
    page_bytes: int  # payload of a page
    page_tokens: int  # 0 for opaque pages
    layers: int
    dtype: str
    kv_heads: int = 0
    head_dim: int = 0
    value_head_dim: int = 0
    tag: str = ""  # tells apart opaque pages of equal size

    @classmethod
    def mha(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        dtype: str,
        value_head_dim: int | None = None,
        order: ByteOrder | str = ByteOrder.LAYER_KV_TOKEN,
    ) -> PageLayout:
        """Keys and values of `kv_heads` heads (this rank's share) of `head_dim` elements."""
        v_dim = head_dim if value_head_dim is None else value_head_dim
        _positive(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, page_tokens=page_tokens, value_head_dim=v_dim
        )
        order = _order(order, ByteOrder.LAYER_KV_TOKEN, ByteOrder.KV_LAYER_TOKEN)
        tokens_heads = page_tokens * kv_heads
        nbytes = _bytes(layers, dtype, tokens_heads * head_dim, tokens_heads * v_dim)
        return cls(PageKind.MHA, order, nbytes, page_tokens, layers, dtype, kv_heads, head_dim, v_dim)

    @classmethod
    def mla(
        cls,
        *,
        layers: int,
        latent_dim: int,
        page_tokens: int,
        dtype: str,
        order: ByteOrder | str = ByteOrder.LAYER_TOKEN,
    ) -> PageLayout:
        """One latent vector of `latent_dim` elements (rank + rope part) a token and layer."""
        _positive(layers=layers, latent_dim=latent_dim, page_tokens=page_tokens)
        order = _order(order, ByteOrder.LAYER_TOKEN, ByteOrder.TOKEN_LAYER)
        nbytes = _bytes(layers, dtype, page_tokens * latent_dim)
        return cls(PageKind.MLA, order, nbytes, page_tokens, layers, dtype, 1, latent_dim, 0)

    @classmethod
    def opaque(cls, page_bytes: int, *, page_tokens: int = 0, tag: str = "") -> PageLayout:
        """Pages of `page_bytes` bytes that have no layers we can address."""
        _positive(page_bytes=page_bytes)
        if page_bytes > MAX_PAGE_BYTES:
            raise ArgumentError(f"a page of {page_bytes} bytes is larger than {MAX_PAGE_BYTES}")
        return cls(PageKind.OPAQUE, ByteOrder.OPAQUE, page_bytes, page_tokens, 1, "uint8", tag=tag)

    @property
    def record_bytes(self) -> int:
        """What a page takes on the drive: the payload, padded to 4 KiB."""
        return align_up(self.page_bytes)

    @property
    def layer_bytes(self) -> int:
        return self.page_bytes // self.layers

    def slice(self, first: int, last: int) -> ByteRange:
        """The byte range of layers `first` (included) to `last` (not included) inside a record.

        Raises ArgumentError where these layers are not contiguous; `slices` gives their pieces.
        """
        pieces = self.slices(first, last)
        if len(pieces) != 1:
            raise ArgumentError(
                f"layers {first}..{last} are {len(pieces)} pieces in order {self.order}; use slices()"
            )
        return pieces[0]

    def slices(self, first: int, last: int) -> tuple[ByteRange, ...]:
        """The byte ranges of layers `first` to `last` (not included), in record order."""
        if not 0 <= first < last <= self.layers:
            raise ArgumentError(f"layers {first}..{last} are not inside 0..{self.layers}")
        if first == 0 and last == self.layers:
            return (ByteRange(0, self.page_bytes),)
        if self.order in (ByteOrder.OPAQUE, ByteOrder.TOKEN_LAYER):
            raise ArgumentError(f"pages in order {self.order} cannot be read by layers")
        if self.order is ByteOrder.KV_LAYER_TOKEN:
            k_layer = self.layer_bytes * self.head_dim // (self.head_dim + self.value_head_dim)
            v_layer, v_base = self.layer_bytes - k_layer, k_layer * self.layers
            count = last - first
            return (
                ByteRange(first * k_layer, count * k_layer),
                ByteRange(v_base + first * v_layer, count * v_layer),
            )
        return (ByteRange(first * self.layer_bytes, (last - first) * self.layer_bytes),)

    def describe(self) -> dict[str, Any]:
        """Everything that makes two pages' bytes interchangeable, as plain values."""
        return {
            "kind": str(self.kind),
            "order": str(self.order),
            "page_bytes": self.page_bytes,
            "page_tokens": self.page_tokens,
            "layers": self.layers,
            "dtype": self.dtype,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "value_head_dim": self.value_head_dim,
            "tag": self.tag,
        }


def _positive(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ArgumentError(f"{name} must be a whole number above 0, not {value!r}")


def _order(order: ByteOrder | str, *allowed: ByteOrder) -> ByteOrder:
    for candidate in allowed:
        if order == candidate:
            return candidate
    raise ArgumentError(f"order {order!r} is not one of {', '.join(allowed)}")


def _bytes(layers: int, dtype: str, *parts: int) -> int:
    """Bytes of a page. `parts`: elements of one layer's K, V or latent; each fills whole bytes, so that layers can be sliced."""
    bits = dtype_bits(dtype)
    for elements in parts:
        if elements * bits % 8:
            raise ArgumentError(f"{elements} elements of {dtype} do not fill whole bytes")
    nbytes = layers * sum(parts) * bits // 8
    if nbytes > MAX_PAGE_BYTES:
        raise ArgumentError(f"a page of {nbytes} bytes is larger than {MAX_PAGE_BYTES}")
    return nbytes
