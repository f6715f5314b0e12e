"""What the daemon answers over HTTP, to whom, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from gdsstore import Store, StoreError
from gdsstore.engines.base import Op
from gdsstore.service import http_server
from gdsstore.service.http import make_app
from gdsstore.service.page_files import TYPES, page_files
from gdsstore.volume.health import HealthLimits, watch_volumes
from gdsstore.waiting import Deadline
from tests.service.serving import WAIT_S, Facts, serving
from tests.store.helpers import make_keys, opaque, save, small_store

TOKEN = "a-long-token"
PATHS = ["/", "/healthz", "/readyz", "/api/status", "/metrics", "/page.js"]


class Asker:
    """Asks an app without a network between."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9470") as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)


Client = Callable[..., Asker]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "s") as opened:
        yield opened


@pytest.fixture
def client(store: Store) -> Client:
    def made(token: str | None = None, facts: Facts | None = None, **options: Any) -> Asker:
        return Asker(make_app(store, facts or Facts(), token, **options))

    return made


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# --- answers ---


def test_the_status_is_the_stores(client: Client, store: Store) -> None:
    save(opaque(store), make_keys(7))
    answer = client().get("/api/status")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    document = answer.json()
    assert (document["version"], document["store"]["pages"]) == (1, 7)
    assert document["daemon"]["clients"] == 3


def test_metrics_are_in_prometheus_text(client: Client, store: Store) -> None:
    save(opaque(store), make_keys(7))
    answer = client().get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert re.search(r"^gdsstore_\w+(\{.*\})? [0-9]", answer.text, re.MULTILINE)


def test_the_page_loads_only_what_is_served_beside_it(client: Client) -> None:
    page = client().get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
    assert named - {"api/status"} <= set(TYPES)
    for name in named:
        assert client().get(f"/{name}").status_code == 200
    assert "<script>" not in page.text
    assert "style=" not in page.text
    assert not re.search(r"\son\w+=", page.text)


def test_every_file_of_the_page_is_served_and_the_vendored_one_has_its_licence() -> None:
    folder = Path(http_server.__file__).parent / "page"
    assert {path.name for path in folder.iterdir()} == set(TYPES)
    assert b"MIT License" in page_files()["/uPlot.LICENSE"][0]
    ours = [name for name in TYPES if name.endswith(".js") and not name.startswith("uPlot")]
    for name in ours:  # text of the store goes into the page as text
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", (folder / name).read_text()
        )


def test_a_head_has_no_body(client: Client) -> None:
    answer = client().request("HEAD", "/api/status")
    assert answer.status_code == 200
    assert answer.content == b""


@pytest.mark.parametrize("path", ["/nothing", "/api/status/", "/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd"])
def test_what_is_not_there_is_not_found(client: Client, path: str) -> None:
    answer = client().get(path)
    assert answer.status_code == 404
    assert "nosniff" in answer.headers["x-content-type-options"]


# --- health and readiness ---


def test_a_closed_store_lives_and_is_not_ready(client: Client, store: Store) -> None:
    asked = client()
    assert asked.get("/readyz").status_code == 200
    store.close()
    assert asked.get("/healthz").status_code == 200
    answer = asked.get("/readyz")
    assert (answer.status_code, "closed" in answer.text) == (503, True)
    assert asked.get("/api/status").status_code == 503


def test_a_draining_daemon_is_not_ready(client: Client) -> None:
    facts = Facts()
    asked = client(facts=facts)
    facts.values["draining"] = True
    answer = asked.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "the daemon is draining\n")


@pytest.mark.parametrize(("sick", "code"), [([0], 200), ([0, 1], 503)])
def test_ready_needs_one_healthy_volume(tmp_path: Path, sick: list[int], code: int) -> None:
    with small_store([tmp_path / "a", tmp_path / "b"]) as store:
        store.health[Op.WRITE] = watch_volumes(2, HealthLimits(timeouts_in_a_row=1))
        for volume in sick:
            store.health[Op.WRITE][volume].record(ok=False, nbytes=1, seconds=1.0, timed_out=True)
        asked = Asker(make_app(store, Facts()))
        assert asked.get("/readyz").status_code == code
        drives = asked.get("/api/status").json()["drives"]
        assert [each["health"] for each in drives] == ["sick" if i in sick else "healthy" for i in range(2)]


