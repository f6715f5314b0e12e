"""Where settings come from: a TOML file and the environment. What a value means is the business of `settings.py`."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gdsstore.errors import ConfigError

ENV_PREFIX = "GDSSTORE_"
ENV_FILE = "GDSSTORE_CONFIG"  # names the TOML file; every other GDSSTORE_* variable is a setting

# Kubernetes and `docker --link` put such variables into every process beside a service whose name starts with "gdsstore".
_SERVICE_LINK = re.compile(
    r"GDSSTORE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


class Given(NamedTuple):
    """A value as a source gave it."""

    name: str
    value: object
    source: str  # for messages
    written: str  # the name as the source spells it
    from_text: bool = False  # the source has only strings


def env_name(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def from_file(file: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Iterator[Given]:
    """What `file`, else the file that GDSSTORE_CONFIG names, gives. Raises ConfigError where it cannot be read."""
    file = env.get(ENV_FILE) if file is None else file
    if file is None:
        return
    try:
        table = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the config file cannot be read: {error.strerror}", path=file, errno=error.errno
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or brackets in brackets without end
        raise ConfigError(f"the config file is not TOML: {error}", path=file) from error
    for name, value in table.items():
        yield Given(name, value, f"file {os.fspath(file)}", written=name)


def from_environment(env: Mapping[str, str]) -> Iterator[Given]:
    """What the GDSSTORE_* variables give, known or not."""
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == ENV_FILE or _is_service_link(variable, text):
            continue
        suffix = variable.removeprefix(ENV_PREFIX)
        # No setting has a capital, so a variable that is not all capitals comes out under a name that nobody knows.
        name = suffix.lower() if suffix.isupper() else suffix.upper()
        yield Given(name, text, f"environment variable {variable}", written=variable, from_text=True)


def _is_service_link(variable: str, text: str) -> bool:
    if _SERVICE_LINK.fullmatch(variable):
        return True
    return variable.endswith("_PORT") and _SERVICE_URL.match(text) is not None
