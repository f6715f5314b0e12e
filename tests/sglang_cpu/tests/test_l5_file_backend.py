"""L5: a real server with SGLang's own file backend, which keeps one ``.bin`` file a page."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server import (
    PAGE_SIZE,
    ServerClient,
    ServerStartError,
    StorageOptions,
    dynamic_storage,
    running_server,
)
from server_checks import (
    CACHED_TOKENS,
    check_damaged_pages_change_the_answer,
    check_warm_equals_cold,
    prompt,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerClient]:
    config = {"file_storage_path": str(folder), "prefetch_threshold": PAGE_SIZE}
    with running_server(storage=StorageOptions("file", config)) as server:
        yield server


def test_warm_equals_cold_and_the_tokens_count_as_storage_hits(server: ServerClient) -> None:
    stored = check_warm_equals_cold(server, seed=1)
    assert stored.storage_tokens == CACHED_TOKENS
    assert stored.cached_details["host"] == 0
    assert stored.cached_details["storage_backend"] == "HiCacheFile"


def test_damaged_pages_change_the_answer(server: ServerClient, folder: Path) -> None:
    check_damaged_pages_change_the_answer(server, folder, seed=2)


def test_metrics_count_backed_up_and_prefetched_tokens(server: ServerClient) -> None:
    before = server.metrics()
    server.generate(prompt(3))
    server.flush_cache()
    server.generate(prompt(3))
    after = server.metrics()
    for name in ("sglang:backuped_tokens_total", "sglang:prefetched_tokens_total"):
        assert after[name] - before.get(name, 0.0) == CACHED_TOKENS


def test_a_text_prompt_is_answered(server: ServerClient) -> None:
    answer = server.generate("pages of sixteen tokens", max_new_tokens=3, logprobs=False)
    assert len(answer.token_ids) == 3
    assert answer.logprobs == ()


def test_a_server_that_cannot_start_raises_and_shows_its_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    storage = dynamic_storage("no_such_module", "NoSuchClass")
    with pytest.raises(ServerStartError, match="exited"), running_server(storage=storage):
        pytest.fail("the server must not become ready")
    assert "no_such_module" in capsys.readouterr().err
