"""NVTX ranges around what a store does, and nothing where nobody listens."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore.engines.base import Op, RangePlan
from gdsstore.observe.nvtx import RANGES, Ranges
from tests.store.helpers import check, make_keys, opaque, save, small_store

PLAN = RangePlan(
    np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(1, np.uint64), np.array([4096]), "load"
)


class Domain:
    """What `nvtx` hands out while a profiler listens."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[str, int]] = {}
        self.ended: list[tuple[str, int]] = []

    def get_event_attributes(self, message: str, payload: int) -> tuple[str, int]:
        return message, payload

    def start_range(self, attributes: tuple[str, int]) -> int:
        self.open[len(self.open) + len(self.ended)] = attributes
        return len(self.open) + len(self.ended) - 1

    def end_range(self, handle: int) -> None:
        self.ended.append(self.open.pop(handle))


class Package:
    """As much of the package `nvtx` as is used, with a profiler."""

    Domain = Domain

    def __init__(self) -> None:
        self.domain = Domain()
        self.seen: list[tuple[str, str]] = []  # message, thread

    def get_domain(self, name: str) -> Domain:
        assert name == "gdsstore"
        return self.domain

    def annotate(self, message: str, *, domain: str) -> Any:
        package = self

        class Annotation:
            def __enter__(self) -> None:
                package.seen.append((message, threading.current_thread().name))

            def __exit__(self, *_: object) -> None: ...

        return Annotation()


@contextmanager
def profiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    package = Package()
    for name in ("gdsstore.transfer.mover", "gdsstore.transfer.call_times"):
        monkeypatch.setattr(importlib.import_module(name), "RANGES", Ranges(package))
    yield package


def test_a_save_and_a_load_have_their_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with profiled(monkeypatch) as package, small_store(tmp_path / "s") as store:
        namespace, keys = opaque(store), make_keys(4)
        save(namespace, keys)
        check(namespace, keys)
    names = [message for message, _ in package.seen]
    assert names[:3] == ["offload", "plan", "verify"]
    assert names[names.index("load") :] == ["load", "plan", "verify", "scatter"]
    assert all(thread.startswith("gdsstore-worker") for _, thread in package.seen)
    assert package.domain.ended == [("write offload", 4 * 8192), ("read load", 4 * 8192)]
    assert package.domain.open == {}


def test_the_end_of_io_is_said_once() -> None:
    package = Package()
    end = Ranges(package).io(Op.READ, PLAN)
    end()
    end()
    assert package.domain.ended == [("read load", 4096)]


@pytest.mark.parametrize("package", [None, type("NoProfiler", (Package,), {"Domain": int})()])
def test_without_the_package_or_a_profiler_nothing_is_done(package: Any) -> None:
    ranges = Ranges(package)
    assert isinstance(ranges.plan, nullcontext)
    ranges.io(Op.READ, PLAN)()
    assert package is None or package.domain.open == {}


def test_nobody_listens_to_the_tests() -> None:
    assert isinstance(RANGES.verify, nullcontext)
