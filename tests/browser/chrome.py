"""Headless Chromium through chromedriver, which speaks W3C WebDriver: JSON over HTTP."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

T = TypeVar("T")
START_S = 60.0
WAIT_S = 60.0
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the standard gives elements in JSON
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str:
    """What is not here of what is needed; "" if nothing is."""
    if not any(map(shutil.which, BROWSERS)):
        return "no Chromium here: install chromium and chromium-driver to run the tests of the live page"
    if shutil.which("chromedriver") is None:
        return (
            "Chromium is here without chromedriver: install chromium-driver to run the tests of the live page"
        )
    return ""


class Chrome:
    """One browser window. All calls raise AssertionError with what the browser says."""

    def __init__(self, url: str, profile: Path) -> None:
        self._http = httpx.Client(base_url=url, timeout=60.0, trust_env=False)
        options = {
            "binary": next(filter(None, map(shutil.which, BROWSERS))),
            "args": [
                "--headless=new",
                "--no-sandbox",  # root in a container has no other way
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-proxy-server",
                f"--user-data-dir={profile}",
            ],
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._path = f"/session/{session['sessionId']}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.request(method, path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def close(self) -> None:
        self._ask("DELETE", self._path)
        self._http.close()

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._path}/url", {"url": url})

    def run(self, code: str, *arguments: object) -> Any:
        """What a function body of JavaScript returns."""
        return self._ask("POST", f"{self._path}/execute/sync", {"script": code, "args": list(arguments)})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._ask("POST", f"{self._path}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def keys(self, selector: str, text: str) -> None:
        """Type into an element, as a user would."""
        found = self._ask("POST", f"{self._path}/element", {"using": "css selector", "value": selector})
        self._ask("POST", f"{self._path}/element/{found[ELEMENT]}/value", {"text": text})

    def complaints(self) -> list[str]:
        """Warnings and errors of the console since the last call: scripts that failed, files that were refused, ..."""
        entries = self._ask("POST", f"{self._path}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def look(self, width: int, height: int, scheme: str) -> None:
        """The window's size in CSS pixels, and "light" or "dark"."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.devtools(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def until(self, ask: Callable[[], T], good: Callable[[T], bool], what: str) -> T:
        """Ask again and again until the answer is good; it must be within WAIT_S."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = ask()
            if good(found):
                return found
            assert time.monotonic() < deadline, f"{what}: still {found!r}"
            time.sleep(0.1)


@contextlib.contextmanager
def chrome(folder: Path) -> Iterator[Chrome]:
    """A browser for the length of a `with`; its profile and logs go into `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["chromedriver", f"--port={port}", f"--log-path={folder / 'chromedriver.log'}"]
    environment = {**os.environ, "HOME": str(folder), "no_proxy": "*"}
    driver = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, driver)
        browser = Chrome(url, folder / "profile")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        try:
            driver.wait(START_S)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()


def _wait_for(url: str, driver: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/status", trust_env=False).json()["value"]["ready"]:
                return
        assert driver.poll() is None, f"chromedriver ended with {driver.returncode}"
        assert time.monotonic() < deadline, "chromedriver does not answer"
        time.sleep(0.05)
