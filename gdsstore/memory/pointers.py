"""Raw addresses as typed pointers inside numba kernels.

A kernel gets memory as addresses (uint64), because a batch mixes arenas, tensors and arrays of the caller; numba has no
cast from an integer to a pointer of its own. The caller promises that the address is mapped for as long as the kernel
uses it: nothing is checked.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def _pointer_cast(element: Any) -> Any:
    """The typing and code of a cast from uint64 to a pointer to `element` (a numba type)."""
    pointer: Any = types.CPointer  # numba carries no types of its own
    signature = pointer(element)(types.uint64)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, codegen


@intrinsic
def _as_u64_pointer(typing_context: Any, address: Any) -> Any:
    return _pointer_cast(types.uint64)


@intrinsic
def _as_u8_pointer(typing_context: Any, address: Any) -> Any:
    return _pointer_cast(types.uint8)


# Untyped, as kernels call them without the typing context.

as_u64_pointer: Any = _as_u64_pointer
"""In a kernel: `address` (uint64, must be a multiple of 8) as a pointer to uint64, for `numba.carray`."""

as_u8_pointer: Any = _as_u8_pointer
"""In a kernel: `address` (uint64, any alignment) as a pointer to uint8, for `numba.carray`."""
