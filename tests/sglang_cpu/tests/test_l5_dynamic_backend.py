"""L5: a real server with a dynamic storage backend that is attached while it runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server import ServerClient, ServerError, StorageOptions, dynamic_storage, running_server
from server_checks import (
    CACHED_TOKENS,
    check_damaged_pages_are_computed_again,
    check_damaged_pages_change_the_answer,
    check_warm_equals_cold,
    cut_last_byte,
    pages_on_disk,
    prompt,
    store,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def storage(folder: Path) -> StorageOptions:
    return dynamic_storage("reference_backend", "ReferenceBackend", config={"directory": str(folder)})


@pytest.fixture(scope="module")
def running() -> Iterator[ServerClient]:
    with running_server(storage=StorageOptions()) as server:
        yield server


@pytest.fixture
def server(running: ServerClient, storage: StorageOptions) -> Iterator[ServerClient]:
    """The running server with the backend attached for one test."""
    running.attach_storage(storage)
    yield running
    # Detach is refused while a backup is under way; the flush waits for it.
    running.flush_cache()
    running.detach_storage()


def test_warm_equals_cold_and_the_tokens_count_as_storage_hits(server: ServerClient) -> None:
    stored = check_warm_equals_cold(server, seed=11)
    assert stored.storage_tokens == CACHED_TOKENS
    assert stored.cached_details["storage_backend"] == "ReferenceBackend"


def test_damaged_pages_change_the_answer(server: ServerClient, folder: Path) -> None:
    check_damaged_pages_change_the_answer(server, folder, seed=12)


def test_pages_of_a_wrong_size_are_computed_again(server: ServerClient, folder: Path) -> None:
    check_damaged_pages_are_computed_again(server, folder, seed=13, damage=cut_last_byte)


def test_pages_outlive_a_detach(server: ServerClient, storage: StorageOptions) -> None:
    cold = server.generate(prompt(14))
    server.flush_cache()
    server.detach_storage()
    assert server.storage_status()["hicache_storage_backend"] is None
    recomputed = server.generate(prompt(14))
    assert (recomputed.cached_tokens, recomputed.logprobs) == (0, cold.logprobs)
    server.flush_cache()
    server.attach_storage(storage)
    stored = server.generate(prompt(14))
    assert (stored.storage_tokens, stored.logprobs) == (CACHED_TOKENS, cold.logprobs)


def test_cleared_pages_are_gone(server: ServerClient, folder: Path) -> None:
    store(server, folder, seed=15)
    server.clear_storage()
    assert not pages_on_disk(folder)
    assert server.generate(prompt(15)).cached_tokens == 0


def test_a_second_backend_is_refused(server: ServerClient) -> None:
    with pytest.raises(ServerError, match="already enabled"):
        server.attach_storage(StorageOptions("file"))


def test_a_second_attach_keeps_the_first_configuration(
    server: ServerClient, folder: Path, tmp_path: Path
) -> None:
    """It answers success and shows the new directory, and changes nothing (trap 8)."""
    other = dynamic_storage(
        "reference_backend", "ReferenceBackend", config={"directory": str(tmp_path / "other")}
    )
    assert "already enabled" in server.attach_storage(other)
    assert str(tmp_path) in server.storage_status()["hicache_storage_backend_extra_config"]
    store(server, folder, seed=16)
    assert not (tmp_path / "other").exists()
