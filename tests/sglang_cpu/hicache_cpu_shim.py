"""Makes SGLang 0.5.23's HiCache (host tier and storage tier) work with ``device="cpu"``.

Three things stand in the way on a machine without a GPU, and ``install`` replaces exactly these;
nothing of SGLang is edited on disk, and SGLang's own code still chooses which copy function runs
for which layout:

1. Host pools pin their memory, which needs the CUDA runtime.
2. Host pools refuse to be built unless 10 GiB stay free after them; test pools hold a few MiB.
3. The ``transfer_kv_*`` copies between device pool and host pool are CUDA kernels. On CPU their
   names are undefined in the pool modules (a ``NameError`` at the first transfer). The functions
   below copy the same bytes with plain memory operations.

In the functions below ``lf`` means layer first (the device pools, and host layout
``layer_first``), ``pf`` page first, ``ph`` page head. Names, parameter names and parameter order
are those of ``sgl_kernel.kvcacheio``. Sizes and strides are bytes, indices are token rows.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Address: TypeAlias = int | torch.Tensor
"""Where a buffer starts: its address, or a tensor whose first element is there."""


def _raw_bytes(address: int, size_bytes: int) -> torch.Tensor:
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _rows(
    start: Address, row_bytes: int, stride_bytes: int, row_count: int, offset_bytes: int = 0
) -> torch.Tensor:
    """``row_count`` rows of ``row_bytes`` bytes, ``stride_bytes`` apart, as a 2D uint8 view."""
    address = start if isinstance(start, int) else start.data_ptr()
    span = stride_bytes * (row_count - 1) + row_bytes
    view = _raw_bytes(address + offset_bytes, span)
    return view.as_strided((row_count, row_bytes), (stride_bytes, 1))


def _addresses(pointers: torch.Tensor, count: int) -> list[int]:
    return [int(pointer) for pointer in pointers[:count].tolist()]


def _copy_rows(
    src: Address,
    dst: Address,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    row_bytes: int,
    *,
    src_stride: int | None = None,
    dst_stride: int | None = None,
    src_offset: int = 0,
    dst_offset: int = 0,
) -> None:
    """Copy row ``src_indices[i]`` to row ``dst_indices[i]``; strides default to ``row_bytes``."""
    if src_indices.numel() == 0:
        return
    from_rows = src_indices.cpu().long()
    to_rows = dst_indices.cpu().long()
    source = _rows(src, row_bytes, src_stride or row_bytes, int(from_rows.max()) + 1, src_offset)
    target = _rows(dst, row_bytes, dst_stride or row_bytes, int(to_rows.max()) + 1, dst_offset)
    target[to_rows] = source[from_rows]


def _page_head_view(
    host: torch.Tensor, page_count: int, page_size: int, head_num: int, head_bytes: int, layers: int
) -> torch.Tensor:
    size_bytes = page_count * page_size * head_num * head_bytes * layers
    shape = (page_count, head_num, page_size, layers, head_bytes)
    return _raw_bytes(host.data_ptr(), size_bytes).view(shape)


def _copy_page_head(
    host: torch.Tensor,
    device: Address,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    *,
    layer: int,
    row_bytes: int,
    host_row_bytes: int,
    page_size: int,
    head_num: int,
    to_host: bool,
) -> None:
    """Copy one layer between a device buffer and a ``page_head`` host buffer.

    ``page_head`` is [page, head, token in page, layer, head_dim]: a token's row of one layer is
    scattered over the heads of its page, which a single row stride cannot describe.
    """
    if host_indices.numel() == 0:
        return
    host_rows = host_indices.cpu().long()
    device_rows = device_indices.cpu().long()
    pages, in_page = host_rows // page_size, host_rows % page_size
    head_bytes = row_bytes // head_num
    host_view = _page_head_view(
        host,
        int(pages.max()) + 1,
        page_size,
        head_num,
        head_bytes,
        layers=host_row_bytes // row_bytes,
    )
    device_view = _rows(device, row_bytes, row_bytes, int(device_rows.max()) + 1)
    device_view = device_view.unflatten(1, (head_num, head_bytes))
    if to_host:
        host_view[pages, :, in_page, layer] = device_view[device_rows]
    else:
        device_view[device_rows] = host_view[pages, :, in_page, layer]


# --- one latent buffer a layer (MLA, and Mamba states below) ---------------------------------


def transfer_kv_per_layer_mla(
    src: Address,
    dst: Address,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **unused: Any,
) -> None:
    _copy_rows(src, dst, src_indices, dst_indices, item_size)


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **unused: Any,
) -> None:
    sources, targets = _addresses(src_layers, num_layers), _addresses(dst_layers, num_layers)
    for src, dst in zip(sources, targets, strict=True):
        _copy_rows(src, dst, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_mla_pf_lf(
    src: Address,
    dst: Address,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **unused: Any,
) -> None:
    _copy_rows(
        src,
        dst,
        src_indices,
        dst_indices,
        item_size,
        src_stride=src_layout_dim,
        src_offset=layer_id * item_size,
    )


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: Address,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **unused: Any,
) -> None:
    for layer, src in enumerate(_addresses(src_layers, num_layers)):
        _copy_rows(
            src,
            dst,
            src_indices,
            dst_indices,
            item_size,
            dst_stride=dst_layout_dim,
            dst_offset=layer * item_size,
        )


# --- K and V buffers (MHA): the same copy, twice ---------------------------------------------


def transfer_kv_per_layer(
    src_k: Address,
    dst_k: Address,
    src_v: Address,
    dst_v: Address,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **unused: Any,
) -> None:
    transfer_kv_per_layer_mla(src_k, dst_k, src_indices, dst_indices, item_size)
    transfer_kv_per_layer_mla(src_v, dst_v, src_indices, dst_indices, item_size)


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **unused: Any,
) -> None:
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_per_layer_pf_lf(
    src_k: Address,
    dst_k: Address,
    src_v: Address,
    dst_v: Address,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **unused: Any,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: Address,
    src_v_layers: torch.Tensor,
    dst_v: Address,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **unused: Any,
) -> None:
    for src_layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_per_layer_ph_lf(
    src_k: torch.Tensor,
    dst_k: Address,
    src_v: torch.Tensor,
    dst_v: Address,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **unused: Any,
) -> None:
    for host, device in ((src_k, dst_k), (src_v, dst_v)):
        _copy_page_head(
            host,
            device,
            src_indices,
            dst_indices,
            layer=layer_id,
            row_bytes=item_size,
            host_row_bytes=src_layout_dim,
            page_size=page_size,
            head_num=head_num,
            to_host=False,
        )


def transfer_kv_all_layer_lf_ph(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **unused: Any,
) -> None:
    for src_layers, host in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, device in enumerate(_addresses(src_layers, num_layers)):
            _copy_page_head(
                host,
                device,
                dst_indices,
                src_indices,
                layer=layer,
                row_bytes=item_size,
                host_row_bytes=dst_layout_dim,
                page_size=page_size,
                head_num=head_num,
                to_host=True,
            )


# --- io backend "direct": tensors instead of addresses ----------------------------------------


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices.long()] = src[src_indices.long()]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    pages = src_indices.long()[::page_size] // page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices.long()] = src[pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """``src_ptrs`` holds all layers of the first host buffer (K), then all of the second (V)."""
    pages = dst_indices.long()[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for buffer, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[buffer * layers + layer][src_indices.long()]
            dst[pages, layer] = rows.unflatten(0, (-1, page_size))


# --- Mamba states: one row a request slot, moved like an MLA buffer ---------------------------


def transfer_kv_mamba_pf_lf(
    src: Address,
    dst: Address,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **unused: Any,
) -> None:
    transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_mamba_lf_pf(
    src_ptrs: torch.Tensor,
    dst: Address,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **unused: Any,
) -> None:
    transfer_kv_all_layer_mla_lf_pf(
        src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
    )


TRANSFER_FUNCTIONS: tuple[Callable[..., None], ...] = (
    transfer_kv_per_layer_mla,
    transfer_kv_all_layer_mla,
    transfer_kv_per_layer_mla_pf_lf,
    transfer_kv_all_layer_mla_lf_pf,
    transfer_kv_per_layer,
    transfer_kv_all_layer,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_per_layer_ph_lf,
    transfer_kv_all_layer_lf_ph,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_mamba_pf_lf,
    transfer_kv_mamba_lf_pf,
)


def _never_pin(pool_class: Any) -> None:
    original_init = pool_class.__init__

    @functools.wraps(original_init)
    def init_without_pinning(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        original_init(self, *args, **kwargs)

    pool_class.__init__ = init_without_pinning


@functools.cache
def install() -> None:
    """Replace the three things named above, once a process. Call before building host pools.

    SGLang calls this in each of its processes through the ``sglang.srt.plugins`` entry point;
    tests that build pools themselves call it directly.
    """
    # Imported here: the plugin loader imports this module before SGLang has set itself up.
    from sglang.srt.mem_cache.pool_host import base, common, dsa, mamba, mha, mla

    # Every host pool passes through HostKVCache.__init__, except Mamba's, which replaces it.
    _never_pin(base.HostKVCache)
    _never_pin(mamba.MambaPoolHost)
    # The DSA indexer pool registers its memory without asking for pin_memory.
    common._cuda_host_register = lambda *args, **kwargs: None
    common._cuda_host_unregister = lambda *args, **kwargs: None

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0

    for module in (mha, mla, mamba, dsa):
        for function in TRANSFER_FUNCTIONS:
            if not hasattr(module, function.__name__):
                setattr(module, function.__name__, function)
