"""The manifests fit Kubernetes' own schemas, each other, and the image. No cluster is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted(file for file in (DEPLOY / "kubernetes").glob("*.yaml") if file.stem != "kustomization")


def manifest(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
@pytest.mark.parametrize("version", ["1.29", "1.33"])
def test_manifests_fit_the_schema(file: Path, version: str) -> None:
    assert kubernetes_validate.validate(yaml.safe_load(file.read_text()), version, strict=True) is not None


def test_kustomization_lists_every_manifest() -> None:
    assert sorted(manifest("kustomization")["resources"]) == [file.name for file in MANIFESTS]


def test_names_labels_and_ports_agree() -> None:
    peers, service = manifest("statefulset"), manifest("service")
    assert peers["spec"]["serviceName"] == service["metadata"]["name"]
    labels = peers["spec"]["template"]["metadata"]["labels"]
    assert peers["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert manifest("disruption-budget")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("network-policy")["spec"]["podSelector"]["matchLabels"] == labels
    container = peers["spec"]["template"]["spec"]["containers"][0]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == ports
    entrypoint = (DEPLOY / "container.py").read_text()
    assert f"PORT = {ports['gossip']}\n" in entrypoint
    assert f"METRICS_PORT = {ports['metrics']}\n" in entrypoint


def test_pods_run_as_the_user_of_the_image_and_see_only_their_own_key() -> None:
    pod = manifest("statefulset")["spec"]["template"]["spec"]
    assert f"--uid {pod['securityContext']['runAsUser']}" in (DEPLOY / "Dockerfile").read_text()
    assert "kits" not in {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_kustomization_and_the_result_fits_the_schema() -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes")]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    documents = list(yaml.safe_load_all(built))
    assert sorted(each["kind"] for each in documents) == sorted(manifest(file.stem)["kind"] for file in MANIFESTS)
    for document in documents:
        assert kubernetes_validate.validate(document, "1.33", strict=True) is not None
    peers = next(each for each in documents if each["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    for container in (*peers["initContainers"], *peers["containers"]):
        assert container["image"] == "sottovoce:latest"


@pytest.mark.usefixtures("warm_python")
def test_the_kits_that_the_readme_makes_reach_each_its_own_pod(tmp_path: Path) -> None:
    text = (DEPLOY / "README.md").read_text().partition("\n## Kubernetes\n")[2]
    block = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]
    before_the_cluster = block.partition("kubectl ")[0]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = ["sh", "-euc", before_the_cluster]
    subprocess.run(script, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, check=True)

    peers = manifest("statefulset")["spec"]
    (init,) = peers["template"]["spec"]["initContainers"]
    mounts = {mount["name"]: mount for mount in init["volumeMounts"]}
    last = peers["replicas"] - 1
    (variable,) = init["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    own = mounts["kits"]["subPathExpr"].replace(f"$({variable['name']})", f"digits-{last}")
    volume = tmp_path / "volume"
    volume.mkdir()
    *shell, line = init["command"]
    # Both are words of their own only after a blank.
    line = line.replace(f" {mounts['state']['mountPath']}", f" {volume}")
    line = line.replace(f" {mounts['kits']['mountPath']}", f" {tmp_path / 'packed' / own}")
    subprocess.run([*shell, line], check=True)
    assert [folder.name for folder in volume.iterdir()] == [f"peer-{last}"]
    assert (volume / f"peer-{last}" / "peer.key").stat().st_mode & 0o077 == 0
    config = tomllib.loads((volume / f"peer-{last}" / "peer.toml").read_text())
    service = manifest("service")["metadata"]["name"]
    assert [each["advertise"] for each in config["peers"]] == [
        f"digits-{number}.{service}:7700" for number in range(peers["replicas"])
    ]
