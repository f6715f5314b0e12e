"""What goes with encryption, and what does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdsstore.engines.routes import PathSetting
from gdsstore.errors import ConfigError

NO_DEVICE = (
    "pages in GPU memory cannot be encrypted: that is done in host memory. Give pages in host memory, or leave out "
    "encryption_key_file and encryption_key"
)


def check(values: Mapping[str, Any]) -> None:
    """`values`: all settings by name. Raises ConfigError where some of them exclude each other."""
    given = [name for name in ("encryption_key_file", "encryption_key") if values[name] is not None]
    if len(given) > 1:
        raise ConfigError("give encryption_key_file or encryption_key, not both")
    if not given:
        return
    if values["path"] is PathSetting.DIRECT or values["strict"]:
        raise ConfigError(
            f"{given[0]} does not go with path = direct or strict = true: pages are encrypted in host memory, which the direct "
            "path goes past"
        )
    if values["share_host_cache"]:
        raise ConfigError(
            f"{given[0]} does not go with share_host_cache: other processes would read the pages in the clear; leave one of the "
            "two out"
        )
