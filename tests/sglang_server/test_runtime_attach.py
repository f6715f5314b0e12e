"""A store that is attached to a running server, detached, attached again and cleared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from server import Generation, ServerClient, ServerError, StorageOptions
from server_checks import CACHED_TOKENS, prompt

from tests.sglang_server.launch import gdsstore_storage
from tests.sglang_server.processes import holds, processes, settled_threads, users
from tests.sglang_server.stored import pages
from tests.sglang_server.workload import check_answer, check_no_call_failed

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def storage(folder: Path) -> StorageOptions:
    return gdsstore_storage(folder)


@pytest.fixture
def server(memory_server: ServerClient, storage: StorageOptions) -> Iterator[ServerClient]:
    """The running server with the store attached for one test. Nothing is in its memory tiers."""
    memory_server.flush_cache()
    memory_server.attach_storage(storage)
    yield memory_server
    memory_server.flush_cache()  # a detach is refused while a backup is under way
    memory_server.detach_storage()


def test_pages_are_found_again_after_a_detach(server: ServerClient, storage: StorageOptions) -> None:
    cold = server.generate(prompt(21))
    assert cold.cached_tokens == 0
    server.flush_cache()
    server.detach_storage()
    without = server.generate(prompt(21))
    assert without.cached_tokens == 0
    server.flush_cache()
    server.attach_storage(storage)
    stored = server.generate(prompt(21))
    assert (stored.storage_tokens, stored.cached_details["host"]) == (CACHED_TOKENS, 0)
    check_answer(without, cold)
    check_answer(stored, cold)


def test_a_detach_leaves_no_thread_and_no_open_file_behind(
    server: ServerClient, storage: StorageOptions, folder: Path
) -> None:
    used(server, folder, seed=22)  # SGLang, too, starts some of its threads at first use
    before = 0
    for seed in (23, 24):
        server.flush_cache()
        server.detach_storage()
        for process in processes(server):
            # The mapping of the heat file goes with the last reference to the store, whenever Python collects that.
            assert {Path(path).name.partition(".")[0] for path in holds(process, folder)} <= {"heat"}
        before = before or scheduler(server).num_threads()
        server.attach_storage(storage)
        assert scheduler(server).num_threads() > before
        used(server, folder, seed)
    server.flush_cache()
    server.detach_storage()
    assert settled_threads(scheduler(server), at_most=before) <= before
    server.attach_storage(storage)


def test_cleared_pages_miss_and_can_be_stored_again(server: ServerClient, folder: Path) -> None:
    cold = used(server, folder, seed=25)
    server.flush_cache()
    server.clear_storage()
    assert pages(folder) == 0
    for storage_tokens in (0, CACHED_TOKENS):
        again = server.generate(prompt(25))
        assert again.cached_tokens == again.storage_tokens == storage_tokens
        check_answer(again, cold)
        server.flush_cache()
    check_no_call_failed(server)


def test_a_configuration_that_cannot_work_is_refused_and_the_server_goes_on(
    memory_server: ServerClient, folder: Path
) -> None:
    memory_server.flush_cache()
    cold = memory_server.generate(prompt(26))
    memory_server.flush_cache()
    with pytest.raises(ServerError, match="did you mean 'capacity'"):
        memory_server.attach_storage(gdsstore_storage(folder, settings={"capacty": "1GiB"}))
    assert memory_server.storage_status()["hicache_storage_backend"] is None
    check_answer(memory_server.generate(prompt(26)), cold)


def used(server: ServerClient, folder: Path, seed: int) -> Generation:
    """The answer to a new prompt, after which the store has been written to and read from."""
    cold = server.generate(prompt(seed))
    server.flush_cache()
    stored = server.generate(prompt(seed))
    assert stored.storage_tokens == CACHED_TOKENS
    assert scheduler(server) in users(server, folder)
    return cold


def scheduler(server: ServerClient) -> psutil.Process:
    (found,) = [each for each in processes(server) if each.cmdline()[0].startswith("sglang::scheduler")]
    return found
