"""Facts go to JSON and back, and nothing else passes for facts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.errors import ArgumentError
from gdsstore.probe.advice import findings, verdicts
from gdsstore.probe.facts import MachineFacts
from gdsstore.probe.summary import about
from gdsstore.probe.trips import IoPath, Outcome, PathBytes, Trip
from tests.probe.machines import NAMES, machine

speeds = st.none() | st.floats(0, 1e6)  # JSON has no NaN
st.register_type_strategy(
    Trip,
    st.builds(
        Trip,
        engine=st.sampled_from(["posix", "kvikio", "nixl-gds-mt", "bounce"]),
        outcome=st.sampled_from(Outcome),
        detail=st.none() | st.text(),
        device=st.none() | st.integers(0, 7),
        path=st.none() | st.sampled_from(IoPath),
        nbytes=st.integers(0, 1 << 40),
        o_direct=st.booleans(),
        written=st.none() | st.from_type(PathBytes),
        read=st.none() | st.from_type(PathBytes),
        write_gbps=speeds,
        read_gbps=speeds,
    ),
)


@given(st.from_type(MachineFacts))
@settings(max_examples=100)
def test_facts_survive_json(facts: MachineFacts) -> None:
    assert MachineFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


@given(st.from_type(MachineFacts))
@settings(max_examples=200)
def test_advice_has_an_answer_to_any_facts(facts: MachineFacts) -> None:
    assert len(verdicts(facts)) == 4
    assert all(each.next_step for each in findings(facts))
    assert all(isinstance(value, str) for _, value in about(facts))


@pytest.mark.parametrize("name", NAMES)
def test_recorded_facts_survive_json(name: str) -> None:
    assert MachineFacts.from_dict(json.loads(json.dumps(machine(name).to_dict()))) == machine(name)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "JSON object"),
        ({"format": 2}, "another version"),
        ({"kernle": {}}, "no field 'kernle'"),
        ({"kernel": {"releas": "6"}}, "facts.kernel has no field 'releas'"),
        ({"kernel": []}, "facts.kernel must be a JSON object"),
        ({"kernel": {"release": 6}}, "facts.kernel.release must be str"),
        ({"kernel": {"p2pdma": 1}}, "facts.kernel.p2pdma must be bool"),
        ({"kernel": {"memlock_bytes": True}}, "facts.kernel.memlock_bytes must be int"),
        ({"nvidia": {"gpus": {}}}, "facts.nvidia.gpus must be a list"),
        ({"nvidia": {"gpus": [{"name": 1}]}}, "facts.nvidia.gpus[0].name must be str"),
        ({"storage": {"drives": [{}]}}, "facts.storage.drives[0]"),
        (
            {"round_trips": [{"engine": "posix", "outcome": "fine"}]},
            "round_trips[0].outcome must be one of works",
        ),
        (
            {"round_trips": [{"engine": "posix", "outcome": []}]},
            "round_trips[0].outcome must be one of works",
        ),
        ({"nvidia": None}, "facts.nvidia must be a JSON object"),
    ],
)
def test_what_is_no_facts_is_refused_by_name(data: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        MachineFacts.from_dict(data)
    assert said in str(refused.value)
