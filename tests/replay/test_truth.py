import hashlib

import numpy as np
import pytest

from gdsstore.errors import ArgumentError
from gdsstore.replay.truth import PageKeys, count_wrong, fill_pages


def random_keys(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 32), dtype=np.uint8)


def test_keys_are_the_chained_hash_of_block_ids() -> None:
    key, expected = b"", []
    for block in (5, 6, 2**40):
        key = hashlib.sha256(key + block.to_bytes(8, "little")).digest()
        expected.append(key)
    keys = PageKeys().of(np.array([5, 6, 2**40]), session=0)
    assert [row.tobytes() for row in keys] == expected


def test_keys_do_not_depend_on_what_a_session_sent_before() -> None:
    dice = np.random.default_rng(1)
    remembering = PageKeys(sessions=2)
    for _ in range(200):
        blocks = dice.integers(0, 3, dice.integers(0, 8))
        keys = remembering.of(blocks, session=int(dice.integers(0, 4)))
        assert np.array_equal(keys, PageKeys().of(blocks, session=0))


def test_a_key_covers_everything_before_its_block() -> None:
    one, other = PageKeys().of(np.array([1, 2, 3]), 0), PageKeys().of(np.array([9, 2, 3]), 1)
    assert (one != other).any(axis=1).all()


@pytest.mark.parametrize("page_bytes", [1, 7, 8, 4096, 5000, 5001])
def test_pages_hold_the_bytes_of_their_keys_and_of_no_other(page_bytes: int) -> None:
    keys = random_keys(20)
    pages = np.zeros((20, page_bytes), dtype=np.uint8)
    fill_pages(keys, pages)
    assert count_wrong(keys, pages).tolist() == []
    if page_bytes >= 7:
        assert count_wrong(keys, np.roll(pages, 1, axis=0)).tolist() == list(range(20))


@pytest.mark.parametrize("page_bytes", [4096, 4099])
def test_one_flipped_bit_anywhere_is_found(page_bytes: int) -> None:
    keys = random_keys(4)
    pages = np.zeros((4, page_bytes), dtype=np.uint8)
    fill_pages(keys, pages)
    for at in {*range(0, page_bytes, 97), page_bytes - 1}:
        pages[2, at] ^= 1 << (at % 8)
        assert count_wrong(keys, pages).tolist() == [2]
        pages[2, at] ^= 1 << (at % 8)


def test_every_word_depends_on_each_byte_of_the_key() -> None:
    keys = np.repeat(random_keys(1), 33, axis=0)
    keys[np.arange(32), np.arange(32)] ^= 1
    pages = np.zeros((33, 4096), dtype=np.uint8)
    fill_pages(keys, pages)
    words = pages.view(np.uint64)
    assert (words[:32] != words[32]).all()
    assert all(len(np.unique(row)) == words.shape[1] for row in words)


def test_every_word_depends_on_its_place() -> None:
    keys = random_keys(1)
    pages = np.zeros((1, 4096), dtype=np.uint8)
    fill_pages(keys, pages)
    assert count_wrong(keys, np.roll(pages, 8, axis=1)).tolist() == [0]


def test_strided_and_unaligned_pages_hold_the_same_bytes_as_plain_ones() -> None:
    keys = random_keys(5)
    plain = np.zeros((5, 4096), dtype=np.uint8)
    fill_pages(keys, plain)
    wide = np.zeros((5, 4200), dtype=np.uint8)
    unaligned = np.zeros(5 * 4096 + 1, dtype=np.uint8)[1:].reshape(5, 4096)
    for pages in (wide[:, 3:4099], unaligned):
        fill_pages(keys, pages)
        assert np.array_equal(pages, plain)
        assert count_wrong(keys, pages).tolist() == []
        pages[4, 4095] ^= 1
        assert count_wrong(keys, pages).tolist() == [4]
    assert not wide[:, :3].any()
    assert not wide[:, 4099:].any()


def test_the_bytes_of_a_key_stay_what_they_are() -> None:
    """A store saved by an older version must still verify, so the definition is pinned."""
    pages = np.zeros((1, 256), dtype=np.uint8)
    fill_pages(np.arange(32, dtype=np.uint8).reshape(1, 32), pages)
    assert (
        hashlib.sha256(pages.tobytes()).hexdigest()
        == "7cc9b4caeb01cce1c65a38c4e209f4fd30bd5587431869e640d222d4775e2b79"
    )


@pytest.mark.parametrize(
    ("keys", "pages"),
    [
        (np.zeros((2, 31), np.uint8), np.zeros((2, 64), np.uint8)),
        (np.zeros((2, 32), np.int8), np.zeros((2, 64), np.uint8)),
        (np.zeros((2, 32), np.uint8), np.zeros((3, 64), np.uint8)),
        (np.zeros((2, 32), np.uint8), np.zeros((2, 64), np.uint16)),
        (np.zeros((2, 32), np.uint8), np.zeros(128, np.uint8)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(keys: np.ndarray, pages: np.ndarray) -> None:
    for call in (fill_pages, count_wrong):
        with pytest.raises(ArgumentError):
            call(keys, pages)
