import numpy as np
import pytest

from gdsstore.errors import ArgumentError
from gdsstore.replay.workload import MultiTurn


def test_the_same_seed_gives_the_same_requests_and_another_gives_others() -> None:
    def told(seed: int) -> list[tuple[float, int, list[int]]]:
        return [(r.arrival_s, r.session, r.blocks.tolist()) for r in MultiTurn(seed=seed, sessions=30)]

    assert told(1) == told(1)
    assert told(1) != told(2)


def test_sessions_share_the_system_prompt_and_nothing_else() -> None:
    workload = MultiTurn(sessions=20, system_tokens=2000)  # three full blocks of 512
    by_session: dict[int, set[int]] = {}
    for request in workload:
        assert request.blocks[:3].tolist() == [0, 1, 2]
        by_session.setdefault(request.session, set()).update(request.blocks[3:].tolist())
    assert len(by_session) == 20
    assert sum(map(len, by_session.values())) == len(set().union(*by_session.values()))


def test_a_turn_repeats_the_full_blocks_of_the_turn_before() -> None:
    last: dict[int, np.ndarray] = {}
    grown = 0
    for request in MultiTurn(sessions=20):
        assert len(request.blocks) == -(-request.input_tokens // 512)
        before = last.get(request.session)
        if before is not None:
            assert np.array_equal(request.blocks[: len(before) - 1], before[:-1])
            grown += len(request.blocks) > len(before)
        last[request.session] = request.blocks
    assert grown > 20


def test_requests_come_in_order_of_arrival_and_sessions_overlap() -> None:
    requests = list(MultiTurn(sessions=20))
    arrivals = [request.arrival_s for request in requests]
    sessions = [request.session for request in requests]
    assert arrivals == sorted(arrivals)
    assert sessions != sorted(sessions)


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"sessions": 0}, {"turns": 0}, {"system_tokens": -1}])
def test_numbers_that_make_no_workload_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        MultiTurn(**wrong)
