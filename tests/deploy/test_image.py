"""The image and the compose file fit the project. Building and running them is for `make test-compose`."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def test_every_dependency_is_pinned_to_a_version_that_it_accepts() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines() if "==" in line
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]["metrics"]
    for text in [*project["project"]["dependencies"], *project["build-system"]["requires"], *extras]:
        wanted = Requirement(text)
        assert pins[wanted.name.lower().replace("_", "-")] in wanted.specifier, text


def test_what_the_image_copies_is_in_its_context() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.*)", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]
    ]
    assert len(copied) > 5
    for name in copied:
        # The brackets make a pattern of it, which may match nothing.
        name = name.replace("[", "").replace("]", "")
        assert name in allowed
        assert name == "deploy/wheels" or (ROOT / name).exists()


def test_every_variable_of_the_compose_file_is_described() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    described = (ROOT / "deploy" / "README.md").read_text()
    variables = set(re.findall(r"\$\{(\w+)", text))
    assert len(variables) >= 5
    for variable in variables:
        assert f"`{variable}`" in described
    services = yaml.safe_load(text)["services"]
    # Neither the engine's own defaults nor a peer's key are to be had from a container that was taken over.
    assert services["peer"]["cap_drop"] == ["ALL"]
    assert "authority:/authority" not in services["peer"]["volumes"]
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["monitoring"]


def test_the_compose_file_is_one_to_the_specification() -> None:
    # That of version 2; what version 1 makes of it, `make test-compose` tries.
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(ROOT / "docker-compose.yml")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return what runs in a container, with its volumes in a folder of the test."""
    found = importlib.util.spec_from_file_location("container", ROOT / "deploy" / "container.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.setattr(module, "KITS", tmp_path)
    monkeypatch.delenv("SOTTO_PEER_INDEX", raising=False)
    return module


@pytest.mark.parametrize(
    ("host_name", "in_network", "index"),
    [
        ("digits-3", None, 3),
        ("digits-12", None, 12),
        ("0af31c99d2e1", "sottovoce_peer_1", 0),
        ("0af31c99d2e1", "my-project-peer-8", 7),
    ],
)
def test_a_container_knows_which_peer_it_is(
    container: ModuleType, monkeypatch: pytest.MonkeyPatch, host_name: str, in_network: str | None, index: int
) -> None:
    monkeypatch.setattr(container.socket, "gethostname", lambda: host_name)
    monkeypatch.setattr(container, "name_in_network", lambda: in_network)
    assert container.my_index() == index
    monkeypatch.setenv("SOTTO_PEER_INDEX", "5")
    assert container.my_index() == 5


def test_a_cluster_is_made_once_and_another_one_refused(
    container: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(container, "AUTHORITY", tmp_path / "authority")
    monkeypatch.setattr(container, "name_in_network", lambda: "run_init_1")
    assert container.init(2, ["--algorithm", "sgp"]) == 0
    assert json.loads((tmp_path / "cluster.json").read_text())["peers"] == 2
    config = tomllib.loads((tmp_path / "peer-1" / "peer.toml").read_text())
    assert [peer["advertise"] for peer in config["peers"]] == ["run_peer_1:7700", "run_peer_2:7700"]
    assert config["peer"]["metrics_listen"] == "0.0.0.0:9470"
    assert config["algorithm"]["name"] == "sgp"
    # The key of the CA stays where peers do not look.
    assert not list(tmp_path.glob("ca.key"))
    assert (tmp_path / "authority" / "kits" / "ca.key").exists()
    before = (tmp_path / "peer-1" / "peer.pem").read_bytes()
    assert container.init(2, ["--algorithm", "sgp"]) == 0
    assert (tmp_path / "peer-1" / "peer.pem").read_bytes() == before
    assert container.init(3, []) == 2
    assert "a cluster of 2 peers" in capsys.readouterr().err
