"""SGLang's factory makes the backend; a configuration that cannot work is refused at attach, and says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu_fixtures
import pytest
import torch
from cpu_fixtures import MHA, MLA, device_pool, host_pool, single_rank_context
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from gdsstore import ArgumentError, ConfigError
from sglang_backend import stores
from sglang_backend.options import LONGEST_CALL_S, SHORTEST_CALL_S
from sglang_backend.storage import GdsStoreHiCache
from tests.sglang_backend.backends import FilledPool, extra_config, saved
from tests.sglang_backend.conftest import Attach


def create(config: dict[str, Any], **facts: Any) -> Any:
    storage_config = cpu_fixtures.storage_config(**config)
    for name, value in facts.items():
        setattr(storage_config, name, value)
    return StorageBackendFactory.create_backend("dynamic", storage_config, None)


def test_the_factory_makes_it_from_the_servers_json(tmp_path: Path) -> None:
    text = json.dumps({**extra_config(tmp_path / "store"), "prefetch_threshold": 32})
    config, *_ = HybridCacheController.parse_storage_backend_extra_config(text)
    backend = create(config)
    assert isinstance(backend, GdsStoreHiCache)
    assert (tmp_path / "store" / "store.json").exists()
    backend.close()
    assert not stores._open


def test_what_sglang_leaves_in_the_configuration_is_no_error(tmp_path: Path) -> None:
    create(extra_config(tmp_path / "store", tp_lcm_size=8, file_storage_path="/x", allocator="shm")).close()


def test_a_list_of_directories_is_one_store_on_several_drives(tmp_path: Path) -> None:
    paths = [str(tmp_path / "first"), str(tmp_path / "second")]
    backend = create(extra_config(tmp_path, path=paths))
    assert [str(volume.path) for volume in backend._store.volumes] == paths
    backend.close()


def test_sglangs_failure_injector_works_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "1.0")
    backend = create(extra_config(tmp_path / "store"))
    assert isinstance(backend, HiCacheStorageFailureInjector)
    filled = FilledPool(MHA, "page_first")
    backend.register_mem_pool_host(filled.pool)
    assert backend.batch_exists(filled.keys) == 0
    backend.close()
    assert not stores._open


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"path": None}, r'"path": "/mnt/nvme0/kv"'),
        ({"path": ""}, "needs a directory"),
        ({"path": []}, "needs a directory"),
        ({"path": [""]}, "needs a directory"),
        ({"path": 3}, "needs a directory"),
        ({"pth": "/x"}, "'pth'.*did you mean 'path'"),
        ({"capcity": "1GiB"}, "'capcity'.*did you mean 'capacity'"),
        ({"prefetch_treshold": 64}, "'prefetch_treshold'.*did you mean 'prefetch_threshold'"),
        ({"interface_v_1": 1}, "'interface_v_1'.*did you mean 'interface_v1'"),
        ({"directory_for_the_pages": "/x"}, "'directory_for_the_pages'"),
        ({"call_limit_s": LONGEST_CALL_S + 1}, f"call_limit_s.*{LONGEST_CALL_S}"),
        ({"call_limit_s": 0}, "call_limit_s"),
        ({"call_limit_s": "5"}, "call_limit_s"),
        ({"call_limit_s": True}, "call_limit_s"),
        ({"call_limit_s": float("nan")}, "call_limit_s"),
        ({"call_limit_s": 2, "io_deadline_s": 3}, "io_deadline_s=3.*call_limit_s=2"),
        ({"weights": 5}, "weights must be a string"),
        ({"capacity": "lots"}, "capacity"),
        ({"engine": "magic"}, "engine"),
        ({"capacity": "1MiB"}, "capacity"),
    ],
)
def test_a_bad_setting_is_refused_and_named(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        create(extra_config(tmp_path / "store", **settings))
    assert not (tmp_path / "store").exists()
    assert not stores._open


def test_the_shortest_call_limit_that_is_allowed_works(tmp_path: Path) -> None:
    create(extra_config(tmp_path / "store", call_limit_s=SHORTEST_CALL_S)).close()


def test_no_configuration_at_all_is_refused() -> None:
    config = cpu_fixtures.storage_config()
    config.extra_config = None
    with pytest.raises(ConfigError, match="needs a directory"):
        GdsStoreHiCache(config, {})


def test_a_directory_that_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(ArgumentError, match="is a file; give a directory"):
        create(extra_config(tmp_path / "store"))
    assert not stores._open


def test_weights_that_nothing_tells_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='"weights": "<revision or digest>"'):
        create(extra_config(tmp_path / "store", weights=None))
    with (
        single_rank_context(model_path=str(tmp_path / "no such model")),
        pytest.raises(ConfigError, match='"weights"'),
    ):
        create(extra_config(tmp_path / "store", weights=None))
    assert not (tmp_path / "store").exists()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with single_rank_context(model_path=str(model)), pytest.raises(ConfigError, match='"weights"'):
        create(extra_config(tmp_path / "store", weights=None))


def test_a_model_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="served-model-name"):
        create(extra_config(tmp_path / "store"), model_name=None)


def test_a_pool_that_is_not_known_is_refused(attach: Attach) -> None:
    kv, other = FilledPool(MHA, "page_first"), FilledPool(MLA, "page_first")
    with pytest.raises(ConfigError, match=r"'deepseek_v4_c4'.*without --hicache-storage-backend"):
        attach(kv, ("deepseek_v4_c4", other))


def test_a_set_without_the_kv_pool_is_refused(attach: Attach) -> None:
    backend = attach()
    backend.register_mem_host_pool_v2(FilledPool(MHA, "page_first").pool, "swa")
    with pytest.raises(ConfigError, match="no KV pool"):
        backend.on_host_pools_registered()


def test_calls_before_the_pools_are_registered_are_misses(attach: Attach) -> None:
    filled, backend = FilledPool(MHA, "page_first"), attach()
    assert backend.batch_exists(filled.keys) == 0
    assert backend.batch_get_v1(filled.keys, filled.indices()) == [False] * 8
    assert backend.batch_set_v1(filled.keys, filled.indices()) == [False] * 8


def test_a_pool_that_was_not_registered_is_a_miss(attach: Attach) -> None:
    filled = FilledPool(MHA, "page_first")
    backend = attach(filled)
    saved(backend, filled)
    transfer = filled.transfer("mamba")
    assert backend.batch_get_v2([transfer]) == {"mamba": [False] * 8}
    assert backend.batch_set_v2([transfer]) == {"mamba": [False] * 8}
    assert backend.batch_exists_v2(filled.keys, [transfer]).kv_hit_pages == 0


@pytest.mark.parametrize("size", [1, 2])
def test_a_draft_with_heads_beside_mla_is_refused_where_ranks_differ(size: int, attach: Attach) -> None:
    kv, draft = FilledPool(MLA, "page_first"), FilledPool(MHA, "page_first")
    facts = {"is_mla_model": True, "tp_size": size}
    if size == 1:
        attach(kv, ("draft", draft), facts=facts)
        return
    with pytest.raises(ConfigError, match="draft model with attention heads"):
        attach(kv, ("draft", draft), facts=facts)


def test_a_layout_without_pieces_is_refused(attach: Attach) -> None:
    pool = host_pool(device_pool(MHA), "page_first")
    pool.layout = "page_unified"  # its get_page_buffer_meta raises
    with pytest.raises(ArgumentError, match=r"page_unified.*try --hicache-mem-layout page_first"):
        attach(pool)


class OddPool(SimpleNamespace):
    """A pool of 4 pages whose pages lie at `starts`."""

    size, page_size, layout = 64, 16, "odd"

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        page = int(indices[0]) // self.page_size
        return [self.starts[page]], [self.lengths[page]]


@pytest.mark.parametrize(
    ("starts", "lengths", "said"),
    [
        ([0, 4096, 8192, 99999], [4096] * 4, "not evenly spaced"),
        ([0, 4096, 8192, 12288], [4096, 4096, 4096, 512], "not evenly spaced"),
        ([0, 4096, 8192, 12288], [0] * 4, "hold no bytes"),
    ],
)
def test_memory_that_does_not_follow_the_rule_is_refused(
    starts: list[int], lengths: list[int], said: str, attach: Attach
) -> None:
    with pytest.raises(ArgumentError, match=said):
        attach(OddPool(starts=starts, lengths=lengths))
