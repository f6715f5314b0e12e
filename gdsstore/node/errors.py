"""What can go wrong between a process and the daemon of its store. None of it is fatal: the process goes on without."""

from __future__ import annotations

from gdsstore.errors import GdsStoreError, StoreError


class ProtocolError(GdsStoreError):
    """The other end sent what the protocol does not know. The connection cannot be used any more."""


class DaemonError(StoreError):
    """There is no daemon, or it refused; `context["code"]` tells the kind of refusal."""
