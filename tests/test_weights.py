"""Weights that differ must have digests that differ: a fine-tune under the same name serves other KV."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gdsstore.errors import ArgumentError
from gdsstore.weights import weights_digest

DATA_BYTES = 200_000


def shard(path: Path, data: bytes, **header: object) -> None:
    head = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}, **header}
    ).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for number in (1, 2):
        shard(tmp_path / f"model-0000{number}-of-00002.safetensors", bytes([number]) * DATA_BYTES)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return tmp_path


def tensors(path: Path, count: int) -> None:
    """A shard of so many equal tensors."""
    size = DATA_BYTES // count
    head = {
        f"layer.{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]}
        for n in range(count)
    }
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\1" * (count * size))


def first(model: Path) -> Path:
    return model / "model-00001-of-00002.safetensors"


def edit(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a larger shard": lambda m: shard(first(m), b"\1" * (DATA_BYTES + 1)),
    "a header": lambda m: shard(first(m), b"\1" * DATA_BYTES, __metadata__={"format": "pt"}),
    "the first bytes of the data": lambda m: edit(first(m), -DATA_BYTES),
    "the last byte of the data": lambda m: edit(first(m), -1),
    "a fine-tune: all of the data, no header": lambda m: shard(first(m), b"\7" * DATA_BYTES),
    "the config": lambda m: (m / "config.json").write_text('{"hidden_size": 9}'),
    "no config": lambda m: (m / "config.json").unlink(),
    "the index": lambda m: (m / "model.safetensors.index.json").write_text("{}"),
    "a shard that is gone": lambda m: first(m).unlink(),
    "a further shard": lambda m: shard(m / "z.safetensors", b"z"),
    "a renamed shard": lambda m: first(m).rename(m / "other.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_changes_with(change: str, model: Path) -> None:
    before = weights_digest(model)
    assert before == weights_digest(str(model))
    CHANGES[change](model)
    assert weights_digest(model) != before


@pytest.mark.parametrize("number", range(0, 40, 3))
def test_a_fine_tune_of_one_tensor_changes_the_digest(number: int, tmp_path: Path) -> None:
    """An adapter that was merged, say: all other tensors stay, and every header and size."""
    path = tmp_path / "model.safetensors"
    tensors(path, 40)
    before = weights_digest(tmp_path)
    raw = bytearray(path.read_bytes())
    size = DATA_BYTES // 40
    start = len(raw) - (40 - number) * size
    raw[start : start + size] = b"\2" * size
    path.write_bytes(raw)
    assert weights_digest(tmp_path) != before


def test_a_shard_of_very_many_tensors_is_sampled_over_all_its_length(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors(path, 1000)
    before = weights_digest(tmp_path)
    raw = bytearray(path.read_bytes())
    for at in range(len(raw) - DATA_BYTES * 6 // 10, len(raw) - DATA_BYTES * 5 // 10):
        raw[at] = 2
    path.write_bytes(raw)
    assert weights_digest(tmp_path) != before


def test_the_digest_does_not_depend_on_where_the_model_lies(model: Path, tmp_path: Path) -> None:
    before = weights_digest(model)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in model.iterdir():
        if path.is_file():
            path.rename(moved / path.name)
    assert weights_digest(moved) == before


def test_shards_without_data_have_a_digest(tmp_path: Path) -> None:
    shard(tmp_path / "empty.safetensors", b"")
    shard_of_one = tmp_path / "one"
    shard_of_one.mkdir()
    shard(shard_of_one / "empty.safetensors", b"1")
    assert weights_digest(tmp_path) != weights_digest(shard_of_one)


def test_a_directory_without_safetensors_asks_for_a_revision(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ArgumentError, match="weights='<revision>'"):
            weights_digest(path)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"short",
        (1 << 40).to_bytes(8, "little") + b"{}",
        b"\xff" * 64,
        (4).to_bytes(8, "little") + b"{no}" + b"data",
        (2).to_bytes(8, "little") + b"[]" + b"data",
        (8).to_bytes(8, "little") + b'{"w": 3}' + b"data",
        (24).to_bytes(8, "little") + b'{"w":{"data_offsets":9}}' + b"data",
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(ArgumentError, match="not a safetensors file"):
        weights_digest(tmp_path)
