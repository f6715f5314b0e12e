#!/usr/bin/env bash
# Installs gdsstore into .venv and shows it at work: saves and loads pages of a made-up multi-turn workload in a store on this
# disk and checks every byte. Arguments go to `gdsstore replay`. Takes 1 GiB of disk while it runs.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
store="$root/.quickstart-store"

bash "$root/scripts/setup_venv.sh" runtime
rm -rf "$store"
trap 'rm -rf "$store"' EXIT
"$root/.venv/bin/gdsstore" replay --store "$store" --capacity 1GiB --requests 60 --page-bytes 262144 "$@"
