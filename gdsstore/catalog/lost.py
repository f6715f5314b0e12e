"""Giving up segments whose files are gone, cut short, or not ours."""

from __future__ import annotations

import errno
import os

from gdsstore.catalog.index import Catalog
from gdsstore.catalog.records import SegmentRow, SegmentState
from gdsstore.errors import GdsStoreError
from gdsstore.volume.volume import Volume

# What will not go away by itself. Anything else (no descriptors left, no permission, a drive mounted read-only) says nothing
# about the pages of a segment, and must not cost them.
NO_FILE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EISDIR,
)  # a link is not followed, and so no file of ours
FOR_GOOD = (*NO_FILE, errno.EIO, errno.ENXIO)


def is_lost(error: OSError | GdsStoreError) -> bool:
    """Whether an error with a segment's file means that the segment is lost."""
    return not isinstance(error, OSError) or error.errno in FOR_GOOD


def give_up(catalog: Catalog, volume: Volume, row: SegmentRow) -> None:
    """Drop a segment's pages, unless it was given away meanwhile. A file that is there is never written to again and counts
    against the capacity until someone deletes it; one that is not is forgotten."""
    with catalog.write(pages=row.slot_count) as txn:
        now = catalog.segment(txn, row.segment_id)
        if now is None or now.generation != row.generation:
            return
        catalog.drop_pages(txn, row.segment_id)
        if os.path.lexists(volume.segment_path(row.segment_id)):
            catalog.put_segment(txn, now.with_(state=SegmentState.LOST))
        else:
            catalog.forget_segment(txn, row.segment_id)
