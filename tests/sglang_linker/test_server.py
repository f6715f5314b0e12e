"""Real servers with the linker: pages outlive a flush and the server, a damaged one costs one request, and none
outlives an update of the weights. In this order."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from server import PAGE_SIZE, Generation, LinkerOptions, ServerClient, ServerError, running_server
from server_checks import CACHED_TOKENS, check_warm_equals_cold, prompt
from tiny_model import write_tiny_model

from tests.sglang_server.launch import CAPACITY, SEGMENT_BYTES, backend_environment
from tests.sglang_server.processes import throwaway_server
from tests.sglang_server.stored import damage, page_keys, pages, tool

pytestmark = pytest.mark.slow

SOUND, DAMAGED = 1, 2  # seeds of prompts
FIRST_DAMAGED_PAGE = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv") / "store"


@pytest.fixture(scope="module")
def linker(folder: Path) -> LinkerOptions:
    settings = {"path": str(folder), "capacity": CAPACITY, "segment_bytes": SEGMENT_BYTES}
    return LinkerOptions("sglang_backend.linker", "GdsStoreLinker", settings)


@pytest.fixture(scope="module")
def first_answers(linker: LinkerOptions) -> dict[int, Generation]:
    """Both prompts: computed, from the device, and after a flush from the store, by a server that has been stopped since."""
    with running_server(linker=linker, env=backend_environment()) as server:
        return {seed: check_warm_equals_cold(server, seed) for seed in (SOUND, DAMAGED)}


@pytest.fixture(scope="module")
def server(linker: LinkerOptions, first_answers: dict[int, Generation]) -> Iterator[ServerClient]:
    """The next server on the same store."""
    with throwaway_server(linker=linker, env=backend_environment()) as server:
        yield server


def check_answer(answer: Generation, first: Generation, cached_tokens: int) -> None:
    assert (answer.token_ids, answer.logprobs) == (first.token_ids, first.logprobs)
    assert answer.cached_tokens == cached_tokens


def test_a_new_server_finds_the_pages_of_the_last_one(
    server: ServerClient, folder: Path, first_answers: dict[int, Generation]
) -> None:
    for seed, first in first_answers.items():
        check_answer(server.generate(prompt(seed)), first, CACHED_TOKENS)
    status, found = tool("verify", folder)
    assert (status, found["clean"], found["damaged"]) == (0, True, [])


def test_a_damaged_page_fails_one_request_and_the_retry_is_right(
    server: ServerClient, folder: Path, first_answers: dict[int, Generation]
) -> None:
    harmed = page_keys(prompt(DAMAGED))[FIRST_DAMAGED_PAGE:]
    server.flush_cache()
    assert damage(folder, harmed) == len(harmed)
    with pytest.raises(ServerError, match="External KV cache load failed") as failure:
        server.generate(prompt(DAMAGED))
    assert failure.value.status == HTTPStatus.SERVICE_UNAVAILABLE

    check_answer(server.generate(prompt(DAMAGED)), first_answers[DAMAGED], FIRST_DAMAGED_PAGE * PAGE_SIZE)
    check_answer(server.generate(prompt(SOUND)), first_answers[SOUND], CACHED_TOKENS)


def test_the_pages_computed_again_take_their_place(
    server: ServerClient, folder: Path, first_answers: dict[int, Generation]
) -> None:
    server.flush_cache()
    check_answer(server.generate(prompt(DAMAGED)), first_answers[DAMAGED], CACHED_TOKENS)
    assert tool("verify", folder)[0] == 0


def test_pages_of_weights_that_were_updated_are_computed_again_and_left_as_they_are(
    server: ServerClient, folder: Path, tmp_path: Path, first_answers: dict[int, Generation]
) -> None:
    before = pages(folder)
    server.update_weights(write_tiny_model(tmp_path / "model", seed=1))
    cold = server.generate(prompt(SOUND))
    assert cold.cached_tokens == 0
    assert cold.logprobs != first_answers[SOUND].logprobs
    server.flush_cache()
    check_answer(server.generate(prompt(SOUND)), cold, 0)
    assert pages(folder) == before
