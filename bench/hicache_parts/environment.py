"""Makes SGLang importable in this process, and keeps the shell's settings from sending a backend elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from gdsstore.errors import StoreError

# The settings of SGLang's own backends. Some name a directory, and this bench removes what lies in theirs.
SGLANG_SETTINGS = "SGLANG_HICACHE_"


def has_sglang() -> bool:
    return importlib.util.find_spec("sglang") is not None


def prepare_sglang(root: Path) -> None:
    """Call before the first import of SGLang. `root`: of the repository. Raises StoreError where SGLang cannot be imported."""
    for name in [name for name in os.environ if name.startswith(SGLANG_SETTINGS)]:
        del os.environ[name]
    for folder in (root, root / "tests" / "sglang_cpu"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        importlib.import_module("harness_env").prepare_this_process()
        importlib.import_module("hicache_cpu_shim").install()
    except ImportError as error:
        raise StoreError(f"SGLang is installed but cannot be imported: {error}") from error
