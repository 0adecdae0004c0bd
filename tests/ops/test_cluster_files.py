"""The folders that `sotto init --peers` writes for the devices of a cluster."""

from __future__ import annotations

import re
import shutil
import stat
from pathlib import Path

import pytest

from peer.config.options import Config, PeerAddress, SecurityOptions, load
from peer.errors import ConfigError, SottoError
from peer.net.security.certificates import Role
from peer.net.security.credentials import load_credentials
from peer.ops.cluster_files import Host, place_peers, write_cluster
from peer.run.plan import validate_config


def test_a_cluster_on_one_machine(tmp_path: Path) -> None:
    files = write_cluster(tmp_path, Config(), place_peers(3, [], 7700))
    assert [file.parent.name for file in files] == ["peer-0", "peer-1", "peer-2"]
    configs = [load(file, environment={}) for file in files]
    assert [config.peer.index for config in configs] == [0, 1, 2]
    assert [config.peer.listen for config in configs] == ["127.0.0.1:7700", "127.0.0.1:7701", "127.0.0.1:7702"]
    assert len({config.run_digest() for config in configs}) == 1
    assert configs[0].peers == configs[2].peers
    for config, file in zip(configs, files, strict=True):
        name = config.own.name
        credentials = load_credentials(config.security, file.parent, name)
        assert credentials is not None
        assert credentials.identity.name == name


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    write_cluster(tmp_path, Config(), place_peers(1, [], 7700))
    for key in tmp_path.rglob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(list(tmp_path.rglob("*.key"))) == 3


def test_the_operator_is_no_peer(tmp_path: Path) -> None:
    write_cluster(tmp_path, Config(), place_peers(2, [], 7700))
    options = SecurityOptions(certificate="operator.pem", key="operator.key")
    credentials = load_credentials(options, tmp_path, None, role=Role.OPERATOR)
    assert credentials is not None
    assert credentials.identity.role is Role.OPERATOR


def test_a_peer_that_cannot_be_reached_listens_nowhere(tmp_path: Path) -> None:
    files = write_cluster(tmp_path, Config(), place_peers(None, ["10.0.0.1", "-", "fd00::1"], 7700))
    configs = [load(file, environment={}) for file in files]
    assert [config.peer.listen for config in configs] == ["0.0.0.0:7700", "", "0.0.0.0:7700"]
    assert [peer.advertise for peer in configs[0].peers] == ["10.0.0.1:7700", None, "[fd00::1]:7700"]


def test_an_insecure_cluster_has_no_certificates(tmp_path: Path) -> None:
    write_cluster(tmp_path, Config(security=SecurityOptions(mode="insecure")), place_peers(2, [], 7700))
    assert not list(tmp_path.rglob("*.pem"))


def test_names_of_the_configuration_are_kept(tmp_path: Path) -> None:
    config = Config(peers=(PeerAddress(name="kitchen"), PeerAddress(name="garage")))
    files = write_cluster(tmp_path, config, place_peers(2, [], 7700))
    assert [peer.name for peer in load(files[0], environment={}).peers] == ["kitchen", "garage"]
    with pytest.raises(ConfigError, match="lists 2"):
        write_cluster(tmp_path / "other", config, place_peers(3, [], 7700))


def test_relative_paths_lead_to_the_same_places(tmp_path: Path) -> None:
    base = tmp_path / "jobs"
    base.mkdir()
    config = load(None, overrides=["training.warm_start=start.safetensors", "data.directory=/data"], environment={})
    files = write_cluster(tmp_path / "kits", config, place_peers(1, [], 7700), base=base)
    moved = load(files[0], environment={})
    assert moved.training.warm_start is not None
    assert (files[0].parent / moved.training.warm_start).resolve() == base / "start.safetensors"
    assert moved.data.directory == "/data"


def test_a_kit_that_is_copied_alone_finds_what_its_paths_lead_to(tmp_path: Path) -> None:
    base = tmp_path / "jobs"
    (base / "data" / "mnist").mkdir(parents=True)
    (base / "data" / "mnist" / "labels").write_text("7")
    (base / "start.safetensors").write_bytes(b"weights")
    (base / "ring.toml").write_text("edges")
    overrides = ["training.warm_start=start.safetensors", "data.directory=data/mnist", "graph.file=ring.toml"]
    config = load(None, overrides=overrides, environment={})
    files = write_cluster(tmp_path / "kits", config, place_peers(2, [], 7700), base=base, to_be_copied=True)
    on_device = tmp_path / "elsewhere" / "deeper" / "peer-1"
    # As `scp -r` does.
    shutil.copytree(files[1].parent, on_device, symlinks=False)
    shutil.rmtree(base)
    found = load(on_device / "peer.toml", environment={})
    assert (found.training.warm_start, found.graph.file, found.data.directory) == (
        "start.safetensors", "ring.toml", "data/mnist",
    )  # fmt: skip
    assert (on_device / "start.safetensors").read_bytes() == b"weights"
    assert (on_device / "ring.toml").read_text() == "edges"
    assert (on_device / "data" / "mnist" / "labels").read_text() == "7"
    assert load(files[0], environment={}).run_digest() == found.run_digest()


