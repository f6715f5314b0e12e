"""Who uses a store, and whether its catalog may be trusted.

Three lock files, all `flock`, so the kernel drops them with their process:

    open.lock        held exclusively while a process opens or closes the store
    users.lock       held shared by every process that has it open
    maintainer.lock  held exclusively by the one that reclaims

`state.json` holds the boot id and a clean-shutdown flag. LMDB without sync survives kill -9 but not a power loss, and a
damaged LMDB file can abort the process that opens it. So the files are opened only when
- the last user closed the store cleanly and they have not been touched since, or
- the machine has not rebooted since, and either other processes use them right now or a child process has walked them.
Otherwise they are deleted unopened and rebuilt from the record tables.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from gdsstore.catalog.records import VALUE_SIZES
from gdsstore.catalog.walk import check
from gdsstore.errors import DeadlineError, from_os_error
from gdsstore.files import read_small, write_atomic
from gdsstore.waiting import Deadline, pause

log = logging.getLogger("gdsstore.catalog")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CHECK_TIMEOUT_S = 120.0
LOCK_TIMEOUT_S = 60.0
USERS = "users.lock"


class Trust(Enum):
    USE = "use"
    REBUILD = "rebuild"


@dataclass(frozen=True, slots=True)
class State:
    boot_id: str = ""
    clean: bool = False
    capacity_bytes: int = 0
    catalog_mark: str = ""  # of data.mdb at the clean shutdown


class Locks:
    """The lock files of one store directory, as held by this process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._users = self._file(USERS)
        self._maintainer = self._file("maintainer.lock")
        self.fds = [self._users, self._maintainer]

    def _file(self, name: str) -> int:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(self._directory / name, flags, 0o600)
        except OSError as error:
            raise from_os_error(error, "cannot use the store's lock file") from error

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Exclude other processes that open or close the store. Raises DeadlineError where one hangs in it."""
        fd = self._file("open.lock")
        self.fds.append(fd)
        deadline = Deadline(LOCK_TIMEOUT_S)
        try:
            while not _try_lock(fd, fcntl.LOCK_EX):
                if deadline.passed:
                    raise DeadlineError(
                        "another process has been opening this store for a minute", path=str(self._directory)
                    )
                pause(0.01)
            yield
        finally:
            self.fds.remove(fd)
            os.close(fd)

    def alone(self) -> bool:
        """Whether no other process has the store open; call inside `opening`. Keeps the shared lock either way.

        Nobody is alone once the store was deleted: another one may be in its place, whose users this lock knows nothing of.
        """
        alone = _try_lock(self._users, fcntl.LOCK_EX)
        fcntl.flock(self._users, fcntl.LOCK_SH)
        return alone and self._there()

    def _there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._users), os.lstat(self._directory / USERS))
        except OSError:
            return False

    def try_maintainer(self) -> bool:
        """Become the maintainer, if there is none."""
        return _try_lock(self._maintainer, fcntl.LOCK_EX)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def boot_id() -> str:
    return BOOT_ID.read_text().strip()


def catalog_mark(directory: Path) -> str:
    """Changes when anybody writes to data.mdb; empty where there is none."""
    try:
        stat = os.lstat(directory / "data.mdb")
    except OSError:
        return ""
    return f"{stat.st_ino}-{stat.st_size}-{stat.st_blocks}-{stat.st_mtime_ns}"


def read_state(path: Path) -> State:
    """The state; a missing or damaged file reads as "not clean"."""
    try:
        values = json.loads(read_small(path))
        known = {name: values[name] for name in State.__dataclass_fields__}
        right = [type(v) for v in known.values()] == [str, bool, int, str]
        if right and 0 <= known["capacity_bytes"] < 1 << 63:
            return State(**known)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return State()


def write_state(path: Path, state: State) -> None:
    """Replace the state, durably."""
    try:
        write_atomic(path, json.dumps(asdict(state)).encode())
    except OSError as error:
        raise from_os_error(error, "cannot write the store's state") from error


def judge(state: State, catalog: Path, alone: bool) -> tuple[Trust, str]:
    """Whether the LMDB files may be opened, and why (not)."""
    mark = catalog_mark(catalog)
    if not mark:
        return Trust.REBUILD, "there is no catalog"
    if not alone:
        return Trust.USE, "other processes use it"
    if state.clean:
        if state.catalog_mark == mark:
            return Trust.USE, "it was closed cleanly"
        return Trust.REBUILD, "the catalog's file was changed after it had been closed"
    if state.boot_id != boot_id():
        return Trust.REBUILD, "the machine went down without a clean shutdown"
    wrong = check(catalog, VALUE_SIZES, CHECK_TIMEOUT_S)
    if not wrong:
        return Trust.USE, "its user died; the catalog was checked"
    log.warning("the catalog is not used: %s", wrong)
    return Trust.REBUILD, "its user died, and the catalog did not pass its check"


def delete_catalog(directory: Path) -> None:
    for name in ("data.mdb", "lock.mdb"):
        with contextlib.suppress(FileNotFoundError):
            (directory / name).unlink()
