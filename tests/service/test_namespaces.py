"""What a digest stands for becomes a namespace again, or is refused: never another one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.errors import ArgumentError
from gdsstore.layout import PageLayout
from gdsstore.namespace import Namespace, Parallelism
from gdsstore.service.namespaces import namespace_of

LAYOUTS = st.sampled_from(
    [
        PageLayout.mha(layers=2, kv_heads=4, head_dim=8, page_tokens=16, dtype="bfloat16"),
        PageLayout.mha(layers=3, kv_heads=2, head_dim=8, value_head_dim=4, page_tokens=8, dtype="fp8_e5m2"),
        PageLayout.mla(layers=2, latent_dim=96, page_tokens=64, dtype="float16", order="token_layer"),
        PageLayout.opaque(5000, page_tokens=3, tag="x"),
    ]
)
SPANS = st.one_of(st.none(), st.tuples(st.integers(0, 5), st.integers(6, 9)))
PAIRS = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)


@given(
    layout=LAYOUTS,
    model=st.text(min_size=1, max_size=20),
    weights=st.text(max_size=10),
    layers=SPANS,
    heads=SPANS,
    rank=st.integers(0, 3),
    extra=PAIRS,
)
def test_a_description_becomes_the_same_namespace_again(
    layout: PageLayout, model: str, weights: str, layers: Any, heads: Any, rank: int, extra: dict[str, str]
) -> None:
    made = Namespace(
        model=model,
        layout=layout,
        weights=weights,
        layers=layers,
        heads=heads,
        parallelism=Parallelism(tp_rank=rank, tp_size=4, pp_rank=1, pp_size=2),
        extra=tuple(extra.items()),
    )
    again = namespace_of(json.loads(json.dumps(made.describe())))
    assert again.digest == made.digest
    assert again.layout == made.layout


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"something": "new"},
        {"layout": {"kind": "mha"}},
        {"layout": None},
        {"parallelism": {"tp_rank": 5, "tp_size": 2}},
        {"layers": [3]},
        {"extra": "x"},
        {"model": ""},
    ],
)
def test_a_description_of_another_program_is_refused(change: dict[str, Any]) -> None:
    made = Namespace(model="m", layout=PageLayout.opaque(4096))
    with pytest.raises(ArgumentError):
        namespace_of({**made.describe(), **change})
