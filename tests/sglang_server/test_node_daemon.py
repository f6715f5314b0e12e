"""Everything at once on one store: its daemon, a server with HiCache, a server with the linker, and a replay in two processes. The
daemon is killed in the middle, and comes back."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server import LinkerOptions, ServerClient, running_server

import gdsstore
from tests.service.daemons import Daemon, until
from tests.sglang_server.launch import FLOAT32, backend_environment, gdsstore_storage
from tests.sglang_server.processes import kill, processes
from tests.sglang_server.stored import tool
from tests.sglang_server.workload import Question, check_answer, check_no_call_failed, conversations

pytestmark = pytest.mark.slow

# In CI long enough for some hundred answers; KV_TOGETHER_S=120 is what a release is tried with.
TOGETHER_S = float(os.environ.get("KV_TOGETHER_S", "20"))
CLIENTS, TURNS = 6, 3
STORE = {"capacity": "192MiB", "segment_bytes": "1MiB", "grace_s": 5.0}
POOL = ("--max-total-tokens", "1024")  # holds few of the conversations: the others come from the store
REPLAY = ("--requests", "150", "--processes", "2", "--page-bytes", "64KiB")


class Traffic:
    """Until its time is up, clients talk to the servers, and replays follow one another."""

    def __init__(self, end: float) -> None:
        self._end = end
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def talk(self, name: str, server: ServerClient, talks: list[list[Question]], client: int) -> None:
        for question in itertools.chain.from_iterable(itertools.cycle(talks[client:] + talks[:client])):
            if time.monotonic() >= self._end:
                return
            answer = server.generate(question.prompt, max_new_tokens=len(question.answer.token_ids))
            check_answer(answer, question.answer)
            with self._lock:
                self.counts.update({f"{name} answers": 1, f"{name} cached tokens": answer.cached_tokens})

    def replay(self, folder: Path) -> None:
        for seed in itertools.count():
            if time.monotonic() >= self._end:
                return
            status, report = tool("replay", folder, *REPLAY, "--seed", str(seed))
            assert (status, report["wrong_pages"]) == (0, 0)
            self.counts.update({"replays": 1, "replayed pages verified": report["pages_verified"]})


def shared_memory(pid: int) -> set[str]:
    """The inodes of the daemons' memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:gdsstore" in line}


def attached(server: ServerClient, daemon: Daemon) -> bool:
    """Whether a process of the server has this daemon's memory mapped."""
    inode = shared_memory(daemon.pid)
    assert len(inode) == 1
    return any(shared_memory(process.pid) & inode for process in processes(server))


def test_the_daemon_is_killed_under_two_servers_and_a_replay(
    memory_server: ServerClient, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    gdsstore.open(folder, **STORE).close()
    talks = conversations(memory_server, seed=17, count=CLIENTS, turns=TURNS)
    linker = LinkerOptions("sglang_backend.linker", "GdsStoreLinker", {"path": str(folder), **STORE})
    storage = gdsstore_storage(folder, settings=STORE, host_to_device_ratio=1.5)
    common = {"env": backend_environment(), "extra_args": (*FLOAT32, *POOL)}
    daemon = Daemon(folder, "--host-cache", "32MiB", "--http", "127.0.0.1:0").wait_ready()
    try:
        with (
            running_server(storage=storage, **common) as hicache,
            running_server(linker=linker, **common) as direct,
        ):
            servers = {"hicache": hicache, "linker": direct}
            until(lambda: all(attached(server, daemon) for server in servers.values()))
            traffic = Traffic(time.monotonic() + TOGETHER_S)
            with ThreadPoolExecutor(2 * CLIENTS + 1) as threads:
                running = [threads.submit(traffic.replay, folder)]
                running += [
                    threads.submit(traffic.talk, name, server, talks, client)
                    for name, server in servers.items()
                    for client in range(CLIENTS)
                ]
                time.sleep(TOGETHER_S / 3)
                before = traffic.counts.copy()
                daemon.kill()
                time.sleep(TOGETHER_S / 6)
                alone = traffic.counts.copy()
                daemon = Daemon(folder, "--host-cache", "32MiB", "--http", "127.0.0.1:0").wait_ready()
                until(lambda: all(attached(server, daemon) for server in servers.values()))
                for each in running:
                    each.result()
            for server in servers.values():
                check_no_call_failed(server)
                kill(server)
        print(dict(traffic.counts))
        for name in servers:
            assert before[f"{name} answers"] < alone[f"{name} answers"] < traffic.counts[f"{name} answers"]
            assert traffic.counts[f"{name} cached tokens"] > 0
        assert traffic.counts["replays"] > 0
        assert daemon.terminate() == 0, daemon.log
    finally:
        daemon.kill()
    status, found = tool("verify", folder)
    assert (status, found["damaged"]) == (0, [])
