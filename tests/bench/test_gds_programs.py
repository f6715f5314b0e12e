"""What `bench/gds_vs_bounce.py` reads from other programs and from DRAM counters."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gdsstore.engines.base import Op
from gdsstore.errors import EngineError
from gdsstore.sizes import KiB

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from gds_parts.dram import Resctrl, bytes_a_count, event_config, open_dram
from gds_parts.reference import Program, read_fio, read_gdsio
from gds_parts.sizes import Cell
from gds_parts.turns import Turn

READ = Cell(16 * KiB, 2, Op.READ, 8, 2)


FIO_SIDE = {
    "io_bytes": READ.nbytes,
    "bw_bytes": 2_500_000_000,
    "clat_ns": {"percentile": {"50.000000": 80_000, "99.000000": 300_000}},
}
FIO_JOB = {"job_runtime": 400, "usr_cpu": 10.0, "sys_cpu": 15.0, "read": FIO_SIDE}


def test_fio_is_read_also_behind_a_line_of_its_warnings() -> None:
    taken = read_fio(READ, "fio: a note\n" + json.dumps({"jobs": [FIO_JOB]}))
    assert taken.gbps == 2.5
    assert taken.cpu_s_per_gb == pytest.approx(0.1 / (READ.nbytes / 1e9))
    assert taken.percentiles_us == (80.0, 300.0)


def test_fio_that_moved_less_than_asked_is_no_number() -> None:
    with pytest.raises(EngineError, match="moved"):
        read_fio(READ, json.dumps({"jobs": [FIO_JOB | {"read": FIO_SIDE | {"io_bytes": 4096}}]}))


def test_gdsio_is_read() -> None:
    line = (
        "IoType: RANDREAD XferType: GPUD Threads: 4 DataSetSize: 1048576/1048576(KiB) IOSize: 1024(KiB) "
        "Throughput: 2.500000 GiB/sec, Avg_Latency: 1561.2 usecs ops: 1024 total_time 0.4 secs"
    )
    assert read_gdsio(READ, line).gbps == pytest.approx(2.5 * 2**30 / 1e9)


@pytest.mark.parametrize("read", [read_fio, read_gdsio])
@pytest.mark.parametrize("output", ["", "usage: fio", "{}", '{"jobs": []}'])
def test_output_that_says_something_else_is_an_error(read: Callable[[Cell, str], Turn], output: str) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        read(READ, output)


def test_a_program_that_fails_says_its_last_line() -> None:
    program = Program("it", lambda cell: ["sh", "-c", "echo first; echo it is broken >&2; exit 3"], read_fio)
    with pytest.raises(EngineError, match="it ended with 3: it is broken"):
        program.turn(READ)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_an_event_of_the_memory_controllers_is_put_together_as_its_format_says(tmp_path: Path) -> None:
    pmu = tmp_path / "uncore_imc_0"
    event = write(pmu / "events/cas_count_read", "event=0x04,umask=0x03\n")
    write(pmu / "events/cas_count_read.scale", "6.103515625e-5\n")
    write(pmu / "events/cas_count_read.unit", "MiB\n")
    write(pmu / "format/event", "config:0-7\n")
    write(pmu / "format/umask", "config:8-15\n")
    assert event_config(pmu, event) == 0x0304
    assert bytes_a_count(event) == 64


def test_resctrl_counts_all_sockets(tmp_path: Path) -> None:
    for socket, count in ((0, 1000), (1, 234)):
        write(tmp_path / f"sys/fs/resctrl/mon_data/mon_L3_0{socket}/mbm_total_bytes", f"{count}\n")
    counter = open_dram(tmp_path)
    assert isinstance(counter, Resctrl)
    assert counter.read_bytes() == 1234


def test_without_a_counter_there_is_a_reason_for_each_kind(tmp_path: Path) -> None:
    reason = open_dram(tmp_path)
    assert isinstance(reason, str)
    assert "uncore_imc" in reason
    assert "resctrl" in reason
