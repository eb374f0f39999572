"""`render kubernetes`: manifests that Kubernetes' own schemas accept, and whose commands our own parser does."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from splitserve.cli.parser import parse as parse_words
from splitserve.errors import ConfigError
from splitserve.launch.deployment import load, parse
from splitserve.launch.kubernetes import Manifest, Wishes, render, to_yaml

ROOT = Path(__file__).parents[2]
WISHES = Wishes(image="registry/splitserve:1", namespace="serving", memory="200Gi", models="models")


def box() -> list[Manifest]:
    return render(load(ROOT / "deploy/rtx-pro-6000-x8.toml", environ={}), WISHES)


def named(found: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in found if m["kind"] == kind}


def container(deployment: Manifest) -> Manifest:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


@pytest.mark.parametrize("file", ["rtx-pro-6000-x8", "demo", "unified", "v4-flash-tp4"])
def test_the_schemas_of_kubernetes_accept_it(file: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for wishes in (WISHES, Wishes()):
        for manifest in render(load(ROOT / f"deploy/{file}.toml", environ={}), wishes):
            validate.validate(manifest, "1.33", strict=True)


def test_every_engine_has_a_name_and_the_router_knows_them_all() -> None:
    found = box()
    assert list(named(found, "Deployment")) == ["v4-flash-prefill-0", "v4-flash-decode-0", "v4-flash-router"]
    assert list(named(found, "Deployment")) == list(named(found, "Service"))
    words = container(named(found, "Deployment")["v4-flash-router"])["args"]
    assert ("--prefill", "http://v4-flash-prefill-0:8000,9000") in pairwise(words)
    assert ("--decode", "http://v4-flash-decode-0:8000") in pairwise(words)
    decode = container(named(found, "Deployment")["v4-flash-decode-0"])["args"]
    assert "v4-flash-prefill-0" in decode  # else it would refuse the rendezvous
    for name in ("v4-flash-prefill-0", "v4-flash-decode-0"):
        assert named(found, "Service")[name]["spec"]["clusterIP"] == "None"


def test_xpyd_has_a_deployment_for_each_engine() -> None:
    tables = {
        "deployment": {"name": "d", "model": "/m/x"},
        "prefill": {"replicas": 2},
        "decode": {"replicas": 3},
    }
    found = named(render(parse(tables, "file d.toml", environ={}), Wishes()), "Deployment")
    assert sum("prefill" in n for n in found) == 2
    assert sum("decode" in n for n in found) == 3
    assert container(found["d-router"])["args"].count("--decode") == 3


def test_commands_are_what_our_parser_takes() -> None:
    for deployment in named(box(), "Deployment").values():
        args = parse_words(container(deployment)["args"])
        assert callable(args.run)


def test_an_engine_asks_for_its_devices_and_its_neighbours() -> None:
    prefill = named(box(), "Deployment")["v4-flash-prefill-0"]
    asked = container(prefill)["resources"]
    assert asked["requests"] == asked["limits"]
    assert asked["limits"] == {"cpu": "16", "memory": "200Gi", "nvidia.com/gpu": "4"}
    words = container(prefill)["args"]
    assert not {"--gpus", "--node", "--cpus"} & set(words)  # the kubelet's to say
    pod = prefill["spec"]["template"]["spec"]
    near = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]
    assert near["podAffinityTerm"]["labelSelector"]["matchLabels"]["splitserve/role"] == "decode"
    assert pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]["splitserve/role"] == "prefill"
    mounts = {m["name"]: m["mountPath"] for m in container(prefill)["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "models": "/models"}
    assert container(prefill)["startupProbe"]["failureThreshold"] == 150  # 300 s to be ready


def test_yaml_says_what_the_objects_are() -> None:
    yaml = pytest.importorskip("yaml")
    assert list(yaml.safe_load_all(to_yaml(box()))) == box()


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"transfer": {"transport": "local"}}, "needs one host"),
        ({"deployment": {"name": "My_Box", "model": "m"}}, "cannot name an object"),
    ],
)
def test_what_makes_no_sense_in_a_cluster_is_refused(tables: dict[str, Any], says: str) -> None:
    base = {"deployment": {"name": "d", "model": "m"}, "prefill": {}, "decode": {}}
    with pytest.raises(ConfigError, match=says):
        render(parse(base | tables, "file d.toml", environ={}), Wishes())
