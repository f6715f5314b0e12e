"""SGLang's own fault injector between it and this backend: calls that fail and calls that take their time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from server import ServerClient

from tests.sglang_server.launch import FLOAT32, backend_environment, gdsstore_storage
from tests.sglang_server.processes import throwaway_server
from tests.sglang_server.workload import ask_together, check_no_call_failed, mixed_questions

pytestmark = pytest.mark.slow

FAULTS = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
}
CLIENTS = 50

IN_STORAGE = re.compile(r'File ".*/(gdsstore|sglang_backend|mem_cache)/')  # a line of a stack trace


def test_fifty_clients_get_right_answers_while_calls_fail(
    memory_server: ServerClient, tmp_path: Path
) -> None:
    questions = mixed_questions(memory_server, seed=4, count=CLIENTS)
    with throwaway_server(
        storage=gdsstore_storage(tmp_path / "store"),
        env=backend_environment(**FAULTS),
        extra_args=FLOAT32,
    ) as server:
        stored = []
        for _ in range(3):
            stored.append(sum(answer.storage_tokens for answer in ask_together(server, questions)))
            server.flush_cache()
        log = server.log_path.read_text(errors="replace")
        assert "HiCache storage test injector enabled" in log
        assert not IN_STORAGE.search(log)
        check_no_call_failed(server)
        assert 0 < stored[-1] < sum(len(question.prompt) for question in questions)
        print(f"prompt tokens from storage, round by round: {stored}")
