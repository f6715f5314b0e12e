"""Settings of the server and files beside the model that change what a page holds are in its identity; others are not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu_fixtures import single_rank_context
from sglang.srt.arg_groups.lora_hook import LoRARef

from gdsstore import ConfigError
from sglang_backend.server import server_args
from sglang_backend.server_facts import facts_of

SAID_IN = "the extra config"


def facts(**given: Any) -> Any:
    return facts_of(SimpleNamespace(**given), SAID_IN)


def adapter(folder: Path, weights: bytes = b"weights", alpha: int = 16) -> Any:
    """As SGLang records one of `--lora-paths`."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return LoRARef(
        lora_id=LoRARef.deterministic_id("a", str(folder)), lora_name="a", lora_path=str(folder), pinned=False
    )


@pytest.mark.parametrize(
    "setting",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"enable_deterministic_inference": True},
        {"rl_on_policy_target": "fsdp"},
        {"modelopt_quant": "fp8"},
        {"quantize_and_serve": True},
        {"rl_quant_profile": "/profile"},
        {"model_loader_extra_config": '{"load_in_8bit": true}'},
        {"custom_weight_loader": ["pkg.loader"]},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_that_changes_bytes_counts(setting: dict[str, Any]) -> None:
    assert facts(**setting) != facts()


def test_settings_that_are_left_alone_do_not() -> None:
    """They were not always known here, and the pages of a store outlive an update of gdsstore."""
    with single_rank_context():
        names = {name for name, _ in facts_of(server_args(), SAID_IN)}
    assert names <= {
        "server_kv_cache_dtype",
        "server_dtype",
        "server_load_format",
        "server_json_model_override_args",
    }


@pytest.mark.parametrize("setting", ["quantization_param_path", "decrypted_config_file"])
def test_a_file_that_is_written_anew_under_its_name_is_another(setting: str, tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    file.write_text("1.0")
    before = facts(**{setting: str(file)})
    assert facts(**{setting: str(file)}) == before
    file.write_text("2.0")
    assert facts(**{setting: str(file)}) != before


def test_an_adapter_trained_anew_in_its_place_is_another(tmp_path: Path) -> None:
    """SGLang's keys tell adapters of --lora-paths by name and path."""
    first = adapter(tmp_path / "a")
    before = facts(lora_paths=[first])
    assert facts(lora_paths=[adapter(tmp_path / "a")]) == before != facts(lora_paths=[])
    again = adapter(tmp_path / "a", weights=b"WEIGHTS")
    assert again.lora_id == first.lora_id
    assert facts(lora_paths=[again]) != before
    assert facts(lora_paths=[adapter(tmp_path / "a", alpha=32)]) != before


def test_the_servers_own_record_of_adapters_is_understood(tmp_path: Path) -> None:
    refs = [adapter(tmp_path / "b"), adapter(tmp_path / "a")]
    with single_rank_context(lora_paths=refs):
        assert facts_of(server_args(), SAID_IN)[-1] == facts(lora_paths=refs[::-1])[-1]


@pytest.mark.parametrize("path", ["", "/nowhere/adapter", "folder"])
def test_an_adapter_that_cannot_be_identified_is_refused(path: str, tmp_path: Path) -> None:
    where = str(tmp_path) if path == "folder" else path
    with pytest.raises(ConfigError, match=r"LoRA adapter 'a'.*--lora-paths"):
        facts(lora_paths=[{"lora_name": "a", "lora_path": where}])
