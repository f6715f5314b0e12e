"""Tensor parallelism in real servers with the linker: each rank its own pages, or one copy for all (MLA)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from server import PAGE_SIZE, LinkerOptions, ServerError
from server_checks import CACHED_TOKENS, check_warm_equals_cold, prompt

from tests.sglang_server.launch import CAPACITY, SEGMENT_BYTES, backend_environment
from tests.sglang_server.mla_model import write_mla_model
from tests.sglang_server.processes import throwaway_server
from tests.sglang_server.stored import damage, namespaces, page_keys
from tests.sglang_server.test_two_ranks import PAGES, TWO_RANKS, cores

pytestmark = pytest.mark.slow


def linker(folder: Path) -> LinkerOptions:
    settings = {"path": str(folder), "capacity": CAPACITY, "segment_bytes": SEGMENT_BYTES}
    return LinkerOptions("sglang_backend.linker", "GdsStoreLinker", settings)


def rank_and_pages(folder: Path) -> list[tuple[int | None, int]]:
    """Of each namespace: whose pages it holds, None for everybody's, and how many."""
    return sorted(
        (each["describes"]["parallelism"].get("tp_rank"), each["pages"]) for each in namespaces(folder)
    )


def check(
    folder: Path, stored: Sequence[tuple[int | None, int]], extra_args: Sequence[str], plugins: bool
) -> None:
    env = backend_environment(plugins=plugins, **cores())
    with throwaway_server(linker=linker(folder), env=env, extra_args=(*TWO_RANKS, *extra_args)) as server:
        first = check_warm_equals_cold(server, seed=61)
        assert rank_and_pages(folder) == list(stored)

        server.flush_cache()
        assert damage(folder, page_keys(prompt(61))[10:]) == len(stored) * (PAGES - 10)
        with pytest.raises(ServerError, match="External KV cache load failed"):
            server.generate(prompt(61))
        again = server.generate(prompt(61))
        assert again.cached_tokens == 10 * PAGE_SIZE
        assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
        server.flush_cache()
        whole = server.generate(prompt(61))
        assert whole.cached_tokens == CACHED_TOKENS
        assert (whole.token_ids, whole.logprobs) == (first.token_ids, first.logprobs)


def test_each_rank_finds_its_own_pages(tmp_path: Path) -> None:
    check(tmp_path / "store", [(0, PAGES), (1, PAGES)], (), plugins=False)


def test_ranks_of_an_mla_model_share_one_copy(tmp_path: Path) -> None:
    model = write_mla_model(tmp_path / "model")
    check(tmp_path / "store", [(None, PAGES)], ("--model-path", str(model)), plugins=True)
