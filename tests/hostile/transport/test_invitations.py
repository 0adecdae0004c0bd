"""Invited devices, and all who are not: the operator's machine and the device over a real connection."""

from __future__ import annotations

import logging
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from peer.config.options import Config, SecurityOptions, load
from peer.errors import ConfigError, PeerUnreachable, RemoteProtocolError, SecurityError, StateError
from peer.net import enrolling
from peer.net.enrolling import Answer, Ask, Hello, Listener, ask
from peer.net.security.authority import CertificateAuthority
from peer.net.security.certificates import Role
from peer.net.security.credentials import Credentials, load_credentials
from peer.net.security.invitations import Invitation, read_invitation
from peer.net.security.requests import read_request
from peer.ops import enrollment
from peer.ops.cluster_files import place_peers, write_cluster
from peer.ops.invitations import Event, Invitations
from peer.ops.joining import join
from peer.run.plan import build_schedule, unreachable_pairs
from tests.ops.test_local_cluster import wait_until

OWN = Config()


class StillWaits(Exception):
    """The device would go on waiting."""


def _wait_no_longer(seconds: float) -> None:
    raise StillWaits


class Site:
    """The operator's machine, with a cluster of two peers, and the devices."""

    def __init__(self, folder: Path, *settings: str, seats: int = 0) -> None:
        self.folder, self.kits = folder, folder / "kits"
        config = load(environment={}, overrides=("run.name=garden", *settings))
        write_cluster(
            self.kits, config, place_peers(2, [], 7700) if not seats else place_peers(3, [], 7700), seats=seats
        )
        self.port = 0
        self._open = ExitStack()
        self.start()

    def start(self, relay: str | None = None) -> None:
        """Begin to answer, as `sotto invite` does."""
        self.desk = self._open.enter_context(Invitations(self.kits, relay=relay))
        self.listener = self.desk.listen([f"127.0.0.1:{self.port}"])
        self.port = self.listener.port
        self._open.callback(self.listener.close)

    def stop(self) -> None:
        self._open.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def invite(self, valid_s: int = 3600) -> Invitation:
        return read_invitation(self.desk.issue([self.address], valid_s).text())

    def decide(self, *, admit: bool = True) -> Event:
        """Decide on what is asked, as the operator does."""
        event = self.desk.events.get(timeout=0)
        while event.kind != "asks":
            event = self.desk.events.get(timeout=0)
        self.desk.decide(event, admit=admit)
        return event

    def join(
        self,
        invitation: Invitation,
        name: str = "garage",
        *,
        folder: str | None = None,
        wait: Callable[[float], object] | None = None,
        own: Config = OWN,
        host: str | None = "127.0.0.1:7790",
    ) -> Path:
        """Return the file of a device that joins; whenever it waits, the operator admits it."""
        return join(
            self.folder / (folder or name),
            invitation,
            name=name,
            host=host,
            own=own,
            say=logging.getLogger("device").info,
            sleep=wait or (lambda seconds: self.decide()),
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.stop()


# -- devices that were invited -----------------------------------------------------------------------------------------


def test_an_invited_device_has_a_certificate_and_the_shared_settings_and_no_other(tmp_path: Path) -> None:
    shared = ("run.rounds=77", "graph.kind=exponential", "data.directory=pictures")
    own = ("state.directory=there", "limits.hours=22:00-07:00", "transport.heartbeat_s=7", "peer.slow_down=3")
    site = Site(tmp_path, *shared, *own)
    mine = load(environment={}, overrides=("limits.day_mbytes=5", f"data.directory={tmp_path}/here"))
    file = site.join(site.invite(), own=mine)
    config = load(file, environment={})
    assert (config.run.name, config.run.rounds, config.graph.kind) == ("garden", 77, "exponential")
    assert [peer.name for peer in config.peers] == ["peer-0", "peer-1", "garage"]
    assert (config.peer.index, config.peer.listen) == (2, "127.0.0.1:7790")
    assert (config.limits, config.state, config.transport) == (mine.limits, Config().state, Config().transport)
    assert config.peer.slow_down == 0
    assert file.parent / str(config.data.directory) == tmp_path / "here"
    assert config.run_digest() == load(site.kits / "peer-0" / "peer.toml", environment={}).run_digest()
    credentials = load_credentials(config.security, file.parent, "garage")
    assert isinstance(credentials, Credentials)
    assert (credentials.identity.index, credentials.identity.address) == (2, "127.0.0.1:7790")
    assert sorted(each.name for each in (site.kits / "peer-2").iterdir()) == ["ca.pem", "peer.pem", "peer.toml"]
    wait_until(lambda: site.desk.unanswered() == [])
    with pytest.raises(ConfigError, match="this device has joined"):
        site.join(site.invite())
    site.stop()


def test_a_run_that_is_named_as_the_default_is_stays_that_run(tmp_path: Path) -> None:
    site = Site(tmp_path, "training.task=loop", "run.name=digits")
    file = site.join(site.invite())
    assert load(file, environment={}).run.name == "digits"
    site.stop()


def test_a_device_that_nobody_can_dial_waits_at_the_relay(site: Site) -> None:
    site.stop()
    site.start(relay="peer-0")
    config = load(site.join(site.invite(), "van", host="-"), environment={})
    assert (config.peers[2].advertise, config.peers[2].relay, config.peer.listen) == (None, "peer-0", "")
    # One that can be dialled needs none.
    assert load(site.join(site.invite()), environment={}).peers[3].relay is None


def test_two_devices_that_nobody_can_dial_have_a_relay_by_themselves(site: Site) -> None:
    config = load(site.join(site.invite(), "van", host="-"), environment={})
    assert config.peers[2].relay is None, "the others dial, so it needs none"
    config = load(site.join(site.invite(), "boat", host="-"), environment={})
    assert config.peers[3].relay == "peer-0"
    seats = Site(site.folder / "seats", "training.task=loop", seats=2)
    _, file = (seats.join(seats.invite(), name, host="-") for name in ("garage", "attic"))
    config = load(file, environment={})
    assert [(each.advertise is None, each.relay) for each in config.peers[1:]] == [(True, "peer-0")] * 2
    assert not unreachable_pairs(config, build_schedule(config, file.parent, 3))
    seats.stop()


def test_seats_are_filled_in_order_and_whoever_comes_later_knows_all_addresses(tmp_path: Path) -> None:
    # Members of such a run cannot change.
    site = Site(tmp_path, "rounds.late=skip", seats=2)
    files = [site.join(site.invite(), "garage"), site.join(site.invite(), "attic", host=None)]
    configs = [load(file, environment={}) for file in (site.kits / "peer-0" / "peer.toml", *files)]
    assert len({config.run_digest() for config in configs}) == 1
    assert [config.peer.index for config in configs] == [0, 1, 2]
    assert not any(peer.admitted for config in configs for peer in config.peers)
    assert configs[0].peers == configs[2].peers
    assert [peer.advertise for peer in configs[2].peers[:2]] == ["127.0.0.1:7700", "127.0.0.1:7790"]
    # The address that the operator's machine saw, with a port that was free.
    assert str(configs[2].peers[2].advertise).startswith("127.0.0.1:77")
    for file, name in zip(files, ("peer-1", "peer-2"), strict=True):
        credentials = load_credentials(SecurityOptions(), file.parent, name)
        assert isinstance(credentials, Credentials)
        assert credentials.identity.index is None
    with pytest.raises(SecurityError, match="thing cannot join: members can change only"):
        site.join(site.invite(), "thing")
    site.stop()


def test_two_that_ask_for_one_seat_get_two(tmp_path: Path) -> None:
    site = Site(tmp_path, seats=2)
    invitations = {name: site.invite() for name in ("garage", "attic", "shed")}
    for name, invitation in invitations.items():
        with pytest.raises(StillWaits):
            site.join(invitation, name, wait=_wait_no_longer)
    site.decide()
    site.decide()
    with pytest.raises(ConfigError, match="all seats have been taken meanwhile"):
        site.decide()
    names = [load(site.join(each, name), environment={}).peers[-1].name for name, each in invitations.items()]
    assert names == ["peer-2", "peer-2", "shed"]
    site.stop()


def test_what_the_run_decides_is_not_the_devices_to_set(site: Site) -> None:
    own = load(environment={}, overrides=("algorithm.averaging_rate=0.5",))
    with pytest.raises(ConfigError, match="algorithm: is the run's"):
        site.join(site.invite(), own=own)
    assert not (site.folder / "garage").exists()


def test_a_lost_answer_is_given_again(site: Site) -> None:
    invitation = site.invite()

    def lose(content: Mapping[str, Any], seen: object) -> None:
        raise ConnectionResetError

    with pytest.raises(StillWaits):
        site.join(invitation, wait=_wait_no_longer)
    site.decide()
    request = (site.folder / "garage" / "request.pem").read_bytes()
    with pytest.raises(PeerUnreachable):
        ask(invitation, site.address, lambda seen: request, lose)
    wait_until(lambda: site.desk.unanswered() == [invitation.id])
    signed = (site.kits / "peer-2" / "peer.pem").read_bytes()
    file = site.join(invitation, wait=_wait_no_longer)
    assert (file.parent / "peer.pem").read_bytes() == signed == (site.kits / "peer-2" / "peer.pem").read_bytes()
    # Also after it had it: a disk that was lost with all but the key.
    file.unlink()
    assert (site.join(invitation, wait=_wait_no_longer).parent / "peer.pem").read_bytes() == signed
    assert len(list((site.kits / "issued").iterdir())) == 1


def test_a_restart_forgets_neither_invitations_nor_keys(site: Site) -> None:
    invitation, unused = site.invite(), site.invite()
    with pytest.raises(StillWaits):
        site.join(invitation, wait=_wait_no_longer)
    site.stop()
    with pytest.raises(StillWaits):
        site.join(invitation, wait=_wait_no_longer)
    site.start()
    with pytest.raises(SecurityError, match="another device has used this invitation"):
        site.join(invitation, "thief", wait=_wait_no_longer)
    assert site.desk.events.get(timeout=0).kind == "leak"
    file = site.join(invitation)
    site.stop()
    site.start()
    file.unlink()
    assert site.join(invitation, wait=_wait_no_longer) == file
    wait_until(lambda: site.desk.unanswered() == [unused.id])
    assert site.join(unused, "attic").exists()


def test_a_kill_between_signature_and_note_signs_nothing_twice(site: Site) -> None:
    invitation = site.invite()
    with pytest.raises(StillWaits):
        site.join(invitation, wait=_wait_no_longer)
    request = (site.folder / "garage" / "request.pem").read_bytes()
    enrollment.admit(site.kits, enrollment.propose(site.kits, request))
    site.stop()
    site.start()
    site.join(invitation, wait=_wait_no_longer)
    assert len(list((site.kits / "issued").iterdir())) == 1


def test_open_invitations_are_the_operators_alone(site: Site) -> None:
    """A file of them holds the secret."""
    site.invite()
    folder = site.kits / "invitations"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    site.stop()
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="other users can enter it"), Invitations(site.kits):
        pass


