"""L1: SGLang's storage factory builds a backend and the base classes behave as documented."""

import importlib.metadata
from pathlib import Path

import pytest
import torch
from cpu_fixtures import storage_config
from harness_env import SGLANG_VERSION
from reference_backend import ReferenceBackend
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageFailureInjector,
    PoolName,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

KEY = "ab" * 32


def test_the_contracts_describe_the_installed_sglang() -> None:
    assert importlib.metadata.version("sglang") == SGLANG_VERSION


def test_a_dynamic_backend_gets_the_config_and_the_rest_of_extra_config(tmp_path: Path) -> None:
    config = storage_config(
        backend_name="reference",
        module_path="reference_backend",
        class_name="ReferenceBackend",
        directory=str(tmp_path),
    )
    backend = StorageBackendFactory.create_backend("dynamic", config, None)
    assert isinstance(backend, ReferenceBackend)
    assert backend.config is config
    assert config.extra_config is not None
    assert config.extra_config["class_name"] == "ReferenceBackend"


@pytest.mark.parametrize("missing", ["backend_name", "module_path", "class_name"])
def test_a_dynamic_backend_needs_its_three_names(missing: str) -> None:
    names = {"backend_name": "x", "module_path": "reference_backend", "class_name": "ReferenceBackend"}
    del names[missing]
    with pytest.raises(ValueError, match=missing):
        StorageBackendFactory.create_backend("dynamic", storage_config(**names), None)


def test_the_controller_takes_four_options_out_of_extra_config() -> None:
    parsed = HybridCacheController.parse_storage_backend_extra_config(
        '{"prefetch_threshold": 32, "prefetch_timeout_base": 2,'
        ' "prefetch_timeout_per_ki_token": 0.5, "hicache_storage_pass_prefix_keys": true,'
        ' "mine": 1}'
    )
    assert parsed == ({"mine": 1}, 32, 2.0, 0.5, True)


def test_extra_config_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "storage.toml"
    path.write_text("prefetch_threshold = 64\nmine = 'x'\n")
    extra_config, threshold, *_ = HybridCacheController.parse_storage_backend_extra_config(f"@{path}")
    assert (extra_config, threshold) == ({"mine": "x"}, 64)


def test_the_file_backend_stores_and_returns_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    backend = StorageBackendFactory.create_backend("file", storage_config(), None)
    assert isinstance(backend, HiCacheFile)
    page = torch.randn(64, dtype=torch.bfloat16)
    assert backend.set(KEY, page)
    assert torch.equal(backend.get(KEY, torch.empty_like(page)), page)
    assert backend.batch_exists([KEY, "absent"]) == 1
    result = backend.batch_exists_v2([KEY, "absent"])
    assert result.kv_hit_pages == 1
    assert result.extra_pool_hit_pages == {PoolName.KV: 1}
    assert result.restorable_prefix_pages == [1]


def test_the_file_backend_ignores_a_second_write_of_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    backend = StorageBackendFactory.create_backend("file", storage_config(), None)
    first, second = torch.zeros(8), torch.ones(8)
    assert backend.set(KEY, first)
    assert backend.set(KEY, second)
    assert torch.equal(backend.get(KEY, torch.empty(8)), first)


def test_the_failure_injector_wraps_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "1.0")
    backend = StorageBackendFactory.create_backend("file", storage_config(), None)
    assert isinstance(backend, HiCacheStorageFailureInjector)
    assert not backend.set(KEY, torch.zeros(8))
    assert backend.batch_exists([KEY]) == 0


def test_page_keys_are_a_chain_of_sha256() -> None:
    page_size = 4
    keys = get_storage_hash_str(RadixKey(list(range(12))), None, page_size=page_size)
    assert [len(key) for key in keys] == [64, 64, 64]
    again = get_storage_hash_str(RadixKey(list(range(4, 12))), keys[0], page_size=page_size)
    assert again == keys[1:]
    assert get_storage_hash_str(RadixKey(list(range(4, 12))), None, page_size=4) != keys[1:]


@pytest.mark.parametrize("namespace", [{"extra_key": "lora"}, {"cache_salt": "tenant"}])
def test_page_keys_contain_the_namespace(namespace: dict[str, str]) -> None:
    tokens = list(range(4))
    plain = get_storage_hash_str(RadixKey(tokens), None, page_size=4)
    assert get_storage_hash_str(RadixKey(tokens, **namespace), None, page_size=4) != plain
