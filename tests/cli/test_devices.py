"""Adding a device to a cluster, and taking a certificate back."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
from cryptography.x509 import SubjectAlternativeName, load_pem_x509_certificate

from peer.config.options import SecurityOptions, load
from peer.errors import SecurityError, StateError
from peer.net.security.credentials import Credentials, load_credentials
from peer.net.security.requests import request_certificate
from peer.state.admission_log import FILE, AdmissionLog
from peer.state.disk import Disk
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

    signed = sotto("admin", "sign", "kits", "garage/request.pem", "--json", "--yes")
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
    assert sotto("admin", "sign", "kits", "van/request.pem", "--yes").exit_code == 0
    config = load(Path("kits/peer-2/peer.toml"), environment={})
    assert config.peers[2].advertise is None
    assert not config.peer.listen


def test_a_peer_of_the_list_gets_a_new_certificate_and_nothing_else() -> None:
    before = contents(Path("kits/peer-1"))
    assert sotto("init", "--join", "again", "--name", "peer-1").exit_code == 0
    answer = json.loads(sotto("admin", "sign", "kits", "again/request.pem", "--json", "--yes").stdout)
    assert (answer["renewed"], answer["index"], answer["folder"]) == (True, 1, "kits/peer-1")
    after = contents(Path("kits/peer-1"))
    after["kits/peer-1/peer.key"] = after.pop("kits/peer-1/peer.key.old")
    assert {file for file in after if after[file] != before[file]} == {"kits/peer-1/peer.pem"}
    Path("kits/peer-1/peer.toml").unlink()
    assert (
        "copy another's and set peer.index = 1" in sotto("admin", "sign", "kits", "again/request.pem", "--yes").stdout
    )


def test_what_is_to_be_copied_is_never_the_key_that_a_device_has_replaced() -> None:
    assert sotto("init", "--join", "again", "--name", "peer-1").exit_code == 0
    renewed = sotto("admin", "sign", "kits", "again/request.pem", "--yes")
    assert [each.name for each in Path("kits/peer-1").glob("peer.key*")] == ["peer.key.old"]
    assert "copy       kits/peer-1/*.pem, and peer.toml if it has none, to the device" in renewed.stdout
    assert "new member" not in renewed.stderr


def test_the_operator_is_told_that_a_request_makes_a_new_member() -> None:
    garage()
    signed = sotto("admin", "sign", "kits", "garage/request.pem", "--yes")
    assert "new member of the run; a device that replaces one asks by its name in `sotto status`" in signed.stderr
    assert "copy       kits/peer-2/* to the device" in signed.stdout


def test_two_devices_in_a_row_get_positions_in_a_row() -> None:
    for index, name in ((2, "garage"), (3, "attic")):
        sotto("init", "--join", name, "--name", name)
        assert (
            json.loads(sotto("admin", "sign", "kits", f"{name}/request.pem", "--json", "--yes").stdout)["index"]
            == index
        )
    assert [peer.name for peer in load(Path("kits/peer-3/peer.toml"), environment={}).peers][2:] == ["garage", "attic"]


def garage() -> str:
    """Make a device's request; return the thumbprint of its key, as the device printed it."""
    made = sotto("init", "--join", "garage", "--name", "garage", "--host", "10.0.0.9:7800")
    return made.stdout.splitlines()[0].rpartition(" ")[2]


def test_the_operator_sees_name_address_and_key_and_nothing_is_signed_unless_he_agrees() -> None:
    key = garage()
    for answer in ("n\n", ""):
        refused = sotto("admin", "sign", "kits", "garage/request.pem", typed=answer)
        assert refused.exit_code == SecurityError.exit_code
        assert "not signed: nobody confirmed it" in refused.stderr
        assert not Path("kits/peer-2").exists()
        assert not Path("kits/issued").exists()
    agreed = sotto("admin", "sign", "kits", "garage/request.pem", typed="y\n")
    assert agreed.exit_code == 0
    for line in ("name       garage", "address    10.0.0.9:7800", f"key        {key}"):
        assert line in agreed.stderr
    assert "left out" not in agreed.stderr


