"""The user's key, which all of a store's keys are derived from: where it comes from, and how it is written.

No message of this module holds any part of a key.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from typing import TYPE_CHECKING

from gdsstore.errors import ConfigError, from_os_error

if TYPE_CHECKING:
    from gdsstore.config import Config

KEY_BYTES = 32
MAX_FILE_BYTES = 4096
FORMS = f"{KEY_BYTES} bytes, as {2 * KEY_BYTES} hex digits or as base64"
_TEXT = bytes([*b"\t\n\r", *range(0x20, 0x7F)])


def parse_key(text: str) -> bytes:
    """The 32 bytes that are written as hex or base64. Raises ValueError with what would be right."""
    text = text.strip()
    try:
        key = bytes.fromhex(text) if len(text) == 2 * KEY_BYTES else _from_base64(text)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        # Without the chain of causes: some of them quote what they could not read.
        raise ValueError(f"must be {FORMS}") from None
    return key


def _from_base64(text: str) -> bytes:
    padded = text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4)
    return base64.b64decode(padded.replace("-", "+").replace("_", "/"), validate=True)


def read_key_file(path: str) -> bytes:
    """The key in a file: 32 bytes as they are, or written as hex or base64. Raises ConfigError.

    Follows symbolic links, as which container platforms mount their secrets.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            content = os.read(fd, MAX_FILE_BYTES) if stat.S_ISREG(found.st_mode) else b""
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, "encryption_key_file cannot be read", ConfigError) from error
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError("encryption_key_file must be a regular file", path=path)
    if found.st_mode & 0o077:
        raise ConfigError(
            "encryption_key_file can be read or changed by others than its owner; chmod 600 it",
            path=path,
            mode=oct(stat.S_IMODE(found.st_mode)),
        )
    # Random bytes never are all text, but half a key in hex is; it would pass for one.
    if len(content) == KEY_BYTES and content.translate(None, _TEXT):
        return content
    try:
        return parse_key(content.decode("ascii"))
    except ValueError:
        raise ConfigError(
            f"encryption_key_file must hold {FORMS}, or the {KEY_BYTES} bytes as they are; one is made by "
            "`openssl rand -hex 32`",
            path=path,
            nbytes=len(content),
        ) from None


def master_key(config: Config) -> bytes | None:
    """The key that the config names; None where pages are not encrypted. Raises ConfigError."""
    if config.encryption_key_file is not None:
        return read_key_file(config.encryption_key_file)
    return None if config.encryption_key is None else parse_key(config.encryption_key.reveal())
