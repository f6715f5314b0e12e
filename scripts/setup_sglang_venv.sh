#!/usr/bin/env bash
# Makes .venv-sglang at the repository's root, in which the tests against SGLang itself run on the CPU (tests/sglang_cpu). Does
# nothing where that was done already for the same files. PYTHON names the interpreter to use. Exit status 69: not on this machine.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
venv="$root/.venv-sglang"
requirements="$root/tests/sglang_cpu/requirements-sglang-cpu.txt"
newest_python=13 # SGLang 0.5.23 has no wheel for later ones

cannot() { say "the tests against SGLang cannot run here: $*" && exit 69; }

# The Debian packages of what SGLang needs when it compiles its page hash at first use.
missing_packages() {
    local compiler="${CXX:-c++}"
    command -v "$compiler" >/dev/null || echo g++
    command -v ninja >/dev/null || echo ninja-build
    "$compiler" -E -x c++ - >/dev/null 2>&1 <<<'#include <openssl/sha.h>' || echo libssl-dev
}

apt_install() {
    export DEBIAN_FRONTEND=noninteractive
    say "installing with apt-get: $*"
    apt-get -qq update >/dev/null 2>&1 || true # older lists may do
    apt-get -qq --yes --no-install-recommends install "$@" 2>&1 >/dev/null | tail -n 5 >&2 || true
}

# The log also takes pip's complaint that sglang lacks what it asks for, which is intended.
quietly() {
    "$@" >>"$venv/pip.log" 2>&1 && return
    tail -n 20 "$venv/pip.log" >&2
    die "could not install what the tests against SGLang need (all of it: $venv/pip.log)"
}

[[ "$(uname -sm)" == "Linux x86_64" ]] || cannot "they need x86-64 Linux"
mapfile -t missing < <(missing_packages)
if ((${#missing[@]})) && ((EUID == 0)) && command -v apt-get >/dev/null; then
    apt_install "${missing[@]}"
    mapfile -t missing < <(missing_packages)
fi
if ((${#missing[@]})); then
    cannot "they need a C++ compiler, ninja and the OpenSSL headers (Debian, Ubuntu: apt-get install ${missing[*]})"
fi

stamp="$(stamp_of "$root"/pyproject.toml "$root"/scripts/{constraints-cpu.txt,common.sh,setup_sglang_venv.sh} "$requirements")"
if has_stamp sglang; then
    exit 0
fi
find_python >/dev/null || cannot "they need Python 3.11 to 3.$newest_python (set PYTHON=/path/to/python3)"
ensure_venv

say "installing SGLang for the CPU into $venv (once; takes two minutes or more, and 2.8 GB)"
: >"$venv/pip.log"
quietly pip_install --constraint "$root/scripts/constraints-cpu.txt" torch
quietly pip_install --no-deps sglang==0.5.23
quietly pip_install --requirement "$requirements" --editable "$root[dev]"
install_nixl
echo "$stamp" >"$venv/.gdsstore-sglang"
