#!/usr/bin/env bash
# Makes .venv at the repository's root and installs gdsstore into it: `setup_venv.sh runtime` or `setup_venv.sh dev`.
# Does nothing where that was done already for the same pyproject.toml. PYTHON names the interpreter to use.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
profile="${1:-dev}"
case "$profile" in runtime | dev) ;; *) echo "usage: $0 [runtime|dev]" >&2 && exit 2 ;; esac

say() { echo "gdsstore: $*" >&2; }
die() { say "$*" && exit 1; }

is_python() { command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if is_python "$name"; then echo "$name" && return; fi
    done
    die "needs Python 3.11 or newer (Debian, Ubuntu: apt-get install python3 python3-venv; or set PYTHON=/path/to/python3)"
}

make_venv() {
    local python
    python="$(find_python)"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "this Python cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)"
    say "making $venv (once; takes a minute or two)"
    "$python" -m venv --clear "$venv"
}

pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@"; }

# nixl's metadata asks for PyTorch and for the builds of every CUDA version, gigabytes that moving bytes between host memory
# and the drive does not need. So: the pins of the extra, without what they ask for.
nixl_pins() {
    "$venv/bin/python" -c '
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"]["nixl"], sep="\n")' "$root/pyproject.toml"
}

install_nixl() {
    local pins
    mapfile -t pins < <(nixl_pins)
    pip_install --no-deps "${pins[@]}" && "$venv/bin/python" -c 'import nixl'
}

# Taken out before other packages are installed, or pip complains loudly about what the pins miss.
remove_nixl() {
    local pins
    mapfile -t pins < <(nixl_pins)
    "$venv/bin/python" -m pip uninstall --quiet --yes "${pins[@]%%==*}" >/dev/null 2>&1 || true
}

# The root is part of it: the scripts inside a virtual environment that was moved or copied run what lies where it was made.
stamp="$root $(cat "$root/pyproject.toml" "$root"/scripts/constraints-cpu.txt "$root/scripts/setup_venv.sh" | cksum)"
matches() { [[ -f "$venv/.gdsstore-$1" && "$(<"$venv/.gdsstore-$1")" == "$stamp" ]]; }

if [[ -x "$venv/bin/python" ]] && { matches dev || matches "$profile"; }; then
    exit 0
fi
if ! { [[ -x "$venv/bin/pip" && -f "$venv/.gdsstore-root" && "$(<"$venv/.gdsstore-root")" == "$root" ]] && is_python "$venv/bin/python"; }; then
    if [[ -e "$venv" && ! -f "$venv/pyvenv.cfg" ]]; then
        die "$venv is in the way and is not a virtual environment; move it away"
    fi
    make_venv
    echo "$root" >"$venv/.gdsstore-root"
fi

say "installing what pyproject.toml asks for into $venv"
remove_nixl
if [[ "$profile" == dev ]]; then
    constraints=()
    if ! nvidia-smi -L >/dev/null 2>&1; then
        constraints=(--constraint "$root/scripts/constraints-cpu.txt")
    fi
    pip_install "${constraints[@]}" --editable "$root[dev]"
else
    pip_install --editable "$root"
fi
if ! install_nixl >"$venv/nixl.log" 2>&1; then
    say "NIXL cannot be used here (see $venv/nixl.log), so the posix engine moves the bytes: slower, with the same result."
fi
echo "$stamp" >"$venv/.gdsstore-$profile"
