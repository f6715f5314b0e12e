"""A real SGLang server on this machine's GPU, with a small random model made here and the linker behind it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATHS = "LINKER_TEST_PATHS"  # names the file that the path report goes to
REPO = Path(__file__).resolve().parents[2]
HARNESS = REPO / "tests" / "sglang_cpu"

# Large enough for pages of 1 MiB (64 tokens), small enough to be made and started in seconds.
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
PAGE_TOKENS = 64


def harness(name: str) -> Any:
    """A module of tests/sglang_cpu. Without the parts of it that stand in for a GPU's."""
    if str(HARNESS) not in sys.path:
        sys.path.append(str(HARNESS))
    return importlib.import_module(name)


def write_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny = harness("tiny_model")
    for name, value in MODEL.items():
        monkeypatch.setitem(tiny.CONFIG, name, value)
    path: Path = tiny.write_tiny_model(folder)
    return path


def arguments(model: Path, port: int, settings: dict[str, Any]) -> list[str]:
    server = harness("server")
    linker = server.LinkerOptions("tests.gpu.reporting_linker", "ReportingLinker", settings)
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cuda", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
        *("--page-size", str(PAGE_TOKENS), "--max-total-tokens", "16384", "--context-length", "4096"),
        *("--max-running-requests", "4", "--mem-fraction-static", "0.3", "--random-seed", "0"),
        *("--served-model-name", "gdsstore-gpu-test", "--admin-api-key", server.ADMIN_KEY),
        *("--skip-server-warmup", "--enable-cache-report", "--disable-cuda-graph"),
        *linker.arguments(),
    ]


@contextmanager
def gpu_server(model: Path, log: Path, paths: Path, settings: dict[str, Any]) -> Iterator[Any]:
    """Yields a ServerClient. The server is stopped whatever happens; where its start or the body fails, its log's end is shown."""
    server = harness("server")
    client = server.ServerClient(server._free_port(), log)
    env = {
        **{name: value for name, value in os.environ.items() if name != "SGLANG_USE_CPU_ENGINE"},
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
        PATHS: str(paths),
    }
    with log.open("ab") as out:
        process = subprocess.Popen(
            arguments(model, client.port, settings),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            cwd=REPO,
            start_new_session=True,
        )
    try:
        server._wait_until_ready(process, client)
        yield client
    except BaseException:
        print(f"--- end of {log}\n{client.log_tail()}", file=sys.stderr)
        raise
    finally:
        server._stop(process)
