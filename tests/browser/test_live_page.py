"""The live page in a real browser: its numbers follow the store, it fits phones, it says when its data is old.

Screenshots go to the folder that GDS_TEST_ARTEFACTS names, or to one of pytest's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gdsstore import BoundNamespace, PageLayout, Store
from gdsstore.engines.base import Op
from gdsstore.observe.activity import Activity, Moved
from gdsstore.service.node_totals import NodeTotals, Reporting
from gdsstore.volume.health import HealthLimits, watch_volumes
from tests.browser.chrome import Chrome, chrome, missing
from tests.service.serving import Facts, serving
from tests.store.helpers import load, make_keys, opaque, save, small_store

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing()), reason=missing() or "a browser is here"),
]
SCRIPT = "<img src=x onerror=alert(1)>"
PAGE_BYTES = 65536
FITS = "return document.documentElement.scrollWidth <= innerWidth"
CHARTS_FIT = "return [...document.querySelectorAll('.chart canvas, #grid')].every((each) => each.clientWidth <= innerWidth)"
STATE = "return document.getElementById('state').dataset.state"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chrome(tmp_path_factory.mktemp("chrome")) as started:
        yield started


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("GDS_TEST_ARTEFACTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store([tmp_path / "nvme0", tmp_path / "nvme1"], host_cache="8MiB") as opened:
        yield opened


def traffic(pages: BoundNamespace, salt: object) -> None:
    """20 pages saved, 25 asked for."""
    assert save(pages, make_keys(20, salt), PAGE_BYTES).all_ok
    load(pages, make_keys(25, salt), PAGE_BYTES)


def opened(browser: Chrome, url: str, state: str = "live") -> None:
    browser.look(1280, 900, "light")
    browser.open("about:blank")
    browser.complaints()  # of the last test's page, whose server is gone
    browser.open(url)
    browser.run("setInterval(poll, 400)")  # oftener than for people
    browser.until(lambda: browser.run(STATE), lambda found: found == state, "the page's state")


def tile(browser: Chrome, name: str) -> str:
    """The number of a tile, by its title."""
    find = "return [...document.querySelectorAll('#tiles > div')].find((each) => each.firstChild.textContent === arguments[0])"
    return str(browser.run(f"{find}?.querySelector('dd').textContent ?? ''", name))


def points(browser: Chrome, chart: str) -> int:
    """How many values a chart shows that are not 0 and no gap."""
    code = "return [...kept.get(arguments[0]).values()].flat().filter((value) => value > 0).length"
    return int(browser.run(code, chart))


def wait_for_points(browser: Chrome, chart: str, more_than: int = 0) -> None:
    browser.until(lambda: points(browser, chart), lambda count: count > more_than, f"the values of {chart}")


def wait_for_tile(browser: Chrome, name: str, text: str) -> None:
    browser.until(lambda: tile(browser, name), lambda now: now == text, name)


def wait_for_true(browser: Chrome, code: str, what: str) -> None:
    browser.until(lambda: browser.run(code), bool, what)


def test_numbers_follow_the_traffic(browser: Chrome, store: Store) -> None:
    pages = opaque(store, PAGE_BYTES, weights=SCRIPT)
    with serving(store) as (url, _):
        opened(browser, url)
        assert tile(browser, "pages stored") == "0"
        assert browser.text("#throughput .nothing") == "no data yet"
        for salt in range(2):
            traffic(pages, salt)
            wait_for_tile(browser, "pages stored", str(20 * (salt + 1)))
        wait_for_points(browser, "throughput")
        wait_for_points(browser, "hits")
        assert points(browser, "latency") > 0
        assert browser.text("#throughput .nothing") == ""
        row = browser.text("#namespaces tr")
        assert "40" in row
        assert "2.62" in row  # MB
        assert "<img" in row  # as text
        assert browser.run("return document.querySelectorAll('main img').length") == 0
        assert "healthy" in browser.text("#drives")
        assert browser.complaints() == []


def test_it_fits_phones_and_desktops_in_both_schemes(browser: Chrome, store: Store, pictures: Path) -> None:
    long_name = "a-model-with-a-name-that-does-not-end-" * 4
    busy = [
        opaque(store, PAGE_BYTES),
        store.namespace(model=long_name, layout=PageLayout.opaque(PAGE_BYTES)),
    ]
    store.health[Op.WRITE] = watch_volumes(2, HealthLimits(timeouts_in_a_row=1, first_retry_s=600))
    totals = NodeTotals(2)
    for pid, name in ((4711, "sglang::scheduler_TP0"), (4712, SCRIPT)):
        moved = Moved({("host", "posix", 0, "read", "load"): (pid * 10**6, pid)})
        reporting = Reporting(
            bytes([pid % 256]) * 16, pid, name, Activity(moved, {}, 0.0), [], time.monotonic()
        )
        totals.take(name, reporting)
    with serving(store, node=totals) as (url, _):
        opened(browser, url)
        rows = browser.run(
            "return [...document.querySelectorAll('#processes tr')].map((row) => row.textContent)"
        )
        assert ["the daemon" in rows[0], SCRIPT in rows[1], "TP0 47114.71" in rows[2]] == [True] * 3  # GB
        for salt in range(2):
            for pages in busy:
                traffic(pages, salt)
            wait_for_points(browser, "throughput", more_than=salt)
        store.health[Op.WRITE][1].record(ok=False, nbytes=1, seconds=1.0, timed_out=True)
        browser.until(lambda: browser.text("#drives"), lambda text: "sick" in text, "the sick drive")
        backs = {}
        for name, width, height in (("phone", 360, 740), ("desktop", 1280, 900)):
            for scheme in ("light", "dark"):
                browser.look(width, height, scheme)
                wait_for_true(browser, FITS, f"{name} scrolls sideways")
                wait_for_true(browser, CHARTS_FIT, f"{name}: a chart is too wide")
                browser.picture(pictures / f"{name}-{scheme}.png")
                backs[scheme] = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert backs["light"] != backs["dark"]
        assert browser.complaints() == []


def test_a_lost_daemon_shows_and_comes_back(browser: Chrome, store: Store, pictures: Path) -> None:
    traffic(opaque(store, PAGE_BYTES), 0)
    with ExitStack() as stack:
        with serving(store) as (url, _):
            opened(browser, url)
        browser.until(lambda: browser.run(STATE), lambda state: state == "lost", "the page's state")
        said = browser.text("#state")
        assert "daemon lost" in said
        assert "old" in said
        assert browser.run("return document.getElementById('content').classList.contains('stale')")
        assert tile(browser, "pages stored") == "20"  # what was known, marked as old
        browser.picture(pictures / "daemon-lost.png")
        stack.enter_context(serving(store, port=urlsplit(url).port or 0))
        browser.until(lambda: browser.run(STATE), lambda state: state == "live", "the page's state")


def test_a_draining_daemon_shows(browser: Chrome, store: Store) -> None:
    facts = Facts()
    facts.values["draining"] = True
    with serving(store, facts=facts) as (url, _):
        opened(browser, url, "draining")


def test_a_token_is_asked_for_and_kept_for_the_tab(browser: Chrome, store: Store, pictures: Path) -> None:
    with serving(store, token="right") as (url, _):
        opened(browser, url, "lost")
        browser.picture(pictures / "token.png")
        browser.keys("#token", "wrong\ue007")  # and Enter
        said = browser.until(
            lambda: browser.text("#login-said"), lambda text: "not taken" in text, "what it says"
        )
        assert "wrong" not in said
        browser.keys("#token", "right\ue007")
        browser.until(lambda: browser.run(STATE), lambda state: state == "live", "the page's state")
        assert browser.run("return document.getElementById('login').hidden")
        browser.open(url)
        browser.until(lambda: browser.run(STATE), lambda state: state == "live", "the page's state")
        assert browser.run("return localStorage.length") == 0


def test_segments_are_reached_with_the_keyboard(browser: Chrome, store: Store) -> None:
    save(opaque(store, PAGE_BYTES), make_keys(40), PAGE_BYTES)
    with serving(store) as (url, _):
        opened(browser, url)
        browser.keys("#grid", "\ue014\ue014")  # arrow right, twice
        first = browser.text("#grid-cell")
        assert first.startswith("segment 1: ")
        assert "written" in first
        browser.keys("#grid-by input[value=fill]", "\ue014")
        assert browser.run("return document.querySelector('#grid-by input:checked').value") == "heat"
        assert "last minute" in browser.text("#grid-legend")
