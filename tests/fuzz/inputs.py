"""Bytes read as choices: whatever they are, they mean something, and small changes of them mean small changes of that."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS = (0, 1, 2, 3, 15, 16, 63, 64, 127, 128, 255, 256, 4095, 4096, 4097, 65535, 65536)
EDGES = tuple(
    sign * ((1 << bits) + more)
    for bits in (7, 15, 16, 31, 32, 63, 64, 70, 1000)
    for more in (-1, 0, 1)
    for sign in (1, -1)
)
WORDS = (
    "",
    ".",
    "..",
    "/",
    "a",
    "\0",
    "x\0y",
    "../../etc",
    "\ud800",
    "nan",
    "e" * 300,
    "00",
    "true",
    "4KiB",
    "-1",
)


class Choices:
    """Reads choices off `data`, front to back. Behind its end all choices are the first one."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def raw(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        self._at += count
        return found.ljust(count, b"\0")

    def rest(self) -> bytes:
        return self.raw(self.left)

    def below(self, count: int) -> int:
        """0 to count - 1."""
        width = max(1, (count - 1).bit_length() + 7 >> 3)
        return int.from_bytes(self.raw(width), "little") % count

    def one(self, of: Sequence[T]) -> T:
        return of[self.below(len(of))]

    def number(self) -> int:
        """Whole numbers of all sizes; the interesting ones often."""
        match self.below(4):
            case 0:
                return self.one(NUMBERS)
            case 1:
                return self.one(EDGES)
            case 2:
                return int.from_bytes(self.raw(2), "little", signed=True)
        return int(struct.unpack("<q", self.raw(8))[0])

    def text(self) -> str:
        if self.below(2):
            return self.one(WORDS)
        return self.raw(self.below(24)).decode("latin-1")

    def json(self, depth: int = 0) -> Any:
        """A value that JSON can hold: of any type, and sometimes much too large or too deep."""
        match self.below(10 if depth < 4 else 7):
            case 0 | 1:
                return self.number()
            case 2:
                return self.text()
            case 3:
                return self.one((True, False, None))
            case 4:
                return self.one((0.5, -1.5, 1e300, float("inf"), float("-inf"), float("nan"), -0.0))
            case 5:
                return self.raw(16).hex()
            case 6:
                return Deep(self.one(("[", '{"a":')), self.one((3, 500, 5000, 100_000)))
            case 7:
                return [self.json(depth + 1) for _ in range(self.below(5))]
            case 8:
                return {self.text(): self.json(depth + 1) for _ in range(self.below(5))}
        return []


class Deep:
    """Brackets in brackets, which no recursion comes to the end of."""

    def __init__(self, bracket: str, count: int) -> None:
        self.bracket, self.count = bracket, count


def dumped(value: Any) -> bytes:
    """As JSON, with what only a damaged file has: NaN, numbers without end, brackets without end."""
    deep: list[Deep] = []

    def plain(part: Any) -> Any:
        if isinstance(part, Deep):
            deep.append(part)
            return f"\x01{len(deep) - 1}\x02"
        if isinstance(part, list):
            return [plain(each) for each in part]
        if isinstance(part, dict):
            return {name: plain(each) for name, each in part.items()}
        return part

    text = json.dumps(plain(value), ensure_ascii=True)
    for number, part in enumerate(deep):
        close = "]" if part.bracket == "[" else "}"
        filling = part.bracket * part.count + ("1" if close == "}" else "") + close * part.count
        text = text.replace(f'"\\u0001{number}\\u0002"', filling)
    return text.encode()


def packable(value: Any) -> Any:
    """What msgpack has: no number beyond 64 bits, no lone surrogate."""
    match value:
        case Deep():
            return []
        case bool():
            return value
        case int():
            return max(-(1 << 63), min(value, (1 << 64) - 1))
        case str():
            return value.encode("utf-8", "replace").decode()
        case list():
            return [packable(each) for each in value]
        case dict():
            return {packable(name): packable(each) for name, each in value.items()}
    return value


def damaged_json(choices: Choices, right: dict[str, Any]) -> bytes:
    """A JSON file that should hold `right` and does not quite."""
    match choices.below(8):
        case 0:
            return choices.rest()
        case 1:
            return dumped(choices.json())
        case 2:
            whole = dumped(right)
            return whole[: choices.below(len(whole) + 1)]
        case 3:
            whole = bytearray(dumped(right))
            for _ in range(1 + choices.below(4)):
                whole[choices.below(len(whole))] ^= 1 << choices.below(8)
            return bytes(whole)
    changed = dict(right)
    for _ in range(1 + choices.below(3)):
        name = choices.one(tuple(right))
        if choices.below(8) == 7:
            changed.pop(name, None)
        elif isinstance(changed.get(name), list) and choices.below(2):
            changed[name] = [*changed[name][: choices.below(3)], choices.json()]
        else:
            changed[name] = choices.json()
    return dumped(changed)
