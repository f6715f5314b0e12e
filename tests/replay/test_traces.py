import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsstore.errors import ArgumentError
from gdsstore.replay.requests import portion, share
from gdsstore.replay.traces import AGENTS_LIVE, open_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 900, "output_length": 8, "hash_ids": [0, 3]},
    {"timestamp": 4500, "input_length": 2000, "output_length": 9, "hash_ids": [0, 1, 2, 4]},
]
AGENTS = [
    {
        "id": "a",
        "block_size": 64,
        "requests": [[0.0, 200, 5, 0, [[1, 3]]], [9.0, 400, 6, 2, [[7, 2], [20, 1]]]],
    },
    {"id": "b", "block_size": 64, "requests": [[0.0, 128, 5, 0, [[1, 2]]], [4.0, 130, 6, 2, []]]},
]


def written(path: Path, lines: list[object], packed: bool = False) -> Path:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_a_mooncake_trace_is_recognised_by_content_and_read_in_order(tmp_path: Path, packed: bool) -> None:
    trace = open_trace(written(tmp_path / "no-suffix", [*MOONCAKE], packed))
    requests = list(trace)
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert [request.arrival_s for request in requests] == [0.0, 3.0, 4.5]
    assert [request.blocks.tolist() for request in requests] == [[0, 1, 2], [0, 3], [0, 1, 2, 4]]
    assert requests[1].blocks.dtype == np.int64
    assert (requests[1].input_tokens, requests[1].output_tokens) == (900, 8)


@pytest.mark.parametrize("packed", [False, True])
def test_an_agent_trace_is_decoded_and_its_sessions_share_no_block(tmp_path: Path, packed: bool) -> None:
    trace = open_trace(written(tmp_path / "trace.gz", [*AGENTS], packed))
    requests = list(trace)
    assert (trace.format, trace.block_tokens) == ("agents", 64)
    assert [(request.session, request.arrival_s) for request in requests] == [(0, 0), (1, 0), (1, 4), (0, 9)]
    first = {request.session: request.blocks for request in requests[:2]}
    assert (requests[3].blocks - first[0][0] + 1).tolist() == [1, 2, 7, 8, 20]
    assert (requests[2].blocks == first[1]).all()
    assert not set(first[0].tolist()) & set(first[1].tolist())


def test_agent_sessions_wait_for_a_free_place_and_time_never_runs_backwards(tmp_path: Path) -> None:
    rows = [[0.0, 64, 1, 0, [[1, 1]]], [10.0, 64, 1, 1, []]]
    lines: list[object] = [{"block_size": 64, "requests": rows} for _ in range(AGENTS_LIVE + 1)]
    requests = list(open_trace(written(tmp_path / "trace", lines)))
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert [r.arrival_s for r in requests if r.session == AGENTS_LIVE] == [10.0, 20.0]


def test_each_iteration_of_a_trace_starts_anew(tmp_path: Path) -> None:
    trace = open_trace(written(tmp_path / "trace", [*MOONCAKE]))
    next(iter(trace))
    assert len(list(trace)) == len(list(trace)) == 3


def test_mooncake_turns_join_the_session_they_build_on_but_not_through_the_system_prompt(
    tmp_path: Path,
) -> None:
    sessions = [request.session for request in open_trace(written(tmp_path / "trace", [*MOONCAKE]))]
    assert sessions[0] == sessions[2] != sessions[1]


def test_skipping_and_sharing_keep_order_and_lose_nothing(tmp_path: Path) -> None:
    lines: list[object] = [{**MOONCAKE[0], "hash_ids": [0, 2 * i + 1, 2 * i + 2]} for i in range(9)]
    trace = open_trace(written(tmp_path / "trace", lines))
    assert [request.blocks[1] for request in portion(trace, skip=3, requests=2)] == [7, 9]
    shares = [[int(request.blocks[1]) for request in share(iter(trace), worker, 2)] for worker in range(2)]
    assert sorted(shares[0] + shares[1]) == list(range(1, 19, 2))
    assert all(part and part == sorted(part) for part in shares)


