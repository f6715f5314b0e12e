"""Moves of raw bytes as numba kernels see them: libc's memmove and memset, and stores that bypass the cache.

LLVM intrinsics and not ctypes functions, because numba cannot cache code that holds the address of one.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

STREAM_BYTES = 64  # one cache line; also the width of the widest vector registers

_llvm: Any = cgutils  # numba carries no types of its own
_ir: Any = _llvm.ir


@intrinsic
def move(typing_context: Any, destination: Any, source: Any, nbytes: Any) -> Any:
    """In a kernel: memmove of `nbytes` (int64) between two addresses (uint64)."""
    signature = types.void(types.uint64, types.uint64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, at, length = arguments
        one = context.get_constant(types.int64, 1)
        _llvm.raw_memmove(builder, _pointer(builder, to), _pointer(builder, at), length, one)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def zero(typing_context: Any, address: Any, nbytes: Any) -> Any:
    """In a kernel: `nbytes` (int64) zero bytes to an address (uint64)."""
    signature = types.void(types.uint64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, length = arguments
        _llvm.memset(builder, _pointer(builder, at), length, 0)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def stream(typing_context: Any, destination: Any, source: Any) -> Any:
    """In a kernel: copy STREAM_BYTES bytes past the cache. `destination` is a multiple of STREAM_BYTES.

    Such stores are not ordered with later ones: call `fence` before telling anybody.
    """
    signature = types.void(types.uint64, types.uint64)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = _ir.VectorType(_ir.IntType(64), STREAM_BYTES // 8).as_pointer()
        value = builder.load(builder.inttoptr(arguments[1], vector), align=1)
        store = builder.store(value, builder.inttoptr(arguments[0], vector), align=STREAM_BYTES)
        hint = builder.module.add_metadata([_ir.Constant(_ir.IntType(32), 1)])
        store.set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def fence(typing_context: Any) -> Any:
    """In a kernel: all stores so far, streamed ones too, are seen before any later one."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, cgutils.voidptr_t)
