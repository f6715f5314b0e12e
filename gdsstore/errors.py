"""Typed errors. Each says what failed, where, and what to do next; `context` holds the same facts as pairs."""

from __future__ import annotations

import os
from typing import Any


class GdsStoreError(Exception):
    """Base of all errors that this library raises on purpose.

    `context` holds the facts (path, key, errno, ...) that the message was made from.
    """

    def __init__(self, message: str, **context: Any) -> None:
        self.context = {name: value for name, value in context.items() if value is not None}
        facts = ", ".join(f"{name}={_show(value)}" for name, value in self.context.items())
        super().__init__(f"{message} [{facts}]" if facts else message)


def _show(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


class ConfigError(GdsStoreError, ValueError):
    """A setting is unknown, of the wrong type, or out of range."""


class ArgumentError(GdsStoreError, ValueError):
    """A call's arguments do not fit together (wrong-sized page, bad key, unknown dtype). Nothing was done."""


class MissingExtraError(GdsStoreError, ImportError):
    """An optional part is not installed; the message names the `pip install` that mends it."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(f'{why} needs {package}: pip install "gdsstore[{extra}]"')


class StoreError(GdsStoreError):
    """The store as a whole cannot be used as asked."""


class StoreClosedError(StoreError):
    """The store was closed, or belongs to the parent of a forked process."""


class StoreVersionError(StoreError):
    """The store was written by a newer format than this program reads."""


class StoreBusyError(StoreError):
    """Another process uses the store in a way that excludes this one."""


class StoreDamagedError(StoreError):
    """`store.json` or another file that cannot be rebuilt is missing or damaged."""


class VolumeError(GdsStoreError):
    """A volume's directory or one of its segments cannot be used."""


class EngineError(GdsStoreError):
    """An engine could not be started, or refused a whole plan."""


class DeviceError(GdsStoreError):
    """A GPU, or its memory, cannot be used as asked."""


class DeadlineError(GdsStoreError, TimeoutError):
    """Something did not answer within its deadline."""


def from_os_error(error: OSError, what: str, kind: type[GdsStoreError] = VolumeError) -> GdsStoreError:
    """The typed error for an OSError: what was tried, on which file, and the errno by name."""
    name = os.strerror(error.errno) if error.errno else str(error)
    return kind(f"{what}: {name}", path=error.filename, errno=error.errno)
