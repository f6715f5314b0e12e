"""What cuFile says of itself: whether it has a direct path at all, and whether it may leave it without a word."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from gdsstore.probe.cufile_driver import NVME_SUPPORTED, ROUTES, Error, Properties

LIBRARY = "libcufile.so.0"
_ALLOW_COMPAT = 1 << 1  # CU_FILE_ALLOW_COMPAT_MODE, of CUfileDriverControlFlags


@dataclass(frozen=True, slots=True)
class CufileState:
    routes: tuple[str, ...]  # between NVMe and the GPU, of `probe.cufile_driver.ROUTES`
    may_fall_back: (
        bool  # its configuration allows compat mode, also for single files that it cannot do otherwise
    )
    nvidia_fs: str  # version; "" without it

    @property
    def available(self) -> bool:
        """Without a route, all transfers are in compat mode."""
        return bool(self.routes)


def cufile_state() -> CufileState | None:
    """Of the cuFile driver that this process has open; None where it has none."""
    try:
        # Found by this name once somebody has loaded it, wherever it lies.
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    library.cuFileDriverGetProperties.restype = Error
    properties = Properties()
    if library.cuFileDriverGetProperties(ctypes.byref(properties)).err:
        return None
    version = f"{properties.major_version}.{properties.minor_version}" if properties.major_version else ""
    routes = {*_nvme_routes(library), *(["nvfs"] if version else [])}
    return CufileState(
        tuple(name for name in ROUTES if name in routes),
        bool(properties.dcontrolflags & _ALLOW_COMPAT),
        version,
    )


def _nvme_routes(library: Any) -> list[str]:
    if not hasattr(library, "cuFileDriverGetP2PFlags"):  # before 1.16
        return []
    library.cuFileDriverGetP2PFlags.restype = Error
    flags = ctypes.c_int()
    if library.cuFileDriverGetP2PFlags(NVME_SUPPORTED, ctypes.byref(flags)).err:
        return []
    return [name for bit, name in enumerate(ROUTES) if flags.value >> bit & 1]