def test_half_a_file_that_a_kill_left_is_no_invitation(site: Site) -> None:
    invitation = site.invite()
    site.stop()
    (site.kits / "invitations" / f".{invitation.id.hex()}.json.0123456789abcdef.part").write_text('{"text": "sotto')
    site.start()
    assert site.join(invitation).exists()


def test_a_device_says_what_it_waits_for(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    invitation = site.invite()
    site.stop()
    waits = iter([site.start, site.decide])
    with caplog.at_level(logging.INFO, logger="device"):
        site.join(invitation, wait=lambda seconds: next(waits)())
    said = [record.getMessage() for record in caplog.records if record.name == "device"]
    assert "`sotto invite` has to run there" in said[0]
    assert said[0].startswith(f"waiting: nobody answers at {site.address}")
    assert said[1].startswith("garage asks for a certificate; the others reach it at 127.0.0.1:7790; thumbprint")
    assert said[2:] == ["waiting: the operator has to confirm this device"]


def test_two_that_are_confirmed_at_once_get_two_numbers_and_one_of_two_with_one_name_is_refused(site: Site) -> None:
    invitations = {name: site.invite() for name in ("garage", "attic", "twin")}
    for name, invitation in invitations.items():
        with pytest.raises(StillWaits):
            site.join(invitation, "garage" if name == "twin" else name, folder=name, wait=_wait_no_longer)
    site.decide()
    site.decide()
    with pytest.raises(ConfigError, match="'garage' has it"):
        site.decide()
    for name, index in (("garage", 2), ("attic", 3)):
        file = site.join(invitations[name], name, wait=_wait_no_longer)
        assert load(file, environment={}).peer.index == index
    with pytest.raises(SecurityError, match="a device of this run has the name garage; join with another --name"):
        site.join(invitations["twin"], "garage", folder="twin")
    # Nothing is spent by that.
    assert load(site.join(invitations["twin"], "twin"), environment={}).peer.index == 4


def test_the_name_of_a_peer_is_not_given_away(site: Site) -> None:
    before = (site.kits / "peer-1" / "peer.pem").read_bytes()
    with pytest.raises(SecurityError, match="has the name peer-1"):
        site.join(site.invite(), "peer-1")
    assert (site.kits / "peer-1" / "peer.pem").read_bytes() == before


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("rounds.late=skip", 'members can change only with rounds.late = "wait"'),
        ("compressor.budget_kbytes_per_s=5", "members cannot change"),
    ],
)
def test_nobody_is_invited_where_members_cannot_change(tmp_path: Path, setting: str, words: str) -> None:
    write_cluster(tmp_path, load(environment={}, overrides=(setting,)), place_peers(2, [], 7700))
    with pytest.raises(ConfigError, match=words):
        Invitations(tmp_path)


