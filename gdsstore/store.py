"""Store: the facade that ties volumes, catalog, engine and transfers together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from gdsstore.bound import BoundNamespace
from gdsstore.config import Config
from gdsstore.engines.base import Engine
from gdsstore.errors import ConfigError, VolumeError
from gdsstore.layout import PageLayout
from gdsstore.memory.arena import Arena
from gdsstore.memory.device_views import whole_buffer
from gdsstore.memory.shared import SharedMemory
from gdsstore.moving import make_arena
from gdsstore.namespace import Namespace
from gdsstore.observe.paths import PathRow
from gdsstore.store_core import LAST_STEPS_S, StoreCore
from gdsstore.store_stats import stats_of
from gdsstore.waiting import Deadline

if TYPE_CHECKING:
    from gdsstore.device_moving import Registration

log = logging.getLogger("gdsstore.store")

T = TypeVar("T")


def open(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    capacity: int | str | None = None,
    config: Config | None = None,
    engine: Engine | str | None = None,
    **settings: Any,
) -> Store:
    """Open the store in a directory, and make it if there is none.

    `paths`: one directory, or one a volume (a filesystem on a drive of its own); the first holds the catalog. `capacity`: how
    many bytes of disk it may use ("500GiB"). `config`, or single `settings` by name: see docs/settings.md; environment and
    config file count too. `engine`: the setting, or an engine of your own instead, for host memory or that of one GPU; the
    store closes it.

    Raises StoreError and its kinds (StoreBusyError, StoreVersionError, StoreDamagedError), VolumeError, ConfigError.
    """
    own = engine if isinstance(engine, Engine) else None
    if engine is not None and own is None:
        settings["engine"] = engine
    if config is not None and (settings or capacity is not None):
        raise ConfigError("give either a config or single settings, not both")
    return Store(paths, config or Config.load(capacity=capacity, **settings), own)


class Store(StoreCore):
    """An open store. Thread-safe. Use as a context manager, or call `close`.

    Several processes may have one store open at the same time. In a forked child an open store is dead, and cannot be opened
    again: fork before opening, or start the process with `spawn`.
    """

    def namespace(
        self,
        namespace: Namespace | None = None,
        /,
        *,
        model: str = "",
        layout: PageLayout | None = None,
        **facts: Any,
    ) -> BoundNamespace:
        """The pages that are interchangeable under this identity: a Namespace, or the arguments of one.

        Raises ArgumentError where facts are missing or contradict each other, or a page is too large for this store.
        """
        with self.using():
            if namespace is None:
                namespace = Namespace(model=model, layout=layout, **facts)  # type: ignore[arg-type]
            bound = BoundNamespace(self, namespace)
            if bound.identity.layout.record_bytes > self.config.staging_bytes:
                raise ConfigError(
                    "a page does not fit into the staging arena; raise staging_bytes",
                    page_bytes=namespace.layout.page_bytes,
                    staging_bytes=self.config.staging_bytes,
                )
            self.directory.describe_namespace(bound.identity)
            return bound

    def arena(self, size_bytes: int) -> Arena:
        """Memory that moves fast: huge pages, aligned, on the right NUMA node, pinned where CUDA is. Close it yourself."""
        return make_arena(self.config, size_bytes, self.volumes[0])

    def sync(self, deadline_s: float | None = None) -> None:
        """Make all pages durable that this process saved, those that the host cache has not written yet too.

        Waits at most `deadline_s` seconds; None: `io_deadline_s`. Raises VolumeError where a drive refuses, and DeadlineError where
        one does not answer in time: it goes on, and the next call waits for it again.
        """
        deadline = Deadline(self.config.io_deadline_s if deadline_s is None else deadline_s)
        with self.using():
            left = self.cache.flush(deadline.left_s)
            self.pool.sync(Deadline(max(deadline.left_s, LAST_STEPS_S)))
        if left:
            raise VolumeError(
                "the drives did not take all pages of the host cache; they stay in it", pages=left
            )

    def preallocate(
        self, size_bytes: int | None = None, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Make segments ahead of their use, up to `size_bytes` or the capacity; returns how many segments there are.

        `progress` is called with (segments there, segments wanted).
        """
        with self.using():
            wanted = self.reclaimer.max_segments()
            if size_bytes is not None:
                wanted = min(wanted, -(-size_bytes // self.segment_bytes))
            have = len(self._segments())
            while have < wanted and self.pool.grow(self.placement.roomiest()) is not None:
                have += 1
                if progress is not None:
                    progress(have, wanted)
            return have

    def stats(self) -> dict[str, Any]:
        """Counters of this process and the state of the store, as plain values; see docs/api.md for the names."""
        with self.using():
            return stats_of(self, self._segments(), self._movers.engine_name, self._scheduler)

    def shared_memory(self) -> SharedMemory | None:
        """The memory of the host cache, for other processes to map; None without `host_cache` and `share_host_cache`.

        The descriptor stays the store's. Raises StoreError where there is not enough memory.
        """
        with self.using():
            return self.cache.shared()

    def register(self, buffer: Any) -> Registration:
        """Let the drive reach a GPU buffer directly: pages in it that are large and aligned skip the staging memory.

        `buffer`: one contiguous CUDA tensor or array. Close what is returned before the buffer is freed. It takes BAR1 and pinned
        memory of cuFile's: see docs/paths.md. Raises ArgumentError, and what `device_moving` raises.
        """
        found = whole_buffer(buffer)
        return self.device_moving(found.device).register(found.memory)

    def measure_paths(self, device: int = 0, seconds: float = 2.0) -> None:
        """Measure the paths to a GPU's memory again, now, instead of once when they are first used: see docs/paths.md.

        Raises what `device_moving` raises, and DeadlineError where its staging memory stays in use.
        """
        with self.using():
            self.device_moving(device).measure(seconds)

    def path_report(self) -> list[PathRow]:
        """Every byte moved since the store was opened, by path, engine, volume and direction: see docs/paths.md."""
        return self._movers.path_report()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
