"""The few memory calls that Python's own `mmap` module does not offer with the flags or the addresses needed here.

Every call raises OSError with its errno. ctypes lets go of the GIL, so a long pre-fault does not stop other threads.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform

# From <asm-generic/mman-common.h> and <linux/mman.h>; equal on x86_64 and aarch64.
MAP_FIXED = 0x10
MAP_HUGETLB = 0x40000
MAP_HUGE_SHIFT = 26
MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_NOHUGEPAGE = 15
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1

# glibc has no wrappers for these; numbers from the kernel's syscall tables.
_NUMBERS = {
    "x86_64": {"mbind": 237, "move_pages": 279},
    "aarch64": {"mbind": 235, "move_pages": 239},
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long

_MAP_FAILED = ctypes.c_void_p(-1).value


def map_anonymous(length: int, flags: int = 0) -> int:
    """Map `length` bytes of zeroed private memory; the address."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags
    address: int | None = _libc.mmap(None, length, protection, kind, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise _last_error()
    return address


def map_over(address: int, length: int) -> None:
    """Put zeroed private memory in the place of whatever is mapped there, whole pages of it."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    if _libc.mmap(address, length, protection, kind, -1, 0) != address:
        raise _last_error()


def reserve(length: int) -> int:
    """Address space that nothing can be read from or written to, for `map_shared`; its address."""
    address: int | None = _libc.mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise _last_error()
    return address


def map_shared(fd: int, length: int, *, writable: bool, address: int | None = None) -> int:
    """Map the first `length` bytes of a file, shared with all who map it; in the place of what is at `address`, or anywhere."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    kind = mmap.MAP_SHARED | (0 if address is None else MAP_FIXED)
    mapped: int | None = _libc.mmap(address, length, protection, kind, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        raise _last_error()
    return mapped


def unmap(address: int, length: int) -> None:
    if _libc.munmap(address, length) != 0:
        raise _last_error()


def advise(address: int, length: int, advice: int) -> None:
    if _libc.madvise(address, length, advice) != 0:
        raise _last_error()


def call(name: str, *arguments: int) -> int:
    """A system call by name; pointers go as integers. ENOSYS on a machine whose numbers are not known here."""
    number = _NUMBERS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name} is not known on {platform.machine()}")
    # A bare int would go as a 32-bit C int through a variadic function.
    result: int = _libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(value) for value in arguments))
    if result < 0:
        raise _last_error()
    return result


def errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
