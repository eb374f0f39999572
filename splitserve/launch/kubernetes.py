"""A deployment as Kubernetes manifests: `splitserve render kubernetes FILE`. Pure: it knows no cluster and asks none.

    each engine   Deployment of one pod (all its ranks) + headless Service: a name of its own that router and peers use
    the router    Deployment of one pod + Service: the address that clients use

An engine is a Deployment of its own and no replica of one, since a prefill engine is met by name (its rendezvous) and
the router counts engines, not pods. What the supervisor does on one host (start again, probe, drain) the kubelet does
here. Cpus and GPUs are asked for as whole numbers with limits equal to requests, so that a static CPU policy pins them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from splitserve.config import EngineConfig
from splitserve.errors import ConfigError
from splitserve.launch.commands import to_flags
from splitserve.launch.deployment import Deployment
from splitserve.types import Role

HTTP, RENDEZVOUS = 8000, 9000
PER_ROLE = "splitserve/role"
OURS = "splitserve"
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Wishes:
    """What a cluster must be told that no deployment file says."""

    image: str = "splitserve:latest"
    namespace: str = "default"
    cpus: int = 0  # of each rank; 0: as [engine] threads, or 4
    memory: str = ""  # of each engine, as 200Gi; "": no request
    shm: str = "8Gi"  # of /dev/shm in an engine's pod
    models: str = ""  # PersistentVolumeClaim with the models; "": the image has them


def render(deployment: Deployment, wishes: Wishes) -> list[Manifest]:
    """All objects, engines first. ConfigError for what needs one host, and for other engines than ours."""
    _check(deployment)
    engines = [
        (f"{deployment.name}-{group.role}-{i}", group.role, group.engine)
        for group in deployment.groups
        for i in range(group.replicas)
    ]
    prefills = [name for name, role, _ in engines if role is Role.PREFILL]
    found: list[Manifest] = []
    for name, role, engine in engines:
        found += _engine(deployment, wishes, name=name, role=role, engine=engine, prefills=prefills)
    return [*found, *_router(deployment, wishes, [(name, role) for name, role, _ in engines])]


def to_yaml(manifests: Sequence[Manifest]) -> str:
    """One YAML document for each. Strings are quoted as JSON's, which YAML reads alike."""
    return "".join("---\n" + "\n".join(_lines(m)) + "\n" for m in manifests)


def _check(deployment: Deployment) -> None:
    for setting in deployment.settings:
        if setting.name.endswith(".engine") and setting.value != OURS:
            raise ConfigError(
                f"manifests are rendered for our own engine, not for {setting.value}", field="engine"
            )
    if deployment.transfer.transport == "local":
        raise ConfigError(
            'transport = "local" needs one host', field="transport", fix='set [transfer] transport = "nixl"'
        )
    if not deployment.name.replace("-", "").isalnum() or deployment.name != deployment.name.lower():
        raise ConfigError(
            f"{deployment.name!r} cannot name an object of Kubernetes",
            field="name",
            fix="set [deployment] name to small letters, digits and dashes",
        )


def _engine(
    deployment: Deployment,
    wishes: Wishes,
    *,
    name: str,
    role: Role,
    engine: EngineConfig,
    prefills: Sequence[str],
) -> list[Manifest]:
    # Which cpus, GPUs and node is the kubelet's to say.
    config = replace(engine, role=str(role), cpus=(), gpus=(), node=-1, memory_bind="auto")
    transfer = replace(
        deployment.transfer,
        bootstrap_host="0.0.0.0",
        bootstrap_port=RENDEZVOUS if role is Role.PREFILL else 0,
        peer_port=RENDEZVOUS if role is Role.DECODE else 0,
        allow_hosts=(*deployment.transfer.allow_hosts, *prefills),
    )
    server = replace(deployment.server, host="0.0.0.0", port=HTTP)
    words = [
        "serve",
        config.model,
        *to_flags(config, skip=("model",)),
        *to_flags(server),
        *to_flags(transfer),
    ]
    ports = {"http": HTTP, **({"rendezvous": RENDEZVOUS} if role is Role.PREFILL else {})}
    labels = _labels(deployment.name, name, str(role))
    container = {
        **_container(wishes, words, ports, ready_timeout_s=deployment.config.ready_timeout_s),
        "resources": _resources(engine, wishes),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, *_mounts(config.model, wishes)],
    }
    pod = {
        "terminationGracePeriodSeconds": _grace(deployment),
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": wishes.shm}},
            *_volumes(wishes),
        ],
        **_nearness(deployment, role),
    }
    return [_deployment(name, labels, wishes, pod), _service(name, labels, wishes, ports, headless=True)]


