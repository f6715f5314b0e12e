"""The simulated GPU from Python.

from tests.cudasim import simgpu
simgpu.load()                       # before kvikio, nixl or cupy are imported
buf = simgpu.DeviceBuffer(1 << 20)  # has __cuda_array_interface__: kvikio takes it as device memory
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


class SimError(RuntimeError):
    """A simulated driver call failed; the text is its code and name."""


class BuildError(RuntimeError):
    """The simulated libraries cannot be built here; the text says what is missing."""


# ---- building and loading --------------------------------------------------------------------------------


def build(out: str | os.PathLike[str] | None = None) -> Path:
    """Bring the libraries in a folder up to date (default: $CUDASIM_LIB, else lib/ here) and return it."""
    folder = Path(out or os.environ.get("CUDASIM_LIB") or HERE / "lib").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    command = ["make", "-s", "-C", str(HERE), f"PYTHON={sys.executable}", f"OUT={folder}"]
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may come here at once
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except FileNotFoundError as e:
            raise BuildError("the simulated GPU needs make and gcc") from e
    if done.returncode:
        raise BuildError(f"the simulated GPU does not build (see requirements.txt):\n{done.stderr}")
    return folder


_cuda: ctypes.CDLL | None = None
_cufile: ctypes.CDLL | None = None


def load(cufile: bool = True, cudart: bool = True) -> None:
    """Put the simulated libraries in place of the real ones, and make device 0 current in this thread.

    A library that is loaded later and needs "libcufile.so.0" gets the first one loaded under that name, so
    this must come before kvikio and nixl. Without cufile, kvikio finds the real one from its wheel. cudart is
    for NIXL's GDS plugins; it is a handful of calls, so leave it out where the real runtime is needed.
    """
    global _cuda, _cufile
    if _cuda:
        return
    late = [name for name in ("kvikio", "nixl", "cupy") if name in sys.modules]
    if late:
        raise SimError(f"simgpu.load() must come before the import of {', '.join(late)}")
    folder = build()
    _cuda = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    _cuda.cudasim_calls.restype = ctypes.c_uint64
    if cudart:
        ctypes.CDLL(str(folder / "libcudart.so.13"), mode=ctypes.RTLD_GLOBAL)
    if cufile:
        _cufile = ctypes.CDLL(str(folder / "libcufile.so.0"), mode=ctypes.RTLD_GLOBAL)
        _cufile.cufilesim_calls.restype = ctypes.c_uint64
    check(_cuda.cuInit(0))
    use(0)


def cuda() -> ctypes.CDLL:
    """The simulated driver, for calls that have no wrapper here."""
    if not _cuda:
        raise SimError("simgpu.load() has not been called")
    return _cuda


def cufile() -> ctypes.CDLL:
    """The simulated cuFile, likewise."""
    if not _cufile:
        raise SimError("simgpu.load(cufile=True) has not been called")
    return _cufile


def check(code: int) -> None:
    """Raise SimError unless a driver call returned CUDA_SUCCESS."""
    if code:
        name = ctypes.c_char_p()
        cuda().cuGetErrorName(code, ctypes.byref(name))
        raise SimError(f"{code} {(name.value or b'?').decode()}")


def use(device: int) -> None:
    """Make the primary context of a device current in this thread."""
    ctx = ctypes.c_void_p()
    check(cuda().cuDevicePrimaryCtxRetain(ctypes.byref(ctx), device))
    check(cuda().cuCtxSetCurrent(ctx))


# ---- memory and streams ----------------------------------------------------------------------------------


class DeviceBuffer:
    """Bytes on the current device; b[i:j] is a part of it."""

    def __init__(self, nbytes: int) -> None:
        ptr = ctypes.c_uint64()
        check(cuda().cuMemAlloc_v2(ctypes.byref(ptr), ctypes.c_size_t(nbytes)))
        self.ptr, self.nbytes = ptr.value, nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.ptr, False),
            "version": 3,
            "strides": None,
        }

    def __getitem__(self, part: slice) -> View:
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise ValueError("a part of a device buffer must be contiguous")
        return View(self, self.ptr + start, stop - start)

    def put(self, data: bytes, at: int = 0) -> None:
        """Copy host bytes in, through the driver."""
        check(cuda().cuMemcpyHtoD_v2(ctypes.c_uint64(self.ptr + at), bytes(data), ctypes.c_size_t(len(data))))

    def get(self, at: int = 0, n: int | None = None) -> bytes:
        """Copy n bytes (default: the rest) out, through the driver."""
        n = self.nbytes - at if n is None else n
        out = ctypes.create_string_buffer(n)
        check(cuda().cuMemcpyDtoH_v2(out, ctypes.c_uint64(self.ptr + at), ctypes.c_size_t(n)))
        return out.raw

    def free(self) -> None:
        if self.ptr:
            check(cuda().cuMemFree_v2(ctypes.c_uint64(self.ptr)))
            self.ptr = 0


class View(DeviceBuffer):
    """Part of a device buffer; keeps the whole alive."""

    def __init__(self, whole: DeviceBuffer, ptr: int, nbytes: int) -> None:
        self.whole, self.ptr, self.nbytes = whole, ptr, nbytes

    def free(self) -> None:
        raise SimError("free the whole buffer, not a part of it")


class Stream:
    """A CUDA stream, non-blocking by default."""

    NON_BLOCKING = 1

    def __init__(self, flags: int = NON_BLOCKING) -> None:
        stream = ctypes.c_void_p()
        check(cuda().cuStreamCreate(ctypes.byref(stream), flags))
        self.ptr = stream.value

    def synchronize(self) -> None:
        check(cuda().cuStreamSynchronize(ctypes.c_void_p(self.ptr)))

    def idle(self) -> bool:
        return bool(cuda().cuStreamQuery(ctypes.c_void_p(self.ptr)) == 0)

    def destroy(self) -> None:
        check(cuda().cuStreamDestroy_v2(ctypes.c_void_p(self.ptr)))


# ---- faults and counters ---------------------------------------------------------------------------------


def cuda_faults(spec: str) -> None:
    """Arm faults in the driver (grammar: src/fault.h); "" disarms all."""
    if cuda().cudasim_faults(spec.encode()):
        raise ValueError(f"not a fault list: {spec!r}")


def cufile_faults(spec: str) -> None:
    """Arm faults in cuFile, likewise."""
    if cufile().cufilesim_faults(spec.encode()):
        raise ValueError(f"not a fault list: {spec!r}")


def cuda_calls(name: str) -> int:
    """How often a driver call was made, by its plain name ("cuMemAlloc")."""
    return int(cuda().cudasim_calls(name.encode()))


def cufile_calls(name: str) -> int:
    """How often a cuFile call was made."""
    return int(cufile().cufilesim_calls(name.encode()))


def usage() -> tuple[int, int]:
    """Live device allocations and their bytes."""
    n, size = ctypes.c_size_t(), ctypes.c_size_t()
    cuda().cudasim_usage(ctypes.byref(n), ctypes.byref(size))
    return n.value, size.value


class Stats(ctypes.Structure):
    """struct cufilesim_stats (src/cufilesim.h says what each counts)."""

    NAMES = (
        *("reads", "writes", "read_bytes", "write_bytes", "direct_ops", "direct_bytes"),
        *("unaligned_ops", "unregistered_ops", "buffered_fd_ops", "host_ops", "short_ops", "failed_ops"),
        *("handles", "buffers", "buffer_bytes"),
        *("batches", "batch_entries", "batch_canceled", "async_ops"),
    )
    _fields_ = [(name, ctypes.c_uint64) for name in NAMES]

    @property
    def fallback_bytes(self) -> int:
        """Bytes a GPU system would have moved through a bounce buffer."""
        return int(self.read_bytes + self.write_bytes - self.direct_bytes)


def stats() -> Stats:
    """cuFile's counters since they were last reset."""
    s = Stats()
    cufile().cufilesim_get_stats(ctypes.byref(s))
    return s


def reset_stats() -> None:
    cufile().cufilesim_reset_stats()