@pytest.mark.parametrize("wrong", [None, "name", "address", "key"])
def test_with_name_address_and_key_nothing_is_asked_and_nothing_else_is_signed(wrong: str | None) -> None:
    given = {"name": "garage", "address": "10.0.0.9:7800", "key": garage().replace(":", "").lower()}
    if wrong is not None:
        given[wrong] = {"name": "attic", "address": "-", "key": "3F:A9"}[wrong]
    options = [word for name, value in given.items() for word in (f"--{name}", value)]
    result = sotto("admin", "sign", "kits", "garage/request.pem", *options, typed="y\n")
    assert Path("kits/peer-2/peer.pem").exists() == (wrong is None)
    if wrong is not None:
        assert result.exit_code == SecurityError.exit_code
        assert f"not signed: the request is for {wrong}" in result.stderr


def test_names_and_addresses_that_a_request_brings_along_are_shown_and_not_signed() -> None:
    pem, _ = request_certificate("peer-1", ["peer-0", "10.6.6.6"], address="10.6.6.6:7700")
    Path("request.pem").write_bytes(pem)
    result = sotto("admin", "sign", "kits", "request.pem", "--json", "--yes")
    assert json.loads(result.stdout)["left_out"] == ["'10.6.6.6:7700'", "'peer-0'"]
    assert "renewal    of the certificate of peer 1" in result.stderr
    names = load_pem_x509_certificate(Path("kits/peer-1/peer.pem").read_bytes()).extensions
    signed = [str(each.value) for each in names.get_extension_for_class(SubjectAlternativeName).value]
    assert signed == ["peer-1", "127.0.0.1", "urn:sottovoce:role:peer"]


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
    result = sotto("admin", "revoke", "kits", "peer-1")
    assert result.exit_code == 6
    assert "failed   peer-0: peer 0: nobody listens at 127.0.0.1:7700" in result.stdout
    assert "copy kits/revoked.pem beside the ca.pem of any peer" in result.stdout
    with pytest.raises(SecurityError, match="the certificate of 'peer-1' was revoked"):
        load_credentials(SecurityOptions(), Path("kits/peer-1"), "peer-1")
    assert load_credentials(SecurityOptions(), Path("kits/peer-0"), "peer-0") is not None


def test_a_device_whose_key_was_lost_goes_on_with_a_new_one() -> None:
    sotto("init", "--join", "again", "--name", "peer-1")
    sotto("admin", "sign", "kits", "again/request.pem", "--yes")
    answer = json.loads(sotto("admin", "revoke", "kits", "peer-1", "--keep-newest", "--json").stdout)
    assert len(answer["revoked"]) == 1
    shutil.copy("again/peer.key", "kits/peer-1")
    assert load_credentials(SecurityOptions(), Path("kits/peer-1"), "peer-1") is not None


def test_a_new_device_gets_the_model_that_the_run_starts_from() -> None:
    Path("start.safetensors").write_bytes(b"weights")
    start = ("--set", "training.warm_start=start.safetensors")
    assert sotto("init", "cluster", "kits", "--peers", "2", "--force", *start).exit_code == 0
    assert sotto("init", "--join", "garage", "--name", "garage").exit_code == 0
    assert sotto("admin", "sign", "kits", "garage/request.pem", "--yes").exit_code == 0
    config = load(Path("kits/peer-2/peer.toml"), environment={})
    assert config.training.warm_start == "start.safetensors"
    assert Path("kits/peer-2/start.safetensors").read_bytes() == b"weights"
    Path("kits/peer-2/start.safetensors").unlink()
    before = sorted(Path("kits").rglob("*"))
    assert sotto("init", "--join", "attic", "--name", "attic").exit_code == 0
    refused = sotto("admin", "sign", "kits", "attic/request.pem", "--yes")
    assert "training.warm_start: cannot be read" in refused.output
    assert sorted(Path("kits").rglob("*")) == before, "all is looked at before the first file is written"


def test_a_new_device_needs_an_address_that_leads_to_it() -> None:
    assert sotto("init", "cluster", "far", "--host", "10.0.0.1", "--host", "10.0.0.2").exit_code == 0
    refused = sotto("init", "--join", "garage", "--name", "garage", "--host", "0.0.0.0")
    assert "stands for all addresses" in refused.output
    assert not Path("garage").exists()
    assert sotto("init", "--join", "garage", "--name", "garage", "--host", "127.0.0.1").exit_code == 0
    refused = sotto("admin", "sign", "far", "garage/request.pem", "--yes")
    assert refused.exit_code == 2
    assert "leads each device to itself" in refused.output
    assert not Path("far/peer-2").exists()