@pytest.mark.parametrize(
    ("directory", "partition", "in_kit", "linked"),
    [
        ("data", "iid", "data", True),
        ("../elsewhere/mnist", "iid", "mnist", True),
        ("data", "own", "data", False),
        ("missing", "iid", "missing", False),
        ("/samples", "iid", "/samples", False),
    ],
)
def test_where_a_kit_looks_for_its_data(
    tmp_path: Path, directory: str, partition: str, in_kit: str, linked: bool
) -> None:
    base = tmp_path / "jobs"
    (base / "data").mkdir(parents=True)
    (tmp_path / "elsewhere" / "mnist").mkdir(parents=True)
    overrides = [f"data.directory={directory}", f"data.partition={partition}"]
    config = load(None, overrides=overrides, environment={})
    for force in (False, True):
        (file,) = write_cluster(
            tmp_path / "kits", config, place_peers(1, [], 7700), base=base, to_be_copied=True, force=force
        )
    assert load(file, environment={}).data.directory == in_kit
    assert (file.parent / in_kit).is_symlink() == linked
    if linked:
        assert (file.parent / in_kit).resolve() == (base / directory).resolve()


def test_a_file_that_is_missing_is_named_before_kits_are_copied(tmp_path: Path) -> None:
    config = load(None, overrides=["training.warm_start=start.safetensors"], environment={})
    with pytest.raises(ConfigError, match=r"training\.warm_start: cannot be read: No such file"):
        write_cluster(tmp_path, config, place_peers(1, [], 7700), to_be_copied=True)


def test_a_cluster_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    write_cluster(tmp_path, Config(), place_peers(2, [], 7700))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="already exists"):
        write_cluster(tmp_path, Config(), place_peers(2, [], 7700))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / "ca.pem").rename(tmp_path / "moved.pem")
    with pytest.raises(ConfigError, match="already exists"):
        write_cluster(tmp_path, Config(), place_peers(2, [], 7700))
    assert not (tmp_path / "ca.pem").exists()
    files = write_cluster(tmp_path, Config(), place_peers(2, [], 7700), force=True)
    assert (tmp_path / "ca.pem").read_bytes() != before[tmp_path / "ca.pem"]
    assert load_credentials(load(files[1], environment={}).security, files[1].parent, "peer-1") is not None


@pytest.mark.parametrize("left", ["peer-0/state", "peer-1/state", "peer-2", "invitations", "collected"])
def test_what_a_run_has_left_stays_beside_no_other_keys(tmp_path: Path, left: str) -> None:
    write_cluster(tmp_path, Config(), place_peers(2, [], 7700))
    (tmp_path / left).mkdir()
    key = (tmp_path / "ca.key").read_bytes()
    with pytest.raises(ConfigError) as caught:
        write_cluster(tmp_path, Config(), place_peers(2, [], 7700), force=True)
    assert str(caught.value).startswith(f"{tmp_path / left}: is of an earlier run")
    assert f"name another folder, or delete {tmp_path}" in str(caught.value)
    assert (tmp_path / "ca.key").read_bytes() == key
    (tmp_path / left).rmdir()
    write_cluster(tmp_path, Config(), place_peers(2, [], 7700), force=True)
    assert (tmp_path / "ca.key").read_bytes() != key


@pytest.mark.parametrize(
    ("num_peers", "hosts", "placed"),
    [
        (2, [], [("127.0.0.1", 7700), ("127.0.0.1", 7701)]),
        (2, ["box:9000"], [("box", 9000), ("box", 9001)]),
        (None, ["a", "b:1"], [("a", 7700), ("b", 1)]),
        (None, ["a", "a", "a"], [("a", 7700), ("a", 7701), ("a", 7702)]),
        (None, ["[::1]:5", "::1"], [("::1", 5), ("::1", 7700)]),
        (1, ["-"], [(None, 7700)]),
    ],
)
def test_hosts_are_placed(num_peers: int | None, hosts: list[str], placed: list[tuple[str | None, int]]) -> None:
    assert place_peers(num_peers, hosts, 7700) == [Host(address, port) for address, port in placed]


