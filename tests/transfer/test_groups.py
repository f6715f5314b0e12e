"""Layer groups: every layer once, the first group small, and a forward that ends in time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.errors import ArgumentError
from gdsstore.sizes import KiB
from gdsstore.transfer.groups import LEAST_PIECE_BYTES, LayerGroup, LayerLoad, finish_s, plan_groups


def forward_ends(load: LayerLoad, groups: tuple[LayerGroup, ...], compute_s: float) -> tuple[float, float]:
    """When the first group is there, and when the forward ends; layer by layer, not by the planner's own sums."""
    drive_s = now_s = first_s = 0.0
    for number, group in enumerate(groups):
        drive_s += load.request_s
        for _ in range(group.first, group.last):
            drive_s += load.layer_bytes * load.pages / load.bandwidth
        first_s = drive_s if number == 0 else first_s
        now_s = max(now_s, drive_s)
        for _ in range(group.first, group.last):
            now_s += compute_s
    return first_s, now_s


LOADS = st.builds(
    LayerLoad,
    layers=st.integers(1, 128),
    pages=st.integers(1, 2048),
    layer_bytes=st.sampled_from([4 * KiB, 9216, 32 * KiB, 128 * KiB, 1024 * KiB]),
    bandwidth=st.floats(2e7, 2e11),
    request_s=st.floats(0, 3e-3),
    compute_s=st.one_of(st.none(), st.floats(0, 0.1)),
)


@given(LOADS)
def test_every_layer_comes_once_in_order_in_pieces_that_are_large_enough(load: LayerLoad) -> None:
    groups = plan_groups(load)
    assert [layer for group in groups for layer in range(*group)] == list(range(load.layers))
    smallest = min(group.layers for group in groups) * load.layer_bytes
    assert smallest >= min(LEAST_PIECE_BYTES, load.layers * load.layer_bytes)


@settings(max_examples=400)
@given(LOADS, st.one_of(st.just(0.25), st.just(1.0), st.just(4.0), st.floats(0.01, 100)))
def test_the_forward_ends_in_time_at_any_ratio_of_compute_to_io(load: LayerLoad, ratio: float) -> None:
    io_s = load.request_s + load.layers * load.layer_bytes * load.pages / load.bandwidth
    compute_s = ratio * io_s / load.layers
    load = LayerLoad(**{name: getattr(load, name) for name in FIELDS} | {"compute_s": compute_s})
    groups = plan_groups(load)
    first_s, end_s = forward_ends(load, groups, compute_s)
    assert end_s <= (1.05 * max(io_s, compute_s * load.layers) + first_s) * (1 + 1e-9)
    assert end_s == pytest.approx(finish_s(load, groups))
    alone = forward_ends(load, (LayerGroup(0, load.layers),), compute_s)[1]
    assert end_s <= alone * (1 + 1e-9)  # groups are never worse than none


FIELDS = ("layers", "pages", "layer_bytes", "bandwidth", "request_s")


@given(LOADS, st.floats(0.01, 100))
def test_groups_for_unknown_compute_suit_any(load: LayerLoad, ratio: float) -> None:
    load = LayerLoad(**{name: getattr(load, name) for name in FIELDS})
    groups = plan_groups(load)
    io_s = load.request_s + load.layers * load.layer_bytes * load.pages / load.bandwidth
    compute_s = ratio * io_s / load.layers
    first_s, end_s = forward_ends(load, groups, compute_s)
    # 5 % of each: the groups were planned for compute as long as the I/O.
    assert end_s <= (max(io_s, compute_s * load.layers) + 0.05 * io_s + first_s) * (1 + 1e-9)


@pytest.mark.parametrize("ratio", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("pages", [64, 256, 2048])
def test_a_large_load_begins_with_a_small_group(pages: int, ratio: float) -> None:
    load = LayerLoad(layers=32, pages=pages, layer_bytes=128 * KiB, bandwidth=5e9, request_s=1e-4)
    load = LayerLoad(**{name: getattr(load, name) for name in FIELDS} | {"compute_s": ratio * load.io_s})
    assert plan_groups(load)[0].layers <= load.layers / 4


def test_compute_that_is_slower_than_the_drive_waits_for_the_first_group_only() -> None:
    load = LayerLoad(layers=64, pages=512, layer_bytes=128 * KiB, bandwidth=4e9, compute_s=0.05)
    groups = plan_groups(load)
    arrived_s = computed_s = 0.0
    for number, group in enumerate(groups):
        arrived_s += group.layers * load.io_s
        assert number == 0 or arrived_s <= computed_s
        computed_s = max(arrived_s, computed_s) + group.layers * 0.05
    sizes = [group.layers for group in groups]
    assert all(after >= before for before, after in itertools.pairwise(sizes[:-1]))
    assert len(groups) < 10


def test_a_fixed_cost_that_outweighs_the_bytes_makes_one_group() -> None:
    load = LayerLoad(
        layers=32, pages=1, layer_bytes=128 * KiB, bandwidth=1e10, request_s=0.01, compute_s=1e-6
    )
    assert plan_groups(load) == (LayerGroup(0, 32),)


def test_a_model_of_one_layer_is_one_group() -> None:
    assert plan_groups(LayerLoad(layers=1, pages=9, layer_bytes=64 * KiB, bandwidth=1e9)) == (
        LayerGroup(0, 1),
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0},
        {"pages": 0},
        {"layer_bytes": -1},
        {"bandwidth": 0.0},
        {"bandwidth": float("nan")},
        {"bandwidth": float("inf")},
        {"request_s": -1.0},
        {"compute_s": float("nan")},
    ],
)
def test_numbers_that_make_no_load_are_refused(wrong: dict[str, float]) -> None:
    fields = {"layers": 4, "pages": 1, "layer_bytes": 4096, "bandwidth": 1e9} | wrong
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        LayerLoad(**fields)
