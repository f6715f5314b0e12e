"""A hit in the wrong namespace is silent garbage: everything that makes bytes differ must change the digest."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.errors import ArgumentError
from gdsstore.layout import ByteOrder, PageLayout
from gdsstore.namespace import DIGEST_BYTES, Namespace, Parallelism, as_key_array

MHA: dict[str, Any] = {"layers": 4, "kv_heads": 2, "head_dim": 8, "page_tokens": 16, "dtype": "fp8_e4m3"}
MLA: dict[str, Any] = {"layers": 4, "latent_dim": 16, "page_tokens": 16, "dtype": "bfloat16"}


def mha(**changes: Any) -> PageLayout:
    return PageLayout.mha(**{**MHA, **changes})


def namespace(**changes: Any) -> Namespace:
    facts: dict[str, Any] = {"model": "m", "layout": mha(), "weights": "w", "layers": (0, 4), "heads": (0, 2)}
    return Namespace(**{**facts, **changes})


DIFFERENT = {
    "model": namespace(model="m2"),
    "weights": namespace(weights="w2"),
    "no weights": namespace(weights=""),
    "pool": namespace(pool="indexer"),
    "layers": namespace(layers=(4, 8)),
    "all layers": namespace(layers=None),
    "heads": namespace(heads=(2, 4)),
    "all heads": namespace(heads=None),
    "extra": namespace(extra=(("lora", "a"),)),
    "extra value": namespace(extra=(("lora", "b"),)),
    "extra name": namespace(extra=(("adapter", "a"),)),
    "dtype of the same width": namespace(layout=mha(dtype="fp8_e5m2")),
    "raw bytes": namespace(layout=mha(dtype="uint8")),
    "byte order": namespace(layout=mha(order=ByteOrder.KV_LAYER_TOKEN)),
    "page size": namespace(layout=mha(page_tokens=32)),
    "page size of the same bytes": namespace(layout=mha(page_tokens=32, kv_heads=1)),
    "layer count of the same bytes": namespace(layout=mha(layers=2, kv_heads=4)),
    "head dim of the same bytes": namespace(layout=mha(head_dim=4, kv_heads=4)),
    "value head dim": namespace(layout=mha(value_head_dim=4)),
    "split of keys and values of the same bytes": namespace(layout=mha(head_dim=12, value_head_dim=4)),
    "kind": namespace(layout=PageLayout.mla(**{**MLA, "dtype": "fp8_e4m3"})),
    "opaque": namespace(layout=PageLayout.opaque(mha().page_bytes)),
    "opaque with a tag": namespace(layout=PageLayout.opaque(mha().page_bytes, tag="t")),
    "opaque with page tokens": namespace(layout=PageLayout.opaque(mha().page_bytes, page_tokens=16)),
    **{
        f"{axis} rank {rank} of {size}": namespace(
            parallelism=Parallelism(**{f"{axis}_rank": rank, f"{axis}_size": size})
        )
        for axis in ("tp", "pp", "cp", "dcp")
        for rank, size in ((0, 2), (1, 2), (1, 4))
    },
}


def test_every_fact_changes_the_digest() -> None:
    everything = {"base": namespace(), **DIFFERENT}
    for (one, a), (other, b) in itertools.combinations(everything.items(), 2):
        assert a.digest != b.digest, f"{one} and {other} have the same digest"
        assert len(a.digest) == DIGEST_BYTES


def test_equal_facts_have_equal_digests_in_every_process() -> None:
    program = (
        "from tests.test_namespace import DIFFERENT, namespace\n"
        "print(namespace().digest.hex(), *(n.digest.hex() for n in DIFFERENT.values()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [n.digest.hex() for n in (namespace(), *DIFFERENT.values())]


def test_the_digest_of_a_known_namespace_never_changes() -> None:
    """Pages on users' drives are found through it. Another digest is another NAMESPACE_VERSION."""
    assert namespace().digest.hex() == "0678fd966265f3ab097cfca52ddc326b"


text = st.text(max_size=6)
FACTS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.text(min_size=1, max_size=6),
    "weights": text,
    "pool": st.text(min_size=1, max_size=6),
    "layers": st.none() | st.tuples(st.integers(0, 3), st.integers(4, 6)),
    "heads": st.none() | st.tuples(st.integers(0, 3), st.integers(4, 6)),
    "extra": st.lists(st.tuples(text, text), max_size=3, unique_by=lambda pair: pair[0]).map(tuple),
    "layout": st.builds(
        mha,
        layers=st.integers(1, 3),
        page_tokens=st.sampled_from([1, 2, 4]),
        kv_heads=st.sampled_from([1, 2, 4]),
        dtype=st.sampled_from(["fp8_e4m3", "fp8_e5m2", "int8", "float16"]),
        order=st.sampled_from([ByteOrder.LAYER_KV_TOKEN, ByteOrder.KV_LAYER_TOKEN]),
    ),
    "parallelism": st.builds(Parallelism, tp_rank=st.integers(0, 1), tp_size=st.integers(2, 3)),
}
facts = st.fixed_dictionaries(FACTS)