def test_two_commands_do_not_answer_at_once(site: Site) -> None:
    with pytest.raises(StateError, match="another `sotto invite` answers"), Invitations(site.kits):
        pass
    with pytest.raises(ConfigError, match=r"--port: cannot be listened on: .* choose another port"):
        site.desk.listen([site.address])


def test_a_device_that_has_a_certificate_gets_it_by_another_invitation_too(site: Site) -> None:
    file = site.join(site.invite())
    signed = (file.parent / "peer.pem").read_bytes()
    file.unlink()
    assert site.join(site.invite(), wait=_wait_no_longer) == file
    assert (file.parent / "peer.pem").read_bytes() == signed
    wait_until(lambda: site.desk.unanswered() == [])


# -- devices that were not, or no longer -------------------------------------------------------------------------------


def test_the_operator_says_no_and_nothing_is_signed(site: Site) -> None:
    invitation = site.invite()
    with pytest.raises(SecurityError, match="not admitted: the operator did not admit this device"):
        site.join(invitation, wait=lambda seconds: site.decide(admit=False))
    with pytest.raises(SecurityError, match="another device has used"):
        site.join(invitation, "other", wait=_wait_no_longer)
    assert not (site.kits / "peer-2").exists()
    assert not (site.folder / "garage" / "peer.toml").exists()


