"""What a scrape says is what the store did: every documented metric, no other one, and numbers that agree with `stats()`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gdsstore import BoundNamespace, PageStatus, Store
from gdsstore.engines.faults import Fault, FaultKind
from gdsstore.engines.faulty import FaultyEngine
from gdsstore.engines.posix import PosixEngine
from gdsstore.observe.activity import Moved, NodeShare
from gdsstore.observe.families import MetricKind
from gdsstore.observe.metrics import FAMILIES, StoreCollector, render
from tests.store.helpers import flip, load, locate, make_keys, opaque, save, small_store

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
PAGE_BYTES = 8192

Scrape = dict[str, dict[tuple[tuple[str, str], ...], float]]
"""Values by sample name and sorted labels."""


def scrape(store: Store, others: Callable[[], NodeShare] | None = None) -> Scrape:
    found: Scrape = defaultdict(dict)
    for family in text_string_to_metric_families(render(store, others).decode()):
        for sample in family.samples:
            found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(found: Scrape, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    wanted = labels.items()
    return sum(n for have, n in found[name].items() if wanted <= dict(have).items())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "s", host_cache="1MiB") as opened:
        yield opened


def work(store: Store) -> BoundNamespace:
    """Saves, loads from both tiers, a miss, a prefetch, look-ups."""
    namespace = opaque(store, PAGE_BYTES)
    keys = make_keys(300)
    assert save(namespace, keys[:290]).all_ok  # more than the host cache holds
    load(namespace, keys)
    load(namespace, keys[-20:])
    namespace.prefetch(keys[:50]).wait(30)
    namespace.lookup(keys)
    return namespace


def test_every_documented_metric_is_there_and_no_other_one(store: Store) -> None:
    work(store)
    text = render(store, lambda: NodeShare(Moved(), 2)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    exposed = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert exposed == [(family.name, family.kind.value) for family in FAMILIES.values()]
    for family in FAMILIES.values():
        counts = family.kind is MetricKind.COUNTER
        parsed = families[family.name.removesuffix("_total") if counts else family.name]
        assert parsed.documentation == family.help
        assert parsed.samples, f"{family.name} has no sample under load"
        for sample in parsed.samples:
            assert set(sample.labels) - {"le"} == set(family.labels)


def test_only_a_daemon_tells_of_the_node_and_of_itself_and_all_others_together(store: Store) -> None:
    work(store)
    own = scrape(store)
    assert not [name for name in own if name.startswith("gdsstore_node_")]
    root = str(store.directory.root)
    others = Moved({("host", "posix", 0, "read", "load"): (1000, 10)}, {"pages_loaded": (7,)})
    found = scrape(store, lambda: NodeShare(others, 2))
    for name, more in (("bytes", 1000), ("operations", 10)):
        for direction in ("read", "write"):
            labels = {"direction": direction, "volume": root}
            node = value(found, f"gdsstore_node_{name}_total", **labels)
            assert node == value(own, f"gdsstore_io_{name}_total", **labels) + more * (direction == "read")
    loaded = store.stats()["pages_loaded"]
    assert value(found, "gdsstore_node_pages_total", outcome="loaded") == loaded + 7
    assert value(found, "gdsstore_node_pages_total", outcome="saved") == 290
    assert value(found, "gdsstore_hits_total") == loaded  # its own, as before
    assert value(found, "gdsstore_node_clients") == 2


def test_names_follow_the_rules_of_prometheus() -> None:
    for family in FAMILIES.values():
        assert re.fullmatch(r"gdsstore_[a-z]+(_[a-z]+)*", family.name)
        assert (family.kind is MetricKind.COUNTER) == family.name.endswith("_total")
        assert (family.kind is not MetricKind.HISTOGRAM) or family.name.endswith("_seconds")
        assert not re.search(r"_(ms|us|mib|gb|kb|percent)(_|$)", family.name)


def test_the_numbers_agree_with_the_stores_own(store: Store) -> None:
    work(store)
    found, stats = scrape(store), store.stats()
    by_path: dict[tuple[str, ...], float] = defaultdict(float)
    for labels, nbytes in found["gdsstore_io_bytes_total"].items():
        of = dict(labels)
        by_path[of["path"], of["engine"], of["volume"], of["direction"]] += nbytes
    assert by_path == {
        (row.path, row.engine, row.volume, row.direction): row.nbytes for row in store.path_report()
    }
    for direction, name in (("read", "drive_bytes_read"), ("write", "drive_bytes_written")):
        assert value(found, "gdsstore_io_bytes_total", direction=direction) == stats[name]
    requests = stats["drive_requests_read"]
    assert value(found, "gdsstore_io_operations_total", direction="read") == requests
    assert value(found, "gdsstore_hits_total") == stats["pages_loaded"]
    assert value(found, "gdsstore_hits_total", tier="host") == stats["pages_loaded_from_host"] > 0
    assert (
        value(found, "gdsstore_misses_total", tier="drive", reason="absent") == stats["pages_miss_absent"] > 0
    )
    assert value(found, "gdsstore_misses_total", tier="host") == stats["host_cache"]["misses"]
    assert value(found, "gdsstore_save_pages_total", result="saved") == stats["pages_saved"] == 290
    assert value(found, "gdsstore_lookup_pages_total", result="hit") == stats["lookup_hits"]
    assert value(found, "gdsstore_volume_segments") == sum(stats["segments"].values())
    assert value(found, "gdsstore_volume_filled_bytes") >= 290 * PAGE_BYTES
    assert value(found, "gdsstore_catalog_pages") == stats["catalog"]["pages"] == 290
    for name, counts in stats["transfers"]["classes"].items():
        for histogram in ("wait", "run"):
            count = value(found, f"gdsstore_call_{histogram}_seconds_count", **{"class": name})
            assert count == counts["started"]


def test_bytes_are_counted_by_what_they_moved_for(store: Store) -> None:
    namespace = opaque(store, PAGE_BYTES)
    keys = make_keys(200)
    save(namespace, keys)
    store.cache.flush(10)
    namespace._warm.clear(namespace._deadline(None))  # type: ignore[union-attr]
    namespace.prefetch(keys[:64]).wait(30)
    load(namespace, keys[100:])
    moved = {
        (dict(labels)["direction"], dict(labels)["class"]): nbytes
        for labels, nbytes in scrape(store)["gdsstore_io_bytes_total"].items()
    }
    assert moved == {
        ("write", "offload"): 200 * PAGE_BYTES,
        ("read", "prefetch"): 64 * PAGE_BYTES,
        ("read", "load"): 100 * PAGE_BYTES,
    }


def test_what_the_host_cache_writes_back_is_an_offload(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", host_cache="1MiB", write_policy="write_back") as store:
        save(opaque(store, PAGE_BYTES), make_keys(20))
        before = scrape(store)
        assert value(before, "gdsstore_host_cache_dirty_bytes") == 20 * PAGE_BYTES
        assert value(before, "gdsstore_io_bytes_total") == 0
        store.sync()
        after = scrape(store)
        written = value(after, "gdsstore_io_bytes_total", direction="write", **{"class": "offload"})
        assert written == 20 * PAGE_BYTES
        assert value(after, "gdsstore_host_cache_dirty_bytes") == 0


def test_counters_never_fall_while_the_store_works(store: Store) -> None:
    stop = threading.Event()
    namespace = opaque(store, PAGE_BYTES)

    def churn(number: int) -> None:
        keys, turn = make_keys(64, number), 0
        while not stop.is_set() and turn < 50:
            save(namespace, keys)
            load(namespace, keys)
            namespace.prefetch(keys[:8]).wait(10)
            namespace.delete(keys[:16])
            turn += 1

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    counting = {name for name, family in FAMILIES.items() if family.kind is MetricKind.COUNTER}
    suffixes = ("_bucket", "_count", "_sum")
    counting |= {
        name + suffix
        for name, family in FAMILIES.items()
        for suffix in suffixes
        if family.kind is MetricKind.HISTOGRAM
    }
    before = scrape(store)
    for _ in range(15):
        now = scrape(store)
        for name in counting:
            for labels, then in before[name].items():
                assert now[name][labels] >= then, f"{name}{labels} fell"
        for name, family in FAMILIES.items():
            if family.kind is MetricKind.HISTOGRAM:
                for labels, count in now[f"{name}_count"].items():
                    assert now[f"{name}_bucket"][tuple(sorted((*labels, ("le", "+Inf"))))] == count
        before = now
    stop.set()
    for thread in threads:
        thread.join(60)
    assert value(scrape(store), "gdsstore_hits_total") > 0


def test_a_damaged_page_is_a_miss_for_its_checksum_and_absent_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with small_store(path) as store:
        namespace = opaque(store, PAGE_BYTES)
        keys = make_keys(4)
        save(namespace, keys)
        segment, offset = locate(namespace, keys)
        flip(path / "segments" / f"{int(segment[1]):08d}.seg", int(offset[1]) * 8 + 7)
        load(namespace, keys)
        load(namespace, keys)
        found = scrape(store)
        assert value(found, "gdsstore_misses_total", reason="checksum") == 1
        assert value(found, "gdsstore_misses_total", reason="absent", tier="drive") == 1
        assert value(found, "gdsstore_damaged_pages_total") == 1


def test_pages_of_a_call_that_was_never_begun_are_counted(tmp_path: Path) -> None:
    engine = FaultyEngine(PosixEngine(2), [Fault(FaultKind.HANG)], 0)
    settings = {"workers": 1, "offload_budget_s": 2.5, "io_deadline_s": 20}
    with small_store(tmp_path / "s", own_engine=engine, **settings) as store:
        namespace = opaque(store, PAGE_BYTES)
        keys = make_keys(8)
        memory = np.zeros((8, PAGE_BYTES), np.uint8)
        first = namespace.save(keys[:1], memory[:1])
        while not engine.injected["hang"] and not first.done():
            time.sleep(0.001)
        second = namespace.save(keys[1:], memory[1:])
        assert second.result(60).count(PageStatus.FAILED_DROPPED) == 7
        found = scrape(store)
        assert value(found, "gdsstore_save_pages_total", result="dropped") == 7
        assert value(found, "gdsstore_calls_ended_total", **{"class": "offload", "outcome": "dropped"}) == 1
        engine.release_hangs()
        first.result(60)


def test_a_registry_can_hold_it_beside_others_and_outlives_the_store(tmp_path: Path) -> None:
    registry = CollectorRegistry(auto_describe=True)
    with small_store(tmp_path / "s") as store:
        registry.register(StoreCollector(store))
        assert b"gdsstore_capacity_bytes 6.7108864e+07" in generate_latest(registry)
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            registry.register(StoreCollector(store))
    assert generate_latest(registry) == b""


def test_without_the_extra_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None; import gdsstore\n"
        "try:\n    import gdsstore.observe.metrics\n"
        "except gdsstore.MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 'pip install "gdsstore[service]"' in done.stdout


# --- the page ---


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "metrics_doc.py"), "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_page_is_what_the_script_writes() -> None:
    result = check(ROOT)
    assert result.returncode == 0, result.stderr


def test_a_stale_page_is_found(tmp_path: Path) -> None:
    (tmp_path / "gdsstore").symlink_to(ROOT / "gdsstore")
    (tmp_path / "scripts").mkdir()
    for script in ("metrics_doc.py", "written_page.py"):
        shutil.copy(ROOT / "scripts" / script, tmp_path / "scripts")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "metrics.md").write_text(PAGE.read_text().replace("`gdsstore_hits_total`", "`x`"))
    result = check(tmp_path)
    assert result.returncode == 1
    assert "stale" in result.stderr


def test_every_metric_is_on_the_page_once() -> None:
    rows = [
        line.strip("| ").split(" | ")
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `gdsstore_")
    ]
    assert [row[0].strip("`") for row in rows] == list(FAMILIES)
    assert {len(row) for row in rows} == {5}, "a | inside a cell breaks the table"


def test_every_reason_for_a_miss_is_explained() -> None:
    explained = set(
        re.findall(r"^\| `([a-z_]+)` \| [^`]", PAGE.read_text().split("### Why")[1].split("## ")[0], re.M)
    )
    assert explained == {
        s.name.removeprefix("MISS_").lower() for s in PageStatus if s.name.startswith("MISS_")
    }


def test_the_example_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(PAGE.read_text().split("```python\n")[1].split("```")[0], {})
