"""Layer-wise saves as calls."""

from __future__ import annotations

import time

import numpy as np

from gdsstore.layered_plan import LayerPlan
from gdsstore.transfer.admission import Admission
from gdsstore.transfer.commit import SaveJob
from gdsstore.transfer.groups import LayerGroup
from gdsstore.transfer.layered_cuts import block_ranges_of_save
from gdsstore.transfer.layered_writes import save_layers
from gdsstore.transfer.pipeline import LOOK_S, LayersComputed
from gdsstore.transfer.results import PageStatus, SaveResult, Statuses
from gdsstore.transfer.save import Saver
from gdsstore.waiting import Deadline


class LayeredSave:
    """One call of `save_layers`. `computed`: how far the forward is."""

    def __init__(self, plan: LayerPlan, computed: LayersComputed) -> None:
        self._plan, self._computed = plan, computed

    def wait_whole(self, deadline: Deadline, admission: Admission) -> bool:
        """Wait for the last layer; whether it was computed in time, and the call not cancelled before. Raises what the `ready` of
        LayersComputed raises."""
        whole = LayerGroup(0, self._plan.layout.layers)
        while not self._computed.has(whole):
            if deadline.passed or admission.stopping:
                return False
            self._computed.wait(whole, min(LOOK_S, deadline.left_s))
        return True

    def write(
        self, saver: Saver, job: SaveJob, status: Statuses, deadline: Deadline, admission: Admission
    ) -> SaveResult:
        """As `Saver.save`, layer by layer."""
        groups = self._plan.groups_of_save(len(job.at))
        ranges = block_ranges_of_save(self._plan.layout, groups)
        start = time.monotonic()
        result, idle_s = save_layers(saver, job, groups, ranges, self._computed, status, deadline, admission)
        saved = int(np.count_nonzero(status[job.at] == PageStatus.SAVED))
        self._plan.learn(saved, ranges, time.monotonic() - start - idle_s)
        return result