def test_a_second_key_is_refused_and_reported_with_both_thumbprints(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    invitation = site.invite()
    site.join(invitation)
    assert site.desk.events.get(timeout=5).kind == "kept"
    for _ in range(3):
        with pytest.raises(SecurityError, match="it has leaked: tell the operator"):
            site.join(invitation, "thief")
    first, second = (
        read_request((site.folder / name / "request.pem").read_bytes()).thumbprint for name in ("garage", "thief")
    )
    event = site.desk.events.get(timeout=0)
    assert (event.kind, event.bound, event.thumbprint, event.name) == ("leak", first, second, "thief")
    leaks = [record.getMessage() for record in caplog.records if "leaked" in record.getMessage()]
    assert len(leaks) == 1, "it is said once"
    assert first in leaks[0]
    assert second in leaks[0]
    assert site.desk.events.empty()


def test_an_expired_invitation_admits_nobody_not_even_its_own_device(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, unused = site.invite(), site.invite()
    file = site.join(used)
    file.unlink()
    later = time.time() + 3601
    monkeypatch.setattr("peer.ops.invitations.time.time", lambda: later)
    for invitation, name in ((used, "garage"), (unused, "attic")):
        with pytest.raises(SecurityError, match="the invitation has expired"):
            site.join(invitation, name, wait=_wait_no_longer)
    wait_until(lambda: site.desk.unanswered() == [])
    # A device that waits for an operator who is away is told the same.
    late = site.invite(valid_s=0)
    site.stop()
    with pytest.raises(PeerUnreachable, match="has expired; ask for a new one"):
        site.join(late, "shed", wait=_wait_no_longer)


def test_a_revoked_device_gets_its_certificate_no_more(site: Site) -> None:
    invitation = site.invite()
    file = site.join(invitation)
    file.unlink()
    enrollment.revoke(site.kits, "garage")
    with pytest.raises(SecurityError, match="the certificate of 'garage' was revoked"):
        site.join(invitation, wait=_wait_no_longer)


def test_a_wrong_secret_is_counted_and_reaches_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    invitation = site.invite()
    monkeypatch.setattr(
        Invitations, "answer", lambda *arguments: pytest.fail("nothing is read of a stranger's request")
    )
    for wrong in (replace(invitation, secret=bytes(16)), replace(invitation, id=bytes(8))):
        with pytest.raises(SecurityError, match="does not know this invitation"):
            site.join(wrong, wait=_wait_no_longer)
    assert site.listener.wrong_proofs == 2


def test_guesses_are_bounded_for_each_host(site: Site) -> None:
    invitation = site.invite()
    for _ in range(14):
        with pytest.raises(SecurityError, match="does not know this invitation"):
            site.join(replace(invitation, secret=bytes(16)), wait=_wait_no_longer)
    with pytest.raises(SecurityError, match="does not know this invitation"):
        site.join(invitation, wait=_wait_no_longer)
    assert site.desk.events.empty()


# -- whoever poses as the operator's machine ---------------------------------------------------------------------------


def test_an_invitation_to_another_run_sends_nothing(site: Site, tmp_path: Path) -> None:
    other = Site(tmp_path / "other")
    invitation = replace(other.invite(), addresses=(site.address,))
    with pytest.raises(SecurityError, match=r"another run answers at 127.0.0.1.*nothing was sent to it.*of garden"):
        site.join(invitation, wait=_wait_no_longer)
    assert not (site.folder / "garage").exists(), "no key is made for whoever it is"
    other.stop()


def test_a_member_that_invites_is_refused(site: Site) -> None:
    ca = (site.kits / "ca.pem").read_bytes()
    member = Listener(site.desk, ("127.0.0.1", 0), site.kits / "peer-0/peer.pem", site.kits / "peer-0/peer.key", ca)
    invitation = replace(site.invite(), addresses=(f"127.0.0.1:{member.port}",))
    with pytest.raises(SecurityError, match=r"a peer answers at .* only the operator's machine invites"):
        site.join(invitation, wait=_wait_no_longer)
    member.close()


def test_a_stranger_that_shows_the_runs_ca_is_refused(site: Site, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    authority = CertificateAuthority.create("garden")
    authority.issue("operator", role=Role.OPERATOR).write(strange / "operator.pem", strange / "operator.key")
    ca = (site.kits / "ca.pem").read_bytes()
    stranger = Listener(site.desk, ("127.0.0.1", 0), strange / "operator.pem", strange / "operator.key", ca)
    alone = replace(site.invite(), addresses=(f"127.0.0.1:{stranger.port}",))
    with pytest.raises(SecurityError, match="has no certificate of this run; nothing was sent"):
        site.join(alone, wait=_wait_no_longer)
    assert not (site.folder / "garage").exists()
    # Of two addresses, the other one still counts.
    invitation = site.invite()
    both = replace(invitation, addresses=(f"127.0.0.1:{stranger.port}", site.address))
    assert site.join(both).exists()
    stranger.close()


def test_of_what_comes_with_the_authority_only_the_authority_is_believed(site: Site) -> None:
    strange = CertificateAuthority.create("strange").certificate
    files = site.kits / "operator.pem", site.kits / "operator.key"
    ca = (site.kits / "ca.pem").read_bytes()
    more = Listener(site.desk, ("127.0.0.1", 0), *files, ca + strange)
    file = site.join(replace(site.invite(), addresses=(f"127.0.0.1:{more.port}",)))
    assert (file.parent / "ca.pem").read_bytes() == ca
    more.close()


class Liar:
    """An operator's machine whose answers are not what they should be."""

    def __init__(self, invitation: Invitation, content: Mapping[str, Any]) -> None:
        self.known, self.content = invitation, content

    def invitation(self, id_: bytes) -> Invitation:
        return self.known

    def answer(self, id_: bytes, request: bytes, host: str) -> Mapping[str, Any]:
        return self.content

    def kept(self, id_: bytes) -> None:
        pytest.fail("the device has kept this")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"settings": {"state": {"directory": "/"}}}, RemoteProtocolError, "state, which are this device's own"),
        ({"settings": {"training": {"warm_start": "/etc/passwd"}}}, RemoteProtocolError, "paths are this device's own"),
        ({"settings": {"data": {"directory": "/home"}}}, RemoteProtocolError, "paths are this device's own"),
        ({"settings": {"run": {"rounds": -1}}}, RemoteProtocolError, "settings that this release does not take"),
        ({"settings": {"run": {"new_key": 1}}}, RemoteProtocolError, "settings that this release does not take"),
        ({"settings": {"run": "no table"}}, RemoteProtocolError, "settings that this release does not take"),
        ({"settings": 7}, RemoteProtocolError, "settings"),
        ({"index": 9}, RemoteProtocolError, "settings that this release does not take"),
        ({"index": 0}, SecurityError, "not the one that was asked for"),
        ({"peers": ()}, RemoteProtocolError, "names no peers"),
        ({"certificate": "none"}, SecurityError, "does not hold a PEM certificate"),
        ({"certificate": "peer-1"}, SecurityError, "not the one that was asked for"),
        ({"revoked": "none"}, SecurityError, "not a list of revoked certificates"),
        ({"state": "promoted"}, RemoteProtocolError, "this release does not know"),
        ({"state": ["admitted"]}, RemoteProtocolError, "state"),
    ],
)
def test_an_answer_that_lies_is_refused_and_nothing_is_written(
    site: Site, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    invitation = site.invite()
    with pytest.raises(StillWaits):
        site.join(invitation, wait=_wait_no_longer)
    site.decide()
    request = (site.folder / "garage" / "request.pem").read_bytes()
    honest = dict(site.desk.answer(invitation.id, request, "here"))
    settings = {**honest["settings"], **(change["settings"] if isinstance(change.get("settings"), dict) else {})}
    lie = {**honest, **change, "settings": change.get("settings") if change.get("settings") == 7 else settings}
    if "peers" in lie:
        lie["settings"].pop("peers")
        lie.pop("peers")
        lie["index"] = 0
    if change.get("certificate") == "peer-1":
        lie["certificate"] = (site.kits / "peer-1" / "peer.pem").read_text()
    files = site.kits / "operator.pem", site.kits / "operator.key"
    liar = Listener(Liar(invitation, lie), ("127.0.0.1", 0), *files, (site.kits / "ca.pem").read_bytes())
    with pytest.raises(error, match=words):
        site.join(replace(invitation, addresses=(f"127.0.0.1:{liar.port}",)), wait=_wait_no_longer)
    assert sorted(file.name for file in (site.folder / "garage").iterdir()) == ["peer.key", "request.pem"]
    liar.close()


def test_a_listener_without_the_secret_gives_no_answer_that_counts(site: Site) -> None:
    """Somebody who took the operator's certificate, and has not seen the invitation."""
    invitation = site.invite()
    files = site.kits / "operator.pem", site.kits / "operator.key"
    ca = (site.kits / "ca.pem").read_bytes()

    class Guessing(Invitation):
        def is_proven(self, *arguments: object) -> bool:
            return True

    guessing = Guessing(**{**vars(invitation), "secret": bytes(16)})
    thief = Listener(Liar(guessing, {"state": "refused", "why": "go away"}), ("127.0.0.1", 0), *files, ca)
    with pytest.raises(SecurityError, match="does not know this invitation; nothing was written"):
        site.join(replace(invitation, addresses=(f"127.0.0.1:{thief.port}",)), wait=_wait_no_longer)
    thief.close()


class Between:
    """A relay on the way to the operator's machine. It keeps what it passes on, and changes it first where it lies."""

    def __init__(self, port: int, *, lies_to: str | None = None) -> None:
        self._port, self._lies_to = port, lies_to
        self.passed = b""
        self._open = ExitStack()
        self._socket = self._open.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._open.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                device, _ = self._socket.accept()
                operator = socket.create_connection(("127.0.0.1", self._port))
                for source, target, whom in ((device, operator, "operator"), (operator, device, "device")):
                    threading.Thread(target=self._pass, args=(source, target, whom), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, whom: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.passed += data
                target.sendall(data[:-1] + bytes([data[-1] ^ 1]) if whom == self._lies_to else data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("whom", ["device", "operator"])
def test_a_relay_that_lies_is_no_answer(site: Site, whom: str) -> None:
    invitation = site.invite()
    relay = Between(site.port, lies_to=whom)
    with pytest.raises(StillWaits):
        site.join(replace(invitation, addresses=(relay.address,)), wait=_wait_no_longer)
    assert relay.passed
    relay.close()
    assert site.desk.events.empty(), "nobody has asked"
    assert site.join(invitation).exists(), "the invitation is not spent"


def test_a_relay_reads_nothing_of_what_it_passes_on(site: Site) -> None:
    invitation = site.invite()
    relay = Between(site.port)
    file = site.join(replace(invitation, addresses=(relay.address,)))
    relay.close()
    request = (file.parent / "request.pem").read_bytes()
    for told in (
        invitation.secret,
        invitation.id,
        invitation.id.hex().encode(),
        request[100:140],
        b"garden",
        b"garage",
    ):
        assert told not in relay.passed


# -- bytes -------------------------------------------------------------------------------------------------------------


class Caller:
    """Somebody who dials the listener and sends what no device sends."""

    def __init__(self, site: Site) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.channel = enrolling._Channel(
            context, socket.create_connection(("127.0.0.1", site.port), timeout=10), server_side=False
        )
        self.hello = self.channel.receive(Hello, 1 << 20)

    def ends(self) -> bool:
        """Return whether the listener ends the connection without an answer."""
        with self.channel.tls:
            try:
                self.channel.receive(Answer, 1 << 20)
            except OSError:
                return True
            return False


def test_a_replayed_request_is_worth_nothing(site: Site) -> None:
    invitation = site.invite()
    with pytest.raises(StillWaits):
        site.join(invitation, wait=_wait_no_longer)
    request = (site.folder / "garage" / "request.pem").read_bytes()
    first, second = Caller(site), Caller(site)
    shown = first.channel.tls.getpeercert(binary_form=True) or b""
    nonces = bytes.fromhex(first.hello.nonce), bytes(32)
    asked = Ask(
        invitation.id.hex(), nonces[1].hex(), request.decode(), invitation.proof("device", shown, nonces, request)
    )
    for caller, is_answered in ((first, True), (second, False)):
        caller.channel.send(asked)
        answer = caller.channel.receive(Answer, 1 << 20)
        assert bool(answer.content) is is_answered
        caller.channel.tls.close()
    assert site.listener.wrong_proofs == 1


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff\xff",
        (1 << 20).to_bytes(4, "big") + b"{}",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x02{}",
        b"\x00\x00\x00\x02\xff\xff",
        b"\x00\x00\x00\x00",
        b"\x00\x00\x02\x58" + b"[" * 600,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_message_end_the_connection_and_nothing_else(site: Site, message: bytes) -> None:
    caller = Caller(site)
    caller.channel.tls.sendall(message)
    assert caller.ends()
    assert site.join(site.invite()).exists()


@pytest.mark.parametrize(
    "change", [{"id": "zz"}, {"id": "00"}, {"nonce": ""}, {"nonce": "00" * 31}, {"id": "é" * 16}, {"request": "\ud800"}]
)
def test_a_request_of_odd_values_ends_the_connection_and_nothing_else(site: Site, change: dict[str, str]) -> None:
    caller = Caller(site)
    caller.channel.send(Ask(**{**asdict(Ask("00" * 8, "00" * 32, "", "")), **change}))
    assert caller.ends()
    assert site.join(site.invite()).exists()


def test_a_device_that_proves_the_secret_and_asks_for_nonsense_binds_nothing(site: Site) -> None:
    invitation = site.invite()
    with pytest.raises(StillWaits):
        site.join(invitation, "operators-friend", wait=_wait_no_longer)
    for request in (b"", b"nonsense", (site.kits / "ca.pem").read_bytes()):
        other = site.invite()
        answer = ask(other, site.address, partial(_same, request), lambda content, seen: None)
        assert answer["state"] == "refused"
        assert site.join(other, f"d{len(request)}", wait=lambda seconds: _decide_all(site)).exists()


def _same(request: bytes, seen: object) -> bytes:
    return request


def _decide_all(site: Site) -> None:
    while not site.desk.events.empty():
        event = site.desk.events.get(timeout=0)
        if event.kind == "asks":
            site.desk.decide(event, admit=True)


def test_strangers_that_say_nothing_hold_few_connections_for_a_short_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolling, "TALK_S", 0.5)
    silent = [Caller(site) for _ in range(4)]
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as fifth:
        assert fifth.recv(1) == b"", "a fifth connection of one host is closed at once"
    assert all(caller.ends() for caller in silent)
    assert site.join(site.invite()).exists()
