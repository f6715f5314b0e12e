"""Run tests in a process of their own: a pytest plugin.

    pytestmark = pytest.mark.own_process(KVIKIO_COMPAT_MODE="OFF")   # environment of that process

The simulated libraries must be loaded before kvikio and nixl, a process can have only one set of settings,
and a crash must not take the other tests with it. So such tests must not import those packages at the top of
their module (fixtures do). Those tests of a module that name the same environment and are to run are handed
to one child pytest, whose reports are shown as if they had been made here. A conftest.py takes this over with

    from tests.cudasim.own_process import pytest_configure, pytest_runtest_logreport, pytest_runtest_protocol
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypeAlias

import pytest

REPORTS = "OWN_PROCESS_REPORTS"  # set in the child: the file its reports go to
# What the process may take in all; in it each test has the limit that holds everywhere.
START_S, EACH_S = 240, 60

Environment: TypeAlias = frozenset[tuple[str, str]]
Reports: TypeAlias = dict[str, list[pytest.TestReport]]

_config: pytest.Config | None = None
_by_group: dict[tuple[str, Environment], Reports] = {}


def pytest_configure(config: pytest.Config) -> None:
    global _config
    _config = config
    config.addinivalue_line(
        "markers",
        "own_process(**environment): run in a process of its own, with those of its module that name the same",
    )


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if REPORTS in os.environ and _config:
        data = _config.hook.pytest_report_to_serializable(config=_config, report=report)
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps(data) + "\n")


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if REPORTS in os.environ or (group := _group(item)) is None:
        return None
    if group not in _by_group:
        # All of the group runs within this one test, whose limit would be one for the group.
        if (cancel := getattr(item.config.hook, "pytest_timeout_cancel_timer", None)) is not None:
            cancel(item=item)
        wanted = [other.nodeid for other in item.session.items if _group(other) == group]
        _by_group[group] = _run(item.config, group, wanted)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _by_group[group][item.nodeid]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What the last test of this process left for this one (its module's fixtures) the next may not know.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _group(item: pytest.Item) -> tuple[str, Environment] | None:
    """The module and environment of a test that wants a process of its own."""
    mark = item.get_closest_marker("own_process")
    if mark is None:
        return None
    return item.nodeid.split("::")[0], frozenset((name, str(value)) for name, value in mark.kwargs.items())


def _run(config: pytest.Config, group: tuple[str, Environment], wanted: list[str]) -> Reports:
    """The reports of the wanted tests; a test that the child did not come to the end of has failed."""
    module, environment = group
    limit_s = START_S + EACH_S * len(wanted)
    reports: Reports = {nodeid: [] for nodeid in wanted}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "reports")
        file.touch()
        # One process is enough for them, whatever options this one was given.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [f"--rootdir={config.rootpath}"]
        command += ["-c", str(config.inipath)] if config.inipath else []
        inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        outcome = "ended early"
        with open(Path(folder, "output"), "w+") as output:
            try:
                code = subprocess.run(
                    [*command, *wanted],
                    cwd=config.rootpath,
                    env={**inherited, **dict(environment), REPORTS: str(file)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=limit_s,
                ).returncode
                if code < 0:
                    outcome = f"was killed by signal {-code}"
            except subprocess.TimeoutExpired:
                outcome = f"did not end within {limit_s} s"
            output.seek(0)
            tail = output.read()[-4000:]
        for line in file.read_text().splitlines():
            report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
            if isinstance(
                report.longrepr, list
            ):  # the place and reason of a skip: JSON has no tuples, pytest insists on one
                report.longrepr = tuple(report.longrepr)
            reports[report.nodeid].append(report)
    for nodeid, parts in reports.items():
        if not any(part.when == "teardown" for part in parts):
            text = f"the process of {module} {outcome} in this test or before it\n{tail}"
            parts.append(pytest.TestReport(nodeid, (module, 0, nodeid), {}, "failed", text, "call"))
    return reports
