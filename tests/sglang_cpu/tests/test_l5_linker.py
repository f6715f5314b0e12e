"""L5: a real server with a dynamic linker, straight between the device pool and files."""

from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from server import LinkerOptions, ServerClient, ServerError, running_server
from server_checks import (
    check_damaged_pages_change_the_answer,
    check_warm_equals_cold,
    cut_last_byte,
    prompt,
    store,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerClient]:
    linker = LinkerOptions("reference_linker", "ReferenceLinker", {"directory": str(folder)})
    with running_server(linker=linker) as server:
        yield server


def test_warm_equals_cold(server: ServerClient) -> None:
    check_warm_equals_cold(server, seed=21)


def test_damaged_pages_change_the_answer(server: ServerClient, folder: Path) -> None:
    check_damaged_pages_change_the_answer(server, folder, seed=22)


def test_a_failed_load_is_an_error_every_time_and_the_server_lives_on(
    server: ServerClient, folder: Path
) -> None:
    _, written = store(server, folder, seed=23)
    for path in written:
        cut_last_byte(path)
    for _ in range(2):
        with pytest.raises(ServerError, match="External KV cache load failed") as failure:
            server.generate(prompt(23))
        assert failure.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    check_warm_equals_cold(server, seed=24)
