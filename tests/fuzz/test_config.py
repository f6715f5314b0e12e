"""Fuzz: the config file and the environment."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.fuzz.harness import fuzz, instrumented, quickly  # noqa: E402

with instrumented():
    from gdsstore.config import SETTINGS, Config
    from gdsstore.errors import ConfigError
    from gdsstore.sizes import parse_size

from gdsstore.errors import ArgumentError  # noqa: E402
from tests.fuzz.inputs import Choices, Deep, dumped  # noqa: E402

NAMES = (*SETTINGS, "capactiy", "", "a.b", "[x]", "__class__", "e" * 300)
TEXTS = (
    "",
    "\0",
    "1e999",
    "0x10",
    "1_000",
    "\u0663",
    "-0",
    "nan",
    "1GiB",
    "99999999999999GiB",
    "on",
    "inf",
    "e" * 5000,
)


def one_input(data: bytes) -> None:
    choices = Choices(data)
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="gdsstore-fuzz-", suffix=".toml") as file:
        Path(file.name).write_bytes(_toml(choices))
        try:
            config = Config.load(file.name, _environment(choices))
        except ConfigError:
            pass
        else:
            assert Config(**{name: getattr(config, name) for name in SETTINGS}) == config
    text = choices.one((choices.one(TEXTS), choices.text()))
    with contextlib.suppress(ArgumentError):
        assert type(parse_size(text)) is int


def _toml(choices: Choices) -> bytes:
    if choices.below(4) == 3:
        return choices.rest()
    lines = []
    for _ in range(choices.below(6)):
        value = choices.json()
        if isinstance(value, Deep):
            text = value.bracket.replace(":", "=") * value.count  # what is never closed
        else:
            text = (
                dumped(value).decode().replace("Infinity", "inf").replace("NaN", "nan").replace("null", "''")
            )
        lines.append(f"{choices.one(NAMES)} = {text}")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _environment(choices: Choices) -> dict[str, str]:
    found = {}
    for _ in range(choices.below(3)):
        name = os.fsdecode(choices.one(NAMES).upper().encode())
        found[f"GDSSTORE_{name}"] = choices.one((choices.one(TEXTS), choices.text(), str(choices.number())))
    return {name: value for name, value in found.items() if name != "GDSSTORE_CONFIG"}


test_a_config_is_right_or_refused = quickly(one_input, 300)

if __name__ == "__main__":
    fuzz(one_input)
