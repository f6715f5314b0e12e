"""Where the bytes of a page lie: a wrong slice serves another layer's KV without an error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.errors import ArgumentError
from gdsstore.layout import (
    ALIGNMENT,
    DTYPE_BITS,
    MAX_PAGE_BYTES,
    ByteOrder,
    PageKind,
    PageLayout,
    align_up,
    dtype_bits,
)

small = st.integers(1, 9)


@st.composite
def mha_layouts(draw: st.DrawFn) -> PageLayout:
    return PageLayout.mha(
        layers=draw(small),
        kv_heads=draw(small),
        head_dim=2 * draw(small),
        value_head_dim=2 * draw(small),
        page_tokens=draw(small),
        dtype=draw(st.sampled_from(sorted(DTYPE_BITS))),
        order=draw(st.sampled_from([ByteOrder.LAYER_KV_TOKEN, ByteOrder.KV_LAYER_TOKEN])),
    )


def layer_of_each_byte(layout: PageLayout) -> np.ndarray:
    """The layer that each byte of a page belongs to, laid out axis by axis as the order's name says."""
    bits = DTYPE_BITS[layout.dtype]
    k = layout.page_tokens * layout.kv_heads * layout.head_dim * bits // 8
    v = layout.page_tokens * layout.kv_heads * layout.value_head_dim * bits // 8
    layers = range(layout.layers)
    if layout.order in (ByteOrder.LAYER_KV_TOKEN, ByteOrder.LAYER_TOKEN):
        return np.repeat(np.arange(layout.layers), k + v)
    assert layout.order is ByteOrder.KV_LAYER_TOKEN
    return np.concatenate([np.full(k, layer) for layer in layers] + [np.full(v, layer) for layer in layers])


@given(mha_layouts(), st.data())
def test_the_slices_of_a_layer_range_hold_exactly_its_bytes(layout: PageLayout, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, layout.layers - 1))
    last = data.draw(st.integers(first + 1, layout.layers))
    owner = layer_of_each_byte(layout)
    covered = np.zeros(layout.page_bytes, np.int64)
    pieces = layout.slices(first, last)
    for offset, length in pieces:
        covered[offset : offset + length] += 1
    assert len(owner) == layout.page_bytes
    assert np.array_equal(covered, ((owner >= first) & (owner < last)).astype(np.int64))
    assert list(pieces) == sorted(pieces)
    if len(pieces) == 1:
        assert layout.slice(first, last) == pieces[0]


@given(mha_layouts())
def test_the_layers_of_a_page_add_up_to_it(layout: PageLayout) -> None:
    parts = [piece for layer in range(layout.layers) for piece in layout.slices(layer, layer + 1)]
    assert sum(piece.length for piece in parts) == layout.page_bytes == layout.layer_bytes * layout.layers
    assert layout.slices(0, layout.layers) == ((0, layout.page_bytes),)


def test_known_models_have_their_known_sizes() -> None:
    llama = PageLayout.mha(layers=32, kv_heads=8, head_dim=128, page_tokens=64, dtype="bfloat16")
    assert llama.page_bytes == 32 * 64 * 8 * 128 * 2 * 2  # 8 MiB
    deepseek = PageLayout.mla(layers=61, latent_dim=576, page_tokens=64, dtype="bfloat16")
    assert deepseek.page_bytes == 61 * 64 * 576 * 2
    fp4 = PageLayout.mla(layers=2, latent_dim=6, page_tokens=1, dtype="fp4_e2m1")
    assert fp4.page_bytes == 6


def test_scattered_layers_are_refused_as_one_slice_but_given_as_two() -> None:
    layout = PageLayout.mha(
        layers=4, kv_heads=2, head_dim=8, page_tokens=4, dtype="float16", order=ByteOrder.KV_LAYER_TOKEN
    )
    with pytest.raises(ArgumentError, match="slices"):
        layout.slice(1, 2)
    assert layout.slices(1, 2) == ((128, 128), (512 + 128, 128))
    assert layout.slice(0, 4) == (0, 1024)


@pytest.mark.parametrize(
    "layout",
    [
        PageLayout.opaque(4096),
        PageLayout.mla(layers=2, latent_dim=8, page_tokens=4, dtype="float16", order=ByteOrder.TOKEN_LAYER),
    ],
    ids=["opaque", "token_layer"],
)
def test_pages_without_addressable_layers_refuse_layer_ranges(layout: PageLayout) -> None:
    if layout.layers > 1:
        with pytest.raises(ArgumentError, match="by layers"):
            layout.slice(0, 1)
    assert layout.slice(0, layout.layers) == (0, layout.page_bytes)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 1), (-1, 2), (0, 5), (4, 5)])
