# Sourced by the scripts that make a virtual environment. They set $venv, where it lies, and may set $newest_python, the last
# minor version of Python 3 that will do.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

say() { echo "gdsstore: $*" >&2; }
die() { say "$*" && exit 1; }

is_python() {
    command -v "$1" >/dev/null &&
        "$1" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, ${newest_python:-99}))" 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if is_python "$name"; then echo "$name" && return; fi
    done
    return 1
}

# Makes $venv, unless it is there, was made for this root, and its interpreter still runs.
ensure_venv() {
    local python
    if [[ -x "$venv/bin/pip" && -f "$venv/.gdsstore-root" && "$(<"$venv/.gdsstore-root")" == "$root" ]] &&
        is_python "$venv/bin/python"; then
        return
    fi
    if [[ -e "$venv" && ! -f "$venv/pyvenv.cfg" ]]; then
        die "$venv is in the way and is not a virtual environment; move it away"
    fi
    python="$(find_python)" ||
        die "needs Python 3.11 or newer (Debian, Ubuntu: apt-get install python3 python3-venv; or set PYTHON=/path/to/python3)"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "this Python cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)"
    say "making $venv (once; takes a minute or two)"
    "$python" -m venv --clear "$venv"
    echo "$root" >"$venv/.gdsstore-root"
}

pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@"; }

nixl_pins() {
    "$venv/bin/python" -c '
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"]["nixl"], sep="\n")' "$root/pyproject.toml"
}

# nixl's metadata asks for PyTorch and for the builds of every CUDA version, gigabytes that moving bytes between host memory
# and the drive does not need. So: the pins of the extra, without what they ask for.
install_nixl() {
    local pins
    mapfile -t pins < <(nixl_pins)
    if ! { pip_install --no-deps "${pins[@]}" && "$venv/bin/python" -c 'import nixl'; } >"$venv/nixl.log" 2>&1; then
        say "NIXL cannot be used here (see $venv/nixl.log), so the posix engine moves the bytes: slower, with the same result."
    fi
}

# What an environment was made from: the root, since the scripts inside a virtual environment that was moved or copied run what
# lies where it was made; and the files that are named.
stamp_of() { echo "$root $(cat "$@" | cksum)"; }
has_stamp() { [[ -x "$venv/bin/python" && -f "$venv/.gdsstore-$1" && "$(<"$venv/.gdsstore-$1")" == "$stamp" ]]; }
