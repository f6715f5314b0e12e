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
    # A file's tests stay together: those that need a process of their own share it.
    workers=$(($(nproc) < 4 ? $(nproc) : 4))
    .venv/bin/python -m pytest -q -n "$workers" --dist loadfile || status=$?
    sglang_status=0
    # Two at most: each may have servers of its own, which take a gigabyte or two.
    with_sglang -n "$((workers < 2 ? workers : 2))" --dist loadfile || sglang_status=$?
    # 69: this machine cannot run them, and the reason was said.
    if ((status == 0 && sglang_status != 69)); then status=$sglang_status; fi
fi
exit "$status"
