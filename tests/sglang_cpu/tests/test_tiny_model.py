"""The tiny model is reproducible and its tokenizer is reversible."""

from pathlib import Path

from tiny_model import CONFIG, VOCAB_SIZE, write_tiny_model
from transformers import AutoTokenizer


def test_the_same_seed_writes_the_same_files(tmp_path: Path) -> None:
    first, second = write_tiny_model(tmp_path / "a"), write_tiny_model(tmp_path / "b")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_another_seed_writes_other_weights(tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "a") / "model.safetensors"
    second = write_tiny_model(tmp_path / "b", seed=1) / "model.safetensors"
    assert first.read_bytes() != second.read_bytes()


def test_the_tokenizer_returns_the_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model(tmp_path))
    text = "Pages of 16 tokens, gr\u00fc\u00dfe \u4e16\u754c"
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < VOCAB_SIZE == CONFIG["vocab_size"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
