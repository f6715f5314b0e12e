import pytest

from gdsstore.errors import ArgumentError
from gdsstore.replay.plan import ReplayPlan


def test_a_plan_survives_the_way_to_a_worker() -> None:
    plan = ReplayPlan(
        stores=("a", "b"),
        page_bytes=4096,
        capacity=1 << 30,
        faults="errno:0.1",
        settings={"segment_bytes": 1 << 24},
    )
    assert ReplayPlan.from_json(plan.to_json()) == plan


def test_the_grace_of_a_replayed_store_is_zero_unless_asked_for() -> None:
    assert ReplayPlan(stores=("a",), page_bytes=1).store_settings()["grace_s"] == 0
    assert ReplayPlan(stores=("a",), page_bytes=1, settings={"grace_s": 3.0}).store_settings()["grace_s"] == 3


@pytest.mark.parametrize(
    "wrong",
    [{"stores": ()}, {"page_bytes": 0}, {"processes": 0}, {"skip": -1}, {"requests": 0}, {"seed": -1}],
)
def test_numbers_that_make_no_replay_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        ReplayPlan(**{"stores": ("a",), "page_bytes": 4096, **wrong})  # type: ignore[arg-type]