@given(facts, facts)
def test_digests_are_equal_only_for_equal_facts(one: dict[str, Any], other: dict[str, Any]) -> None:
    def comparable(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "extra": sorted(given["extra"])}

    same = comparable(one) == comparable(other)
    assert (Namespace(**one).digest == Namespace(**other).digest) == same


@given(facts, st.sampled_from(sorted(FACTS)), st.data())
def test_changing_one_fact_changes_the_digest(
    given_facts: dict[str, Any], name: str, data: st.DataObject
) -> None:
    changed = {**given_facts, name: data.draw(FACTS[name])}
    same = sorted(changed["extra"]) == sorted(given_facts["extra"]) and all(
        changed[key] == given_facts[key] for key in changed if key != "extra"
    )
    assert (Namespace(**given_facts).digest == Namespace(**changed).digest) == same


def test_extra_facts_count_in_any_order() -> None:
    assert (
        namespace(extra=(("a", "1"), ("b", "2"))).digest == namespace(extra=(("b", "2"), ("a", "1"))).digest
    )


def test_mla_pages_are_the_same_on_every_tensor_parallel_rank() -> None:
    layout = PageLayout.mla(**MLA)
    ranks = [namespace(layout=layout, parallelism=Parallelism(tp_rank=r, tp_size=4)) for r in range(4)]
    assert len({rank.digest for rank in ranks}) == 1
    assert ranks[0].replicated
    assert not namespace().replicated
    pipeline = [namespace(layout=layout, parallelism=Parallelism(pp_rank=r, pp_size=2)) for r in range(2)]
    assert pipeline[0].digest != pipeline[1].digest


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"model": 7},
        {"pool": ""},
        {"weights": None},
        {"layers": (4, 4)},
        {"layers": (-1, 4)},
        {"heads": (2, 1)},
        {"layers": (0, 1, 2)},
        {"layers": 4},
        {"layers": ("a", "b")},
        {"extra": (("a", "1"), ("a", "2"))},
        {"extra": (("a",),)},
        {"extra": (("a", 1),)},
        {"extra": ("ab",)},
        {"extra": {"a": "b"}},
        {"layout": None},
        {"layout": 4096},
        {"parallelism": None},
    ],
    ids=str,
)
def test_facts_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        namespace(**wrong)


@pytest.mark.parametrize("ranks", [(2, 2), (-1, 2), (0, 0), ("0", 2), (0.0, 2), (True, 2)])
def test_a_rank_outside_its_group_is_refused(ranks: tuple[Any, Any]) -> None:
    for axis in ("tp", "pp", "cp", "dcp"):
        with pytest.raises(ArgumentError, match=f"{axis}_rank"):
            Parallelism(**{f"{axis}_rank": ranks[0], f"{axis}_size": ranks[1]})


def test_keys_come_as_bytes_or_as_an_array() -> None:
    keys = [bytes([i]) * 32 for i in range(5)]
    array = np.frombuffer(b"".join(keys), np.uint8).reshape(5, 32)
    assert np.array_equal(as_key_array(keys), array)
    assert np.array_equal(as_key_array(tuple(keys)), array)
    assert np.array_equal(as_key_array(array), array)
    assert np.array_equal(as_key_array(array[::-1]), array[::-1])
    assert as_key_array(array[::-1]).flags.c_contiguous
    assert np.array_equal(as_key_array(np.asfortranarray(array)), array)
    assert as_key_array([]).shape == (0, 32)
    assert as_key_array(np.zeros((0, 32), np.uint8)).shape == (0, 32)


@pytest.mark.parametrize(
    "wrong",
    [
        [b"short"],
        [b"x" * 31, b"x" * 33],
        [b"x" * 32, b""],
        ["00" * 32],
        b"x" * 64,
        "x" * 32,
        [None],
        None,
        7,
        np.zeros((2, 31), np.uint8),
        np.zeros((2, 32), np.int8),
        np.zeros(32, np.uint8),
        np.zeros((2, 4), np.uint64),
    ],
    ids=repr,
)
def test_anything_that_is_not_32_byte_keys_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError):
        as_key_array(wrong)
