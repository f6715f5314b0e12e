"""The daemon's place in a store's directory: one daemon a store, and a socket that only its user can open."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from gdsstore.errors import StoreBusyError, StoreError, from_os_error
from gdsstore.node.socket_file import Identity, identity
from gdsstore.node.wire import SOCKET_NAME

LOCK_NAME = "node.lock"
BACKLOG = 128
MOST_PID_BYTES = 32


@contextlib.contextmanager
def only_daemon(directory: Path) -> Iterator[None]:
    """Be the one daemon of a store for the length of a `with`. The kernel lets go of the lock with the process.

    Raises StoreBusyError where there is another one.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(directory / LOCK_NAME, flags, 0o600)
    except OSError as error:
        raise from_os_error(error, "cannot use the daemon's lock file", StoreError) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, MOST_PID_BYTES, 0).decode("ascii", "replace").strip() or None
            raise StoreBusyError(
                "another daemon serves this store; stop it first", path=str(directory), pid=pid
            ) from None
        with contextlib.suppress(OSError):  # for people only; a full drive is no reason not to serve it
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


class ListeningSocket:
    """`sock` listens, without blocking. A socket that a dead daemon left is replaced. Call it with `only_daemon` held."""

    def __init__(self, directory: Path) -> None:
        """Raises StoreError where the directory takes no socket."""
        self._path = directory / SOCKET_NAME
        aside = f"{SOCKET_NAME}.{os.getpid()}.new"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        held = -1
        try:
            held = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fchmod(
                self.sock.fileno(), 0o600
            )  # the mode that its file gets: there is no moment with another one
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=held)
            # A socket's address has no room for a long path.
            self.sock.bind(f"/proc/self/fd/{held}/{aside}")
            self.sock.listen(BACKLOG)
            os.rename(aside, SOCKET_NAME, src_dir_fd=held, dst_dir_fd=held)  # who finds it can connect
            self.identity: Identity | None = identity(directory)
        except OSError as error:
            self.sock.close()
            raise from_os_error(error, "cannot make the daemon's socket", StoreError) from error
        finally:
            if held >= 0:
                os.close(held)

    def remove(self) -> None:
        """Let nobody find it any more. Idempotent."""
        if self.identity is not None and identity(self._path.parent) == self.identity:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self.identity = None

    def close(self) -> None:
        self.remove()
        self.sock.close()
