"""The daemon's Unix socket: takes connections in, keeps their sessions, and ends them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from typing import Any

from gdsstore.node.socket_file import peer_uid, trusted
from gdsstore.service.handlers import Office
from gdsstore.service.leases import LEASE_S
from gdsstore.service.listening import ListeningSocket
from gdsstore.service.sessions import House, Session
from gdsstore.waiting import Deadline

log = logging.getLogger("gdsstore.service")

MOST_CONNECTIONS = 256
SWEEP_S = 5.0
LOOK_S = 0.02
REST_S = 0.1  # after a connection could not be taken


class NodeServer:
    """For the event loop's thread."""

    def __init__(self, listening: ListeningSocket, house: House, office: Office) -> None:
        self._listening, self._house, self._office = listening, house, office
        self._sessions: dict[asyncio.Task[None], Session] = {}
        self._accepted = self._refused = self._expired = 0
        self._clients_before = 0  # whose sessions are over
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._sweep())]

    @property
    def facts(self) -> Mapping[str, Any]:
        """Plain values for the status. Any thread may ask."""
        before, sessions = self._clients_before, list(self._sessions.values())
        clients = sum(session.is_client for session in sessions)
        return {
            "clients": clients,
            "clients_in_all": before + clients,
            "connections_refused": self._refused,
            "leases": sum(len(session.client.leases) for session in sessions),
            "leased_pages": sum(session.client.leases.pages for session in sessions),
            "leases_expired": self._expired,
            "namespaces": len(self._office.namespaces),
            "prefetches": sum(session.client.prefetches.under_way for session in sessions),
        }

    async def drain(self, seconds: float, hurry: asyncio.Event) -> bool:
        """Take no more connections, begin nothing new, and wait for what is under way, at most so many seconds or until `hurry`.

        Whether it ended by itself.
        """
        self._office.draining = True
        self._listening.remove()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listening.close()
        for session in self._sessions.values():
            session.client.prefetches.cancel_all()
        deadline = Deadline(seconds)
        while self._at_work and not deadline.passed and not hurry.is_set():
            await asyncio.sleep(LOOK_S)
        ended = not self._at_work
        for task in self._sessions:
            task.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)
        return ended

    @property
    def _at_work(self) -> bool:
        return any(session.at_work for session in self._sessions.values())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listening.sock)
            except OSError as error:  # too many open files, say
                log.warning("a client could not be taken: %s", error)
                await asyncio.sleep(REST_S)
                continue
            if not self._welcome(sock):
                self._refused += 1
                sock.close()
                continue
            self._accepted += 1
            session = Session(sock, self._house, self._office, f"client-{self._accepted}")
            task = asyncio.create_task(session.run())
            self._sessions[task] = session
            task.add_done_callback(self._over)

    def _welcome(self, sock: socket.socket) -> bool:
        """Before anything is read: whether the client may talk to us at all."""
        try:
            uid = peer_uid(sock)
        except OSError:
            return False
        if not trusted(uid):
            log.warning("user %d, who is neither the daemon's nor root, was turned away", uid)
            return False
        if len(self._sessions) >= MOST_CONNECTIONS:
            log.warning("a client was turned away: there are %d", MOST_CONNECTIONS)
            return False
        return True

    def _over(self, task: asyncio.Task[None]) -> None:
        session = self._sessions.pop(task, None)
        self._clients_before += session is not None and session.is_client
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a session ended with an error", exc_info=error)  # the others go on

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for session in list(self._sessions.values()):
                old = session.client.leases.release_old()
                self._expired += old
                if old:
                    log.warning("%d leases were taken back, which a client held for over %g s", old, LEASE_S)
