"""What does not fit is refused at once, with an error that says what to do, and nothing is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gdsstore
from gdsstore import (
    ArgumentError,
    BoundNamespace,
    Config,
    ConfigError,
    PageLayout,
    Pieces,
    Store,
    StoreClosedError,
)
from gdsstore.engines.base import Engine, Op, RangePlan, Transfer
from gdsstore.engines.posix import PosixEngine
from gdsstore.errors import EngineError
from tests.store.helpers import check, make_keys, opaque, save, small_config, small_store, statuses, truth

PAGE = 8192
KEYS = make_keys(3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "s") as made:
        yield made


@pytest.fixture
def namespace(store: Store) -> BoundNamespace:
    return opaque(store, PAGE)


def zeros(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.zeros(shape, dtype)


ONE_PAGE = zeros(PAGE)


BAD_PAGES = {
    "too few pages": zeros(2, PAGE),
    "too many pages": zeros(4, PAGE),
    "pages too small": zeros(3, PAGE - 1),
    "pages too large": zeros(3, PAGE + 1),
    "pages of twice as wide elements": zeros(3, PAGE, dtype=np.uint16),
    "no first dimension": np.uint8(0).reshape(()),
    "scattered pages": zeros(3, 2, PAGE)[:, :, ::2],
    "transposed pages": zeros(PAGE, 3).T,
    "Python objects": np.empty((3, PAGE // 8), object),
    "bytes": bytes(3 * PAGE),
    "bytes, one a page": [bytes(PAGE)] * 3,
    "numbers": [1, 2, 3],
    "nothing": None,
    "one page of another size": [zeros(PAGE), zeros(PAGE), zeros(PAGE - 4096)],
    "scattered tensor": torch.zeros(3, 2, PAGE, dtype=torch.uint8)[:, :, ::2],
    "tensor without a dimension": torch.tensor(0),
    "tensor on another device": torch.zeros(3, PAGE, dtype=torch.uint8, device="meta"),
    "one tensor on another device": [torch.zeros(PAGE, dtype=torch.uint8, device="meta")] * 3,
    "pieces at no address": Pieces([0, 4096, 8192], PAGE),
    "pieces of floats": Pieces(np.ones(3), PAGE),
    "pieces of too many dimensions": Pieces(np.ones((3, 1, 1), np.int64), PAGE),
    "pieces of no length": Pieces([[4096, 8192]] * 3, [[PAGE, 0]] * 3),
    "pieces of negative length": Pieces([[4096, 8192]] * 3, [[2 * PAGE, -PAGE]] * 3),
    "pieces of a wrong sum": Pieces([[4096, 8192]] * 3, PAGE),
    "lengths of floats": Pieces(np.full(3, 4096), float(PAGE)),
    "one length a page, but two pieces": Pieces([[4096, 8192]] * 3, [[PAGE], [PAGE], [PAGE]]),
    "lengths that do not fit": Pieces([[4096, 8192]] * 3, [PAGE, PAGE, PAGE]),
}


@pytest.mark.parametrize("what", BAD_PAGES)
def test_memory_that_does_not_fit_is_refused(what: str, namespace: BoundNamespace) -> None:
    for call in (namespace.save, namespace.load):
        with pytest.raises(ArgumentError):
            call(KEYS, BAD_PAGES[what])
    assert not namespace.contains(KEYS).any()


def test_the_message_says_which_page_is_wrong_and_how(namespace: BoundNamespace) -> None:
    with pytest.raises(ArgumentError, match="page 2 has 4096 bytes, the namespace's layout says 8192"):
        namespace.save(KEYS, [zeros(PAGE), zeros(PAGE), zeros(4096)])
    with pytest.raises(ArgumentError, match="3 keys, but memory for 2 pages"):
        namespace.save(KEYS, zeros(2, PAGE))


def read_only() -> np.ndarray:
    memory = zeros(3, PAGE)
    memory.flags.writeable = False
    return memory


@pytest.mark.parametrize(
    "memory",
    [
        read_only(),
        [zeros(PAGE), zeros(PAGE), read_only()[0]],
        np.broadcast_to(zeros(1, PAGE), (3, PAGE)),
        torch.zeros(1, PAGE, dtype=torch.uint8).expand(3, PAGE),
        np.lib.stride_tricks.as_strided(zeros(PAGE + 8), (3, PAGE), (4, 1)),
        [zeros(PAGE), *[zeros(PAGE)] * 2],
        Pieces(np.full(3, ONE_PAGE.ctypes.data), PAGE),
    ],
    ids=[
        "read-only",
        "one read-only",
        "broadcast",
        "expanded tensor",
        "overlapping",
        "twice",
        "pieces twice",
    ],
)
def test_memory_that_cannot_take_pages_is_refused_for_loads_and_fine_for_saves(
    memory: Any, namespace: BoundNamespace
) -> None:
    assert namespace.save(KEYS, memory).result(30).all_ok
    with pytest.raises(ArgumentError):
        namespace.load(KEYS, memory)


@pytest.mark.parametrize(
    "keys", [[b"short"] * 3, ["0" * 64] * 3, b"x" * 96, np.zeros((3, 16), np.uint8), None]
)
def test_keys_that_are_none_are_refused(keys: Any, namespace: BoundNamespace) -> None:
    calls = [
        lambda: namespace.lookup(keys),
        lambda: namespace.contains(keys),
        lambda: namespace.delete(keys),
        lambda: namespace.save(keys, zeros(3, PAGE)),
        lambda: namespace.load(keys, zeros(3, PAGE)),
    ]
    for call in calls:
        with pytest.raises(ArgumentError):
            call()


def test_a_page_that_fits_into_no_segment_is_refused_when_its_namespace_is_made(store: Store) -> None:
    with pytest.raises(ArgumentError, match="segment_bytes"):
        opaque(store, 1 << 20)
    assert opaque(store, 1000 * 1024)


def test_a_page_that_does_not_fit_into_the_staging_arena_is_refused_when_its_namespace_is_made(
    tmp_path: Path,
) -> None:
    small = {"staging_bytes": "64KiB", "chunk_bytes": "64KiB"}
    with small_store(tmp_path / "s", **small) as store, pytest.raises(ConfigError, match="staging_bytes"):
        opaque(store, 100_000)


def test_a_namespace_needs_a_model_and_a_layout(store: Store) -> None:
    for facts in ({"model": "m"}, {"layout": PageLayout.opaque(1)}, {"model": "m", "layout": "opaque"}):
        with pytest.raises(ArgumentError):
            store.namespace(**facts)  # type: ignore[arg-type]


@pytest.mark.parametrize("paths", [[], ["a", "a"], ["a", "./a"]])
def test_paths_that_name_no_volumes_are_refused(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError):
        small_store(paths)
    assert list(tmp_path.iterdir()) == []


def test_settings_and_a_config_at_once_are_refused(tmp_path: Path) -> None:
    for both in ({"capacity": "64MiB"}, {"verify": False}, {"engine": "posix"}):
        with pytest.raises(ConfigError, match="either"):
            gdsstore.open(tmp_path / "s", config=Config(), **both)  # type: ignore[arg-type]


def test_the_engine_may_be_given_by_name_like_any_setting(tmp_path: Path) -> None:
    with gdsstore.open(tmp_path / "s", capacity="64MiB", engine="posix") as store:
        assert save(opaque(store), KEYS).all_ok
        assert store.stats()["engine"] == "posix"
    with pytest.raises(ConfigError, match="engine"):
        gdsstore.open(tmp_path / "s", engine="warp")


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = small_store(tmp_path / "s")
    namespace = opaque(store)
    assert save(namespace, KEYS).all_ok
    store.close()
    store.close()
    calls = [
        lambda: namespace.lookup(KEYS),
        lambda: namespace.contains(KEYS),
        lambda: namespace.delete(KEYS),
        lambda: namespace.clear(),
        lambda: namespace.save(KEYS, truth(KEYS, PAGE)),
        lambda: namespace.load(KEYS, zeros(3, PAGE)),
        lambda: opaque(store),
        lambda: store.stats(),
        lambda: store.sync(),
        lambda: store.preallocate(),
    ]
    for call in calls:
        with pytest.raises(StoreClosedError):
            call()


class StubEngine(Engine):
    """Refuses where it is told to, and notes whether it was closed."""

    name = "stub"

    def __init__(self, inner: Engine, refuse: str) -> None:
        self.inner, self.refuse, self.closed, self.submits = inner, refuse, False, 0

    def attach(self, fd: int, size: int) -> None:
        if self.refuse == "attach":
            raise EngineError("no room for files")
        self.inner.attach(fd, size)

    def detach(self, fd: int) -> None:
        self.inner.detach(fd)

    def submit(self, op: Op, plan: RangePlan) -> Transfer:
        self.submits += 1
        if self.refuse == "submit" or (self.refuse == "retry" and self.submits > 1):
            raise EngineError("no room for plans")
        if self.refuse == "retry":  # a first try in which nothing goes well
            plan = RangePlan(plan.fd * 0 - 1, plan.file_offset, plan.address, plan.length)
        return self.inner.submit(op, plan)

    def close(self, timeout_s: float) -> None:
        self.closed = True
        self.inner.close(timeout_s)


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("refuse", ["attach", "submit", "retry"])
def test_an_engine_that_refuses_costs_pages_and_neither_errors_nor_leaks(
    tmp_path: Path, refuse: str, zero_copy: bool
) -> None:
    with small_store(tmp_path / "s") as store:
        assert save(opaque(store), KEYS).all_ok
    engine = StubEngine(PosixEngine(1), refuse)
    with small_store(tmp_path / "s", own_engine=engine, zero_copy=zero_copy) as store:
        namespace = opaque(store)
        more = make_keys(3, "more")
        assert statuses(save(namespace, more)) == ["FAILED_IO"] * 3
        assert not namespace.contains(more).any()
        engine.submits = 0
        missed = "MISS_SEGMENT" if refuse == "attach" else "MISS_IO"
        assert statuses(check(namespace, KEYS)) == [missed] * 3
        if not zero_copy:
            assert store.moving().staging.arena().stats().leased_bytes == 0
        engine.refuse = ""
        assert check(namespace, KEYS).all_ok  # the pages were not dropped
        assert save(namespace, more).all_ok
    assert engine.closed


def test_an_engine_that_was_given_is_closed_though_it_was_never_used(tmp_path: Path) -> None:
    engine = StubEngine(PosixEngine(1), "")
    small_store(tmp_path / "s", own_engine=engine, engine="auto").close()
    assert engine.closed


def test_the_configuration_is_what_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        small_store(tmp_path / "s", capacity="1MiB")
    assert not (tmp_path / "s").exists()
    assert small_config().segment_bytes == 1 << 20


@pytest.mark.parametrize("priority", [1.5, float("nan"), "high", None])
def test_a_priority_that_is_no_whole_number_is_refused(tmp_path: Path, priority: Any) -> None:
    with small_store(tmp_path / "s", host_cache="8MiB") as store:
        with pytest.raises(ArgumentError, match="whole number"):
            opaque(store, PAGE).prefetch(KEYS, priority=priority)
        assert opaque(store, PAGE).prefetch(KEYS, priority=-3).wait(30)
