"""Measuring the paths of a device on the store's volumes, once, and keeping the result with the store."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

from gdsstore.engines import measured
from gdsstore.engines.device import DeviceEngine
from gdsstore.engines.fingerprint import device_id, fingerprint
from gdsstore.engines.measure import measure_paths
from gdsstore.engines.paths import Path
from gdsstore.engines.select import Measurement
from gdsstore.errors import DeadlineError
from gdsstore.memory.cuda import CudaDevice
from gdsstore.memory.device_arena import DeviceArena
from gdsstore.memory.lease import Lease
from gdsstore.sizes import MiB
from gdsstore.volume.volume import Volume
from gdsstore.waiting import Deadline, pause

log = logging.getLogger("gdsstore.store")

STAGING_BYTES = 16 * MiB  # holds the largest plan that is measured
STAGING_WAIT_S = 10.0
POLL_S = 0.05


class PathMeasuring:
    """For one device and store. `root`: the store directory; `engines`: by path."""

    def __init__(
        self,
        root: FilePath,
        volumes: Sequence[Volume],
        device: CudaDevice,
        engines: Mapping[Path, DeviceEngine],
        arena: DeviceArena,
    ) -> None:
        self._root, self._volumes, self._device = root, volumes, device
        self._engines, self._arena = dict(engines), arena

    def kept(self) -> list[Measurement] | None:
        """What was measured before and still counts, of all volumes. Raises DeviceError."""
        found: list[Measurement] = []
        for volume in self._volumes:
            facts = self._fingerprint(volume)
            kept = measured.load(
                self._root, device_id(self._device), volume.index, facts, list(self._engines)
            )
            log.info("paths of %s: %s", volume.path, kept.why)
            if kept.measurements is None:
                return None
            found += kept.measurements
        return slowest(found)

    def measure(self, budget_s: float) -> tuple[list[Path], list[Measurement]]:
        """Measure on each volume for about `budget_s` seconds in all, and keep what was found. The paths that may be used, and
        what was measured of them.

        Raises DeadlineError where the staging memory stays in use, DeviceError, StoreClosedError.
        """
        found: list[Measurement] = []
        usable = list(self._engines)
        for volume in self._volumes:
            size = min(STAGING_BYTES, self._arena.size_bytes // 2)
            lease = self._lease(size)
            under_way = None
            try:
                result = measure_paths(
                    self._engines, volume.path, lease.address, size, budget_s=budget_s / len(self._volumes)
                )
                under_way = result.under_way
            finally:
                if under_way is None:
                    lease.release()
                else:
                    lease.quarantine(lambda transfer=under_way: transfer.done)  # type: ignore[misc]
            for path, problem in result.problems.items():
                log.warning("path %s was not measured on %s: %s", path, volume.path, problem)
            if result.measurements:
                measured.save(
                    self._root,
                    device_id(self._device),
                    volume.index,
                    self._fingerprint(volume),
                    result.measurements,
                )
            found += result.measurements
            usable = [path for path in result.usable(list(self._engines)) if path in usable]
        # Where each path has its problem on one of the volumes, transfers have to show which is the lesser one.
        return usable or list(self._engines), slowest(found)

    def _lease(self, size: int) -> Lease:
        """Staging memory that nobody needs now: in the line for it, a large request would hold up all calls behind it."""
        deadline = Deadline(STAGING_WAIT_S)
        while True:
            try:
                return self._arena.lease(size, 0.0)
            except DeadlineError:
                if deadline.passed:
                    raise
                pause(POLL_S)

    def _fingerprint(self, volume: Volume) -> dict[str, str]:
        names = {path: engine.name for path, engine in self._engines.items()}
        return fingerprint(self._device, volume.path, names)


def slowest(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Of each cell and path, the measurement of the slowest volume: pages are striped over all, and a call waits for the last."""
    least: dict[tuple[object, ...], Measurement] = {}
    for each in measurements:
        key = each[:-1]
        if key not in least or each.bytes_per_s < least[key].bytes_per_s:
            least[key] = each
    return list(least.values())
