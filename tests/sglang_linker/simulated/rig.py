"""The linker's loads and offloads on device pools of the simulated GPU, with stand-ins for what is SGLang's and torch's.

A pool has SGLang's class name and attributes, and its buffers say what CUDA tensors say of themselves: shape, strides, dtype,
address and device. Everything behind them is the linker's and the store's own code.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gdsstore import Parallelism, Store
from gdsstore.memory.streams import Event, Stream
from sglang_backend import linker_worker
from sglang_backend.device_pools_resolve import resolve
from sglang_backend.identity import Model
from sglang_backend.linker_identity import Rank
from sglang_backend.linker_loads import Loads
from sglang_backend.linker_offloads import Offloads
from sglang_backend.linker_pools import bind
from tests.sglang_backend.drives import waits
from tests.store.device_helpers import WAIT_S

U8 = npt.NDArray[np.uint8]

PAGE_TOKENS, LAYERS = 16, 6
HEADS, DIM, LATENT = 2, 32, 72
QUEUED_BEFORE = 150  # operations, each of which takes as long as the simulator is told to delay it
MHA, MLA = "mha", "mla"


class Buffer:
    """A contiguous bfloat16 tensor of `shape` on the simulated GPU."""

    def __init__(self, simgpu: ModuleType, *shape: int) -> None:
        self.shape, self.dtype, self.device = shape, torch.bfloat16, torch.device("cuda", 0)
        self.row_bytes = math.prod(shape[1:]) * 2
        self.memory = simgpu.DeviceBuffer(shape[0] * self.row_bytes)

    def data_ptr(self) -> int:
        return int(self.memory.ptr)

    def element_size(self) -> int:
        return 2

    def stride(self, axis: int | None = None) -> Any:
        strides = tuple(math.prod(self.shape[at + 1 :]) for at in range(len(self.shape)))
        return strides if axis is None else strides[axis]

    def is_contiguous(self) -> bool:
        return True


def pool(kind: str, simgpu: ModuleType, tokens: int) -> Any:
    """A plain MHA or MLA pool, as SGLang's classes look to the linker."""
    name = {MHA: "MHATokenToKVPool", MLA: "MLATokenToKVPool"}[kind]
    facts: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "store_dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "start_layer": 0,
    }
    if kind == MHA:
        facts |= {"head_num": HEADS, "head_dim": DIM, "v_head_dim": DIM, "k_scale_buffer": None}
        for buffers in ("k_buffer", "v_buffer"):
            facts[buffers] = [Buffer(simgpu, tokens, HEADS, DIM) for _ in range(LAYERS)]
    else:
        facts |= {"kv_cache_dim": LATENT}
        facts["kv_buffer"] = [Buffer(simgpu, tokens, 1, LATENT) for _ in range(LAYERS)]
    return type(name, (), {"__module__": "sglang.simulated", **facts})()


class Counter:
    """As SGLang's LayerWiseLoadCounter. `seen` is called with each layer, in the thread that completes it, before the forward may
    go on."""

    def __init__(self, seen: Callable[[int], None]) -> None:
        self._seen = seen
        self.completed: list[int] = []
        self.error: BaseException | None = None

    def update_producer(self) -> int:
        self.completed, self.error = [], None
        return 0

    def complete(self, index: int, layer: int) -> None:
        self._seen(layer)
        self.completed.append(layer)

    def fail(self, index: int, error: BaseException) -> None:
        self.error = error

    def finish(self, index: int) -> bool:
        return True  # the verdict comes after the layers


