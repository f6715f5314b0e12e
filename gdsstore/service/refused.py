"""What the daemon does not do for a client, as an exception that becomes the answer."""

from __future__ import annotations

from gdsstore.errors import GdsStoreError
from gdsstore.node.messages import Refusal, Refused

MOST_TEXT = 1000  # characters


class RefusedError(GdsStoreError):
    """Not done; `code` and the message go to the client."""

    def __init__(self, code: Refusal, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def answer(self) -> Refused:
        return Refused(self.code, str(self)[:MOST_TEXT])
