"""Pages are shared by those whose bytes are the same, and by nobody else."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import cpu_fixtures
import pytest
import torch
from cpu_fixtures import MHA, MLA, single_rank_context

from tests.sglang_backend.backends import FilledPool, saved
from tests.sglang_backend.conftest import Attach

PAGES = 8
MLA_MODEL = {"is_mla_model": True}


def attached(
    attach: Attach,
    kind: str = MHA,
    layout: str = "page_first",
    facts: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    fixture: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Any, FilledPool]:
    """A backend of a server that differs as said. `fixture`: sizes of its pools; `pool`: attributes of the host pool."""
    with pytest.MonkeyPatch.context() as patch, single_rank_context(**(server or {})):
        for name, value in (fixture or {}).items():
            patch.setattr(cpu_fixtures, name, value)
        filled = FilledPool(kind, layout, PAGES)
        for name, value in (pool or {}).items():
            setattr(filled.pool, name, value)
        return attach(filled, facts=facts, **settings), filled


MHA_DIFFERENCES: dict[str, dict[str, Any]] = {
    "weights": {"weights": "other"},
    "model name": {"facts": {"model_name": "other/model"}},
    "page size": {"fixture": {"PAGE_SIZE": 32}},
    "dtype": {"fixture": {"DTYPE": torch.float16}},
    "number of heads": {"fixture": {"HEADS": 4}},
    "heads for head dim": {"fixture": {"HEADS": 4, "HEAD_DIM": 8}},
    "layers for head dim": {"fixture": {"LAYERS": 6, "HEAD_DIM": 8}},
    "kv dtype": {"server": {"kv_cache_dtype": "fp8_e5m2"}},
    "quantization": {"server": {"quantization": "fp8"}},
    "tp rank": {"facts": {"tp_rank": 1, "tp_size": 2}},
    "tp size": {"facts": {"tp_size": 2}},
    "pp rank": {"facts": {"pp_rank": 1, "pp_size": 2}},
    "cp rank": {"facts": {"attn_cp_rank": 1, "attn_cp_size": 2}},
    "weights that are made up": {"server": {"load_format": "dummy"}},
    "rope scaling": {"server": {"json_model_override_args": '{"rope_scaling": {"factor": 4}}'}},
    "draft model": {"server": {"speculative_draft_model_path": "/draft"}},
    "layers of the model": {"pool": {"start_layer": 3, "end_layer": 6}},
    "layout": {"layout": "page_first_direct"},
    "another layout": {"layout": "page_head"},
    "layer first": {"layout": "layer_first"},
    "kind": {"kind": MLA},
}
MLA_DIFFERENCES: dict[str, dict[str, Any]] = {
    "latent for rope": {"fixture": {"LATENT_RANK": 16, "ROPE_DIM": 16}},
    "pp rank": {"facts": {"pp_rank": 1, "pp_size": 2, **MLA_MODEL}},
    "cp rank": {"facts": {"attn_cp_rank": 1, "attn_cp_size": 2, **MLA_MODEL}},
    "dcp rank": {
        "facts": {
            "dcp_rank": 1,
            "dcp_size": 2,
            "tp_rank": 1,
            "tp_size": 2,
            "logical_page_size": 32,
            **MLA_MODEL,
        }
    },
    "layout": {"layout": "page_first_direct"},
}


def finds_what_the_first_stored(attach: Attach, first: dict[str, Any], second: dict[str, Any]) -> bool:
    backend, filled = attached(attach, **first)
    saved(backend, filled)
    backend.close()
    other, mine = attached(attach, **second)
    found = other.batch_exists(filled.keys)
    loaded = other.batch_get_v1(filled.keys, mine.indices())
    assert loaded == [found == PAGES] * PAGES
    if loaded[0]:
        assert all(map(torch.equal, mine.pages(), filled.truth))
    again, same = attached(attach, **first)
    assert again.batch_get_v1(filled.keys, same.indices()) == [True] * PAGES
    assert all(map(torch.equal, same.pages(), filled.truth))
    return bool(found == PAGES)


@pytest.mark.parametrize("difference", MHA_DIFFERENCES)
def test_servers_whose_bytes_differ_share_nothing(difference: str, attach: Attach) -> None:
    assert not finds_what_the_first_stored(attach, {}, MHA_DIFFERENCES[difference])


@pytest.mark.parametrize("difference", MLA_DIFFERENCES)
def test_mla_servers_whose_bytes_differ_share_nothing(difference: str, attach: Attach) -> None:
    first = {"kind": MLA, "facts": MLA_MODEL}
    assert not finds_what_the_first_stored(attach, first, {**first, **MLA_DIFFERENCES[difference]})


def test_fp8_formats_of_one_width_share_nothing(attach: Attach) -> None:
    """Their host pools look the same: both hold bytes."""
    formats = [{"server": {"kv_cache_dtype": name}} for name in ("fp8_e4m3", "fp8_e5m2")]
    for first, second in (formats, formats[::-1]):
        assert not finds_what_the_first_stored(attach, first, second)


def test_the_same_server_finds_its_pages_again(attach: Attach) -> None:
    assert finds_what_the_first_stored(attach, {}, {})


def test_groups_of_data_parallel_attention_share_pages(attach: Attach) -> None:
    assert finds_what_the_first_stored(attach, {}, {"facts": {"dp_rank": 1}})


def test_tensor_parallel_ranks_of_mla_share_kv_pages(attach: Attach) -> None:
    ranks = [{"kind": MLA, "facts": {"tp_rank": rank, "tp_size": 2, **MLA_MODEL}} for rank in (0, 1)]
    assert finds_what_the_first_stored(attach, *ranks)


def test_mla_shares_kv_pages_though_the_number_of_ranks_differs(attach: Attach) -> None:
    sizes = [{"kind": MLA, "facts": {"tp_size": size, **MLA_MODEL}} for size in (2, 8)]
    assert finds_what_the_first_stored(attach, *sizes)


def test_mamba_beside_mla_is_of_one_rank(attach: Attach) -> None:
    kv, states = FilledPool(MLA, "page_first"), FilledPool(MHA, "page_first")
    first, second = (
        attach(kv, ("mamba", states), facts={"tp_rank": rank, "tp_size": 2, **MLA_MODEL}) for rank in (0, 1)
    )
    transfer = states.transfer("mamba")
    assert first.batch_set_v2([transfer]) == {"mamba": [True] * PAGES}
    assert first.batch_get_v2([transfer]) == {"mamba": [True] * PAGES}
    assert second.batch_get_v2([transfer]) == {"mamba": [False] * PAGES}


def test_pools_of_one_model_share_nothing_though_they_look_alike(attach: Attach) -> None:
    kv, swa, other = (FilledPool(MHA, "page_first") for _ in range(3))
    backend = attach(kv, ("swa", swa), ("draft", other))
    swa.keys = other.keys = kv.keys  # as SGLang does: all pools have the same key for the same page
    assert backend.batch_set_v2([swa.transfer("swa")]) == {"swa": [True] * PAGES}
    assert backend.batch_get_v2([other.transfer("draft")]) == {"draft": [False] * PAGES}
    assert backend.batch_get_v1(kv.keys, kv.indices()) == [False] * PAGES
    assert backend.batch_set_v1(kv.keys, kv.indices()) == [True] * PAGES
    for pool in (kv, swa):
        pool.wipe()
    assert backend.batch_get_v2([swa.transfer("swa")]) == {"swa": [True] * PAGES}
    assert backend.batch_get_v1(kv.keys, kv.indices()) == [True] * PAGES
    assert all(kv.holds_truth())
    assert all(swa.holds_truth())


def test_the_files_of_the_weights_are_in_the_identity(attach: Attach, tmp_path: Path) -> None:
    servers = []
    for name in ("first", "second"):
        model = tmp_path / name
        model.mkdir()
        (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + name.encode() * 1000)
        servers.append({"server": {"model_path": str(model)}, "weights": None})
    assert not finds_what_the_first_stored(attach, *servers)
    assert finds_what_the_first_stored(attach, servers[0], servers[0])


def test_two_backends_in_one_process_share_a_store_and_the_one_that_stays_works(attach: Attach) -> None:
    first, filled = attached(attach)
    second, mine = attached(attach)
    assert first._store is second._store
    saved(first, filled)
    assert second.batch_get_v1(filled.keys, mine.indices()) == [True] * PAGES
    first.close()
    first.close()
    assert first.batch_exists(filled.keys) == 0
    assert second.batch_exists(filled.keys) == PAGES
    assert second.batch_get_v1(filled.keys, mine.indices()) == [True] * PAGES
    assert all(map(torch.equal, mine.pages(), filled.truth))
    assert second.batch_set_v1(mine.keys, mine.indices()) == [True] * PAGES


def test_one_directory_under_two_names_is_one_store(attach: Attach, tmp_path: Path) -> None:
    first, filled = attached(attach)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    second, mine = attached(attach, path=str(tmp_path / "link"))
    saved(first, filled)
    assert second.batch_get_v1(filled.keys, mine.indices()) == [True] * PAGES
