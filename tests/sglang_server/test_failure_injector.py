"""SGLang's own fault injector between it and this backend: calls that fail and calls that take their time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from server import ServerClient, StorageOptions

from tests.sglang_server.launch import FLOAT32, backend_environment, gdsstore_storage
from tests.sglang_server.processes import throwaway_server
from tests.sglang_server.workload import Question, ask_together, check_no_call_failed, mixed_questions

pytestmark = pytest.mark.slow

FAULTS = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
}
CLIENTS = 50

IN_STORAGE = re.compile(r'File ".*/(gdsstore|sglang_backend|mem_cache)/')  # a line of a stack trace


# Each policy of both kinds once: they come with the attach.
POLICIES = [
    ("write_through", "wait_complete"),
    ("write_through_selective", "timeout"),
    ("write_back", "best_effort"),
]


@pytest.fixture(scope="module")
def questions(memory_server: ServerClient) -> list[Question]:
    return mixed_questions(memory_server, seed=4, count=CLIENTS)


@pytest.fixture(scope="module")
def failing_server(questions: list[Question]) -> Iterator[ServerClient]:
    """A server that wraps whatever is attached to it."""
    with throwaway_server(
        storage=StorageOptions(), env=backend_environment(**FAULTS), extra_args=FLOAT32
    ) as server:
        yield server


@pytest.mark.parametrize(("write_policy", "prefetch_policy"), POLICIES)
def test_fifty_clients_get_right_answers_while_calls_fail(
    failing_server: ServerClient,
    questions: list[Question],
    tmp_path: Path,
    write_policy: str,
    prefetch_policy: str,
) -> None:
    server = failing_server
    server.flush_cache()
    server.attach_storage(
        gdsstore_storage(tmp_path / "store", write_policy=write_policy, prefetch_policy=prefetch_policy)
    )
    try:
        stored = []
        for _ in range(3):
            stored.append(sum(answer.storage_tokens for answer in ask_together(server, questions)))
            server.flush_cache()
    finally:
        server.flush_cache()
        server.detach_storage()
    log = server.log_path.read_text(errors="replace")
    assert "HiCache storage test injector enabled" in log
    assert not IN_STORAGE.search(log)
    check_no_call_failed(server)
    assert stored[-1] < sum(len(question.prompt) for question in questions)
    if (write_policy, prefetch_policy) == POLICIES[0]:  # the others may store late, or not wait
        assert stored[-1] > 0
    print(f"prompt tokens from storage, round by round: {stored}")
