"""The linker on a real GPU: its parts on CUDA pools, and a whole SGLang server where SGLang is installed for CUDA.

docs/linker.md says how to run it. The tests of the parts run in host memory as well, for the sake of the Python in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdsstore import GdsStoreError, Store
from tests.gpu.linker_rig import MHA, MLA, Rig
from tests.gpu.need import REAL, need, why_no_cufile
from tests.store.device_helpers import report
from tests.store.helpers import make_keys, small_store, truth

COUNT = 12
SHUFFLED = np.random.default_rng(5).permutation(np.arange(1, 1 + 2 * COUNT)).tolist()  # page 0 is SGLang's
HERE, THERE = SHUFFLED[:COUNT], SHUFFLED[COUNT:]
PAGES = 1 + 2 * COUNT
KEYS = make_keys(COUNT)
PLACES = [pytest.param("real", marks=REAL), "host"]
SETTINGS: dict[str, Any] = {
    "capacity": "512MiB",
    "segment_bytes": "64MiB",
    "staging_bytes": "32MiB",
    "chunk_bytes": "4MiB",
    "measure_s": 0,
}
Make = Callable[..., Rig]
Open = Callable[..., Store]


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest) -> str:
    place = str(request.param)
    need_torch(place)
    return place


def need_torch(place: str) -> None:
    if place == "real":
        need("real", "torch")
    else:
        pytest.importorskip("torch")


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    opened: list[Store] = []

    def make(where: str, **settings: Any) -> Store:
        # As the linker has it: in host memory through the arena, on a GPU on whatever path there is.
        place = {"zero_copy": False} if where == "host" else {"engine": "auto"}
        opened.append(small_store(tmp_path / "s", **{**SETTINGS, **place, **settings}))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def rig() -> Iterator[Make]:
    made: list[Rig] = []

    def make(*arguments: Any) -> Rig:
        made.append(Rig(*arguments))
        print(f"pools: {made[-1].made_of}")
        return made[-1]

    yield make
    for each in made:
        each.close()


def segment_with(folder: Path, content: bytes) -> tuple[Path, int]:
    """The file that a page lies in, and where."""
    for path in sorted((folder / "s" / "segments").glob("*.seg")):
        at = path.read_bytes().find(content)
        if at >= 0:
            return path, at
    raise AssertionError("no segment has the page")


@pytest.mark.parametrize("kind", [MHA, MLA])
def test_pages_come_back_to_other_rows_layer_by_layer(
    kind: str, where: str, rig: Make, open_store: Open
) -> None:
    pool = rig(kind, where, open_store(where), PAGES)
    want = truth(KEYS, pool.layout.page_bytes)
    pool.put(HERE, want)
    assert pool.offload(KEYS, HERE)
    assert pool.load(KEYS, THERE)
    assert pool.counter.completed == list(range(pool.layout.layers))
    assert (pool.get(THERE) == want).all()
    assert (pool.get(HERE) == want).all()
    assert not pool.get([0]).any()


def test_the_pages_of_the_last_process_are_found(where: str, rig: Make, open_store: Open) -> None:
    first = open_store(where)
    pool = rig(MHA, where, first, PAGES)
    want = truth(KEYS, pool.layout.page_bytes)
    pool.put(HERE, want)
    assert pool.offload(KEYS, HERE)
    pool.close()
    first.close()
    again = rig(MHA, where, open_store(where), PAGES)
    assert again.load(KEYS, THERE)
    assert (again.get(THERE) == want).all()


def test_a_damaged_page_fails_its_batch_once_and_then_misses(
    where: str, rig: Make, open_store: Open, tmp_path: Path
) -> None:
    pool = rig(MLA, where, open_store(where), PAGES)
    want = truth(KEYS, pool.layout.page_bytes)
    pool.put(HERE, want)
    assert pool.offload(KEYS, HERE)
    path, at = segment_with(tmp_path, want[3].tobytes())
    with path.open("r+b") as file:
        file.seek(at + pool.layout.page_bytes - 1)  # in the last layer
        file.write(bytes([want[3, -1] ^ 1]))
    assert not pool.load(KEYS, THERE)
    assert "MISS_CHECKSUM" in str(pool.counter.error)
    assert (pool.get(HERE) == want).all()
    assert pool.pools[0].bound.contains(KEYS).tolist() == [number != 3 for number in range(COUNT)]
    assert pool.load(KEYS[:3], THERE[:3])
    assert (pool.get(THERE[:3]) == want[:3]).all()


@REAL
def test_every_byte_goes_directly_or_the_reason_is_said(rig: Make, open_store: Open) -> None:
    need("real", "torch", "kvikio")
    if reason := why_no_cufile():
        pytest.skip(reason)
    try:
        store = open_store("real", path="direct", strict=True)
        store.device_moving(0)
    except GdsStoreError as error:
        pytest.skip(f"no direct path on this machine: {error}")
    pool = rig(MHA, "real", store, PAGES)
    pool.put(HERE, truth(KEYS, pool.layout.page_bytes))
    assert pool.offload(KEYS, HERE)
    assert pool.load(KEYS, THERE)
    nbytes = COUNT * pool.layout.record_bytes
    found = report(store)
    assert {path for path, _, _ in found} == {"direct"}, found
    assert sum(found.values()) == 2 * nbytes


@REAL
def test_an_offload_waits_for_the_forward_that_fills_its_rows(rig: Make, open_store: Open) -> None:
    need("real", "torch")
    import torch

    store = open_store("real")
    source, pool, other = (rig(MHA, "real", store, PAGES) for _ in range(3))
    want = truth(KEYS, pool.layout.page_bytes)
    source.put(HERE, want)
    assert pool.offload(
        make_keys(1, "first"), [1]
    )  # the first call takes seconds, in which all would be over
    torch.cuda.synchronize()
    stream, ready = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second
        pool.copy_from(source)
        ready.record()
    assert pool.offload(KEYS, HERE, [ready])
    assert other.load(KEYS, THERE)
    assert (other.get(THERE) == want).all()


@REAL
def test_a_load_waits_for_those_who_still_read_its_rows(rig: Make, open_store: Open) -> None:
    need("real", "torch")
    import torch

    store = open_store("real")
    source, pool, reader = (rig(MHA, "real", store, PAGES) for _ in range(3))
    want = truth(KEYS, pool.layout.page_bytes)
    old = truth(make_keys(COUNT, "old"), pool.layout.page_bytes)
    source.put(HERE, want)
    assert source.offload(KEYS, HERE)
    pool.put(THERE, old)
    assert reader.load(KEYS, HERE)
    torch.cuda.synchronize()
    stream, ready = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        reader.copy_from(pool)
        ready.record()
    assert pool.load(KEYS, THERE, [ready])
    stream.synchronize()
    assert (reader.get(THERE) == old).all(), "the load came before the reader"
    assert (pool.get(THERE) == want).all()


@REAL
def test_a_server_computes_hits_restarts_and_survives_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("real", "torch", "sglang")
    from tests.gpu.linker_server import PAGE_TOKENS, gpu_server, harness, write_model

    checks, errors = harness("server_checks"), harness("server")
    monkeypatch.setattr(errors, "PAGE_SIZE", PAGE_TOKENS)
    cached = (checks.PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
    prompt = checks.prompt(1)
    model = write_model(tmp_path / "model", monkeypatch)
    paths, log = tmp_path / "paths.json", tmp_path / "server.log"
    settings = {"path": str(tmp_path / "s"), "capacity": "512MiB", "segment_bytes": "64MiB"}

    with gpu_server(model, log, paths, settings) as server:
        cold = server.generate(prompt)
        assert cold.cached_tokens == 0
        on_device = server.generate(
            prompt
        )  # what was cached is computed in other shapes, so that this is to compare with
        assert on_device.cached_details["device"] == cached
        server.flush_cache()
        warm = server.generate(prompt)
        assert (warm.cached_tokens, warm.cached_details["device"]) == (cached, 0)
        assert (warm.token_ids, warm.logprobs) == (on_device.token_ids, on_device.logprobs)
    rows = json.loads(paths.read_text())
    print(f"paths: {rows}")
    assert sum(nbytes for _, _, way, nbytes in rows if way == "read") > 0

    with gpu_server(model, log, paths, settings) as server:
        again = server.generate(prompt)
        assert again.cached_tokens == cached
        assert (again.token_ids, again.logprobs) == (on_device.token_ids, on_device.logprobs)

        from tests.sglang_server import stored

        monkeypatch.setattr(stored, "PAGE_SIZE", PAGE_TOKENS)
        server.flush_cache()
        harmed = stored.page_keys(prompt)[5:]
        assert stored.damage(tmp_path / "s", harmed) == len(harmed)
        with pytest.raises(errors.ServerError, match="External KV cache load failed") as failure:
            server.generate(prompt)
        assert failure.value.status == HTTPStatus.SERVICE_UNAVAILABLE
        retry = server.generate(prompt)
        assert retry.cached_tokens == 5 * PAGE_TOKENS
        assert retry.token_ids[0] == cold.token_ids[0]


def test_the_servers_command_line_names_the_linker_and_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be checked of it without a GPU."""
    pytest.importorskip("tokenizers", reason="the harness of SGLang's servers makes models with it")
    pytest.importorskip("safetensors")
    from tests.gpu.linker_server import arguments

    line = arguments(tmp_path, 1, {"path": "/kv"})
    assert line[line.index("--device") + 1] == "cuda"
    config = json.loads(line[line.index("--unified-cache-external-linker-config") + 1])
    assert config["linker_module_path"] == "tests.gpu.reporting_linker"
    assert config["linker_extra_config"] == {"path": "/kv"}
