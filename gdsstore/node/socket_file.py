"""Finding the daemon: its socket file in the store's directory, and who answers there."""

from __future__ import annotations

import os
import socket
import stat
import struct
import weakref
from pathlib import Path

from gdsstore.errors import DeadlineError, GdsStoreError, from_os_error
from gdsstore.node.errors import DaemonError
from gdsstore.node.wire import SOCKET_NAME
from gdsstore.waiting import Deadline

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

Identity = tuple[int, int, int]
"""Device, inode and change time of a socket file: another daemon has another one."""


def identity(directory: Path) -> Identity | None:
    """Of the socket file of the store in `directory`; None where there is none. One `lstat`."""
    try:
        found = os.lstat(directory / SOCKET_NAME)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_ctime_ns) if stat.S_ISSOCK(found.st_mode) else None


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end, as the kernel knows it. Raises OSError."""
    return int(
        _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    )


def trusted(uid: int) -> bool:
    """Whether a user may have to do with this process's pages: this one, and root."""
    return uid in (os.geteuid(), 0)


def connect(directory: Path, deadline: Deadline) -> socket.socket:
    """A connection to the daemon of the store in `directory`.

    Raises DaemonError where there is none, or somebody else's socket; DeadlineError where it takes no connections.
    """
    try:
        # What is checked is what is connected to: the file is held, and its name is not looked up again. It also makes short
        # what a socket address has no room for.
        held = os.open(directory / SOCKET_NAME, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, "there is no daemon", DaemonError) from error
    try:
        found = os.fstat(held)
        if not stat.S_ISSOCK(found.st_mode):
            raise DaemonError(
                "what lies in the socket's place is no socket", path=str(directory / SOCKET_NAME)
            )
        _refuse_stranger(found.st_uid, directory)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _sockets.add(sock)
            sock.settimeout(max(deadline.left_s, 0.001))
            sock.connect(f"/proc/self/fd/{held}")
            _refuse_stranger(peer_uid(sock), directory)
        except BaseException:
            sock.close()
            raise
        return sock
    except GdsStoreError:
        raise
    except (TimeoutError, BlockingIOError) as error:  # the latter: more wait for it than it has room for
        raise DeadlineError("the daemon takes no connections") from error
    except OSError as error:
        raise from_os_error(error, "the daemon is gone", DaemonError) from error
    finally:
        os.close(held)


def _refuse_stranger(uid: int, directory: Path) -> None:
    if not trusted(uid):
        raise DaemonError(
            "the socket belongs to another user, who could serve anything; run daemon and processes as one user",
            path=str(directory / SOCKET_NAME),
            uid=uid,
        )


def _after_fork_in_child() -> None:
    """The daemon must see its connections end with the parent; so the child keeps none of them."""
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
