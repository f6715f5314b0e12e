"""The Kubernetes manifests: what must agree between daemon, server and image, and that they are what the API server takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"


def _load(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((K8S / name).read_text()) if each]


def _pod(name: str) -> dict[str, Any]:
    return _load(name)[0]["spec"]["template"]["spec"]


def _patched(*patches: str) -> dict[str, Any]:
    merged = _load("daemonset.yaml")[0]
    for name in patches:
        merged = _merged(merged, _load(name)[0])
    return merged


def _merged(base: Any, patch: Any) -> Any:
    """A strategic merge as far as these patches need one: maps by key, lists of named things by name."""
    if isinstance(base, dict):
        return base | {key: _merged(base[key], each) if key in base else each for key, each in patch.items()}
    if isinstance(base, list) and all("name" in each for each in base + patch):
        by_name = {each["name"]: each for each in base}
        return list(_merged(by_name, {each["name"]: each for each in patch}).values())
    return patch


PATCHES = {"monitoring": "monitoring/token.yaml", "hugepages": "hugepages/hugepages.yaml"}
OBJECTS = {
    f"{each['kind']} {each['metadata']['name']}": each
    for name in ("namespace.yaml", "daemonset.yaml", "sglang.yaml")
    for each in _load(name)
} | {f"with {name}": _patched(patch) for name, patch in PATCHES.items()}


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("name", OBJECTS)
def test_the_objects_fit_the_schemas_of_kubernetes(name: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    validate.validate(OBJECTS[name], version, strict=True)


def test_every_file_that_a_kustomization_names_is_there() -> None:
    for file in K8S.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(file.read_text())
        named = [
            *kustomization.get("resources", []),
            *(patch["path"] for patch in kustomization.get("patches", [])),
            *(name for each in kustomization.get("configMapGenerator", []) for name in each["files"]),
            *re.findall(r"^#   - (\w+)$", file.read_text(), re.MULTILINE),
        ]
        assert named
        for name in named:
            assert (file.parent / name).exists(), f"{file}: {name}"


def test_daemon_and_server_share_what_they_must() -> None:
    daemon, server = _pod("daemonset.yaml"), _pod("sglang.yaml")
    assert daemon["nodeSelector"] == server["nodeSelector"]
    assert daemon["hostPID"] is server["hostPID"] is True  # LMDB knows its readers by process id
    for key in ("runAsUser", "runAsGroup"):
        assert daemon["securityContext"][key] == server["securityContext"][key]
    host, inside = zip(*(_store(pod) for pod in (daemon, server)), strict=True)
    assert host[0] == host[1]
    assert set(inside) == {"/store"}


def _store(pod: dict[str, Any]) -> tuple[str, str]:
    """Where the store lies on the host, and where in the container."""
    (host,) = (each["hostPath"]["path"] for each in pod["volumes"] if each["name"] == "store")
    (inside,) = (
        each["mountPath"] for each in pod["containers"][0]["volumeMounts"] if each["name"] == "store"
    )
    return host, inside


def test_user_paths_port_and_probes_are_the_images() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    daemon = _pod("daemonset.yaml")
    container = daemon["containers"][0]
    assert f"ARG UID={daemon['securityContext']['runAsUser']}\n" in dockerfile
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert {"/store", "/var/cache/gdsstore", "/tmp"} <= mounts  # the root is read-only
    address = next(each["value"] for each in container["env"] if each["name"] == "KV_HTTP")
    assert f"KV_HTTP={address}\n" in dockerfile
    assert container["ports"][0]["containerPort"] == int(address.rpartition(":")[2])
    probes = {
        probe: container[probe]["exec"]["command"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert {command[0] for command in probes.values()} == {"gdsstore-health"}
    assert "docker/health.py /usr/local/bin/gdsstore-health\n" in dockerfile
    # What is only not ready is not started again.
    assert [command[1] for command in probes.values()] == ["/healthz", "/healthz", "/readyz"]


def test_the_grace_period_is_longer_than_drain_and_close() -> None:
    package = ROOT / "gdsstore"
    drain = re.search(r"drain_s: DrainS = ([\d.]+)", (package / "cli" / "serve.py").read_text())
    close = re.search(r"^CLOSE_S = ([\d.]+)", (package / "service" / "daemon.py").read_text(), re.MULTILINE)
    assert drain
    assert close
    assert _pod("daemonset.yaml")["terminationGracePeriodSeconds"] > float(drain[1]) + float(close[1])


@pytest.mark.parametrize("name", ["DaemonSet gdsstore", "Deployment sglang", "with monitoring"])
def test_only_init_containers_are_root_and_nothing_else_has_capabilities(name: str) -> None:
    pod = OBJECTS[name]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in (*pod["initContainers"], *pod["containers"]):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert "limits" in container["resources"]
    for container in pod["containers"]:
        assert "runAsUser" not in container["securityContext"]
        assert "add" not in container["securityContext"]["capabilities"]


def test_with_an_open_address_comes_a_token() -> None:
    """Loopback is the default; the monitoring component opens the port, which the daemon refuses without a token."""
    template = OBJECTS["with monitoring"]["spec"]["template"]
    container = template["spec"]["containers"][0]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert env["KV_HTTP"].startswith("0.0.0.0:")
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert mounts[str(Path(env["KV_HTTP_TOKEN_FILE"]).parent)] == "token"
    (monitor,) = _load("monitoring/podmonitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == container["ports"][0]["name"]
    (secret,) = (each["secret"] for each in template["spec"]["volumes"] if "secret" in each)
    assert endpoint["authorization"]["credentials"]["name"] == secret["secretName"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_memory_holds_the_shared_cache() -> None:
    for name, resource in (("DaemonSet gdsstore", "memory"), ("with hugepages", "hugepages-2Mi")):
        container = OBJECTS[name]["spec"]["template"]["spec"]["containers"][0]
        (cache,) = (each["value"] for each in container["env"] if each["name"] == "GDSSTORE_HOST_CACHE")
        assert _mib(container["resources"]["limits"][resource]) > _mib(cache.removesuffix("B"))


def _mib(quantity: str) -> int:
    return int(quantity[:-2]) * {"Gi": 1024, "Mi": 1}[quantity[-2:]]
