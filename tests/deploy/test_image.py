"""The image and the compose file fit the project. Building and running them is for `make test-compose`."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from peer.config.options import Config, load
from peer.net.security.credentials import load_credentials
from peer.ops import enrollment

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def test_the_base_is_named_by_its_digest_and_compose_names_the_same() -> None:
    (base,) = re.findall(r"(?m)^ARG BASE=(\S+)", DOCKERFILE)
    assert re.fullmatch(r"python:3\.11-[\w-]+@sha256:[0-9a-f]{64}", base)
    assert f"BASE: ${{SOTTO_BASE:-{base}}}" in (ROOT / "docker-compose.yml").read_text()
    assert re.findall(r"(?m)^FROM (\S+)", DOCKERFILE) == ["${BASE}", "${BASE}"]


def test_each_package_of_the_image_has_a_listed_hash() -> None:
    """What is installed comes from the list with hashes, or from the source alone, for which nothing is fetched."""
    commands = re.split(r"&&|\n(?=[A-Z]+ )", re.sub(r"(?m)^#.*\n", "", DOCKERFILE).replace("\\\n", " "))
    installs = [command.split() for command in commands if re.search(r"\bpip3? install\b", command)]
    listed, source = installs
    assert {"--require-hashes", "--no-deps"} <= set(listed)
    assert listed[-2:] == ["--requirement", "/wheels/requirements.txt"]
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(source)
    assert source[-1] == "/source"
    assert not re.search(r"\b(curl|wget|ADD)\b", DOCKERFILE)


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
    assert services["peer-0"]["cap_drop"] == services["operator"]["cap_drop"] == ["ALL"]
    assert services["operator"]["profiles"] == ["operator"]
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["monitoring"]


def test_each_container_mounts_its_own_volume_and_only_the_operators_the_keys_of_the_cluster() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounted = {name: set(service["volumes"]) for name, service in services.items()}
    peers = [f"peer-{index}" for index in range(8)]
    assert {name for name in services if name.startswith("peer")} == set(peers)
    for index, peer in enumerate(peers):
        assert mounted[peer] == {f"{peer}:/kits/{peer}"}
        assert services[peer]["environment"]["SOTTO_PEER_INDEX"] == index
    assert mounted["init"] == {"authority:/authority", *(f"{peer}:/kits/{peer}" for peer in peers)}
    assert mounted["operator"] == {"authority:/authority", *(f"{peer}:/kits/{peer}:ro" for peer in peers)}
    assert {name for name, volumes in mounted.items() if "authority:/authority" in volumes} == {"init", "operator"}
    # A volume takes over the owner of the folder that it is mounted on.
    assert "$(seq -f /kits/peer-%g 0 7)" in DOCKERFILE


def test_grafana_has_no_account_with_a_password_that_everybody_knows() -> None:
    settings = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]["environment"]
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


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
    ("host_name", "index"),
    [("digits-3", 3), ("digits-12", 12)],
)
def test_a_container_knows_which_peer_it_is(
    container: ModuleType, monkeypatch: pytest.MonkeyPatch, host_name: str, index: int
) -> None:
    monkeypatch.setattr(container.socket, "gethostname", lambda: host_name)
    assert container.my_index() == index
    monkeypatch.setenv("SOTTO_PEER_INDEX", "5")
    assert container.my_index() == 5


def test_a_cluster_is_made_once_and_another_one_refused(
    container: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, kits = tmp_path / "authority", tmp_path / "kits"
    for index in range(2):
        (kits / f"peer-{index}").mkdir(parents=True)
    monkeypatch.setattr(container, "AUTHORITY", authority)
    monkeypatch.setattr(container, "KITS", kits)
    assert container.init(3, []) == 2
    assert "has volumes for 2 peers, not for 3" in capsys.readouterr().err
    assert container.init(2, ["--algorithm", "sgp"]) == 0
    assert json.loads((authority / "cluster.json").read_text())["peers"] == 2
    config = tomllib.loads((kits / "peer-1" / "peer.toml").read_text())
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for peer in config["peers"]:
        assert peer["advertise"] == f"{peer['name']}:7700"
        assert peer["name"] in services
    assert config["peer"]["metrics_listen"] == "0.0.0.0:9470"
    assert config["algorithm"]["name"] == "sgp"
    # Every key is in one place: a peer's with the peer, the CA's and the operator's where no peer looks.
    keys = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.key")}
    own = {"kits/peer-0/peer.key", "kits/peer-1/peer.key"}
    assert keys == {"authority/kits/ca.key", "authority/kits/operator.key", *own}
    assert all(stat.S_IMODE((tmp_path / key).stat().st_mode) == 0o600 for key in keys)
    before = (kits / "peer-1" / "peer.pem").read_bytes()
    # A release that did not have it made the cluster.
    (authority / "kits" / "peer-0" / "state").unlink()
    assert container.init(2, ["--algorithm", "sgp"]) == 0
    for peer in ("peer-0", "peer-1"):
        assert (authority / "kits" / peer / "state").readlink() == kits / peer / "state"
    assert (kits / "peer-1" / "peer.pem").read_bytes() == before
    assert container.init(3, []) == 2
    assert "a cluster of 2 peers" in capsys.readouterr().err


def test_kits_are_added_to_a_cluster_when_that_is_asked_for(
    container: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kits, authority = tmp_path / "kits", tmp_path / "authority"
    for index in range(4):
        (kits / f"peer-{index}").mkdir(parents=True)
    monkeypatch.setattr(container, "AUTHORITY", authority)
    monkeypatch.setattr(container, "KITS", kits)
    monkeypatch.setenv("SOTTO_PEERS", "2")
    monkeypatch.setenv("SOTTO_OPTIONS", "--set run.rounds=7")
    assert container.main(["init"]) == 0
    before = {file: file.read_bytes() for file in kits.rglob("*") if file.is_file()}
    # The volume of peer 1 is lost, and there are to be two more. A shell without the variables does nothing of it.
    for file in (kits / "peer-1").iterdir():
        file.unlink()
    for missing in ({"SOTTO_PEERS": "8"}, {"SOTTO_PEERS": "8", "SOTTO_OPTIONS": ""}):
        with monkeypatch.context() as changed:
            for name, value in missing.items():
                changed.setenv(name, value)
            assert container.main(["init"]) == 2
        advice = capsys.readouterr().err
        assert re.match(r"\d{4}-\d\d-\d\d ", advice)
        # Advice that destroys data never comes first.
        assert 0 < advice.index("SOTTO_PEERS=2 and SOTTO_OPTIONS=--set run.rounds=7") < advice.index("--volumes")
        assert ".env" in advice
        assert "run --rm init add" in advice
    monkeypatch.setenv("SOTTO_PEERS", "4")
    assert container.main(["add"]) == 0
    for index in range(4):
        config = tomllib.loads((kits / f"peer-{index}" / "peer.toml").read_text())
        assert config["peer"]["index"] == index
        assert config["peer"]["listen"] == "0.0.0.0:7700"
        assert config["peer"]["metrics_listen"] == "0.0.0.0:9470"
        assert config["run"]["rounds"] == 7
        assert config["peers"][index]["advertise"] == f"peer-{index}:7700"
        load_credentials(config_of(kits, index).security, kits / f"peer-{index}", f"peer-{index}")
        assert not (authority / "kits" / f"peer-{index}" / "peer.key").exists()
        # How a peer has ended that answers nobody any more.
        (kits / f"peer-{index}" / "state").mkdir(exist_ok=True)
        (kits / f"peer-{index}" / "state" / "model.safetensors").touch()
        assert (authority / "kits" / f"peer-{index}" / "state" / "model.safetensors").exists()
    after = {file: file.read_bytes() for file in kits.rglob("*") if file.is_file()}
    changed_files = {file for file, content in before.items() if after[file] != content}
    assert changed_files == {kits / "peer-1" / "peer.key", kits / "peer-1" / "peer.pem"}
    # It is what the cluster is from now on, and nothing is made twice.
    assert container.main(["init"]) == container.main(["add"]) == 0
    assert {file: file.read_bytes() for file in kits.rglob("*") if file.is_file()} == after
    monkeypatch.setenv("SOTTO_PEERS", "3")
    assert container.main(["add"]) == 2, "peers are taken out with `sotto admin leave` and `sotto remove`"


def config_of(kits: Path, index: int) -> Config:
    return load(kits / f"peer-{index}" / "peer.toml", environment={})


def test_a_container_of_any_user_says_what_it_may_not_read(
    container: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As OpenShift starts it: a user that no file knows, of group 0."""
    assert "--group=root --mode=0770 /kits /authority $(seq -f /kits/peer-%g 0 7)" in DOCKERFILE

    def refused() -> Path:
        raise PermissionError(errno.EACCES, "Permission denied", "/kits/peer-0/peer.toml")

    monkeypatch.setattr(container, "my_file", refused)
    assert container.main(["health"]) == 1
    said = capsys.readouterr().err
    assert f"Permission denied: '/kits/peer-0/peer.toml': may user {os.getuid()} of group" in said


