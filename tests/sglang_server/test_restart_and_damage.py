"""Pages outlive the server, and damaged ones are computed again. The tests build on each other, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server import PAGE_SIZE, Generation, ServerClient, running_server
from server_checks import CACHED_TOKENS, check_warm_equals_cold, prompt

from tests.sglang_server.launch import backend_environment, gdsstore_storage
from tests.sglang_server.processes import throwaway_server
from tests.sglang_server.stored import damage, page_keys, tool
from tests.sglang_server.workload import check_no_call_failed

pytestmark = pytest.mark.slow

SOUND, DAMAGED = 1, 2  # seeds of prompts
FIRST_DAMAGED_PAGE = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv") / "store"


@pytest.fixture(scope="module")
def first_answers(folder: Path) -> dict[int, Generation]:
    """Both prompts, computed and served from the store by a server that has been stopped since."""
    with running_server(storage=gdsstore_storage(folder), env=backend_environment()) as server:
        answers = {seed: check_warm_equals_cold(server, seed) for seed in (SOUND, DAMAGED)}
    for answer in answers.values():
        assert answer.storage_tokens == CACHED_TOKENS
        assert answer.cached_details["host"] == 0
        assert answer.cached_details["storage_backend"] == "GdsStoreHiCache"
    return answers


@pytest.fixture(scope="module")
def server(folder: Path, first_answers: dict[int, Generation]) -> Iterator[ServerClient]:
    """The next server on the same store, with its host pool in gdsstore's memory, which makes no difference to the pages."""
    storage = gdsstore_storage(folder, settings={"host_allocator": True})
    with throwaway_server(storage=storage, env=backend_environment()) as server:
        yield server


def test_the_host_pool_lies_where_it_was_asked_for(server: ServerClient) -> None:
    assert "host pool: " in server.log_path.read_text(errors="replace")


def check_answer(answer: Generation, first: Generation, storage_tokens: int) -> None:
    assert answer.storage_tokens == storage_tokens
    assert (answer.token_ids, answer.logprobs) == (first.token_ids, first.logprobs)


def test_a_new_server_finds_the_pages_of_the_last_one(
    server: ServerClient, folder: Path, first_answers: dict[int, Generation]
) -> None:
    for seed, first in first_answers.items():
        check_answer(server.generate(prompt(seed)), first, CACHED_TOKENS)
    status, found = tool("verify", folder)
    assert (status, found["clean"], found["damaged"]) == (0, True, [])
    assert found["pages_checked"] == len(first_answers) * CACHED_TOKENS // PAGE_SIZE
    check_no_call_failed(server)


def test_the_metrics_tell_what_was_read(server: ServerClient, first_answers: dict[int, Generation]) -> None:
    metrics = server.metrics()
    assert metrics["sglang:prefetched_tokens_total"] == len(first_answers) * CACHED_TOKENS
    assert metrics["sglang:prefetch_pgs_sum"] == len(first_answers) * CACHED_TOKENS // PAGE_SIZE
    assert metrics["sglang:prefetch_bandwidth_count"] == metrics["sglang:prefetch_pgs_count"] > 0


def test_damaged_pages_are_named_and_computed_again(
    server: ServerClient, folder: Path, first_answers: dict[int, Generation]
) -> None:
    harmed = page_keys(prompt(DAMAGED))[FIRST_DAMAGED_PAGE:]
    server.flush_cache()
    assert damage(folder, harmed) == len(harmed) == CACHED_TOKENS // PAGE_SIZE - FIRST_DAMAGED_PAGE
    status, found = tool("verify", folder)
    assert (status, found["clean"]) == (1, False)
    assert {(each["key"], each["kind"]) for each in found["damaged"]} == {(key, "payload") for key in harmed}

    answer = server.generate(prompt(DAMAGED))
    check_answer(answer, first_answers[DAMAGED], FIRST_DAMAGED_PAGE * PAGE_SIZE)
    assert answer.cached_tokens == answer.storage_tokens
    check_answer(server.generate(prompt(SOUND)), first_answers[SOUND], CACHED_TOKENS)


def test_the_pages_computed_again_take_their_place(
    server: ServerClient, folder: Path, first_answers: dict[int, Generation]
) -> None:
    server.flush_cache()
    check_answer(server.generate(prompt(DAMAGED)), first_answers[DAMAGED], CACHED_TOKENS)
    assert tool("verify", folder)[0] == 0
