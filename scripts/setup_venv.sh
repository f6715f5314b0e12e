#!/usr/bin/env bash
# Makes .venv at the repository's root and installs gdsstore into it: `setup_venv.sh runtime` or `setup_venv.sh dev`.
# Does nothing where that was done already for the same pyproject.toml. PYTHON names the interpreter to use.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
venv="$root/.venv"
profile="${1:-dev}"
case "$profile" in runtime | dev) ;; *) echo "usage: $0 [runtime|dev]" >&2 && exit 2 ;; esac

# Taken out before other packages are installed, or pip complains loudly about what the pins miss.
remove_nixl() {
    local pins
    mapfile -t pins < <(nixl_pins)
    "$venv/bin/python" -m pip uninstall --quiet --yes "${pins[@]%%==*}" >/dev/null 2>&1 || true
}

simulated_gpu="$root/tests/cudasim/requirements.txt"
stamp="$(stamp_of "$root"/pyproject.toml "$root"/scripts/{constraints-cpu.txt,common.sh,setup_venv.sh} "$simulated_gpu")"
if has_stamp dev || has_stamp "$profile"; then
    exit 0
fi
ensure_venv

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
install_nixl
if [[ "$profile" == dev ]] && ! pip_install --no-deps --requirement "$simulated_gpu" >"$venv/kvikio.log" 2>&1; then
    say "kvikio and the CUDA headers cannot be had here (see $venv/kvikio.log): the tests on the simulated GPU are skipped"
fi
echo "$stamp" >"$venv/.gdsstore-$profile"
