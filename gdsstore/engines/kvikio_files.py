"""kvikio as the kvikio engine uses it: imported late, in a compat mode that we choose, with errors that say something."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gdsstore.engines.base import Op
from gdsstore.engines.cufile import cufile_state
from gdsstore.errors import EngineError, MissingExtraError
from gdsstore.memory.device_memory import DeviceView

# kvikio's compat mode is the process's: what others do with it must not see ours.
_setting = threading.Lock()


class Kvikio:
    """The kvikio package, in one compat mode."""

    def __init__(self, compat: bool) -> None:
        """Raises MissingExtraError where it is not installed, EngineError where cuFile does not start and it is needed."""
        try:
            self._package: Any = importlib.import_module("kvikio")
            importlib.import_module("kvikio.cufile_driver").get("is_gds_available")  # opens cuFile's driver
            self._defaults: Any = importlib.import_module("kvikio.defaults")
        except ImportError as error:
            raise MissingExtraError(
                "kvikio (cuda12 or cuda13, as the driver is)", "cuda13", "the kvikio engine"
            ) from error
        self._mode = self._package.CompatMode.ON if compat else self._package.CompatMode.OFF
        # Where cuFile's driver does not open, kvikio goes on, until a file is opened.
        state = cufile_state()
        if not compat and (state is None or not (state.available or state.may_fall_back)):
            raise EngineError(
                "cuFile does not start here: load nvidia-fs, or allow P2PDMA or cuFile's compat mode in cufile.json"
            )
        self.cufile = state

    def open(self, fd: int) -> File:
        """The file behind a descriptor, opened anew for kvikio, which knows only paths. Raises EngineError."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        access = flags & os.O_ACCMODE
        try:
            with self._in_mode():
                # "w" would truncate it.
                handle = self._package.CuFile(f"/proc/self/fd/{fd}", "r" if access == os.O_RDONLY else "r+")
        except RuntimeError as error:
            raise EngineError(f"kvikio refused a file: {last_line(error)}", fd=fd) from error
        stat = os.fstat(fd)
        ops = {os.O_RDONLY: {Op.READ}, os.O_WRONLY: {Op.WRITE}}.get(access, set(Op))
        direct = bool(flags & os.O_DIRECT) and _direct_io(handle)
        return File(handle, (stat.st_dev, stat.st_ino), frozenset(ops), direct)

    def register(self, address: int, nbytes: int) -> None:
        """Raises EngineError where cuFile refuses."""
        try:
            with self._in_mode():  # in compat mode kvikio registers nothing, and says nothing
                self._package.memory_register(DeviceView(address, nbytes))
        except RuntimeError as error:
            raise EngineError(
                f"cuFile refused device memory: {last_line(error)}", address=hex(address), nbytes=nbytes
            ) from error

    def deregister(self, address: int) -> None:
        """Raises EngineError."""
        try:
            with self._in_mode():
                self._package.memory_deregister(DeviceView(address, 1))
        except RuntimeError as error:
            raise EngineError(
                f"cuFile did not let go of device memory: {last_line(error)}", address=hex(address)
            ) from error

    @contextmanager
    def _in_mode(self) -> Iterator[None]:
        with _setting, self._defaults.set({"compat_mode": self._mode}):
            yield


class File:
    """An open file of kvikio's."""

    __slots__ = ("_handle", "_identity", "direct", "ops")

    def __init__(self, handle: Any, identity: tuple[int, int], ops: frozenset[Op], direct: bool) -> None:
        self._handle, self._identity = handle, identity
        self.ops = ops  # what its descriptor was opened for
        self.direct = direct  # open with O_DIRECT

    def is_at(self, fd: int) -> bool:
        """Whether `fd` is still this file: a closed descriptor's number may be another's."""
        try:
            stat = os.fstat(fd)
        except OSError:
            return False
        return (stat.st_dev, stat.st_ino) == self._identity

    def move(self, op: Op, base: DeviceView, length: int, file_offset: int, base_offset: int) -> int:
        """Bytes moved. Raises RuntimeError; `errno_of` tells what it means."""
        call = self._handle.raw_read if op is Op.READ else self._handle.raw_write
        return int(call(base, length, file_offset, base_offset))

    def close(self) -> None:
        self._handle.close()


def last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def errno_of(op: Op, error: Exception) -> int | None:
    """The errno that an error's text names, where it can be believed.

    A failed cuFileRead is -1 with an errno; kvikio 26.10 takes the -1 for the negated errno, so that whatever it was reads
    "Operation not permitted" (EPERM is 1).
    """
    text = last_line(error)
    named = [code for code in errno.errorcode if text.endswith(": " + os.strerror(code))]
    return next((code for code in named if op is Op.WRITE or code != errno.EPERM), None)


def _direct_io(handle: Any) -> bool:
    try:
        return bool(handle.is_direct_io_supported())
    except AttributeError:  # a version that does not tell
        return True
