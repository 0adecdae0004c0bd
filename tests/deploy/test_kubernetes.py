"""The manifests fit Kubernetes' own schemas, each other, and the image. No cluster is needed."""

from __future__ import annotations

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
