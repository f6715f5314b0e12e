"""The alert rules and the dashboard ask for metrics that there are, and the rules say what they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest

from gdsstore import PageStatus
from gdsstore.engines.base import Op
from gdsstore.engines.paths import Path
from gdsstore.observe.families import Family, MetricKind
from gdsstore.observe.families_moving import OUTCOMES
from gdsstore.observe.metrics import FAMILIES
from gdsstore.transfer.policy_terms import TransferClass

DEPLOY = FilePath(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "gdsstore.rules.yml"
RULES_TEST = DEPLOY / "prometheus" / "gdsstore.rules.test.yml"
DASHBOARD = DEPLOY / "grafana" / "gdsstore.json"
PROMTOOL = shutil.which("promtool")

METRIC = re.compile(r"\b(gdsstore_\w+)(?:\{([^}]*)\})?")
LABEL = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
OF_THE_SCRAPE = {"job", "instance", "le"}
VALUES = {
    "class": {cls.name.lower() for cls in TransferClass},
    "direction": {op.value for op in Op},
    "outcome": set(OUTCOMES),
    "path": set(Path),
    "reason": {status.name.removeprefix("MISS_").lower() for status in PageStatus},
    "result": {status.name.removeprefix("FAILED_").lower() for status in PageStatus} | {"hit", "miss"},
    "tier": {"drive", "host", "shared"},
}
ALERTS = {
    "GdsstoreDaemonDown",
    "GdsstoreVolumeSick",
    "GdsstoreChecksumFailures",
    "GdsstoreDirectPathLost",
    "GdsstoreDiskNearFull",
    "GdsstoreOffloadsDropped",
}


def exposed(family: Family) -> list[str]:
    """The names under which Prometheus knows it."""
    if family.kind is MetricKind.HISTOGRAM:
        return [f"{family.name}{suffix}" for suffix in ("_bucket", "_count", "_sum")]
    return [family.name]


KNOWN = {name: family for family in FAMILIES.values() for name in exposed(family)}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def texts() -> Iterator[tuple[str, str]]:
    """Everything that names metrics: where, and the text."""
    yield "rules", RULES.read_text()
    yield "test of the rules", RULES_TEST.read_text()
    for panel in panels():
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        yield variable["name"], str(variable["query"])


@pytest.mark.parametrize(("where", "text"), list(texts()))
def test_every_metric_and_label_that_is_used_exists(where: str, text: str) -> None:
    for name, selector in METRIC.findall(text):
        if name in ("gdsstore_rules", "gdsstore_json"):
            continue
        assert name in KNOWN, f"{where}: there is no metric {name}"
        for label, wanted in LABEL.findall(selector):
            if label in OF_THE_SCRAPE:
                continue
            assert label in KNOWN[name].labels, f"{where}: {name} has no label {label}"
            if label in VALUES:
                assert set(wanted.split("|")) <= VALUES[label], f"{where}: {name} is never {wanted}"


def test_every_alert_is_there_and_tested() -> None:
    assert set(re.findall(r"^ +- alert: (\w+)$", RULES.read_text(), re.MULTILINE)) == ALERTS
    tested = set(re.findall(r"alertname: (\w+)\n +exp_alerts:\n", RULES_TEST.read_text()))
    assert tested == ALERTS, "each alert fires in a test"


def test_the_dashboard_shows_what_there_is_to_see() -> None:
    shown = {
        name for panel in panels() for t in panel.get("targets", []) for name, _ in METRIC.findall(t["expr"])
    }
    for name in (
        "gdsstore_io_bytes_total",
        "gdsstore_hits_total",
        "gdsstore_misses_total",
        "gdsstore_call_run_seconds_bucket",
        "gdsstore_call_wait_seconds_bucket",
        "gdsstore_io_chunk_duration_seconds_bucket",
        "gdsstore_calls_waiting",
        "gdsstore_volume_sick",
        "gdsstore_physical_bytes",
        "gdsstore_calls_ended_total",
        "gdsstore_host_cache_resident_bytes",
    ):
        assert name in shown


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["id"] is None, "an id belongs to the server that it was exported from"
    assert dashboard["title"]
    assert dashboard["uid"]
    assert dashboard["schemaVersion"] >= 39
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & mine, f"{panel['title']} lies on another panel"
        cells |= mine
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval", "__range"}


needs_promtool = pytest.mark.skipif(
    PROMTOOL is None,
    reason="promtool is not here: it comes with Prometheus (Debian: apt-get install prometheus)",
)


def promtool(*arguments: str, cwd: FilePath) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], capture_output=True, text=True, cwd=cwd, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_rules_are_valid_and_fire_when_they_should() -> None:
    promtool("check", "rules", RULES.name, cwd=RULES.parent)
    promtool("test", "rules", RULES_TEST.name, cwd=RULES.parent)


@needs_promtool
def test_the_dashboards_queries_are_valid(tmp_path: FilePath) -> None:
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    lines = ["groups:", "- name: dashboard", "  rules:"]
    for number, query in enumerate(queries):
        query = query.replace("$__rate_interval", "5m").replace("$job", "a").replace("$instance", "b")
        lines += [f"  - record: query:{number}", f"    expr: {json.dumps(query)}"]
    (tmp_path / "queries.yml").write_text("\n".join(lines) + "\n")
    promtool("check", "rules", "queries.yml", cwd=tmp_path)