@pytest.mark.parametrize(
    ("num_peers", "hosts", "fragment"),
    [
        (None, [], "--peers: is missing"),
        (3, ["a", "b"], "2 times, but there are 3 peers"),
        (None, ["a", "b:port"], "'b:port'"),
        (None, ["a", ":5"], "':5'"),
        (None, ["a", "b:70000"], "'b:70000'"),
        (2, ["-"], "needs an address that others can dial"),
        (9, ["a:65530"], "no room"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(num_peers: int | None, hosts: list[str], fragment: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(fragment)):
        place_peers(num_peers, hosts, 7700)


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["0.0.0.0", "10.0.0.2"], "stands for all addresses"),
        (["::", "10.0.0.2"], "stands for all addresses"),
        (["::ffff:0.0.0.0", "10.0.0.2"], "stands for all addresses"),
        (["224.0.0.1", "10.0.0.2"], "of many devices"),
        (["ff02::1", "10.0.0.2"], "of many devices"),
        (["255.255.255.255", "10.0.0.2"], "of many devices"),
        (["fe80::1", "fd00::2"], "needs a scope"),
        (["10.0.0.256", "10.0.0.2"], "is no IPv4 address"),
        (["10.1", "10.0.0.2"], "is no IPv4 address"),
        (["a b", "c"], "neither a host name nor an IP address"),
        (["a/b", "c"], "neither a host name nor an IP address"),
        (["a_b", "c"], "no certificate can be made out"),
        (["a" * 64 + ".org", "c"], "at most 253 in all and 63 between two dots"),
        (["a." * 126 + "org", "c"], "at most 253 in all and 63 between two dots"),
        (["localhost", "10.0.0.2"], "leads each device to itself, and 10.0.0.2 is another one"),
        (["10.0.0.2", "127.0.1.1"], "leads each device to itself"),
        (["pi-a.local", "::1"], "leads each device to itself"),
        (["LOCALHOST.", "::ffff:127.0.0.1", "pi-a"], "leads each device to itself"),
    ],
)
def test_a_host_that_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, hosts: list[str], words: str
) -> None:
    with pytest.raises(SottoError, match=words):
        write_cluster(tmp_path / "kits", Config(), place_peers(None, hosts, 7700))
    assert not (tmp_path / "kits").exists()


@pytest.mark.parametrize(
    ("hosts", "listen"),
    [
        (["::1", "[::1]:7811"], ["[::1]:7700", "[::1]:7811"]),
        (["localhost", "localhost"], ["localhost:7700", "localhost:7701"]),
        (["127.0.0.1", "127.0.0.2"], ["127.0.0.1:7700", "127.0.0.2:7700"]),
        (["pi-a.local", "fd00::2"], ["0.0.0.0:7700", "0.0.0.0:7700"]),
        # Longer than the name of a peer may be, or than the common name of a certificate.
        (["digits-0." + "namespace-of-a-team." * 4 + "cluster.local", "c"], ["0.0.0.0:7700", "0.0.0.0:7700"]),
    ],
)
def test_a_peer_listens_where_others_dial_it(tmp_path: Path, hosts: list[str], listen: list[str]) -> None:
    files = write_cluster(tmp_path, Config(), place_peers(None, hosts, 7700))
    assert [load(file, environment={}).peer.listen for file in files] == listen


def test_what_else_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = load(None, overrides=["training.warm_start=missing.safetensors"], environment={})
    with pytest.raises(ConfigError, match=r"training\.warm_start: cannot be read"):
        write_cluster(tmp_path / "kits", config, place_peers(2, [], 7700), base=tmp_path, to_be_copied=True)
    assert not (tmp_path / "kits").exists()


def test_an_address_of_an_older_list_that_leads_nowhere_is_warned_about(tmp_path: Path) -> None:
    (file, _) = write_cluster(tmp_path, Config(), place_peers(None, ["10.0.0.1", "10.0.0.2"], 7700))
    file.write_text(file.read_text().replace("10.0.0.2:7700", "0.0.0.0:7700"))
    said = [each for each in validate_config(load(file, environment={}), tmp_path) if each.key == "peers.1.advertise"]
    assert [each.level for each in said] == ["warning"]
    assert "0.0.0.0:7700 stands for all addresses" in said[0].sentence
