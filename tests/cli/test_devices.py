"""Adding a device to a cluster, and taking a certificate back."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from peer.config import SecurityOptions, load
from peer.errors import SecurityError
from peer.net.security.credentials import Credentials, load_credentials
from tests.cli.runner import sotto


@pytest.fixture(autouse=True)
def _a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sotto("init", "cluster", "kits", "--peers", "2").exit_code == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_device_joins_with_a_key_that_never_leaves_it_and_nothing_of_the_others_changes() -> None:
    before = contents(Path("kits"))
    made = sotto("init", "--join", "garage", "--name", "garage", "--host", "10.0.0.9:7800")
    assert made.exit_code == 0
    key = Path("garage/peer.key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert sorted(file.name for file in Path("garage").iterdir()) == ["peer.key", "request.pem"]

    signed = sotto("sign", "kits", "garage/request.pem", "--json")
    assert signed.exit_code == 0
    answer = json.loads(signed.stdout)
    assert (answer["name"], answer["index"], answer["renewed"]) == ("garage", 2, False)
    assert answer["key"] in made.stdout

    after = contents(Path("kits"))
    assert before.items() <= after.items()
    new = {Path(file).relative_to("kits").parts[0] for file in after.keys() - before.keys()}
    assert new == {"peer-2", "issued"}
    for file in Path("kits/peer-2").iterdir():
        file.rename(Path("garage") / file.name)
    config = load(Path("garage/peer.toml"), environment={})
    assert [peer.name for peer in config.peers] == ["peer-0", "peer-1", "garage"]
    assert (config.peer.index, config.peer.listen) == (2, "0.0.0.0:7800")
    assert config.peers[2].advertise == "10.0.0.9:7800"
    assert isinstance(load_credentials(config.security, Path("garage"), "garage"), Credentials)


def test_a_device_that_nobody_can_reach_asks_without_a_host() -> None:
    assert sotto("init", "--join", "van", "--name", "van").exit_code == 0
    assert sotto("sign", "kits", "van/request.pem").exit_code == 0
    config = load(Path("kits/peer-2/peer.toml"), environment={})
    assert config.peers[2].advertise is None
    assert not config.peer.listen


def test_a_peer_of_the_list_gets_a_new_certificate_and_nothing_else() -> None:
    before = contents(Path("kits/peer-1"))
    assert sotto("init", "--join", "again", "--name", "peer-1").exit_code == 0
    answer = json.loads(sotto("sign", "kits", "again/request.pem", "--json").stdout)
    assert (answer["renewed"], answer["index"], answer["folder"]) == (True, 1, "kits/peer-1")
    after = contents(Path("kits/peer-1"))
    assert {file for file in after if after[file] != before[file]} == {"kits/peer-1/peer.pem"}


def test_two_devices_in_a_row_get_positions_in_a_row() -> None:
    for index, name in ((2, "garage"), (3, "attic")):
        sotto("init", "--join", name, "--name", name)
        assert json.loads(sotto("sign", "kits", f"{name}/request.pem", "--json").stdout)["index"] == index
    assert [peer.name for peer in load(Path("kits/peer-3/peer.toml"), environment={}).peers][2:] == ["garage", "attic"]


def test_a_key_that_is_there_is_not_overwritten() -> None:
    assert sotto("init", "--join", "garage", "--name", "garage").exit_code == 0
    result = sotto("init", "--join", "garage", "--name", "garage")
    assert result.exit_code == SecurityError.exit_code
    assert "exists already and is not overwritten" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("init", "--join", "x"), "--name: is missing"),
        (("init", "--name", "x"), "--name: can only be used with --join"),
        (("sign", "kits", "kits/ca.pem"), "not a request for a certificate"),
        (("sign", "kits/peer-0", "request.pem"), "run this command where the cluster was created"),
        (("revoke", "kits", "nobody"), "kits has not issued a certificate to 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(arguments: tuple[str, ...], words: str) -> None:
    assert sotto("init", "--join", ".", "--name", "x").exit_code == 0
    result = sotto(*arguments)
    assert result.exit_code in (2, 3)
    assert words in result.stderr


def test_revoking_reaches_every_folder_and_says_when_nobody_could_be_told() -> None:
    result = sotto("revoke", "kits", "peer-1")
    assert result.exit_code == 6
    assert "failed   peer-0: peer 0: nobody listens at 127.0.0.1:7700" in result.stdout
    assert "copy kits/revoked.pem beside the ca.pem of any peer" in result.stdout
    with pytest.raises(SecurityError, match="the certificate of 'peer-1' was revoked"):
        load_credentials(SecurityOptions(), Path("kits/peer-1"), "peer-1")
    assert load_credentials(SecurityOptions(), Path("kits/peer-0"), "peer-0") is not None


def test_a_device_whose_key_was_lost_goes_on_with_a_new_one() -> None:
    sotto("init", "--join", "again", "--name", "peer-1")
    sotto("sign", "kits", "again/request.pem")
    answer = json.loads(sotto("revoke", "kits", "peer-1", "--keep-newest", "--json").stdout)
    assert len(answer["revoked"]) == 1
    Path("kits/peer-1/peer.key").write_bytes(Path("again/peer.key").read_bytes())
    assert load_credentials(SecurityOptions(), Path("kits/peer-1"), "peer-1") is not None
