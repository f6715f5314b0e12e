"""A digest of a model's weights that is quick to take: the index, and each shard's size, header and samples."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

from gdsstore.errors import ArgumentError

MAX_HEADER_BYTES = 100 << 20  # the limit that the safetensors format sets
SAMPLES, SAMPLE_BYTES = 8, 4096
# Of a shard's tensors, each with a sample from its middle: all of most models', of others as many, evenly spread.
TENSORS, TENSOR_SAMPLE_BYTES = 128, 1024


def weights_digest(model_path: str | os.PathLike[str]) -> str:
    """32 hex digits that change when the weights in `model_path` do.

    Covers `config.json`, the safetensors index, and of each shard the size, the header, a few samples of the data and one of each
    tensor (a fine-tune keeps every header, and may leave most tensors alone). Raises ArgumentError where there are no safetensors
    files: give the revision yourself then.
    """
    root = Path(model_path)
    shards = sorted(root.glob("*.safetensors")) if root.is_dir() else []
    if not shards:
        raise ArgumentError("no *.safetensors files here; pass weights='<revision>' instead", path=str(root))
    digest = hashlib.sha256(b"gdsstore-weights-v2")
    for name in ("config.json", "model.safetensors.index.json"):
        path = root / name
        if path.is_file():
            _feed(digest, name.encode(), path.read_bytes())
    for shard in shards:
        size = shard.stat().st_size
        _feed(digest, shard.name.encode(), struct.pack("<Q", size))
        with shard.open("rb") as file:
            length = _header_length(file.read(8), shard, size)
            header = file.read(length)
            _feed(digest, b"header", header)
            start, data = 8 + length, size - 8 - length
            for i in range(SAMPLES if data > 0 else 0):
                file.seek(start + max(0, data - SAMPLE_BYTES) * i // (SAMPLES - 1))
                _feed(digest, b"sample", file.read(SAMPLE_BYTES))
            for middle in _middles(header, shard):
                file.seek(start + max(0, middle - TENSOR_SAMPLE_BYTES // 2))
                _feed(digest, b"tensor", file.read(TENSOR_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _feed(digest: hashlib._Hash, name: bytes, value: bytes) -> None:
    """Length before content, so that no two lists of parts run together to the same bytes."""
    digest.update(struct.pack("<QQ", len(name), len(value)) + name + value)


def _middles(header: bytes, shard: Path) -> list[int]:
    """The middles of the sampled tensors, in bytes from the start of the data, rising."""
    try:
        tensors = {name: facts for name, facts in json.loads(header).items() if name != "__metadata__"}
        middles = sorted(sum(map(int, facts["data_offsets"])) // 2 for facts in tensors.values())
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ArgumentError("not a safetensors file: its header cannot be read", path=str(shard)) from error
    return middles[:: max(1, -(-len(middles) // TENSORS))]


def _header_length(prefix: bytes, shard: Path, size: int) -> int:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ArgumentError("not a safetensors file, or cut short", path=str(shard))
    return length
