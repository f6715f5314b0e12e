from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gdsstore
from gdsstore.errors import ArgumentError, ConfigError, StoreError
from gdsstore.replay import processes
from gdsstore.replay.plan import ReplayPlan
from gdsstore.replay.runner import replay
from gdsstore.sizes import KiB, MiB

TRACE = Path(__file__).parent / "data" / "conversation_400.jsonl.gz"
PAGE_BYTES = 16 * KiB

Planner = Callable[..., ReplayPlan]


@pytest.fixture
def plan(tmp_path: Path) -> Planner:
    def make(**asked: Any) -> ReplayPlan:
        settings = {
            "segment_bytes": MiB,
            "staging_bytes": 16 * MiB,
            "chunk_bytes": 4 * MiB,
            "engine": "posix",
        } | asked.pop("settings", {})
        fields = {
            "stores": (str(tmp_path / "store"),),
            "page_bytes": PAGE_BYTES,
            "trace": str(TRACE),
            "capacity": 64 * MiB,
            "requests": 60,
            "settings": settings,
        }
        return ReplayPlan(**{**fields, **asked})

    return make


def test_a_roomy_store_hits_as_much_as_an_lru_and_every_page_is_right(plan: Planner) -> None:
    told: list[int] = []
    report = replay(plan(), told.append)
    assert report.wrong_pages == 0
    assert report.hit_rate == report.lru_hit_rate > 0.03
    assert report.pages_hit == report.pages_loaded == report.pages_verified
    assert report.pages_saved == report.pages - report.pages_hit == report.misses["not found"]
    assert report.requests == told[-1] == 60
    assert report.tokens == report.pages * 512
    assert (report.engine, report.capacity_bytes) == ("posix", 64 * MiB)
    assert report.drive_bytes_written >= report.pages_saved * PAGE_BYTES


def test_a_full_store_reclaims_and_serves_no_wrong_page(plan: Planner, tmp_path: Path) -> None:
    report = replay(plan(trace=None, requests=300, capacity=16 * MiB))
    assert report.wrong_pages == 0
    assert report.pages_saved * PAGE_BYTES > 16 * MiB
    assert report.pages_verified == report.pages_loaded > 0
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.seg")) <= 16 * MiB


def test_pages_of_odd_sizes_come_back_right(plan: Planner) -> None:
    report = replay(plan(page_bytes=5001, requests=20))
    assert report.wrong_pages == 0
    assert report.hit_rate == report.lru_hit_rate


def test_what_was_saved_before_a_restart_is_hit_after(plan: Planner) -> None:
    replay(plan(requests=30))
    report = replay(plan(skip=30, requests=30))
    assert report.hit_rate == report.lru_hit_rate_warm > report.lru_hit_rate
    assert report.wrong_pages == 0


def test_several_processes_share_one_store(plan: Planner) -> None:
    together = replay(plan(processes=2))
    alone = replay(plan())
    assert together.requests == alone.requests == 60
    assert together.pages == alone.pages
    assert together.wrong_pages == alone.wrong_pages == 0
    assert together.pages_saved == alone.pages - together.pages_hit - together.saves.get("ALREADY_THERE", 0)
    assert alone.pages_hit == alone.pages  # what either worker saved, a third process finds


def test_faults_cost_hits_and_never_bring_wrong_bytes(plan: Planner) -> None:
    faults = "errno:0.02,short:0.02,corrupt:0.05,misdirect:0.02,hang:0.001"
    report = replay(plan(faults=faults, settings={"io_deadline_s": 0.2}))
    assert report.wrong_pages == 0
    assert report.faults["corrupt"] > 0
    assert report.misses.get("MISS_CHECKSUM", 0) > 0
    assert report.hit_rate < report.lru_hit_rate
    assert report.engine == "faulty-posix"


def test_wrong_bytes_that_get_through_are_counted(plan: Planner) -> None:
    """Proves that the check sees what a store does wrong: verification is off, and the drive flips bits."""
    report = replay(plan(faults="corrupt:0.5", settings={"verify": False}))
    assert report.wrong_pages > 0
    assert report.pages_verified == report.pages_loaded - report.wrong_pages
    assert 0 < len(report.wrong_keys) <= 8


def test_a_bad_trace_leaves_no_store_behind(plan: Planner, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("nothing\n")
    with pytest.raises(ArgumentError, match="line 1"):
        replay(plan(trace=str(bad)))
    assert not (tmp_path / "store").exists()


def test_unknown_faults_are_refused(plan: Planner) -> None:
    with pytest.raises(ConfigError, match="errno"):
        replay(plan(faults="errrno:0.5"))


def test_the_error_of_a_worker_process_keeps_its_kind(plan: Planner, tmp_path: Path) -> None:
    replay(plan(requests=1))
    bad = tmp_path / "bad"
    bad.write_bytes(TRACE.read_bytes()[:2000])
    with pytest.raises(ArgumentError, match="gzip"):
        replay(plan(trace=str(bad), requests=None, processes=2))


def test_a_worker_process_that_dies_is_an_error(plan: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    with pytest.raises(StoreError, match="ended without an answer"):
        replay(plan(processes=2))


def test_a_workload_of_our_own_follows_from_its_seed(plan: Planner, tmp_path: Path) -> None:
    reports = [
        replay(plan(trace=None, seed=seed, stores=(str(tmp_path / name),)))
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    ]
    assert reports[0].pages_hit == reports[1].pages_hit
    assert reports[0].pages != reports[2].pages
    assert "seed 5" in reports[0].trace


def test_a_report_is_shown_as_plain_values_and_as_a_table(plan: Planner) -> None:
    report = replay(plan(requests=5))
    values = report.to_dict()
    assert {"hit_rate", "lru_hit_rate", "wrong_pages", "pages_loaded", "cpu_s_per_gb"} <= values.keys()
    assert report.to_table().row_count > 10
    assert (
        replace(report, wrong_pages=1, wrong_keys=["ab"]).to_table().row_count
        == report.to_table().row_count + 1
    )


def test_the_store_of_a_replay_opens_as_any_other(plan: Planner) -> None:
    asked = plan()
    report = replay(asked)
    with gdsstore.open(asked.stores) as store:
        assert store.capacity_bytes == report.capacity_bytes