def _router(deployment: Deployment, wishes: Wishes, engines: Sequence[tuple[str, Role]]) -> list[Manifest]:
    name = f"{deployment.name}-router"
    router = replace(deployment.router, host="0.0.0.0", port=HTTP, drain_s=deployment.config.drain_s)
    words = ["router", *to_flags(router, skip=("port",)), "--port", str(HTTP)]
    for engine, role in engines:
        match role:
            case Role.PREFILL:
                words += ["--prefill", f"http://{engine}:{HTTP},{RENDEZVOUS}"]
            case Role.DECODE:
                words += ["--decode", f"http://{engine}:{HTTP}"]
            case _:
                words += ["--worker", f"http://{engine}:{HTTP}"]
    labels = _labels(deployment.name, name, "router")
    ports = {"http": HTTP}
    container = _container(wishes, words, ports, ready_timeout_s=deployment.config.ready_timeout_s)
    container["resources"] = {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
    pod = {"terminationGracePeriodSeconds": _grace(deployment), "containers": [container]}
    return [_deployment(name, labels, wishes, pod), _service(name, labels, wishes, ports, headless=False)]


def _labels(deployment: str, name: str, role: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "splitserve",
        "app.kubernetes.io/instance": deployment,
        "app.kubernetes.io/component": name,
        PER_ROLE: role,
    }


def _container(
    wishes: Wishes, words: Sequence[str], ports: Mapping[str, int], *, ready_timeout_s: float
) -> Manifest:
    """Ready is what can answer; an engine that hangs ends itself, so that liveness need only see the process answer."""

    def probe(path: str, period_s: int, failures: int) -> Manifest:
        get = {"path": path, "port": "http"}
        return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}

    return {
        "name": "splitserve",
        "image": wishes.image,
        "args": list(words),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "startupProbe": probe("/ready", 2, max(1, int(ready_timeout_s / 2))),
        "readinessProbe": probe("/ready", 2, 2),
        "livenessProbe": probe("/health", 10, 6),
    }


def _resources(engine: EngineConfig, wishes: Wishes) -> Manifest:
    cpus = engine.tp * (wishes.cpus or engine.threads or 4)
    asked = {"cpu": str(cpus)}
    if wishes.memory:
        asked["memory"] = wishes.memory
    if engine.device == "cuda":
        asked["nvidia.com/gpu"] = str(engine.tp)
    return {"requests": dict(asked), "limits": dict(asked)}


def _nearness(deployment: Deployment, role: Role) -> Manifest:
    """Equal engines apart, so that a host's end costs one; the halves of a pair near, since state crosses there."""

    def others(of: str) -> Manifest:
        return {"matchLabels": {"app.kubernetes.io/instance": deployment.name, PER_ROLE: of}}

    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": others(str(role)),
    }
    found: Manifest = {"topologySpreadConstraints": [spread]}
    if deployment.split:
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        near = [
            {"weight": weight, "podAffinityTerm": {"topologyKey": key, "labelSelector": others(str(other))}}
            for key, weight in (("kubernetes.io/hostname", 100), ("topology.kubernetes.io/zone", 50))
        ]
        found["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": near}}
    return found


def _mounts(model: str, wishes: Wishes) -> list[Manifest]:
    if not wishes.models:
        return []
    where = str(PurePosixPath(model).parent)
    return [{"name": "models", "mountPath": where if where != "." else "/models", "readOnly": True}]


def _volumes(wishes: Wishes) -> list[Manifest]:
    claim = {"claimName": wishes.models, "readOnly": True}
    return [{"name": "models", "persistentVolumeClaim": claim}] if wishes.models else []


def _grace(deployment: Deployment) -> int:
    return int(deployment.config.drain_s + deployment.config.kill_after_s) + 5


def _deployment(name: str, labels: Mapping[str, str], wishes: Wishes, pod: Manifest) -> Manifest:
    """`Recreate`: there are no second GPUs for a new pod beside the old one."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": wishes.namespace, "labels": dict(labels)},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": dict(labels)},
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }


def _service(
    name: str, labels: Mapping[str, str], wishes: Wishes, ports: Mapping[str, int], *, headless: bool
) -> Manifest:
    """A headless one is the pod's own address, also before it is ready: engines meet before they answer."""
    spec: Manifest = {
        "selector": dict(labels),
        "ports": [{"name": key, "port": port, "targetPort": key} for key, port in ports.items()],
    }
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": wishes.namespace, "labels": dict(labels)},
        "spec": spec,
    }


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """Block style for mappings and lists; what is empty or plain on one line."""
    match value:
        case dict() if value:
            for key, inner in value.items():
                yield from _entry(f"{indent}{json.dumps(key) if '/' in key else key}:", inner, f"{indent}  ")
        case list() if value:
            for inner in value:
                first, *rest = _lines(inner, f"{indent}  ")
                yield f"{indent}- {first.lstrip()}"
                yield from rest
        case _:
            yield f"{indent}{json.dumps(value, ensure_ascii=False)}"


def _entry(head: str, inner: Any, indent: str) -> Iterator[str]:
    if isinstance(inner, dict | list) and inner:
        yield head
        yield from _lines(inner, indent)
    else:
        yield f"{head} {json.dumps(inner, ensure_ascii=False)}"
