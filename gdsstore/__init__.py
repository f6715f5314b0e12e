"""gdsstore: KV-cache pages of LLM servers on local NVMe, verified on every read. The public API."""

from gdsstore.bound import BoundNamespace
from gdsstore.config import Config, Durability
from gdsstore.errors import (
    ArgumentError,
    ConfigError,
    DeadlineError,
    DeviceError,
    EngineError,
    GdsStoreError,
    MissingExtraError,
    StoreBusyError,
    StoreClosedError,
    StoreDamagedError,
    StoreError,
    StoreVersionError,
    VolumeError,
)
from gdsstore.layout import ByteOrder, ByteRange, PageKind, PageLayout
from gdsstore.memory.arena import Arena
from gdsstore.memory.device_views import DevicePieces
from gdsstore.memory.views import Pages, Pieces
from gdsstore.namespace import Keys, Namespace, Parallelism
from gdsstore.observe.paths import PathRow
from gdsstore.prefetch import Prefetch
from gdsstore.store import Store, open
from gdsstore.transfer.cost import Advice, CostSetting
from gdsstore.transfer.results import LoadResult, PageStatus, SaveResult
from gdsstore.weights import weights_digest

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Arena",
    "ArgumentError",
    "BoundNamespace",
    "ByteOrder",
    "ByteRange",
    "Config",
    "ConfigError",
    "CostSetting",
    "DeadlineError",
    "DeviceError",
    "DevicePieces",
    "Durability",
    "EngineError",
    "GdsStoreError",
    "Keys",
    "LoadResult",
    "MissingExtraError",
    "Namespace",
    "PageKind",
    "PageLayout",
    "PageStatus",
    "Pages",
    "Parallelism",
    "PathRow",
    "Pieces",
    "Prefetch",
    "SaveResult",
    "Store",
    "StoreBusyError",
    "StoreClosedError",
    "StoreDamagedError",
    "StoreError",
    "StoreVersionError",
    "VolumeError",
    "open",
    "weights_digest",
]