@pytest.mark.parametrize(
    ("command", "variables", "said"),
    [
        ("init", {"SOTTO_PEERS": "three"}, "SOTTO_PEERS is 'three', and no number"),
        ("add", {"SOTTO_PEERS": "-1"}, "SOTTO_PEERS is '-1', and no number"),
        ("peer", {"SOTTO_PEERS": "2", "SOTTO_PEER_INDEX": "peer-1"}, "SOTTO_PEER_INDEX is 'peer-1', and no number"),
        ("init", {"SOTTO_PEERS": "2", "SOTTO_OPTIONS": "--name 'a"}, "could not read either: No closing quotation"),
        # Windows' editors end lines of .env like this, which is no fault.
        ("peer", {"SOTTO_PEERS": "2\r", "SOTTO_PEER_INDEX": "2\r"}, None),
    ],
)
def test_a_variable_that_cannot_be_meant_is_named(
    container: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    variables: dict[str, str],
    said: str | None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if said is None:
        with pytest.raises(SystemExit):
            container.main([command])
    else:
        assert container.main([command]) == 2
        assert said in capsys.readouterr().err


def test_the_operators_container_can_revoke_what_init_made(
    container: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(container, "AUTHORITY", tmp_path / "authority")
    for index in range(2):
        (tmp_path / f"peer-{index}").mkdir()
    assert container.init(2, []) == 0
    revoked, _ = enrollment.revoke(tmp_path / "authority" / "kits", "peer-1")
    assert [each.name for each in revoked] == ["peer-1"]


def test_a_container_beyond_the_clusters_peers_ends_well(
    container: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOTTO_PEER_INDEX", "4")
    monkeypatch.setenv("SOTTO_PEERS", "4")
    with pytest.raises(SystemExit) as ended:
        container.main(["peer"])
    assert ended.value.code == 0
    assert "this cluster has 4 peers, and peer 4 is none of them" in capsys.readouterr().err
