"""Telling systemd how the daemon is: the datagrams of sd_notify(3), without its library."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

CLOSING_USEC = 600_000_000

log = logging.getLogger("gdsstore.service")


class Notifier:
    """Does nothing where no manager listens. `interval_s`: time between two signs of life that it wants; None: it wants none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self.interval_s = _interval(environment) if self._address else None

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}\n")

    def alive(self) -> None:
        self._send("WATCHDOG=1\n")

    def stopping(self) -> None:
        # Behind the event loop, the store writes and closes; its own deadlines watch over that.
        self._send(f"STOPPING=1\nSTATUS=draining\nWATCHDOG_USEC={CLOSING_USEC}\n")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.connect(self._address)
                sock.send(text.encode())
        except OSError as error:
            log.warning("the service manager could not be told: %s", error)


def _interval(environment: Mapping[str, str]) -> float | None:
    """Half of what the watchdog waits for, as sd_watchdog_enabled(3) recommends."""
    asked, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not asked.isdigit() or int(asked) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(asked) / 1e6 / 2
