"""The KV of a draft model goes with the target's: EAGLE's pool beside it, and MTP's layers, each in a pool of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_fixtures import (
    DEVICE_TOKENS,
    DTYPE,
    HEAD_DIM,
    HEADS,
    LAYERS,
    MHA,
    MLA,
    PAGE_SIZE,
    device_buffers,
    device_pool,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from gdsstore import ConfigError, Parallelism
from gdsstore.weights import weights_digest
from sglang_backend.device_pools_resolve import DevicePools, resolve
from sglang_backend.identity import Model
from sglang_backend.linker_identity import Rank, draft_model_of, namespace_of_pool
from tests.sglang_linker.tree import TOKENS, Tree, drafted_tree, equal, keys_of, tree_of


def draft_pool(layers: int = 1, tokens: int = DEVICE_TOKENS, head_dim: int = HEAD_DIM // 2) -> Any:
    return MHATokenToKVPool(
        size=tokens,
        page_size=PAGE_SIZE,
        dtype=DTYPE,
        head_num=HEADS,
        head_dim=head_dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def params(pool: Any, packed: Any = (), sidecar: Any = (), mamba: Any = ()) -> SimpleNamespace:
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        page_size=PAGE_SIZE,
        mtp_draft_device_pools=packed,
        sidecar_draft_device_pools=sidecar,
        mtp_draft_mamba_pools=mamba,
        req_to_token_pool=None,
    )


def resolved(*args: Any, **pools: Any) -> DevicePools:
    return resolve(params(*args, **pools), {ComponentType.FULL})


def buffers(pools: tuple[Any, ...]) -> list[torch.Tensor]:
    return [buffer for pool in pools for buffer in (*pool.k_buffer, *pool.v_buffer)]


@pytest.mark.parametrize("mode", ["sidecar", "packed"])
def test_the_drafts_kv_comes_back_with_the_targets(mode: str, tmp_path: Path) -> None:
    drafts = (draft_pool(2),) if mode == "sidecar" else (draft_pool(), draft_pool(), draft_pool())
    for buffer in buffers(drafts):
        buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
    before = [buffer.clone() for buffer in buffers(drafts)]
    with drafted_tree(tmp_path, **{mode: drafts}) as tree:
        for buffer in device_buffers(tree.device):
            buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
        rows = tree.allocator.alloc(TOKENS)
        tree.insert(5000, rows)
        expected = tree.kv(rows)
        wanted = [buffer[rows].clone() for buffer in before]
        tree.flush()
        _clear(drafts)
        request, now = tree.queue(5000)
        assert tree.run_batch(request) == []
        assert equal(tree.kv(now), expected)
        assert equal([buffer[now] for buffer in buffers(drafts)], wanted)


def test_a_layer_of_the_target_waits_for_the_draft_at_the_end_only() -> None:
    target, draft = resolved(device_pool(MHA), sidecar=(draft_pool(2),)).pools
    assert target.needed_at == tuple(range(LAYERS))
    assert draft.needed_at == (LAYERS - 1, LAYERS - 1)


def test_a_prefix_whose_draft_is_not_stored_is_no_hit(tmp_path: Path) -> None:
    with drafted_tree(tmp_path, sidecar=(draft_pool(),)) as tree:
        tree.compute(5000)
        (draft,) = (stored for stored in tree.linker.stored if stored.pool.draft)
        keys = torch.tensor([list(bytes.fromhex(key)) for key in keys_of(5000)], dtype=torch.uint8).numpy()
        draft.bound.delete(keys[5:])
        tree.flush()
        assert tree.stored_tokens(5000) == 5 * PAGE_SIZE


def test_pages_of_a_run_without_the_draft_are_completed(tmp_path: Path) -> None:
    with tree_of(MHA, "rust", tmp_path) as tree:
        tree.compute(5000)
    with drafted_tree(tmp_path, sidecar=(draft_pool(),)) as tree:
        assert tree.stored_tokens(5000) == 0
        tree.compute(5000)
        tree.flush()
        assert tree.stored_tokens(5000) == TOKENS


def test_a_damaged_draft_page_fails_the_load_and_then_misses(tmp_path: Path) -> None:
    with drafted_tree(tmp_path, sidecar=(draft_pool(),)) as tree:
        tree.compute(5000)
        (draft,) = (stored for stored in tree.linker.stored if stored.pool.draft)
        tree.flush()
        request, _ = tree.queue(5000)
        _damage(tree, draft)
        assert tree.run_batch(request) == [request]
        tree.flush()
        assert tree.stored_tokens(5000) == 0


def _damage(tree: Tree, draft: Any) -> None:
    """The drive forgets the draft's pages behind the look-up's back."""
    keys = torch.tensor([list(bytes.fromhex(key)) for key in keys_of(5000)], dtype=torch.uint8).numpy()
    assert draft.bound.delete(keys).all()


def test_another_draft_model_shares_the_targets_pages_and_not_the_drafts(tmp_path: Path) -> None:
    pools = resolved(device_pool(MHA), sidecar=(draft_pool(),))
    digests = [
        [
            namespace_of_pool(Model("m", "w", ()), Rank(Parallelism(), True), pools, pool, draft).digest
            for pool in pools.pools
        ]
        for draft in ((("draft_weights", "a"),), (("draft_weights", "b"),))
    ]
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


def test_a_draft_model_is_known_by_its_files_or_by_what_the_user_says(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    args = SimpleNamespace(model_path="/nowhere/target", speculative_draft_model_path=str(tmp_path))
    assert dict(draft_model_of("", args))["draft_weights"] == weights_digest(tmp_path)
    assert dict(draft_model_of("mine", args))["draft_weights"] == "mine"
    own = SimpleNamespace(model_path="/nowhere/target", speculative_draft_model_path="/nowhere/target")
    assert "draft_weights" not in dict(
        draft_model_of("", own)
    )  # MTP: it is a part of the target's checkpoint
    other = SimpleNamespace(model_path="/nowhere/target", speculative_draft_model_path="/nowhere/draft")
    with pytest.raises(ConfigError, match=r'"draft_weights": .* to linker_extra_config'):
        draft_model_of("", other)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        (
            lambda: {"sidecar": (draft_pool(tokens=DEVICE_TOKENS // 2),)},
            "room for .* indices cannot be the target's",
        ),
        (lambda: {"packed": (draft_pool(), draft_pool(head_dim=HEAD_DIM))}, "not alike"),
        (lambda: {"mamba": (SimpleNamespace(),)}, "states of a draft model"),
        (lambda: {"sidecar": (SimpleNamespace(layer_num=1),)}, "SimpleNamespace.*HiCache"),
    ],
)
def test_a_drafts_pools_that_are_not_known_are_refused(
    pools: Callable[[], dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(device_pool(MHA), **pools())


def test_an_mla_targets_draft_may_be_mla() -> None:
    target, draft = resolved(device_pool(MLA), packed=(device_pool(MLA),)).pools
    assert (target.replicated, draft.replicated) == (True, True)
    assert draft.layout == target.layout


def _clear(pools: tuple[Any, ...]) -> None:
    for buffer in buffers(pools):
        buffer.zero_()