# --- refusals ---


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9470", "127.0.0.1", "[::1]:9470", "10.1.2.3:9470", "node7:80"]
)
def test_addresses_and_configured_names_are_answered(client: Client, host: str) -> None:
    assert client(hosts=["node7"]).get("/api/status", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1", "a@localhost", "127.1"],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_anybody_can_point_here_is_refused(client: Client, host: str, path: str) -> None:
    assert client().get(path, headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/api/status"])
def test_only_get_and_head_are_taken(client: Client, method: str, path: str) -> None:
    answer = client().request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_a_request_with_a_body_is_refused(client: Client) -> None:
    assert client().request("GET", "/api/status", content=b"x").status_code == 413
    chunked = {"Transfer-Encoding": "chunked"}
    assert client().request("GET", "/api/status", headers=chunked).status_code == 413


def test_every_answer_has_the_security_headers(client: Client) -> None:
    asked = client(TOKEN)
    answers = [asked.get(path) for path in [*PATHS, "/nothing"]]
    answers += [asked.request("POST", "/"), asked.get("/", headers={"Host": "evil.example"})]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/api/status", "/metrics", "/readyz", "/nothing"])
def test_with_a_token_data_needs_it(client: Client, path: str) -> None:
    asked = client(TOKEN)
    for headers in (
        {},
        bearer("wrong"),
        bearer(""),
        bearer(TOKEN + "x"),
        bearer(TOKEN[:-1]),
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
    ):
        answer = asked.get(path, headers=headers)
        assert answer.status_code == 401
        assert "Bearer" in answer.headers["www-authenticate"]
    twice = httpx.Headers([("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer wrong")])
    assert asked.get(path, headers=twice).status_code == 401
    assert asked.get(path, headers=bearer(TOKEN)).status_code == (404 if path == "/nothing" else 200)


def test_health_and_the_page_itself_need_no_token(client: Client) -> None:
    asked = client(TOKEN)
    assert [asked.get(path).status_code for path in ["/healthz", "/", "/page.js"]] == [200, 200, 200]


def test_no_answer_holds_the_token_or_the_environment(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", "do-not-tell")
    asked = client(TOKEN)
    for path in PATHS:
        text = asked.get(path, headers=bearer(TOKEN)).text
        assert TOKEN not in text
        assert "do-not-tell" not in text


# --- the server ---


def raw(url: str, request: bytes, wait_s: float = 60.0) -> bytes:
    """All that the server says to these bytes until it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def test_the_server_answers_and_stops(store: Store) -> None:
    with serving(store) as (url, server):
        answer = httpx.get(f"{url}/api/status", trust_env=False, timeout=WAIT_S)
        assert json.loads(answer.content)["daemon"]["leases"] == 17
        assert "server" not in answer.headers
        server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz", trust_env=False)


def test_a_port_in_use_is_an_error_that_says_what_to_do(store: Store) -> None:
    with serving(store) as (url, _), pytest.raises(StoreError, match="Choose another port"):
        http_server.serve_http(make_app(store, Facts()), port=int(url.rpartition(":")[2]))


def test_endless_headers_are_cut_off(store: Store) -> None:
    with serving(store) as (url, _):
        flood = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"a" * (64 << 10)
        assert raw(url, flood).startswith(b"HTTP/1.1 4")
        assert httpx.get(f"{url}/healthz", trust_env=False, timeout=WAIT_S).status_code == 200


def test_two_host_headers_are_refused(store: Store) -> None:
    with serving(store) as (url, _):
        request = (
            b"GET /api/status HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
        )
        assert raw(url, request).startswith(b"HTTP/1.1 4")


def test_a_connection_on_which_no_request_comes_is_closed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "IDLE_LOOK_S", 0.1)
    with serving(store) as (url, _):
        for half in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            with contextlib.suppress(ConnectionResetError):  # and no TimeoutError: the server was first
                assert raw(url, half) == b""


def test_connections_beyond_the_limit_are_closed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a descriptor, and any user of the machine can open them."""
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    with serving(store) as (url, _), contextlib.ExitStack() as opened:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        poller = select.poll()
        for _ in range(13):
            poller.register(opened.enter_context(socket.create_connection(address)), select.POLLIN)
        deadline = Deadline(WAIT_S)
        while len(poller.poll(100)) < 5:
            assert not deadline.passed
        opened.close()
        while httpx.get(f"{url}/healthz", trust_env=False, timeout=WAIT_S).status_code != 200:
            assert not deadline.passed
