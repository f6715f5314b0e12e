"""The config: later sources win, and nothing wrong is let in or guessed."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.config import (
    SETTINGS,
    AutoOff,
    Config,
    CostSetting,
    Durability,
    EngineName,
    GpuEngineName,
    PathSetting,
    WritePolicy,
)
from gdsstore.errors import ConfigError
from gdsstore.sealing.secret import Secret
from gdsstore.sizes import GiB, KiB, MiB


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_what_the_settings_promise() -> None:
    config = Config.load(env={})
    assert config == Config()
    assert (config.capacity, config.verify, config.durability) == (None, True, Durability.INTERVAL)
    assert (config.chunk_bytes, config.in_flight_ranges) == (32 * MiB, 128)


def test_a_later_source_wins(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "workers = 1\nposix_threads = 1\nmax_open_files = 16\n")
    env = {"GDSSTORE_POSIX_THREADS": "2", "GDSSTORE_MAX_OPEN_FILES": "17"}
    config = Config.load(file, env, max_open_files=18)
    assert (config.in_flight_ranges, config.workers, config.posix_threads, config.max_open_files) == (
        128,
        1,
        2,
        18,
    )


def test_the_file_that_the_environment_names_is_read_and_a_given_file_goes_before_it(tmp_path: Path) -> None:
    named, given = write(tmp_path / "a.toml", "workers = 1"), write(tmp_path / "b.toml", "posix_threads = 2")
    env = {"GDSSTORE_CONFIG": str(named)}
    assert Config.load(env=env).workers == 1
    assert (Config.load(given, env).workers, Config.load(given, env).posix_threads) == (6, 2)


def test_the_environment_of_the_process_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDSSTORE_WORKERS", "7")
    assert Config.load().workers == 7


def test_every_setting_can_be_set_from_the_environment() -> None:
    texts = {
        "capacity": ("4GiB", 4 * GiB), "segment_bytes": ("32MiB", 32 * MiB), "free_segments": ("0", 0),
        "catalog_map_bytes": ("1073741824", GiB), "grace_s": ("5", 5.0), "durability": ("commit", Durability.COMMIT),
        "sync_interval_s": ("0.25", 0.25), "verify": ("no", False), "io_deadline_s": ("1e1", 10.0),
        "engine": ("posix", EngineName.POSIX), "workers": ("2", 2), "chunk_bytes": ("1MiB", MiB),
        "in_flight_ranges": ("16", 16), "posix_threads": ("3", 3), "max_open_files": ("64", 64),
        "staging_bytes": ("64MiB", 64 * MiB), "zero_copy": ("FALSE", False), "huge_pages": ("off", AutoOff.OFF),
        "numa_node": ("1", 1), "pin_host": ("off", AutoOff.OFF), "maintain": ("0", False),
        "maintain_interval_s": ("2", 2.0), "path": ("direct", PathSetting.DIRECT), "strict": ("yes", True),
        "gpu_engine": ("kvikio", GpuEngineName.KVIKIO), "gpu_in_flight": ("8", 8), "gpu_staging_bytes": ("64MiB", 64 * MiB),
        "bounce_bytes": ("32MiB", 32 * MiB), "measure_s": ("0", 0.0),
        "offload_budget_s": ("4", 4.0), "volume_ops": ("99", 99),
        "drive_breaker": ("off", AutoOff.OFF), "host_cache": ("1GiB", GiB),
        "write_policy": ("write_back", WritePolicy.WRITE_BACK),
        "share_host_cache": ("on", True), "daemon": ("off", AutoOff.OFF),
        "cost_model": ("enforce", CostSetting.ENFORCE), "prefill_tokens_s": ("9000", 9000),
    }  # fmt: skip
    keys = {"encryption_key_file": ("/run/key", "/run/key"), "encryption_key": ("ab" * 32, Secret("ab" * 32))}
    assert {*texts, *keys} == set(SETTINGS)
    # A key excludes the other one, and some of the rest.
    for together in (texts, *({name: given} for name, given in keys.items())):
        config = Config.load(env={f"GDSSTORE_{name.upper()}": text for name, (text, _) in together.items()})
        for name, (_, value) in together.items():
            found = getattr(config, name)
            assert found == value, name
            assert type(found) is type(value), name


@pytest.mark.parametrize("written", ["capcity", "Capacity", "CAPACITY", "capacity_"])
def test_an_unknown_keyword_is_refused_with_the_nearest_name(written: str) -> None:
    unknown: dict[str, Any] = {written: 1}
    with pytest.raises(ConfigError, match=rf"unknown setting {written}; did you mean capacity\?"):
        Config.load(env={}, **unknown)


def test_an_unknown_keyword_is_refused_even_if_it_is_none() -> None:
    with pytest.raises(ConfigError, match="unknown setting capcity"):
        Config.load(env={}, capcity=None)


@pytest.mark.parametrize("variable", ["GDSSTORE_WORKER", "GDSSTORE_workers", "GDSSTORE_Workers"])
def test_an_unknown_variable_is_refused_with_the_nearest_one(variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown setting {variable}; did you mean GDSSTORE_WORKERS\?"):
        Config.load(env={variable: "1"})


def test_an_unknown_name_in_the_file_is_refused_with_the_nearest_one_and_the_path(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "durabilty = 'none'")
    with pytest.raises(ConfigError, match=r"did you mean durability\?.*a\.toml"):
        Config.load(file, {})


def test_a_name_like_no_other_is_refused_with_a_pointer_to_the_list() -> None:
    with pytest.raises(ConfigError, match=r"docs/settings\.md"):
        Config.load(env={}, zzz=1)


def test_variables_that_kubernetes_makes_for_a_service_are_left_alone() -> None:
    env = {
        "GDSSTORE_SERVICE_HOST": "10.0.0.1",
        "GDSSTORE_SERVICE_PORT": "80",
        "GDSSTORE_SERVICE_PORT_HTTP": "80",
        "GDSSTORE_PORT": "tcp://10.0.0.1:80",
        "GDSSTORE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "GDSSTORE_PORT_80_TCP_ADDR": "10.0.0.1",
        "GDSSTORE_METRICS_SERVICE_HOST": "10.0.0.2",
        "GDSSTORE_METRICS_PORT": "tcp://10.0.0.2:90",
    }
    assert Config.load(env=env) == Config()
    with pytest.raises(ConfigError, match="GDSSTORE_PORT"):
        Config.load(env={"GDSSTORE_PORT": "80"})


WRONG: list[tuple[str, Any]] = [
    ("capacity", "4G"), ("capacity", True), ("capacity", 1.5), ("capacity", 0), ("capacity", -1), ("capacity", MiB),
    ("segment_bytes", 3 * MiB), ("segment_bytes", 512 * KiB), ("chunk_bytes", 100_000), ("catalog_map_bytes", 4096),
    ("workers", 0), ("workers", 4.0), ("workers", "4"), ("workers", True), ("workers", 10**400),
    ("grace_s", -1), ("grace_s", float("nan")), ("io_deadline_s", float("inf")), ("io_deadline_s", 0),
    ("sync_interval_s", "1"), ("grace_s", 10**400), ("grace_s", True), ("verify", 1), ("verify", "true"),
    ("durability", "comit"), ("durability", True), ("engine", "NIXL"), ("engine", 0), ("huge_pages", "on"),
    ("numa_node", -2), ("workers", [1]), ("workers", {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_wherever_it_stands(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be .*source=keyword {name}"):
        Config.load(env={}, **{name: value})
    with pytest.raises(ConfigError, match=rf"^{name} must be "):
        Config(**{name: value})


@pytest.mark.parametrize(
    ("name", "text"),
    [("workers", ""), ("workers", "four"), ("workers", "4.0"), ("grace_s", "1s"), ("grace_s", "nan"), ("grace_s", "inf"),
     ("verify", "maybe"), ("verify", ""), ("capacity", ""), ("durability", "")],
)  # fmt: skip
def test_a_wrong_text_in_the_environment_is_refused_by_the_name_of_its_variable(name: str, text: str) -> None:
    variable = f"GDSSTORE_{name.upper()}"
    with pytest.raises(ConfigError, match=rf"^{variable} must be .*environment variable {variable}"):
        Config.load(env={variable: text})


def test_a_wrong_value_is_refused_even_where_a_later_source_would_win() -> None:
    with pytest.raises(ConfigError, match="GDSSTORE_WORKERS"):
        Config.load(env={"GDSSTORE_WORKERS": "0"}, workers=2)


@pytest.mark.parametrize("content", [b"workers = ", b"workers = 1\nworkers = 2", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"not TOML.*a\.toml"):
        Config.load(file, {})


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(env={"GDSSTORE_CONFIG": str(tmp_path / name)})


def test_values_that_do_not_fit_together_are_refused_with_where_each_came_from() -> None:
    with pytest.raises(ConfigError, match=r"staging_bytes=1MiB \(environment.*chunk_bytes=2MiB \(keyword"):
        Config.load(env={"GDSSTORE_STAGING_BYTES": "1MiB"}, chunk_bytes="2MiB")
    with pytest.raises(ConfigError, match="staging_bytes"):
        Config(chunk_bytes=2 * MiB, staging_bytes=MiB)


def test_a_capacity_without_room_for_its_segments_is_refused() -> None:
    Config(capacity=64 * MiB, segment_bytes=32 * MiB)
    with pytest.raises(ConfigError, match="96MiB or more"):
        Config(capacity=64 * MiB, segment_bytes=32 * MiB, free_segments=2)


@pytest.mark.parametrize(
    ("capacity", "segment_bytes"),
    [(32 * MiB, 16 * MiB), (GiB, 16 * MiB), (4 * GiB, 64 * MiB), (5 * GiB, 64 * MiB), (500 * GiB, 256 * MiB)],
)
def test_the_automatic_segment_size_is_a_64th_of_the_capacity_within_bounds(
    capacity: int, segment_bytes: int
) -> None:
    assert Config().segment_bytes_for(capacity) == segment_bytes


def test_a_given_segment_size_goes_before_the_automatic_one() -> None:
    assert Config(segment_bytes=MiB).segment_bytes_for(500 * GiB) == MiB


def test_a_new_store_without_room_for_two_automatic_segments_is_refused() -> None:
    with pytest.raises(ConfigError, match="32MiB or more"):
        Config().segment_bytes_for(31 * MiB)


def test_a_keyword_that_is_none_counts_as_not_given() -> None:
    assert Config.load(env={"GDSSTORE_CAPACITY": "4GiB"}, capacity=None, workers=None) == Config(
        capacity=4 * GiB
    )


def test_values_are_kept_in_the_type_of_their_field() -> None:
    config = Config.load(env={}, capacity="4GiB", durability="commit", workers=np.int64(2), grace_s=5)
    assert config == Config(capacity=4 * GiB, durability=Durability.COMMIT, workers=2, grace_s=5.0)
    assert [
        type(value) for value in (config.capacity, config.durability, config.workers, config.grace_s)
    ] == [
        int,
        Durability,
        int,
        float,
    ]


def test_a_config_cannot_be_changed_and_a_changed_copy_is_checked() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.workers = 2  # type: ignore[misc]
    assert dataclasses.replace(config, workers=2).workers == 2
    with pytest.raises(ConfigError):
        dataclasses.replace(config, workers=0)


def test_a_config_can_be_handed_to_a_worker_process() -> None:
    config = Config(capacity=4 * GiB, durability=Durability.COMMIT)
    assert pickle.loads(pickle.dumps(config)) == config
