"""From (namespace, page key) to the catalog's two numbers.

`index` is the LMDB key: a native 64-bit integer makes a denser and shallower tree than 48 raw bytes (measured: 128 look-ups
in 1 M pages took 154 us against 243 us). `tag` is 64 more bits that a look-up compares. Both mix all 32 bytes of the key and
the namespace. Two pages that share an index are 1 in 2^64: the newer hides the older, which is a miss. Two that share both
are still told apart by the checksum, whose seed holds the full key.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_INDEX_SEED = np.uint64(0x243F6A8885A308D3)  # digits of pi
_TAG_SEED = np.uint64(0x13198A2E03707344)
_M1 = np.uint64(0xFF51AFD7ED558CCD)  # murmur3's 64-bit finaliser
_M2 = np.uint64(0xC4CEB9FE1A85EC53)
_S33 = np.uint64(33)


def index_keys(keys: npt.NDArray[np.uint8], namespace_digest: bytes) -> tuple[U64, U64]:
    """Index and tag of each key. `keys`: uint8 (n, 32), C-contiguous; the digest: 16 bytes. Returns two uint64 (n,)."""
    words = np.frombuffer(namespace_digest, np.uint64)
    index = np.empty(len(keys), np.uint64)
    tag = np.empty(len(keys), np.uint64)
    _fold(keys.view(np.uint64).reshape(-1, 4), words[0], words[1], index, tag)
    return index, tag


@numba.njit(nogil=True, cache=True)
def _fold(keys: U64, low: np.uint64, high: np.uint64, index: U64, tag: U64) -> None:
    for i in range(len(keys)):
        a, b = _INDEX_SEED ^ low, _TAG_SEED ^ high
        for j in range(4):
            a = _mix(a ^ keys[i, j])
            b = _mix(b + keys[i, j])
        index[i] = _mix(a ^ high)
        tag[i] = _mix(b ^ low)


@numba.njit(nogil=True, cache=True, inline="always")
def _mix(x: np.uint64) -> np.uint64:
    x ^= x >> _S33
    x *= _M1
    x ^= x >> _S33
    x *= _M2
    return x ^ (x >> _S33)
