"""Fuzz: reading recorded traces, plain and packed."""

from __future__ import annotations

import gzip
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.fuzz.harness import fuzz, instrumented, quickly  # noqa: E402

with instrumented():
    from gdsstore.errors import ArgumentError
    from gdsstore.replay.traces import open_trace

from tests.fuzz.inputs import Choices, damaged_json, dumped  # noqa: E402

MOST_REQUESTS = 50


def one_input(data: bytes) -> None:
    choices = Choices(data)
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="gdsstore-fuzz-") as file:
        Path(file.name).write_bytes(_content(choices))
        try:
            trace = open_trace(file.name)
            last_s = -1.0
            for request in islice(trace, MOST_REQUESTS):
                assert len(request.blocks) <= 1 << 21
                assert request.blocks.dtype == "int64"
                assert (request.blocks >= 0).all()
                assert request.arrival_s >= 0
                assert request.input_tokens >= 0
                assert trace.format != "agents" or request.arrival_s >= last_s, "requests come in order"
                last_s = request.arrival_s
        except ArgumentError as error:
            message = str(error)
        else:
            return
        assert file.name in message


def _content(choices: Choices) -> bytes:
    line = _mooncake if choices.below(2) else _agents
    whole = b"\n".join(
        damaged_json(choices, line(choices)) if choices.below(3) == 2 else dumped(line(choices))
        for _ in range(1 + choices.below(4))
    )
    if choices.below(3) < 2:
        return whole
    packed = bytearray(gzip.compress(whole, 1))
    for _ in range(choices.below(3)):
        packed[choices.below(len(packed))] ^= 1 << choices.below(8)
    return bytes(packed[: choices.below(len(packed) + 1)] if choices.below(2) else packed)


def _mooncake(choices: Choices) -> dict[str, Any]:
    return {
        "timestamp": choices.below(1000),
        "input_length": choices.below(5000),
        "output_length": choices.below(500),
        "hash_ids": [choices.one((choices.below(9), choices.number())) for _ in range(1 + choices.below(6))],
    }


def _agents(choices: Choices) -> dict[str, Any]:
    rows = [
        [choices.below(99), choices.below(999), 5, choices.below(3), [[choices.number(), choices.below(40)]]]
        for _ in range(choices.below(4))
    ]
    return {"block_size": choices.one((64, 64, 1, 0)), "requests": rows}


test_a_trace_is_read_or_refused_with_its_line = quickly(one_input, 300)

if __name__ == "__main__":
    fuzz(one_input)
