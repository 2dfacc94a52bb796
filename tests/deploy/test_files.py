"""The files of ``deploy/`` are valid by the tools of their own formats, and name settings and metrics that exist."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.conformance.servers import LORIMER, ROOT, environment, running_server
from tests.ray.environment import RELEASE

DEPLOY = ROOT / "deploy"
TOOLS = ROOT / ".venvs" / "deploy" / "bin"


def tool(name: str) -> str:
    """Return the path of a validator, or skip."""
    found = shutil.which(name, path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed: make test-deploy")
    return found


def check(*command: object, **variables: str) -> str:
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_image_is_built_as_hadolint_recommends():
    check(tool("hadolint"), DEPLOY / "Dockerfile")


def test_the_image_has_what_the_project_pins():
    text = (DEPLOY / "Dockerfile").read_text()
    (torch,) = re.findall(r'"(torch==[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert set(re.findall(r'"(torch==[^"]*)"', text)) == {torch}
    lock = re.sub(
        r" \\$", "", re.sub(r"^ *--hash.*\n?", "", (ROOT / "requirements.lock").read_text(), flags=re.M), flags=re.M
    )
    command = re.search(r"sed (-e .*) requirements.lock", text)
    assert command is not None
    assert check("sh", "-c", f"sed {command[1]} {ROOT / 'requirements.lock'}") == lock
    assert "--hash" not in lock and "starlette==" in lock


def test_compose_reads_its_file():
    found = check(
        *(tool("docker-compose"), "--file", DEPLOY / "compose.yaml", "config"), POSTGRES_PASSWORD="a", S3_SECRET="b"
    )
    assert list(yaml.safe_load(found)["services"]) == ["api1", "api2", "balancer", "postgres", "seaweedfs", "worker"]


def test_kubernetes_accepts_the_manifests():
    check(tool("kubernetes-validate"), "--strict", DEPLOY / "kubernetes" / "lorimer.yaml")


RAY_CLUSTER = {
    "spec": {"rayVersion", "headGroupSpec", "workerGroupSpecs"},
    "head": {"serviceType", "rayStartParams", "template"},
    "workers": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}
"""The fields of a RayCluster that ours uses; they are those of KubeRay 1.7, against whose schema it was validated."""


def test_the_pods_of_ray_are_those_of_lorimer(tmp_path):
    cluster = yaml.safe_load((DEPLOY / "kubernetes" / "lorimer-ray.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert spec.keys() == RAY_CLUSTER["spec"] and spec["headGroupSpec"].keys() == RAY_CLUSTER["head"]
    assert [group.keys() for group in spec["workerGroupSpecs"]] == [RAY_CLUSTER["workers"]]
    assert f"ray=={spec['rayVersion']}" == RELEASE, "the release that the tests run"
    known = {one["metadata"]["name"] for one in manifests() if one["kind"] == "ConfigMap"}
    for number, group in enumerate([spec["headGroupSpec"], *spec["workerGroupSpecs"]]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": group["template"]["spec"]}
        (container,) = pod["spec"]["containers"]
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
        assert {volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume} <= known
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(pod))
        check(tool("kubernetes-validate"), "--strict", tmp_path / f"{number}.yaml")


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / "lorimer.yaml").read_text()))


@pytest.mark.parametrize("name", sorted(path.name for path in (DEPLOY / "systemd").iterdir()))
def test_systemd_accepts_the_units(name, tmp_path):
    unit = tmp_path / name
    installed = Path(sys.executable).with_name("lorimer")
    unit.write_text((DEPLOY / "systemd" / name).read_text().replace("/opt/lorimer/bin/lorimer", str(installed)))
    assert check(tool("systemd-analyze"), "verify", tmp_path / name.replace("@", "@1")) == ""


def test_prometheus_accepts_its_jobs():
    check(tool("promtool"), "check", "config", DEPLOY / "prometheus.yml")


def configurations() -> dict[str, str]:
    (config,) = (one for one in manifests() if one["kind"] == "ConfigMap")
    kubernetes = config["data"]["lorimer.toml"]
    ray = 'cluster = "ray"\ndevice = "cuda"\n' + kubernetes
    return {"compose": (DEPLOY / "lorimer.toml").read_text(), "kubernetes": kubernetes, "ray": ray}


@pytest.mark.parametrize("name", ["compose", "kubernetes", "ray"])
def test_the_settings_exist(name, tmp_path):
    (tmp_path / "lorimer.toml").write_text(configurations()[name])
    check(*LORIMER, "config", "--config", tmp_path / "lorimer.toml", **environment())


def test_the_dashboard_shows_metrics_that_exist(tmp_path):
    import httpx2

    dashboard = json.loads((DEPLOY / "grafana" / "lorimer.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    with running_server(tmp_path / "data", ["lorimer/debug"]) as server:
        found = httpx2.get(f"{server.url}/metrics").raise_for_status().text
    known = set(re.findall(r"^# TYPE (\S+)", found, re.M))
    asked = {name for query in queries for name in re.findall(r"\b(?:lorimer|process)_[a-z_]+", query)}
    assert {name.removesuffix("_bucket") for name in asked} <= known | {"lorimer_http_requests_total"}
    for query in queries if shutil.which("promtool") else []:
        check("promtool", "check", "rules", rules(tmp_path, query))


def rules(folder: Path, query: str) -> Path:
    path = folder / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "a", "rules": [{"record": "a", "expr": query}]}]}))
    return path
