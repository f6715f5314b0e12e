#!/usr/bin/env bash
# Installs gdsstore and what its tests need, and runs all tests: first in .venv, then those against SGLang in .venv-sglang.
# `test.sh ARGUMENTS` runs only the first and gives the arguments to pytest, `test.sh sglang ARGUMENTS` only the second.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

with_sglang() {
    bash scripts/setup_sglang_venv.sh && .venv-sglang/bin/python -m pytest -q -o "testpaths=tests/sglang_*" "$@"
}

if [[ "${1:-}" == sglang ]]; then
    with_sglang "${@:2}"
    exit
fi

bash scripts/setup_venv.sh dev
status=0
if (($#)); then
    .venv/bin/python -m pytest -q "$@" || status=$?
else
    cores="$(nproc)"
    # A file's tests stay together: those that need a process of their own share it. The order of the files is tests/conftest.py's.
    files=(--dist loadfile --no-loadscope-reorder)
    # Half more than there are cores: about half of the time these tests wait, for the disk and for processes.
    workers=$(((3 * cores + 1) / 2))
    .venv/bin/python -m pytest -q -n "$((workers < 6 ? workers : 6))" "${files[@]}" || status=$?
    sglang_status=0
    # Two at most: each may have servers of its own, which take a gigabyte or two.
    with_sglang -n "$((cores < 2 ? cores : 2))" "${files[@]}" || sglang_status=$?
    # 69: this machine cannot run them, and the reason was said.
    if ((status == 0 && sglang_status != 69)); then status=$sglang_status; fi
fi
exit "$status"
