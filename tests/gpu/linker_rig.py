"""The linker's loads and offloads on pools of torch tensors: on a real GPU, or in host memory where only their Python is tested.

On a GPU the pools are SGLang's own where SGLang can be imported, else stand-ins with its classes' names and attributes;
`made_of` says which. Everything behind them is the linker's and the store's own code.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from gdsstore import Parallelism, Store
from sglang_backend.device_pools_resolve import resolve
from sglang_backend.identity import Model
from sglang_backend.linker_identity import Rank
from sglang_backend.linker_loads import Loads
from sglang_backend.linker_offloads import Offloads
from sglang_backend.linker_pools import bind

U8 = npt.NDArray[np.uint8]

PAGE_TOKENS, LAYERS = 64, 6
HEADS, DIM, LATENT = 8, 128, 576
MHA, MLA = "mha", "mla"
DEVICES = {"real": "cuda:0", "host": "cpu"}
WAIT_S = 120.0


def sglang_pools() -> Any | None:
    """SGLang's module of pools, where it can be imported."""
    try:
        return importlib.import_module("sglang.srt.mem_cache.memory_pool")
    except Exception:  # not installed, or not for this machine: which it is matters to nobody here
        return None


def make_pool(kind: str, where: str, tokens: int) -> tuple[Any, str]:
    """A plain pool with room for `tokens`, and what it is made of."""
    sglang = sglang_pools() if where == "real" else None
    if sglang is not None:
        return _sglang_pool(sglang, kind, tokens), "SGLang's classes"
    return _stand_in(kind, where, tokens), "stand-ins"


def _sglang_pool(sglang: Any, kind: str, tokens: int) -> Any:
    import torch

    more: dict[str, Any] = {
        "size": tokens,
        "page_size": PAGE_TOKENS,
        "dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "device": "cuda",
        "enable_memory_saver": False,
    }
    if kind == MHA:
        return sglang.MHATokenToKVPool(head_num=HEADS, head_dim=DIM, **more)
    return sglang.MLATokenToKVPool(kv_lora_rank=LATENT - 64, qk_rope_head_dim=64, **more)


def _stand_in(kind: str, where: str, tokens: int) -> Any:
    import torch

    def buffers(*row: int) -> list[Any]:
        shape = (tokens + PAGE_TOKENS, *row)
        return [torch.zeros(shape, dtype=torch.bfloat16, device=DEVICES[where]) for _ in range(LAYERS)]

    facts: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "store_dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "start_layer": 0,
    }
    if kind == MHA:
        facts |= {"head_num": HEADS, "head_dim": DIM, "v_head_dim": DIM, "k_scale_buffer": None}
        facts |= {"k_buffer": buffers(HEADS, DIM), "v_buffer": buffers(HEADS, DIM)}
    else:
        facts |= {"kv_cache_dim": LATENT, "kv_buffer": buffers(1, LATENT)}
    name = {MHA: "MHATokenToKVPool", MLA: "MLATokenToKVPool"}[kind]
    return type(name, (), {"__module__": "sglang.stand_in", **facts})()


class Counter:
    """As SGLang's LayerWiseLoadCounter, and notes the layers in the order in which they are completed."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._change = threading.Condition()
        self.completed: list[int] = []
        self.error: BaseException | None = None

    def update_producer(self) -> int:
        self.completed, self.error = [], None
        return 0

    def complete(self, index: int, layer: int) -> None:
        with self._change:
            self.completed.append(layer)
            self._change.notify_all()

    def fail(self, index: int, error: BaseException) -> None:
        with self._change:
            self.error = error
            self._change.notify_all()

    def finish(self, index: int) -> bool:
        with self._change:
            ended = self._change.wait_for(
                lambda: self.error is not None or len(self.completed) == self._layers, WAIT_S
            )
        assert ended, "the layers never came"
        return self.error is None


class Rig:
    """A pool of `pages` pages with a linker's parts behind it."""

    def __init__(self, kind: str, where: str, store: Store, pages: int) -> None:
        self.pool, self.made_of = make_pool(kind, where, pages * PAGE_TOKENS)
        params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.pool),
            page_size=PAGE_TOKENS,
            mtp_draft_device_pools=(),
            sidecar_draft_device_pools=(),
            mtp_draft_mamba_pools=(),
        )
        resolved = resolve(params, [SimpleNamespace(name="FULL")])
        assert resolved.device == (0 if where == "real" else None)
        self.pools = bind(store, Model("m", "w", ()), Rank(Parallelism(), True), resolved)
        self.layout = self.pools[0].pool.layout
        self.counter = Counter(resolved.layers)
        self.loads = Loads(self.pools, resolved.layers, self.counter, WAIT_S)
        self.offloads = Offloads(self.pools, pages, WAIT_S)

    @property
    def buffers(self) -> list[Any]:
        """In the order of a record."""
        if hasattr(self.pool, "kv_buffer"):
            return list(self.pool.kv_buffer)
        return [
            buffer for pair in zip(self.pool.k_buffer, self.pool.v_buffer, strict=True) for buffer in pair
        ]

    def get(self, pages: Sequence[int]) -> U8:
        """What the pages hold. Shape (n, page bytes)."""
        import torch

        rows = [self._bytes(buffer)[list(pages)].cpu() for buffer in self.buffers]
        return np.asarray(torch.cat([row.reshape(len(pages), -1) for row in rows], dim=1).numpy())

    def put(self, pages: Sequence[int], content: U8) -> None:
        import torch

        start = 0
        for buffer in self.buffers:
            size = self._bytes(buffer).shape[1]
            part = torch.from_numpy(np.ascontiguousarray(content[:, start : start + size]))
            self._bytes(buffer)[list(pages)] = part.to(buffer.device)
            start += size

    def copy_from(self, other: Rig) -> None:
        """On the current stream."""
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.copy_(theirs, non_blocking=True)

    def offload(self, keys: U8, pages: Sequence[int], ready: Sequence[Any] = ()) -> bool:
        assert self.offloads.offload(_transfers(keys, pages), lambda: ready)
        end = time.monotonic() + WAIT_S
        while not self.offloads.completed():
            assert time.monotonic() < end, "the offload never ended"
            time.sleep(0.002)
        return self.offloads.pop()

    def load(self, keys: U8, pages: Sequence[int], ready: Sequence[Any] = ()) -> bool:
        assert self.loads.queue("request", _transfers(keys, pages))
        return self.loads.finish(self.loads.start(lambda: ready))

    def close(self) -> None:
        self.loads.close()
        self.offloads.close()

    def _bytes(self, buffer: Any) -> Any:
        """As uint8, a row a page."""
        import torch

        return buffer.view(torch.uint8).reshape(buffer.shape[0] // PAGE_TOKENS, -1)


def _transfers(keys: U8, pages: Sequence[int]) -> list[Any]:
    import torch

    indices = (np.array(pages)[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
    return [
        SimpleNamespace(
            name=SimpleNamespace(value="kv"),
            keys=[key.tobytes().hex() for key in keys],
            device_indices=torch.from_numpy(indices),
        )
    ]
