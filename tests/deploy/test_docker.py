"""The images' scripts, run here with a `gdsstore` that only writes down what it is asked; and what compose and Dockerfile share."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DEADLINE_S = 30

FAKE = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
case "$1" in
    doctor)
        if [[ -n "${DOCTOR_HANGS:-}" ]]; then echo $$ >"$DOCTOR_HANGS"; exec sleep 600; fi
        if [[ -n "${DOCTOR_RESULT:-}" ]]; then echo "$DOCTOR_RESULT" >"$4"; fi
        exit "${DOCTOR_STATUS:-0}"
        ;;
    serve)
        if [[ -n "${SERVE_WAITS:-}" ]]; then
            trap 'echo drained >>"$CALLS"; exit 0' TERM
            echo $$ >"$SERVE_WAITS"
            while :; do sleep 0.05; done
        fi
        ;;
esac
"""


class Box:
    """A directory with the fakes, a store, and a home."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls_file = root, root / "calls"
        for name in ("bin", "store", "home"):
            (root / name).mkdir()
        (root / "store" / "store.json").write_text("{}")
        for name in ("gdsstore", "python3"):
            fake = root / "bin" / name
            fake.write_text(FAKE)
            fake.chmod(0o755)

    def env(self, **more: str) -> dict[str, str]:
        return {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.root / "home"),
            "CALLS": str(self.calls_file),
            "KV_STORE": str(self.root / "store"),
            "DOCTOR_RESULT": "{}",
            **more,
        }

    def start(self, *command: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(DOCKER / "entrypoint.sh"), *command],
            env=self.env(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, **more: str) -> tuple[int, str]:
        """The exit code and what was said on standard error."""
        process = self.start(*command, **more)
        _, said = process.communicate(timeout=DEADLINE_S)
        return process.returncode, said

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    @property
    def serve(self) -> str:
        return f"gdsstore serve --http 127.0.0.1:9470 --store {self.root / 'store'}"

    @property
    def doctor(self) -> str:
        return f"gdsstore doctor {self.root / 'store'} --json {self.root / 'home' / 'doctor.json'}"


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def _written(file: Path) -> str:
    """What another process writes into a file, once it is there."""
    for _ in range(DEADLINE_S * 50):
        if file.exists() and (text := file.read_text().strip()):
            return text
        threading.Event().wait(0.02)
    raise AssertionError(f"{file} was not written")


def test_the_doctor_runs_and_then_the_daemon(box: Box) -> None:
    assert box.run() == (0, "")
    assert box.calls == [box.doctor, box.serve]


def test_the_doctor_can_be_left_out(box: Box) -> None:
    assert box.run(KV_DOCTOR="off")[0] == 0
    assert box.calls == [box.serve]


def test_a_doctor_that_finds_nothing_good_does_not_stop_the_start(box: Box) -> None:
    code, said = box.run(DOCTOR_STATUS="2")
    assert code == 0
    assert "a store does not work" in said
    assert box.calls == [box.doctor, box.serve]


def test_where_the_doctor_is_required_a_store_that_does_not_work_stops_the_start(box: Box) -> None:
    assert box.run(KV_DOCTOR="required", DOCTOR_STATUS="2")[0] == 2
    assert box.calls == [box.doctor]


def test_a_required_doctor_that_says_not_direct_is_good_enough(box: Box) -> None:
    assert box.run(KV_DOCTOR="required", DOCTOR_STATUS="1")[0] == 0
    assert box.calls == [box.doctor, box.serve]


def test_a_required_doctor_that_broke_is_not_good_enough(box: Box) -> None:
    """A traceback has exit code 1 as well, which means `not direct` when the doctor came to its end."""
    (box.root / "home" / "doctor.json").write_text("{}")  # of an earlier start
    assert box.run(KV_DOCTOR="required", DOCTOR_STATUS="1", DOCTOR_RESULT="")[0] == 2
    assert box.calls == [box.doctor]


def test_what_the_doctor_is_told_must_be_known(box: Box) -> None:
    code, said = box.run(KV_DOCTOR="yes")
    assert code == 2
    assert "on, off or required" in said
    assert box.calls == []


def test_a_given_command_takes_the_daemons_place(box: Box) -> None:
    process = box.start("bash", "-c", 'echo $$ "$@"', "x", "two words", "--store")
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert out == f"{process.pid} two words --store\n"  # the same process, so signals reach it
    assert box.calls == [box.doctor]


def test_options_alone_go_to_the_daemon(box: Box) -> None:
    box.run("--scrub-rate", "0", KV_DOCTOR="off")
    assert box.calls == [f"{box.serve} --scrub-rate 0"]


def test_several_volumes_and_a_token_go_to_the_daemon(box: Box) -> None:
    (box.root / "second").mkdir()
    volumes = f"{box.root / 'store'}:{box.root / 'second'}"
    box.run(KV_DOCTOR="off", KV_STORE=volumes, KV_HTTP="0.0.0.0:80", KV_HTTP_TOKEN_FILE="/t o k")
    first, second = volumes.split(":")
    assert box.calls == [
        f"gdsstore serve --http 0.0.0.0:80 --store {first} --store {second} --token-file /t o k"
    ]


def test_a_new_store_is_made_only_with_a_capacity(box: Box) -> None:
    (box.root / "store" / "store.json").unlink()
    code, said = box.run(KV_DOCTOR="off")
    assert code == 2
    assert "GDSSTORE_CAPACITY" in said
    assert box.calls == []
    assert box.run(KV_DOCTOR="off", GDSSTORE_CAPACITY="1GiB")[0] == 0
    make, serve = box.calls
    assert make.startswith("python3 -c ")
    assert make.endswith(f" {box.root / 'store'}")
    assert serve == box.serve


def test_without_a_place_for_its_caches_it_says_so(box: Box) -> None:
    code, said = box.run(HOME=str(box.root / "missing"))
    assert code == 2
    assert "may not write" in said
    assert box.calls == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_doctor_at_once(box: Box, number: signal.Signals) -> None:
    process = box.start(DOCTOR_HANGS=str(box.root / "doctor.pid"))
    doctor = int(_written(box.root / "doctor.pid"))
    process.send_signal(number)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert box.calls == [box.doctor]
    with pytest.raises(ProcessLookupError):
        _wait_until_gone(doctor)


def _wait_until_gone(pid: int) -> None:
    for _ in range(DEADLINE_S * 50):
        os.kill(pid, 0)
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            raise ProcessLookupError  # dead; nobody here reaps it
        threading.Event().wait(0.02)


def test_a_signal_reaches_the_daemon(box: Box) -> None:
    process = box.start(KV_DOCTOR="off", SERVE_WAITS=str(box.root / "serve.pid"))
    assert int(_written(box.root / "serve.pid")) == process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert box.calls == [box.serve, "drained"]


# --- health.py ---


@pytest.fixture
def daemon() -> Iterator[int]:
    """A port that answers 200 on /healthz, and on /readyz only with the token."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = self.headers["Authorization"] == "Bearer a-token"
            self.send_response(200 if self.path == "/healthz" or ready else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def _health(*arguments: str, **env: str) -> int:
    command = [sys.executable, "-I", str(DOCKER / "health.py"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, timeout=DEADLINE_S, check=False).returncode


def test_the_health_check_says_what_the_daemon_says(daemon: int, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token\n")
    for host in ("127.0.0.1", "0.0.0.0", "[::]"):
        assert _health(KV_HTTP=f"{host}:{daemon}") == 0
    assert _health("/readyz", KV_HTTP=f"127.0.0.1:{daemon}") == 1
    assert _health("/readyz", KV_HTTP=f"127.0.0.1:{daemon}", KV_HTTP_TOKEN_FILE=str(token)) == 0


def test_a_daemon_on_one_address_is_asked_there() -> None:
    with http.server.HTTPServer(("127.0.0.2", 0), http.server.SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert _health("/", KV_HTTP=f"127.0.0.2:{server.server_port}") == 0


def test_no_daemon_is_not_healthy(daemon: int, tmp_path: Path) -> None:
    assert _health(KV_HTTP="127.0.0.1:1") == 1
    assert _health(KV_HTTP="nonsense") == 1
    assert _health(KV_HTTP=f"127.0.0.1:{daemon}", KV_HTTP_TOKEN_FILE=str(tmp_path / "missing")) == 1


# --- files that must agree ---


@pytest.mark.parametrize("script", ["entrypoint.sh", "prove.sh"])
def test_the_scripts_are_sound(script: str) -> None:
    checks = [["bash", "-n"], *([["shellcheck"]] if shutil.which("shellcheck") else [])]
    for check in checks:
        done = subprocess.run([*check, str(DOCKER / script)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert os.access(DOCKER / script, os.X_OK)


def _requirements(extras: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(DOCKER / "requirements.py"), extras]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("extras", ["cuda13,service", "nixl,service"])
def test_everything_that_an_image_installs_is_pinned(extras: str) -> None:
    pinned = {
        line.partition("==")[0]
        for line in (DOCKER / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    found = _requirements(extras).stdout.split("\n")
    for requirement in filter(None, found):
        name = re.match(r"[\w-]+", requirement)
        assert name
        assert name[0] in pinned or (requirement.startswith("nixl") and "==" in requirement), requirement
    assert "msgspec>=0.19" in found
    assert "nixl==1.5.1" in found


def test_an_extra_that_is_not_there_stops_the_build() -> None:
    assert _requirements("cuda99").returncode != 0


def _dockerfile() -> str:
    return (DOCKER / "Dockerfile").read_text()


def _services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    return services


def test_all_services_run_as_the_images_user_and_can_share_a_store() -> None:
    (uid,) = set(re.findall(r"^ARG UID=(\d+)$", _dockerfile(), re.MULTILINE))
    for name, service in _services().items():
        assert service["user"] == f"{uid}:{uid}", name
        assert service["pid"] == "host", name  # LMDB knows its readers by process id
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["ulimits"]["memlock"] == -1
        inside = {
            each.rpartition("}")[2].lstrip(":").split(":")[-1 if each.startswith("$") else 1]
            for each in service["volumes"]
        }
        assert {"/store", "/var/cache/gdsstore"} <= inside, name
        assert "/run/udev:/run/udev:ro" in service["volumes"]


def test_compose_builds_what_the_dockerfile_has() -> None:
    dockerfile = _dockerfile()
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))
    arguments = set(re.findall(r"^ARG (\w+)=", dockerfile, re.MULTILINE))
    for service in _services().values():
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
        assert build["target"] in targets
        assert set(build.get("args", {})) <= arguments


def test_compose_waits_for_drain_and_close() -> None:
    serve = (ROOT / "gdsstore" / "cli" / "serve.py").read_text()
    daemon = (ROOT / "gdsstore" / "service" / "daemon.py").read_text()
    drain = re.search(r"drain_s: DrainS = ([\d.]+)", serve)
    close = re.search(r"^CLOSE_S = ([\d.]+)", daemon, re.MULTILINE)
    assert drain
    assert close
    for name in ("gdsstore", "gdsstore-cpu"):
        assert int(_services()[name]["stop_grace_period"].removesuffix("s")) > float(drain[1]) + float(
            close[1]
        )


def test_settings_in_compose_are_settings_of_the_store() -> None:
    """An unknown GDSSTORE_* variable is refused by the library."""
    settings = (ROOT / "docs" / "settings.md").read_text()
    names = {
        key
        for service in _services().values()
        for key in service["environment"]
        if key.startswith("GDSSTORE_")
    }
    assert names
    for name in names:
        assert f"`{name}`" in settings
    assert not re.search(r"^\s+GDSSTORE_", _dockerfile(), re.MULTILINE)


def test_what_is_copied_into_the_image_is_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", _dockerfile(), re.MULTILINE)
    assert copied
    for source in " ".join(copied).split():
        assert (ROOT / source).exists(), source
        assert source.partition("/")[0] in allowed, source
