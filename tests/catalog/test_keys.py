"""Index and tag: where a page is looked for. Every bit of key and namespace counts in both."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.catalog.keys import index_keys

MASK = (1 << 64) - 1
KEY, DIGEST = st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16)


def mix(x: int) -> int:
    x ^= x >> 33
    x = x * 0xFF51AFD7ED558CCD & MASK
    x ^= x >> 33
    x = x * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ (x >> 33)


def plain(key: bytes, digest: bytes) -> tuple[int, int]:
    """The same in plain integers."""
    words = [int.from_bytes(key[i : i + 8], "little") for i in range(0, 32, 8)]
    low, high = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    a, b = 0x243F6A8885A308D3 ^ low, 0x13198A2E03707344 ^ high
    for word in words:
        a, b = mix(a ^ word), mix((b + word) & MASK)
    return mix(a ^ high), mix(b ^ low)


@given(st.lists(KEY, max_size=5), DIGEST)
def test_the_compiled_fold_equals_the_plain_one(keys: list[bytes], digest: bytes) -> None:
    index, tag = index_keys(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32), digest)
    assert list(zip(index.tolist(), tag.tolist(), strict=True)) == [plain(key, digest) for key in keys]


def test_every_bit_of_key_and_namespace_changes_index_and_tag() -> None:
    key, digest = bytes(range(32)), bytes(range(100, 116))
    base_index, base_tag = plain(key, digest)
    for bit in range(384):
        changed = bytearray(key + digest)
        changed[bit // 8] ^= 1 << bit % 8
        index, tag = index_keys(np.frombuffer(changed[:32], np.uint8).reshape(1, 32), bytes(changed[32:]))
        # Half of the bits, about, and at any rate many: pages that are alike lie far apart.
        assert int(index[0] ^ np.uint64(base_index)).bit_count() > 8
        assert int(tag[0] ^ np.uint64(base_tag)).bit_count() > 8


def test_indexes_of_many_pages_do_not_collide_and_spread_evenly() -> None:
    keys = np.random.default_rng(1).integers(0, 256, (200_000, 32), dtype=np.uint8)
    index, tag = index_keys(keys, bytes(16))
    assert len(np.unique(index)) == len(np.unique(tag)) == len(keys)
    assert abs(np.bincount((index >> np.uint64(60)).astype(int), minlength=16) - 12_500).max() < 700
    assert abs((index >> np.uint64(32)).astype(float).mean() / 2**31 - 1) < 0.01


def test_keys_that_differ_in_order_only_do_not_collide() -> None:
    words = np.arange(4, dtype=np.uint64)
    orders = (
        np.array([np.roll(words, i) for i in range(4)] + [words[[1, 0, 2, 3]]]).view(np.uint8).reshape(-1, 32)
    )
    index, tag = index_keys(orders, bytes(16))
    assert len(np.unique(index)) == len(np.unique(tag)) == 5
