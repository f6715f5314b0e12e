"""What was tried outweighs what follows from the facts, and what stands beside the recorded machines in detail."""

from __future__ import annotations

import pytest

from gdsstore.config import Config
from gdsstore.memory.device_arena import DEFAULT_BYTES
from gdsstore.probe.advice import IoPath, Severity, State, exit_code, findings, verdicts
from gdsstore.probe.facts import Cuda
from gdsstore.probe.trips import Outcome, Trip
from tests.probe.machines import NAMES, machine
from tests.probe.test_machines import (
    CHANGES,
    HOST_ONLY,
    NOTHING,
    P2P,
    changed,
    tried,
    weighty,
    with_config,
    with_gpu,
)

TRIED = machine("p2pdma-healthy")


def went(engine: str, path: IoPath, detail: str | None = None) -> Trip:
    return Trip(engine, Outcome.WORKS, detail, device=0, path=path, nbytes=64 << 20)


KVIKIO_FAILED = Trip("kvikio", Outcome.FAILED, "Input/output error", device=0)


def test_only_what_was_tried_is_said_to_be_direct() -> None:
    assert (verdicts(P2P)[0].state, exit_code(verdicts(P2P))) == (State.SHOULD, 1)
    assert (verdicts(TRIED)[0].state, exit_code(verdicts(TRIED))) == (State.WORKS, 0)
    assert "kvikio wrote, read back and compared 64 MiB with GPU 0" in verdicts(TRIED)[0].reason


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_went_direct_outweigh_whatever_speaks_against_it(name: str) -> None:
    facts = tried(machine(name), went("nixl-gds-mt", IoPath.DIRECT))
    assert verdicts(facts)[0].state is State.WORKS
    blocking = (Severity.BLOCKS, Severity.MAY_BLOCK)
    assert not [each for each in findings(facts) if each.path is IoPath.DIRECT and each.severity in blocking]


def test_a_direct_path_that_fell_back_is_compat() -> None:
    fallen = tried(P2P, went("kvikio", IoPath.COMPAT, "direct was refused: no luck"))
    direct, compat, *_ = verdicts(fallen)
    assert (direct.state, compat.state, exit_code(verdicts(fallen))) == (State.DOES_NOT, State.NOT_DIRECT, 1)
    assert "no luck" in direct.reason
    assert "Tried: kvikio" in compat.reason


def test_one_engine_that_is_direct_is_enough() -> None:
    facts = tried(P2P, KVIKIO_FAILED, went("nixl-gds-mt", IoPath.DIRECT))
    assert exit_code(verdicts(facts)) == 0
    assert weighty(facts) == {"device-round-trip-failed"}  # as a cost


def test_engines_that_fail_are_neither_direct_nor_compat() -> None:
    direct, compat, bounce, host = verdicts(tried(P2P, KVIKIO_FAILED))
    assert (direct.state, compat.state) == (State.DOES_NOT, State.DOES_NOT)
    assert (bounce.state, host.state) == (State.NOT_DIRECT, State.WORKS)
    assert "Input/output error" in compat.reason


def test_an_engine_that_is_not_installed_was_not_tried() -> None:
    absent = Trip("kvikio", Outcome.NOT_INSTALLED, "pip install", device=0)
    assert verdicts(tried(P2P, absent)) == verdicts(P2P)


def test_a_host_round_trip_that_fails_is_a_store_that_does_not_work() -> None:
    judged = verdicts(CHANGES["host-round-trip-failed"])
    assert tuple(each.state for each in judged) == NOTHING
    assert "Input/output error" in judged[3].reason
    assert exit_code(judged) == 2


@pytest.mark.parametrize(
    ("error", "visible", "said"),
    [
        ("libcuda.so.1 cannot be loaded: no such file", None, "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        ("CUDA_ERROR_NO_DEVICE", "7", "CUDA_VISIBLE_DEVICES ('7')"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", None, "reboot"),
        ("CUDA_ERROR_UNKNOWN", None, "nvidia-smi"),
        (None, "", "CUDA_VISIBLE_DEVICES ('')"),
    ],
)
def test_a_gpu_that_cuda_cannot_use_gets_its_own_step(
    error: str | None, visible: str | None, said: str
) -> None:
    facts = changed(changed(P2P, "nvidia", cuda=Cuda(error)), "environment", cuda_visible_devices=visible)
    (found,) = [each for each in findings(facts) if each.code == "cuda-does-not-start"]
    assert said in found.next_step
    assert [each.state for each in verdicts(facts)] == list(HOST_ONLY)


@pytest.mark.parametrize(
    ("mode", "code"),
    [("ON", "kvikio-compat-on"), ("OFF", "kvikio-compat-set"), ("AUTO", "kvikio-compat-set")],
)
def test_each_compat_mode_of_kvikio_is_explained_and_none_blocks_a_store(mode: str, code: str) -> None:
    facts = changed(P2P, "environment", kvikio_compat_mode=mode)
    (found,) = [each for each in findings(facts) if each.code == code]
    assert (found.severity, found.see) == (Severity.HINT, ("kvikio#529",))
    assert verdicts(facts) == verdicts(P2P)


def test_the_staging_memory_that_advice_counts_with_is_a_store_s() -> None:
    assert Config().gpu_staging_bytes == DEFAULT_BYTES
    assert "bar1-too-small" not in weighty(
        with_gpu(P2P, bar1_bytes=DEFAULT_BYTES, bar1_used_bytes=0, memory_bytes=None)
    )
    assert "bar1-too-small" in weighty(with_gpu(P2P, bar1_bytes=DEFAULT_BYTES - 1, memory_bytes=None))
    assert "pinned-limit-small" not in weighty(
        with_config(P2P, max_device_pinned_mem_size_kb=DEFAULT_BYTES >> 10)
    )
    assert "pinned-limit-small" in weighty(
        with_config(P2P, max_device_pinned_mem_size_kb=(DEFAULT_BYTES >> 10) - 1)
    )