good_mooncake = json.dumps(MOONCAKE[0])
good_agent = json.dumps(AGENTS[0])
BAD_LINES = {
    "not json": (good_mooncake, "{"),
    "not text": (good_mooncake, '{"hash_ids": "\udcff"}'),
    "not an object": (good_mooncake, "[1]"),
    "another format": (good_mooncake, good_agent),
    "ids missing": (good_mooncake, json.dumps({**MOONCAKE[0], "hash_ids": None})),
    "no ids": (good_mooncake, json.dumps({**MOONCAKE[0], "hash_ids": []})),
    "a broken id": (good_mooncake, json.dumps({**MOONCAKE[0], "hash_ids": [1, 2.5]})),
    "a word for an id": (good_mooncake, json.dumps({**MOONCAKE[0], "hash_ids": [1, "2"]})),
    "nested ids": (good_mooncake, json.dumps({**MOONCAKE[0], "hash_ids": [1, [2]]})),
    "an id past 64 bits": (good_mooncake, json.dumps({**MOONCAKE[0], "hash_ids": [1, 2**70]})),
    "an id past 63 bits": (good_mooncake, json.dumps({**MOONCAKE[0], "hash_ids": [2**63]})),
    "a negative id": (good_mooncake, json.dumps({**MOONCAKE[0], "hash_ids": [1, -2]})),
    "no time": (good_mooncake, json.dumps({**MOONCAKE[0], "timestamp": "1"})),
    "no finite time": (good_mooncake, json.dumps({**MOONCAKE[0], "timestamp": float("nan")})),
    "a time past all floats": (good_mooncake, json.dumps({**MOONCAKE[0], "timestamp": 10**400})),
    "a negative length": (good_mooncake, json.dumps({**MOONCAKE[0], "input_length": -1})),
    "a short row": (good_agent, json.dumps({"block_size": 64, "requests": [[0.0, 1, 1, 0]]})),
    "requests missing": (good_agent, json.dumps({"block_size": 64, "requests": 3})),
    "another block size": (good_agent, json.dumps({"block_size": 16, "requests": []})),
    "a prefix never sent": (good_agent, json.dumps({"block_size": 64, "requests": [[0.0, 1, 1, 1, []]]})),
    "an odd run": (good_agent, json.dumps({"block_size": 64, "requests": [[0.0, 1, 1, 0, [[1, 2, 3]]]]})),
    "a run of wrong sign": (
        good_agent,
        json.dumps({"block_size": 64, "requests": [[0.0, 1, 1, 0, [[1, -2]]]]}),
    ),
    "a run of 2^40": (good_agent, json.dumps({"block_size": 64, "requests": [[0.0, 1, 1, 0, [[1, 2**40]]]]})),
    "a run near 2^63": (
        good_agent,
        json.dumps({"block_size": 64, "requests": [[0.0, 1, 1, 0, [[2**63 - 1, 1]]]]}),
    ),
    "runs without end": (
        good_agent,
        json.dumps({"block_size": 64, "requests": [[0.0, 1, 1, 0, [[1, 2**20]] * 2]]}),
    ),
}


@pytest.mark.parametrize(("good", "bad"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_damaged_line_is_named(tmp_path: Path, good: str, bad: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(f"{good}\n\n{bad}\n{good}\n".encode(errors="surrogateescape"))
    with pytest.raises(ArgumentError, match=r"line 3: ") as caught:
        list(open_trace(path))
    assert caught.value.context == {"path": str(path), "line": 3}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"{}\n",
        b"\x1f\x8b",
        b"\x1f\x8bgarbage",
        b"\x00" * 100,
        b"text\n",
        b'{"requests": 1, "block_size": 0}',
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match="trace"):
        open_trace(path)


def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ArgumentError, match=str(path)):
            open_trace(path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_truncated_or_flipped_gzip_reads_as_requests_or_an_argument_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = written(tmp_path_factory.mktemp("damage") / "trace", [*MOONCAKE] * 20, packed=True)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:at]
    else:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    refusal = None
    try:
        list(open_trace(path))
    except ArgumentError as error:
        refusal = str(error)
    assert refusal is None or str(path) in refusal