class Ready:
    """A torch event: `synchronize` waits for what was queued on the stream before."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def synchronize(self) -> None:
        assert self._event.wait(WAIT_S)


class Rig:
    """A pool of `pages` pages on the simulated GPU, with a linker's parts behind it."""

    def __init__(self, kind: str, simgpu: ModuleType, store: Store, pages: int) -> None:
        self._simgpu, self._scratch = simgpu, simgpu.DeviceBuffer(64)
        self.sglang_pool = pool(kind, simgpu, pages * PAGE_TOKENS)
        params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.sglang_pool),
            page_size=PAGE_TOKENS,
            mtp_draft_device_pools=(),
            sidecar_draft_device_pools=(),
            mtp_draft_mamba_pools=(),
        )
        resolved = resolve(params, [SimpleNamespace(name="FULL")])
        assert resolved.device == 0
        self.pools = bind(store, Model("m", "w", ()), Rank(Parallelism(), True), resolved)
        self.layout = self.pools[0].pool.layout
        self.layers_seen: list[tuple[int, U8]] = []  # of the load under way
        self.watched: Sequence[int] = ()  # pages whose bytes are noted when a layer is completed
        self.counter = Counter(self._note)
        self._layers = resolved.layers
        self.loads = self._loads()
        self.offloads = Offloads(self.pools, pages, WAIT_S)

    def _loads(self, *streams: int) -> Loads:
        return Loads(self.pools, self._layers, self.counter, WAIT_S, streams)

    def forwards_run_on(self, stream: Stream) -> None:
        self.loads.close()
        self.loads = self._loads(stream.handle)

    def _note(self, layer: int) -> None:
        self._simgpu.use(0)  # in the linker's threads no context is current
        self.layers_seen.append((layer, self.layer(layer, self.watched)))

    @property
    def buffers(self) -> list[list[Buffer]]:
        """Of each layer."""
        found = self.sglang_pool
        if hasattr(found, "kv_buffer"):
            return [[buffer] for buffer in found.kv_buffer]
        return [list(pair) for pair in zip(found.k_buffer, found.v_buffer, strict=True)]

    def layer(self, layer: int, pages: Sequence[int]) -> U8:
        """What the pages hold of one layer. Shape (n, bytes)."""
        rows = []
        for page in pages:
            parts = []
            for buffer in self.buffers[layer]:
                size = PAGE_TOKENS * buffer.row_bytes
                parts.append(buffer.memory.get(page * size, size))
            rows.append(np.frombuffer(b"".join(parts), np.uint8))
        return np.stack(rows)

    def pages(self, pages: Sequence[int]) -> U8:
        """What the pages hold, layer by layer. Shape (n, page bytes)."""
        return np.concatenate([self.layer(layer, pages) for layer in range(LAYERS)], axis=1)

    def put(self, pages: Sequence[int], content: U8) -> None:
        for page, row in zip(pages, content, strict=True):
            start = 0
            for buffer in (buffer for layer in self.buffers for buffer in layer):
                size = PAGE_TOKENS * buffer.row_bytes
                buffer.memory.put(row[start : start + size].tobytes(), page * size)
                start += size

    def fill_late(self, stream: Stream, source: Rig) -> None:
        """Queue copies of all that another rig's pool holds, as a forward queues its kernels: behind much other work."""
        for _ in range(QUEUED_BEFORE):
            stream.zero(self._scratch.ptr, 64)
        for mine, theirs in zip(self.buffers, source.buffers, strict=True):
            for to, at in zip(mine, theirs, strict=True):
                stream.copy(to.data_ptr(), at.data_ptr(), to.memory.nbytes)

    def offload(self, keys: U8, pages: Sequence[int], ready: Sequence[Any] = ()) -> bool:
        """Store pages, as the insert of a node does; whether they are stored."""
        assert self.offloads.offload(_transfers(keys, pages), lambda: ready)
        waits(lambda: self.offloads.completed() > 0, WAIT_S)
        return self.offloads.pop()

    def load(self, keys: U8, pages: Sequence[int], ready: Sequence[Any] = (), prefetched: Any = None) -> bool:
        """Load pages as a batch does; whether all came. `layers_seen` has what they held when each layer was handed out."""
        self.layers_seen, self.watched = [], pages
        assert self.loads.queue("request", _transfers(keys, pages), prefetched)
        return self.loads.finish(self.loads.start(lambda: ready))

    def close(self) -> None:
        self.loads.close()
        self.offloads.close()


def _transfers(keys: U8, pages: Sequence[int]) -> list[Any]:
    indices = (np.array(pages)[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
    return [
        SimpleNamespace(
            name=SimpleNamespace(value="kv"),
            keys=[key.tobytes().hex() for key in keys],
            device_indices=torch.from_numpy(indices),
        )
    ]


@pytest.fixture
def rig(
    gpu: ModuleType, device_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Rig]]:
    # The workers' own torch stream is for copies of indices, which lie on the host here.
    monkeypatch.setattr(linker_worker, "_device", lambda device: contextlib.nullcontext())
    made: list[Rig] = []

    def make(kind: str, store: Store, pages: int) -> Rig:
        made.append(Rig(kind, gpu, store, pages))
        return made[-1]

    yield make
    for each in made:
        each.close()
