"""What one setting is: its kind, its bounds, its documentation, and how a value of it is read. `config.py` has the settings."""

from __future__ import annotations

import difflib
import math
import operator
import os
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gdsstore.errors import ArgumentError
from gdsstore.sealing.key import parse_key
from gdsstore.sealing.secret import Secret
from gdsstore.sizes import format_size, parse_size

_TRUTH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


class Kind(StrEnum):
    SIZE = "size"  # bytes
    INTEGER = "integer"
    SECONDS = "seconds"
    SWITCH = "true or false"
    CHOICE = "choice"
    PATH = "path"
    KEY = "key"  # a Secret


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a field of `Config` beyond its type and default."""

    section: str
    kind: Kind
    doc: str
    low: float = 0
    high: float = math.inf
    step: int = 1  # a value is a multiple of it
    power_of_two: bool = False
    zero_is_automatic: bool = False
    optional: bool = False  # None is a value
    choices: type[StrEnum] | None = None

    def read(self, value: object, from_text: bool = False) -> Any:
        """The value in the field's type; `from_text` where the source has only strings, as the environment does.

        Raises ValueError with the part of the message that follows the setting's name.
        """
        if value is None and self.optional:
            return None
        match self.kind:
            case Kind.SIZE:
                return self._within(_size(value))
            case Kind.INTEGER:
                return self._within(_integer(value, from_text))
            case Kind.SECONDS:
                return self._within(_seconds(value, from_text))
            case Kind.SWITCH:
                return _switch(value, from_text)
            case Kind.CHOICE:
                return self._choice(value)
            case Kind.PATH:
                return _path(value)
            case Kind.KEY:
                return _key(value)

    def show(self, value: object) -> str:
        """A value as a person would write it."""
        if value is None:
            return "none"
        if isinstance(value, bool):
            return str(value).lower()
        if self.kind is Kind.SIZE and isinstance(value, int | float):
            return format_size(int(value)) if value else "0"
        return str(value)

    @property
    def bounds(self) -> str:
        """The values that are let in, in words; empty where all of the type are."""
        if self.choices is not None:
            return ", ".join(self.choices)
        if self.kind in (Kind.SWITCH, Kind.PATH, Kind.KEY):
            return ""
        words = f"at least {self.show(self.low)}"
        if not math.isinf(self.high):
            words = f"{self.show(self.low)} to {self.show(self.high)}"
        if self.step > 1:
            words += f", a multiple of {self.show(self.step)}"
        if self.power_of_two:
            words += ", a power of two"
        return f"0, or {words}" if self.zero_is_automatic else words

    def _within(self, value: Any) -> Any:
        if value == 0 and self.zero_is_automatic:
            return value
        fits = self.low <= value <= self.high
        if not fits or (self.step > 1 and value % self.step) or (self.power_of_two and value & (value - 1)):
            raise ValueError(f"must be {self.bounds}")
        return value

    def _choice(self, value: object) -> StrEnum:
        assert self.choices is not None
        if isinstance(value, str) and value in list(self.choices):
            return self.choices(value)
        near = difflib.get_close_matches(str(value).lower(), list(self.choices), 1)
        raise ValueError(f"must be one of {self.bounds}" + (f"; did you mean {near[0]}?" if near else ""))


def setting(default: object, section: str, kind: Kind, doc: str, **limits: Any) -> Any:
    """A dataclass field that carries its `Setting`."""
    return field(default=default, metadata={"setting": Setting(section, kind, doc, **limits)})


def choice(default: StrEnum, section: str, doc: str) -> Any:
    """A field whose values are the members of `default`'s enum."""
    return setting(default, section, Kind.CHOICE, doc, choices=type(default))


def _size(value: object) -> int:
    try:
        return parse_size(value)  # type: ignore[arg-type]  # it refuses other types itself
    except ArgumentError as error:
        raise ValueError(f"must be a size: {error}") from error


def _integer(value: object, from_text: bool) -> int:
    # bool is an int to Python, and `workers = true` is a mistake. operator.index lets numpy's integers in and floats not.
    if not isinstance(value, bool):
        try:
            return int(value) if from_text and isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
    raise ValueError("must be a whole number")


def _seconds(value: object, from_text: bool) -> float:
    if isinstance(value, int | float | (str if from_text else int)) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except (ValueError, OverflowError):  # not a number; an int beyond all floats
            seconds = math.nan
        if math.isfinite(seconds):
            return seconds
    raise ValueError("must be a number of seconds")


def _path(value: object) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if isinstance(path, str) and path:
        return path
    raise ValueError("must be a path")


def _key(value: object) -> Secret:
    secret = Secret(value) if isinstance(value, str) else value
    if not isinstance(secret, Secret):
        raise ValueError("must be a string")
    parse_key(secret.reveal())
    return secret


def _switch(value: object, from_text: bool) -> bool:
    if from_text and isinstance(value, str):
        value = _TRUTH.get(value.lower())
    if isinstance(value, bool):
        return value
    raise ValueError("must be true or false")
