"""Whatever SGLang's policies for writing and prefetching, a warm answer is the cold one."""

from __future__ import annotations

from pathlib import Path

import pytest
from server import MAX_TOTAL_TOKENS, PAGE_SIZE, ServerClient
from server_checks import CACHED_TOKENS, PROMPT_TOKENS, prompt

from tests.sglang_server.launch import gdsstore_storage
from tests.sglang_server.stored import pages
from tests.sglang_server.workload import FLOAT32_TOLERANCE, check_answer, check_no_call_failed, difference

pytestmark = pytest.mark.slow

# Each policy once or more; the server is the same, policies come with the attach.
COMBINATIONS = [
    ("write_through", "best_effort"),
    ("write_through", "timeout"),
    ("write_through_selective", "wait_complete"),
    ("write_through_selective", "best_effort"),
    ("write_back", "wait_complete"),
    ("write_back", "timeout"),
]


@pytest.mark.parametrize(("write_policy", "prefetch_policy"), COMBINATIONS)
def test_warm_equals_cold(
    memory_server: ServerClient, tmp_path: Path, write_policy: str, prefetch_policy: str
) -> None:
    server, folder = memory_server, tmp_path / "store"
    seed = 31 + COMBINATIONS.index((write_policy, prefetch_policy))
    server.flush_cache()
    server.attach_storage(
        gdsstore_storage(folder, write_policy=write_policy, prefetch_policy=prefetch_policy)
    )
    try:
        cold = server.generate(prompt(seed))
        assert cold.cached_tokens == 0
        if write_policy != "write_through":
            server.flush_cache()
            assert pages(folder) == 0, f"{write_policy} stored a prompt that was asked once"
            check_answer(server.generate(prompt(seed)), cold)
        if write_policy == "write_through_selective":
            check_answer(server.generate(prompt(seed)), cold)
        if write_policy == "write_back":
            for other in range(MAX_TOTAL_TOKENS // PROMPT_TOKENS + 1):  # until the device evicts
                server.generate(prompt(100 + other), max_new_tokens=1)
        server.flush_cache()
        warm = server.generate(prompt(seed))
        check_answer(warm, cold)
        assert warm.cached_details.get("device", 0) == warm.cached_details.get("host", 0) == 0
        if prefetch_policy != "best_effort":  # that one takes what has arrived, which may be nothing
            assert warm.storage_tokens == CACHED_TOKENS
        else:
            assert pages(folder) >= CACHED_TOKENS // PAGE_SIZE
        check_no_call_failed(server)
    finally:
        server.flush_cache()
        server.detach_storage()


def test_one_other_page_changes_the_answer(memory_server: ServerClient) -> None:
    """What gives all comparisons of answers their meaning."""
    right = memory_server.generate(prompt(41))
    for page in range(0, CACHED_TOKENS // PAGE_SIZE, 6):
        other = prompt(41)
        other[page * PAGE_SIZE + 3] = prompt(42)[page * PAGE_SIZE + 3]
        assert difference(memory_server.generate(other), right) > 10 * FLOAT32_TOLERANCE