# -- lifetimes, the passphrase of the authority, the admission log -----------------------------------------------------


def _days(file: str) -> int:
    certificate = load_pem_x509_certificate(Path(file).read_bytes())
    return (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days - 1  # It is valid since yesterday.


def test_lifetimes_are_an_option_and_nothing_outlives_the_authority() -> None:
    made = sotto("init", "cluster", "short", "--peers", "1", "--days", "90", "--ca-days", "365")
    assert made.exit_code == 0
    assert (_days("short/peer-0/peer.pem"), _days("short/operator.pem"), _days("short/ca.pem")) == (90, 90, 365)
    assert sotto("init", "--join", "again", "--name", "peer-0").exit_code == 0
    assert sotto("admin", "sign", "short", "again/request.pem", "--yes", "--days", "7").exit_code == 0
    assert _days("short/peer-0/peer.pem") == 7
    assert sotto("admin", "sign", "short", "again/request.pem", "--yes", "--days", "3000").exit_code == 0
    assert _days("short/peer-0/peer.pem") in (364, 365)


def test_the_key_of_the_authority_may_have_a_passphrase() -> None:
    typed = "correct horse\n"
    made = sotto("init", "cluster", "secret", "--peers", "2", "--passphrase", typed=2 * typed)
    assert made.exit_code == 0
    assert b"ENCRYPTED" in Path("secret/ca.key").read_bytes()
    assert sotto("init", "--join", "van", "--name", "van").exit_code == 0
    wrong = sotto("admin", "sign", "secret", "van/request.pem", "--yes", typed="wrong\n")
    assert wrong.exit_code == SecurityError.exit_code
    assert "cannot be read with that passphrase" in wrong.stderr
    assert sotto("admin", "sign", "secret", "van/request.pem", "--yes", typed=typed).exit_code == 0
    by_script = {"SOTTO_CA_PASSPHRASE": "correct horse"}
    assert sotto("admin", "sign", "secret", "van/request.pem", "--yes", **by_script).exit_code == 0
    assert "revoked  van" in sotto("admin", "revoke", "secret", "van", **by_script).stdout
    # A peer's own key has none, and keys without one are read as before.
    assert sotto("admin", "sign", "kits", "van/request.pem", "--yes", **by_script).exit_code == 0
    assert sotto("init", "cluster", "empty", "--passphrase", SOTTO_CA_PASSPHRASE="").exit_code == 2


def test_the_admission_log_is_shown_and_verified() -> None:
    state = Path("kits/peer-0/state")
    empty = sotto("admin", "audit", "--config", "kits/peer-0/peer.toml")
    assert (empty.exit_code, empty.stdout) == (0, "0 entries, each follows from those before it\n")
    state.mkdir()
    log = AdmissionLog(Disk(state), lambda: 1_700_000_000.0)
    log.add("join", name="garage", peer=2, told_by="peer-0", from_round=40, frame="00")
    log.add("control", call="remove", caller="operator", name="garage", outcome="done")
    log.close()
    shown = sotto("admin", "audit", "--config", "kits/peer-0/peer.toml", "--chain", log.chain)
    assert shown.exit_code == 0
    assert "join      name garage, peer 2, told_by peer-0, from_round 40\n" in shown.stdout
    assert f"the chain ends with {log.chain}" in shown.stdout
    entries = json.loads(sotto("admin", "audit", "--config", "kits/peer-0/peer.toml", "--json").stdout)
    assert [entry["what"] for entry in entries] == ["join", "control"]
    lost = sotto("admin", "audit", "--config", "kits/peer-0/peer.toml", "--chain", "0" * 64)
    assert (lost.exit_code, "no entry has the chain" in lost.stderr) == (StateError.exit_code, True)
    file = state / FILE
    file.write_bytes(file.read_bytes().replace(b"garage", b"attic"))
    changed = sotto("admin", "audit", "--config", "kits/peer-0/peer.toml")
    assert (changed.exit_code, "line 1 was changed" in changed.stderr) == (StateError.exit_code, True)
