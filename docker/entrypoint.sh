#!/usr/bin/env bash
# Runs `gdsstore doctor`, then becomes the command that is given, or the node daemon where there is none or only options:
#   (nothing)             gdsstore serve --store ... --http ...
#   --OPTION ...          the same with these options of `gdsstore serve` added
#   COMMAND ARGUMENT ...  that command
# What it reads: KV_STORE, KV_DOCTOR, KV_HTTP, KV_HTTP_TOKEN_FILE (docker/README.md). They are not named GDSSTORE_*: those are
# settings of the store, and an unknown one is refused.
set -euo pipefail

say() { echo "gdsstore-entrypoint: $*" >&2; }
die() { say "$*" && exit 2; }

IFS=: read -ra volumes <<<"${KV_STORE:-/store}"
doctor="${KV_DOCTOR:-on}"
case "$doctor" in
    on | off | required) ;;
    *) die "KV_DOCTOR is '$doctor'; it can be on, off or required" ;;
esac

# Nothing of gdsstore runs without a place for what is compiled at first use.
caches="${HOME:-/}"
[[ -w "$caches" ]] || die "user $(id -u) may not write to $caches: mount a volume there that belongs to that user"

# In the background: a shell that waits for a child in the foreground hears no signal, and as process 1 it would not even die of
# one, so that a stop would take as long as the doctor.
run_doctor() {
    local pid status=0 result="$caches/doctor.json"
    rm -f "$result"
    gdsstore doctor "${volumes[0]}" --json "$result" >&2 &
    pid=$!
    trap 'kill -TERM "$pid" 2>/dev/null || true; exit 143' TERM INT
    wait "$pid" || status=$?
    trap - TERM INT
    # 0: bytes went direct; 1: a store works, but not direct, as on every machine without a GPU. A doctor that broke may say 1
    # too, but leaves no result.
    if ((status <= 1)) && [[ -s "$result" ]]; then return; fi
    say "doctor: a store does not work in ${volumes[0]}, or the doctor itself does not (exit code $status)"
    if [[ "$doctor" == required ]]; then exit 2; fi
}

# `serve` wants a store that is there. A new one must say how much of the drive it takes: by default that is half of what is free.
make_store() {
    [[ -n "${GDSSTORE_CAPACITY:-}${GDSSTORE_CONFIG:-}" ]] ||
        die "there is no store in ${volumes[0]}: set GDSSTORE_CAPACITY (such as 500GiB) for a new one, or mount one there"
    say "making a store in ${volumes[*]}"
    python3 -c 'import sys, gdsstore; gdsstore.open(sys.argv[1:]).close()' "${volumes[@]}"
}

if [[ "$doctor" != off ]]; then run_doctor; fi
if (($# > 0)) && [[ "$1" != -* ]]; then exec "$@"; fi

if [[ ! -e "${volumes[0]}/store.json" ]]; then make_store; fi
options=(--http "${KV_HTTP:-127.0.0.1:9470}")
for volume in "${volumes[@]}"; do options+=(--store "$volume"); done
if [[ -n "${KV_HTTP_TOKEN_FILE:-}" ]]; then options+=(--token-file "$KV_HTTP_TOKEN_FILE"); fi
exec gdsstore serve "${options[@]}" "$@"
