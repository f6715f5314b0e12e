"""docs/format.md says, byte for byte, what the code reads and writes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gdsstore.catalog import heat, records
from gdsstore.checksum.definition import KEYS, finish, reference_raw, seeds
from gdsstore.volume import format as segment_format

PAGE = Path(__file__).resolve().parent.parent / "docs" / "format.md"
TEXT = PAGE.read_text(encoding="utf-8")

STRUCTS = {
    "Superblock": segment_format.SUPERBLOCK,
    "Record table entry": segment_format.ENTRY,
    "PAGE": records.PAGE,
    "EXTENT_HEADER": records.EXTENT_HEADER,
    "IDENT": records.IDENT,
    "ITEM": records.ITEM,
    "SEGMENT": records.SEGMENT,
}


def table(head: str, text: str = TEXT) -> list[list[str]]:
    """The rows of the first table with this head, cells without backticks."""
    lines = text.split(f"| {head} |\n", 1)[1].splitlines()[1:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def section(title: str) -> str:
    return re.split(r"^#+ ", TEXT.split(f"\n### {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def kind(dtype: np.dtype) -> str:
    """A field's type in the words of the page."""
    base = dtype.base
    if dtype.shape or base.kind in "SV":
        assert base.itemsize == 1 or base.kind in "SV"
        return f"bytes[{dtype.itemsize}]"
    assert base.byteorder in "<="
    assert base.kind == "u"
    return f"u{8 * base.itemsize}"


@pytest.mark.parametrize("title", STRUCTS)
def test_a_struct_is_described_field_by_field(title: str) -> None:
    dtype = STRUCTS[title]
    described = [row[:3] for row in table("offset | type | field | meaning", section(title))]
    assert dtype.fields is not None
    assert dtype.names is not None
    real = [[str(dtype.fields[name][1]), kind(dtype.fields[name][0]), name] for name in dtype.names]
    assert described == real


@pytest.mark.parametrize("title", ["Superblock", "Record table entry"])
def test_a_struct_has_the_size_that_is_said_and_no_gaps(title: str) -> None:
    dtype = STRUCTS[title]
    assert f", {dtype.itemsize} bytes" in section(title)
    assert dtype.fields is not None
    assert dtype.names is not None
    assert sum(dtype.fields[name][0].itemsize for name in dtype.names) == dtype.itemsize


def test_the_flags_are_those_of_the_code() -> None:
    flags = {name: int(value) for name, value, _ in table("flag | value | meaning")}
    code = {name: value for name, value in vars(segment_format).items() if name.startswith("FLAG_")}
    assert flags == code


def test_the_examples_of_geometry_are_right() -> None:
    rows = table("segment_bytes | slot_bytes | slot_count | data_offset")
    assert len(rows) >= 3
    for segment_bytes, slot_bytes, slot_count, data_offset in (map(int, row) for row in rows):
        geometry = segment_format.Geometry.of(segment_bytes, slot_bytes)
        assert (geometry.slot_count, geometry.data_offset) == (slot_count, data_offset)
        larger = -(-(4096 + 128 * (slot_count + 1)) // 4096) * 4096 + (slot_count + 1) * slot_bytes
        assert larger > segment_bytes  # "the largest number for which"


def test_the_worked_example_is_right() -> None:
    said = {name: int(value, 16) for name, value in table("value | hex")}
    page = bytes(i % 251 for i in range(5000))
    key, namespace, uuid = np.arange(32, dtype=np.uint8)[None], bytes(range(16)), bytes(range(16, 32))
    raw = reference_raw(page + bytes(8192 - len(page)))
    seed = seeds(key, namespace, np.array([7], np.uint64), np.array([len(page)], np.int64))
    checksum = finish(np.array([raw], np.uint64), seed)
    entry = np.zeros(1, segment_format.ENTRY)
    entry["key"], entry["namespace"] = key, np.frombuffer(namespace, np.uint8)
    entry["checksum"], entry["generation"], entry["sequence"] = checksum, 7, 9
    entry["payload_bytes"], entry["flags"] = len(page), segment_format.FLAG_STORED
    entry["segment_id"], entry["slot"] = 3, 2
    salt = segment_format.entry_salt(uuid)
    segment_format.seal_entries(entry, salt)
    assert said == {
        "raw": raw,
        "seed": int(seed[0]),
        "checksum": int(checksum[0]),
        "salt": salt,
        "entry crc": int(entry["crc"][0]),
    }


def test_the_constants_in_the_text_are_those_of_the_code() -> None:
    assert f"Format version **{segment_format.FORMAT_VERSION}**" in TEXT
    assert segment_format.MAGIC == b"GDSSEG\r\n"
    assert hex(int(KEYS[0])) in TEXT
    assert hex(int(KEYS[-1])) in TEXT
    assert f"at most {records.EXTENT_PAGES}" in TEXT
    assert f"version ({records.CATALOG_VERSION})" in TEXT
    states = ", ".join(f"{state.value} {state.name}" for state in records.SegmentState)
    assert states in TEXT
    stamps = heat.HEADER_BYTES + 4 * segment_format.MAX_SEGMENTS
    assert f"{heat.HEADER_BYTES}          {segment_format.MAX_SEGMENTS} x u32" in TEXT
    assert f"{stamps}       stride x u32" in TEXT
    assert f"1/{heat.TICKS_PER_S} s" in TEXT
