"""Sizes: what people write is read as meant, or refused; nothing is rounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdsstore.errors import ArgumentError
from gdsstore.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 << 30),
        ("256MiB", 256 << 20),
        ("64 kib", 64 << 10),
        (" 1.5GiB ", 3 << 29),
        ("2TB", 2 * 10**12),
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        (1 << 40, 1 << 40),
        (np.int64(4096), 4096),
    ],
)
def test_a_size_is_read_as_written(text: int | str, nbytes: int) -> None:
    parsed = parse_size(text)
    assert parsed == nbytes
    assert type(parsed) is int


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "GiB",
        "-1",
        "-4GiB",
        "4 Gi B",
        "1e9",
        "0x10",
        "4GiBs",
        "nan",
        "1.0001KiB",
        "1_000",
        "٤GiB",
        "16EiB",
        "9999PiB",
    ],
)
def test_what_is_not_a_size_is_refused(bad: str) -> None:
    with pytest.raises(ArgumentError):
        parse_size(bad)


@pytest.mark.parametrize("bad", [True, 1.5, None, -1, 1 << 63, b"4GiB", [1]])
def test_wrong_types_and_impossible_numbers_are_refused(bad: object) -> None:
    with pytest.raises(ArgumentError):
        parse_size(bad)  # type: ignore[arg-type]


def test_a_lone_letter_is_refused_because_it_has_two_meanings() -> None:
    with pytest.raises(ArgumentError, match="4GiB or 4GB"):
        parse_size("4G")


@given(st.one_of(st.integers(0, (1 << 63) - 1), st.integers(0, 1 << 20).map(lambda n: n << 30)))
def test_a_formatted_size_reads_back_to_the_same_bytes(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0B"), (1000, "1000B"), (4096, "4KiB"), (3 << 29, "1536MiB"), (1 << 40, "1TiB")]
)
def test_a_size_is_shown_in_the_largest_unit_that_keeps_it_whole(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text