def test_layer_ranges_outside_the_page_are_refused(first: int, last: int) -> None:
    layout = PageLayout.mha(layers=4, kv_heads=1, head_dim=8, page_tokens=1, dtype="float16")
    with pytest.raises(ArgumentError, match="not inside"):
        layout.slices(first, last)


@given(st.integers(1, 1 << 24))
def test_records_are_whole_blocks_that_hold_the_page(nbytes: int) -> None:
    record = PageLayout.opaque(nbytes).record_bytes
    assert record % ALIGNMENT == 0
    assert nbytes <= record < nbytes + ALIGNMENT


@given(st.integers(0, 1 << 40), st.integers(0, 16))
def test_align_up_goes_to_the_next_multiple(nbytes: int, power: int) -> None:
    aligned = align_up(nbytes, 1 << power)
    assert aligned % (1 << power) == 0
    assert 0 <= aligned - nbytes < 1 << power


def test_an_unknown_dtype_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'fp8_e4m3'"):
        dtype_bits("fp8_e4m3fn")
    with pytest.raises(ArgumentError, match="unknown KV dtype 'complex'"):
        PageLayout.mha(layers=1, kv_heads=1, head_dim=8, page_tokens=1, dtype="complex")


_MAKERS: dict[str, tuple[Callable[..., PageLayout], dict[str, object]]] = {
    "mha": (
        PageLayout.mha,
        {"layers": 2, "kv_heads": 2, "head_dim": 8, "value_head_dim": 8, "page_tokens": 4, "dtype": "int8"},
    ),
    "mla": (PageLayout.mla, {"layers": 2, "latent_dim": 8, "page_tokens": 4, "dtype": "int8"}),
    "opaque": (PageLayout.opaque, {"page_bytes": 64}),
}


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "8", None])
@pytest.mark.parametrize("kind", _MAKERS)
def test_sizes_that_are_no_whole_positive_numbers_are_refused(kind: str, bad: object) -> None:
    make, arguments = _MAKERS[kind]
    make(**arguments)
    for name, value in arguments.items():
        if isinstance(value, int) and not (name == "value_head_dim" and bad is None):
            with pytest.raises(ArgumentError, match="whole number"):
                make(**{**arguments, name: bad})


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_an_order_of_another_kind_of_page_is_refused(kind: str) -> None:
    make, arguments = _MAKERS[kind]
    wrong = ByteOrder.LAYER_TOKEN if kind == "mha" else ByteOrder.LAYER_KV_TOKEN
    for order in (wrong, "sideways"):
        with pytest.raises(ArgumentError, match="is not one of"):
            make(**arguments, order=order)


def test_an_order_may_be_given_by_name() -> None:
    make, arguments = _MAKERS["mha"]
    assert make(**arguments, order="kv_layer_token").order is ByteOrder.KV_LAYER_TOKEN


def test_pages_too_large_or_of_broken_bytes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="larger than"):
        PageLayout.opaque(MAX_PAGE_BYTES + 1)
    with pytest.raises(ArgumentError, match="larger than"):
        PageLayout.mla(layers=1 << 10, latent_dim=1 << 10, page_tokens=1 << 10, dtype="float32")
    with pytest.raises(ArgumentError, match="whole bytes"):
        PageLayout.mla(layers=1, latent_dim=3, page_tokens=1, dtype="int4")


@pytest.mark.parametrize("order", ["layer_kv_token", "kv_layer_token"])
def test_a_layer_that_would_end_inside_a_byte_is_refused(order: str) -> None:
    """Its slice would be half a byte off: together the layers fill whole bytes, each alone does not."""
    with pytest.raises(ArgumentError, match="whole bytes"):
        PageLayout.mla(layers=2, latent_dim=3, page_tokens=1, dtype="int4")
    with pytest.raises(ArgumentError, match="whole bytes"):
        PageLayout.mha(
            layers=1, kv_heads=1, head_dim=3, value_head_dim=5, page_tokens=1, dtype="int4", order=order
        )


def test_kinds_say_what_they_are() -> None:
    assert PageLayout.opaque(1).kind is PageKind.OPAQUE
    assert _MAKERS["mla"][0](**_MAKERS["mla"][1]).kind is PageKind.MLA
    assert _MAKERS["mha"][0](**_MAKERS["mha"][1]).kind is PageKind.MHA
