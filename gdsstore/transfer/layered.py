"""A layer-wise load: layer groups in order, each told when its bytes are in place, and the pages judged at the end.

Layers are handed out before the whole of a page is verified: its checksum covers the record, and is known with its last layers.
The result is the judgement. Nothing computed from a page that missed may be kept.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from gdsstore.checksum.definition import finish, seeds
from gdsstore.layout import ByteRange
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.layered_reads import LayerReads
from gdsstore.transfer.layered_transfers import GroupTransfers
from gdsstore.transfer.load import Landed, LoadJob, StillThere
from gdsstore.transfer.mover import Mover
from gdsstore.transfer.pipeline import LayerPipeline, Mask, OnLayers
from gdsstore.transfer.results import LoadResult, PageStatus, Statuses
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.transfer")


def load_layers(
    mover: Mover,
    job: LoadJob,
    groups: Sequence[LayerGroup],
    ranges: Sequence[Sequence[ByteRange]],
    on_layers: OnLayers,
    status: Statuses,
    chunk_bytes: int,
    verify: bool,
    still_there: StillThere,
    deadline: Deadline,
    admission: Admission,
    landed: Landed | None = None,
) -> LoadResult:
    """Read the job's pages into their memory, group by group. `ranges`: what each group reads of a record, see `block_ranges`.
    `status` (one a key of the call) is filled in and returned. A page that was not good in every `on_layers` is a miss.
    `landed` is told once, of what is verified.

    Does not raise: what `on_layers` raises ends the load with misses.
    """
    status[job.at] = PageStatus.MISS_IO  # until better is known
    reads = LayerReads(mover, job, chunk_bytes, verify, deadline, admission)

    def start(group: LayerGroup, wanted: Mask) -> GroupTransfers:
        return reads.add(ranges[groups.index(group)])

    # All groups at once: what is under way is bounded by its bytes.
    pipeline = LayerPipeline(groups, len(job.at), start, on_layers, ahead=len(groups))
    try:
        came = pipeline.run(deadline).ok
        outcome = reads.outcome
        outcome[(outcome == PageStatus.PENDING) & ~came] = (
            PageStatus.MISS_DEADLINE if deadline.passed else PageStatus.MISS_IO
        )
        _judge(job, reads, verify, still_there)
        status[job.at] = outcome
        good = np.flatnonzero(outcome == PageStatus.LOADED)
        if landed is not None and verify and len(good):
            landed(job.at[good], reads.raw[good])
    except Exception:  # an exception could not say which memory the drive still writes to; a result does
        log.exception("a layer-wise load failed")
    finally:
        reads.end()
    return LoadResult(status, reads.unfinished)


def _judge(job: LoadJob, reads: LayerReads, verify: bool, still_there: StillThere) -> None:
    """Whether the pages of which every byte has come are what the catalog says."""
    outcome = reads.outcome
    came = np.flatnonzero(outcome == PageStatus.PENDING)
    if verify:
        payload = job.where.payload_bytes[came].astype(np.int64)
        seed = seeds(job.keys[came], job.namespace_digest, job.where.generation[came], payload)
        right = finish(reads.raw[came], seed) == job.where.checksum[came]
    else:
        right = still_there(came)  # nothing but the generation guards against a reclaimed slot now
    outcome[came[right]] = PageStatus.LOADED
    wrong = came[~right]
    outcome[wrong] = PageStatus.MISS_RECLAIMED
    if verify and len(wrong):
        # Reclaimed while we read it, or damaged? Only the catalog can tell.
        outcome[wrong[still_there(wrong)]] = PageStatus.MISS_CHECKSUM
