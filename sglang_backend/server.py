"""The arguments of the SGLang server that this process belongs to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def server_args() -> Any:
    """What SGLang made of its arguments, as attributes; None outside a server (a unit test of the backend, say).

    Not ServerArgs itself: that holds what the user wrote, "auto" and all.
    """
    from sglang.srt.runtime_context import get_context

    try:
        return SimpleNamespace(**get_context().resolved_server_args_dict())
    except (AttributeError, RuntimeError, ValueError):
        return None
