"""A process that hangs, dies or talks is heard out, and never outlives its time."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gdsstore.probe.child import ask


def test_the_answer_is_the_json_object_in_the_last_line() -> None:
    said = ask(["-c", "print('hello'); print('{\"a\": 1}')"], 30.0)
    assert (said.lines, said.answer, said.exit_code) == (("hello", '{"a": 1}'), {"a": 1}, 0)


def test_what_is_no_json_object_is_no_answer() -> None:
    assert ask(["-c", "print('[1]')"], 30.0).answer is None
    assert ask(["-c", "print('{')"], 30.0).answer is None
    assert ask(["-c", "pass"], 30.0).answer is None


def test_a_process_that_hangs_is_killed_and_what_it_said_is_kept(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); print('here', flush=True); time.sleep(60)"
    start = time.monotonic()
    said = ask(["-c", code], 3.0)
    assert time.monotonic() - start < 30
    assert (said.lines, said.exit_code) == (("here",), None)
    assert not os.path.exists(f"/proc/{pid.read_text()}")


def test_a_process_that_dies_says_by_which_signal() -> None:
    assert ask(["-c", "import os; os.kill(os.getpid(), 11)"], 30.0).exit_code == -11


def test_the_last_error_in_cufile_s_log_is_told_and_the_log_is_gone() -> None:
    code = (
        "import os; open('cufile.log', 'w').write("
        "'1 [pid=1 tid=1] ERROR  cufio-dr:1 first\\n2 [pid=1 tid=1] ERROR  cufio-fs:2 no volume\\n3 NOTICE x\\n');"
        "print(os.getcwd())"
    )
    said = ask(["-c", code], 30.0)
    assert said.refused == "cufio-fs:2 no volume"
    assert not Path(said.lines[0]).exists()


def test_the_environment_is_the_one_that_was_given() -> None:
    said = ask(["-c", "import os; print(os.environ['WORD'])"], 30.0, {**os.environ, "WORD": "plum"})
    assert said.lines == ("plum",)
