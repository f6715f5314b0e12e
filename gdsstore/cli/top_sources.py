"""Where `gdsstore top` gets the status from: the daemon's socket, an address, or the store's own files."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gdsstore.cli.options import existing, open_existing
from gdsstore.errors import ArgumentError, GdsStoreError, StoreError
from gdsstore.files import read_small
from gdsstore.node.errors import DaemonError
from gdsstore.node.socket_file import identity
from gdsstore.service.status import VERSION, StatusBoard
from gdsstore.waiting import Deadline

ANSWER_S = 5.0
MAX_ANSWER_BYTES = 8 << 20

Ask = Callable[[], dict[str, Any]]
"""One status document. Raises GdsStoreError where there is none now."""


@contextlib.contextmanager
def from_url(url: str, token_file: Path | None) -> Iterator[Ask]:
    """Over HTTP. `url`: of the daemon, such as http://127.0.0.1:9470. Raises ArgumentError."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ArgumentError("this is no address of a daemon; it looks like http://127.0.0.1:9470", url=url)
    headers = {"Accept": "application/json"}
    if token_file is not None:
        try:
            headers["Authorization"] = f"Bearer {read_small(token_file).decode().strip()}"
        except (OSError, ValueError) as error:
            raise ArgumentError("the token cannot be read", path=str(token_file)) from error
    # No proxy, and no redirect: the token is for this address only.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    request = urllib.request.Request(f"{url.rstrip('/')}/api/status", headers=headers)

    def ask() -> dict[str, Any]:
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                return _checked(json.loads(answer.read(MAX_ANSWER_BYTES)))
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace").strip()
            if error.code == 401:
                said += "; give --token-file"
            raise StoreError(f"the daemon says: {said}", url=url, status=error.code) from error
        except (OSError, ValueError) as error:
            raise StoreError(f"there is no daemon: {error}", url=url) from error

    yield ask


@contextlib.contextmanager
def from_store(paths: list[Path]) -> Iterator[Ask]:
    """Through the socket in the store's directory; without a daemon, by opening the store as one more user."""
    directory, _ = existing(paths)
    if _serves(directory.root):
        yield lambda: _over_socket(directory.root)
        return
    with open_existing(paths) as store:
        board = StatusBoard(store)
        yield lambda: board.wait(ANSWER_S)


def _serves(root: Path) -> bool:
    """Whether there is a daemon. Its socket may be there without it, where it was killed. Raises MissingExtraError."""
    if identity(root) is None:
        return False
    try:
        _over_socket(root)
    except DaemonError:
        return False
    return True


def _over_socket(root: Path) -> dict[str, Any]:
    from gdsstore.node.connection import Connection  # needs msgspec, which the other sources do not

    deadline = Deadline(ANSWER_S)
    with contextlib.closing(Connection.open(root, b"", deadline, memory=False)) as connection:
        return _checked(connection.status(deadline))


def _checked(document: Any) -> dict[str, Any]:
    version = document.get("version") if isinstance(document, dict) else None
    if version != VERSION:
        raise GdsStoreError(
            f"the daemon tells its status in version {version}; use the same gdsstore as it does"
        )
    return dict(document)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
