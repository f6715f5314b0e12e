#!/usr/bin/env bash
# Installs gdsstore and what its tests need into .venv and runs all tests. Arguments go to pytest.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

bash "$root/scripts/setup_venv.sh" dev
cd "$root"
exec "$root/.venv/bin/python" -m pytest -q "$@"
