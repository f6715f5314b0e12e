"""Tensor parallelism: two ranks on one store, each with other heads, or with the same latent vectors (MLA)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from server import PAGE_SIZE, ServerClient
from server_checks import CACHED_TOKENS, check_warm_equals_cold, prompt

from tests.sglang_server.launch import backend_environment, gdsstore_storage
from tests.sglang_server.mla_model import write_mla_model
from tests.sglang_server.processes import throwaway_server
from tests.sglang_server.stored import damage, namespaces, page_keys, tool
from tests.sglang_server.workload import check_no_call_failed

pytestmark = pytest.mark.slow

PAGES = CACHED_TOKENS // PAGE_SIZE
TWO_RANKS = ("--tp-size", "2")


def cores() -> dict[str, str]:
    """One for each rank: SGLang takes no more ranks than NUMA nodes unless told which cores are whose."""
    ours = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{ours[0]}|{ours[-1]}"}


def loaded_tokens(server: ServerClient) -> dict[str, list[int]]:
    """What each rank's prefetches loaded from the store, from the server's log."""
    log = server.log_path.read_text(errors="replace")
    found: dict[str, list[int]] = {"TP0": [], "TP1": []}
    for rank, tokens in re.findall(r" (TP\d)\] HiCache prefetch success .* loaded=(\d+)", log):
        found[rank].append(int(tokens))
    return found


def ranks(found: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Of each namespace: rank, ranks and pages."""
    return sorted(
        (
            each["describes"]["parallelism"]["tp_rank"],
            each["describes"]["parallelism"]["tp_size"],
            each["pages"],
        )
        for each in found
    )


def test_each_rank_finds_its_own_pages(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with throwaway_server(
        storage=gdsstore_storage(folder), env=backend_environment(**cores()), extra_args=TWO_RANKS
    ) as server:
        stored = check_warm_equals_cold(server, seed=61)
        assert stored.storage_tokens == CACHED_TOKENS
        check_no_call_failed(server)
        assert loaded_tokens(server) == {"TP0": [CACHED_TOKENS], "TP1": [CACHED_TOKENS]}
        # The same keys twice, in a namespace of each rank: none can take the other's.
        assert ranks(namespaces(folder)) == [(0, 2, PAGES), (1, 2, PAGES)]

        server.flush_cache()
        keys = page_keys(prompt(61))[10:]
        assert damage(folder, keys) == 2 * len(keys)
        status, found = tool("verify", folder)
        assert (status, len(found["damaged"])) == (1, 2 * len(keys))
        again = server.generate(prompt(61))
        assert again.storage_tokens == 10 * PAGE_SIZE
        assert (again.token_ids, again.logprobs) == (stored.token_ids, stored.logprobs)


def test_ranks_of_an_mla_model_share_one_copy(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    model = write_mla_model(tmp_path / "model")
    with throwaway_server(
        storage=gdsstore_storage(folder),
        env=backend_environment(plugins=True, **cores()),
        extra_args=(*TWO_RANKS, "--model-path", str(model)),
    ) as server:
        stored = check_warm_equals_cold(server, seed=62)
        assert stored.storage_tokens == CACHED_TOKENS
        check_no_call_failed(server)
        assert loaded_tokens(server) == {"TP0": [CACHED_TOKENS], "TP1": [CACHED_TOKENS]}
        assert ranks(namespaces(folder)) == [(0, 1, PAGES)]
        assert "MLATokenToKVPoolHost" in str(namespaces(folder))

        server.flush_cache()
        keys = page_keys(prompt(62))[10:]
        assert damage(folder, keys) == len(keys)
        again = server.generate(prompt(62))
        assert again.storage_tokens == 10 * PAGE_SIZE
        assert (again.token_ids, again.logprobs) == (stored.token_ids, stored.logprobs)
