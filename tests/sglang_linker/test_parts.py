"""The linker's parts: layers in order, quarantine, options, ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cpu_fixtures import single_rank_context
from hypothesis import given
from hypothesis import strategies as st

from gdsstore import ConfigError
from sglang_backend.identity import identify_model
from sglang_backend.linker_identity import model_of, this_rank
from sglang_backend.linker_layers import Progress
from sglang_backend.linker_options import parse_linker_options
from sglang_backend.linker_quarantine import Quarantine

GOOD, BAD = np.ones(3, np.bool_), np.array([True, False, True])


def keys(*numbers: int) -> Any:
    return np.array([[number] * 32 for number in numbers], np.uint8)


@given(st.randoms(use_true_random=False))
def test_a_layer_is_complete_when_every_pool_has_come_that_far(random: Any) -> None:
    layers = 9
    owner = [random.randrange(3) for _ in range(layers)]
    needed_at = [[layer for layer in range(layers) if owner[layer] == pool] for pool in range(3)]
    told: list[int] = []
    progress = Progress(needed_at, layers, told.append)
    come = [0, 0, 0]
    while any(come[pool] < len(needed_at[pool]) for pool in range(3)):
        pool = random.choice([pool for pool in range(3) if come[pool] < len(needed_at[pool])])
        last = random.randint(come[pool] + 1, len(needed_at[pool]))
        progress.of(pool)(come[pool], last, GOOD)
        come[pool] = last
        missing = [layer for p in range(3) for layer in needed_at[p][come[p] :]]
        assert told == list(range(min(missing, default=layers)))
    progress.finish()
    assert told == list(range(layers))


def test_layers_behind_a_failed_page_are_not_handed_out() -> None:
    told: list[int] = []
    on_layers = Progress([[0, 1, 2, 3]], 4, told.append).of(0)
    on_layers(0, 2, GOOD)
    on_layers(2, 3, BAD)
    on_layers(3, 4, GOOD)
    assert told == [0, 1]


def test_a_quarantined_page_is_free_again_when_saved_anew_or_after_its_time() -> None:
    quarantine = Quarantine()
    quarantine.add(keys(1, 2))
    assert quarantine.free(keys(1, 2, 3)).tolist() == [False, False, True]
    quarantine.lift(keys(2))
    assert quarantine.free(keys(1, 2, 3)).tolist() == [False, True, True]
    short = Quarantine(seconds=0.0)
    short.add(keys(1))
    assert short.free(keys(1)).tolist() == [True]
    assert short.failures == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, '"path": "/mnt/nvme0/kv" in linker_extra_config'),
        ({"path": "x", "capacty": "1GiB"}, "did you mean 'capacity'"),
        ({"path": "x", "path_policy": "fastest"}, "path"),
        ({"path": "x", "load_deadline_s": 1000}, "load_deadline_s"),
        ({"path": "x", "offload_deadline_s": True}, "offload_deadline_s"),
        ({"path": "x", "prefetch_deadline_s": 0}, "prefetch_deadline_s"),
        ({"path": "x", "backlog_pages": 0}, "backlog_pages"),
        ({"path": "x", "weights": 5}, "weights"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_linker_options(given, on_device=True)


@pytest.mark.parametrize(
    ("identify", "where"),
    [
        (lambda args: model_of("", args), "linker_extra_config"),
        (lambda args: identify_model(None, "", args), "--hicache-storage-backend-extra-config"),
    ],
)
def test_weights_that_nothing_identifies_are_asked_for_where_they_can_be_given(
    identify: Any, where: str
) -> None:
    with pytest.raises(ConfigError, match=f'"weights": .* to {where}'):
        identify(SimpleNamespace(model_path="/nowhere/model", served_model_name="m"))


def test_the_path_policy_is_the_stores_path() -> None:
    options = parse_linker_options(
        {"path": ["a", "b"], "path_policy": "bounce", "host_cache": "64GiB", "capacity": "2TiB"},
        on_device=True,
    )
    assert (options.paths, str(options.config.path), options.config.capacity) == (
        ("a", "b"),
        "bounce",
        2 << 40,
    )
    assert options.config.host_cache == 64 << 30


def test_stages_of_a_pipeline_are_refused() -> None:
    params = SimpleNamespace(pp_rank=0, pp_size=2)
    with single_rank_context(), pytest.raises(ConfigError, match=r"pipeline parallelism.*HiCache"):
        this_rank(params, SimpleNamespace(tp_size=1))


@pytest.mark.parametrize(
    ("rank", "size", "server", "writes"),
    [
        (0, 8, {"tp_size": 8, "nnodes": 1}, True),
        (5, 8, {"tp_size": 8, "nnodes": 1}, False),
        (
            8,
            16,
            {"tp_size": 16, "nnodes": 2},
            True,
        ),  # the first of the second machine, which has drives of its own
        (9, 16, {"tp_size": 16, "nnodes": 2}, False),
        (0, 2, {"tp_size": 16, "nnodes": 2}, True),  # one of eight groups of attention data parallelism
        (1, 2, {"tp_size": 16, "nnodes": 2}, False),
    ],
)
def test_one_rank_of_a_machine_writes_what_all_ranks_share(
    rank: int, size: int, server: dict[str, int], writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: size)
    params = SimpleNamespace(
        attn_tp_cache_group=None, tp_cache_group="group", pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1
    )
    with single_rank_context():
        found = this_rank(params, SimpleNamespace(**server))
    assert (found.parallelism.tp_rank, found.parallelism.tp_size) == (rank, size)
    assert found.writes_shared == writes
