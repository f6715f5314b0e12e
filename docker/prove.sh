#!/usr/bin/env bash
# Builds the CPU image for real and runs it, on a Debian machine without Docker: as root, with buildah, podman and runc from the
# distribution, on a base that debootstrap makes from the mirror that apt uses here. Needs 6 GB of disk (WORK: where) and ten
# minutes; takes nothing from a container registry. Where pip is configured with files of this machine (an index, a certificate),
# name their directories: MOUNTS="/opt/wheels /opt/pypi".
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
say() { echo "prove: $*" >&2; }
die() { say "FAILED: $*" && exit 1; }

((EUID == 0)) || die "this must run as root"
missing=()
for tool in buildah podman runc debootstrap; do command -v "$tool" >/dev/null || missing+=("$tool"); done
if ((${#missing[@]})); then
    say "installing ${missing[*]}"
    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq --yes --no-install-recommends install "${missing[@]}" >/dev/null
fi

work="$(mktemp -d "${WORK:-/var/tmp}/gdsstore-prove.XXXXXX")"
storage=(--root "$work/storage" --runroot "$work/run" --storage-driver vfs)
buildah_() { buildah "${storage[@]}" "$@"; }
# The complaint is about health checks as systemd timers; the check itself is run below.
podman_() { podman "${storage[@]}" --cgroup-manager cgroupfs --runtime runc "$@" 2> >(grep -v 'systemd connection' >&2); }
clean_up() {
    podman_ rm --all --force >/dev/null 2>&1 || true
    buildah_ rm --all >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap clean_up EXIT

# shellcheck disable=SC1091
release="$(. /etc/os-release && echo "$VERSION_CODENAME")"
# shellcheck disable=SC2016 # apt and awk expand these
mirror="$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' | awk -v r="$release" '$1 == r {print $2; exit}')"
[[ -n "$mirror" ]] || die "apt has no mirror for $release"

say "1. a base of $release, by debootstrap"
debootstrap --variant=minbase "$release" "$work/base" "$mirror" >"$work/debootstrap.log" 2>&1 || die "$(tail -n 5 "$work/debootstrap.log")"
container="$(buildah_ from scratch)"
mounted="$(buildah_ mount "$container")"
cp -a "$work/base/." "$mounted/"
rm -rf "$work/base" "$mounted"/var/cache/apt/archives/*.deb "$mounted"/var/lib/apt/lists/*
buildah_ commit --rm "$container" gdsstore-base >/dev/null 2>&1

say "2. the CPU image, by buildah (docker/Dockerfile, target daemon)"
pip=()
config="$(python3 -m pip config list 2>/dev/null |
    sed -En "s/^global\.(cert|index-url|extra-index-url|find-links|trusted-host)='(.*)'$/\1 = \2/p" | sed 's/\\n/\n  /g')"
certificate="$(sed -n 's/^cert = //p' <<<"$config")"
if [[ -n "$config" ]]; then
    sed -e 's#^cert = .*#cert = /run/certificate.pem#' -e '1i [global]' <<<"$config" >"$work/pip.conf"
    pip+=(--secret "id=pip,src=$work/pip.conf")
fi
if [[ -n "$certificate" ]]; then pip+=(--volume "$certificate:/run/certificate.pem:ro"); fi
for directory in ${MOUNTS:-}; do pip+=(--volume "$directory:$directory:ro"); done
buildah_ bud --isolation chroot --format docker --layers=false --target daemon "${pip[@]}" --build-arg BASE_IMAGE=localhost/gdsstore-base \
    --build-arg EXTRAS=nixl,service --build-arg SYSTEM_PACKAGES= --tag gdsstore:cpu --file "$root/docker/Dockerfile" "$root" \
    >"$work/build.log" 2>&1 || die "$(tail -n 20 "$work/build.log")"
buildah_ images gdsstore:cpu

# A container as in compose.yaml: another user, no capabilities, a read-only root. Limits of files and processes are given since
# podman would raise them, which not every root may.
mkdir -m 0700 "$work/store"
chown 10001:10001 "$work/store"
run() {
    podman_ run --read-only --cap-drop ALL --security-opt no-new-privileges --network none --tmpfs /tmp:mode=1777 \
        --ulimit nofile=16384:16384 --ulimit nproc=4096:4096 --volume "$work/store:/store" --volume cache:/var/cache/gdsstore "$@"
}
# until SECONDS COMMAND: tries the command once a second.
until_() {
    local seconds="$1" && shift
    for ((; seconds > 0; seconds--)); do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 1
    done
    return 1
}

say "3. the doctor, required; and the quickstart's workload inside"
# shellcheck disable=SC2016 # the shell in the container expands it
run --rm --env KV_DOCTOR=required gdsstore:cpu bash -euc '
    (($(id -u) == 10001)) && ! touch /x 2>/dev/null
    gdsstore replay --store /store/quickstart --capacity 1GiB --requests 60 --page-bytes 262144 --json /tmp/result
    python3 -c "import json; r = json.load(open(\"/tmp/result\")); print({k: v for k, v in r.items() if \"wrong\" in k})"
    rm -r /store/quickstart' || die "the quickstart's workload"

say "4. the daemon: a new store, health, the live page's status"
run --detach --name daemon --env KV_DOCTOR=off --env GDSSTORE_CAPACITY=1GiB --env GDSSTORE_HOST_CACHE=128MiB gdsstore:cpu >/dev/null
until_ 60 podman_ exec daemon gdsstore-health /readyz || die "not ready: $(podman_ logs daemon 2>&1 | tail -n 5)"
podman_ exec daemon gdsstore-health
podman_ exec daemon gdsstore-health /readyz
podman_ exec daemon gdsstore-health /metrics >/dev/null || die "/metrics"
[[ "$(podman_ exec daemon sh -c 'tr "\0" " " </proc/1/cmdline')" == *"gdsstore serve"* ]] || die "process 1 is not the daemon"

say "5. a second container uses the store, in the daemon's PID namespace"
run --rm --pid container:daemon --env KV_DOCTOR=off gdsstore:cpu \
    gdsstore replay --store /store --capacity 1GiB --requests 20 --page-bytes 262144 || die "a second container"

say "6. SIGTERM to the daemon"
started=$SECONDS
podman_ stop --time 60 daemon >/dev/null
[[ "$(podman_ inspect daemon --format '{{.State.ExitCode}}')" == 0 ]] || die "it did not end cleanly: $(podman_ logs daemon 2>&1 | tail -n 5)"
say "it ended with exit code 0 after $((SECONDS - started)) s"
[[ ! -e "$work/store/node.sock" ]] || die "it left its socket"
run --rm --env KV_DOCTOR=off gdsstore:cpu gdsstore verify --store /store || die "the store afterwards"

say "7. SIGTERM while the doctor runs"
run --detach --name early --env KV_DOCTOR=required --env GDSSTORE_CAPACITY=1GiB gdsstore:cpu >/dev/null
sleep 1
started=$SECONDS
podman_ stop --time 30 early >/dev/null
[[ "$(podman_ inspect early --format '{{.State.ExitCode}}')" == 143 ]] || die "exit code $(podman_ inspect early --format '{{.State.ExitCode}}')"
say "it ended after $((SECONDS - started)) s"
say "all of it worked"
