"""Records in the daemon's memory that it keeps in place for this process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gdsstore.layout import ALIGNMENT
from gdsstore.memory.shared import SharedView
from gdsstore.node.errors import ProtocolError


class DaemonLease:
    """See `gdsstore.tiers.remote.NodeLease`. `record_bytes`: how many bytes lie at each address; 0 where nothing was found."""

    def __init__(
        self,
        view: SharedView,
        found: npt.NDArray[np.bool_],
        address: npt.NDArray[np.uint64],
        record_bytes: int,
        give_back: Callable[[], None],
    ) -> None:
        self.found, self.address, self.record_bytes = found, address, record_bytes
        self._view: SharedView | None = view  # the memory stays mapped as long as somebody refers to it
        self._give_back = [give_back]  # popped by whoever closes first

    def close(self) -> None:
        """Give the records back. Idempotent, from any thread; never raises."""
        try:
            give_back = self._give_back.pop()
        except IndexError:
            return
        give_back()
        self._view = None


def addresses(
    view: SharedView, found: npt.NDArray[np.bool_], offsets: bytes, record_bytes: int
) -> npt.NDArray[np.uint64]:
    """Where the records at these offsets (little-endian uint64, one for each that is `found`) lie in a view; 0 for the others.

    Raises ProtocolError for offsets that do not fit, so that nobody reads beside the view.
    """
    if len(offsets) != 8 * int(np.count_nonzero(found)):
        raise ProtocolError("a lease has another number of records than it says")
    at = np.frombuffer(offsets, "<u8").astype(np.uint64, copy=False)
    if len(at):
        last = view.size_bytes - record_bytes
        whole = record_bytes > 0 and record_bytes % ALIGNMENT == 0 and not (at % ALIGNMENT).any()
        if not whole or last < 0 or int(at.max()) > last:
            raise ProtocolError("the daemon names records outside of its memory")
    address = np.zeros(len(found), np.uint64)
    address[found] = at + np.uint64(view.address)
    return address
