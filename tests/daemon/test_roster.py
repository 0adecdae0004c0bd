"""Who is who, and what vouches for a peer that nobody listed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from peer.config.options import Config, PeerAddress, PeerOptions, load
from peer.daemon.members.roster import Roster
from peer.daemon.process import open_peer
from peer.daemon.rounds import RoundLoop
from peer.errors import ConfigError, HandshakeRefused, RemoteProtocolError, SecurityError, SottoError
from peer.gossip.incarnations import MAX_INCARNATIONS
from peer.gossip.membership import Change, ChangeKind, Newcomer
from peer.net.neighbor import Neighbor
from peer.net.security.credentials import load_credentials
from peer.node import membership_codec
from peer.ops.cluster_files import place_peers, write_cluster
from peer.ops.enrollment import Admitted, admit, propose, request, revoke


class Kits:
    """A cluster of two, and devices that were signed later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_cluster(folder, Config(), place_peers(None, ["10.0.0.1", "10.0.0.2"], 7700))

    def sign(self, name: str, host: str | None = "10.0.0.9", relay: str | None = None) -> Admitted:
        device = self.folder.parent / name
        request(device, name, host, 7700)
        admitted = admit(self.folder, propose(self.folder, (device / "request.pem").read_bytes(), relay=relay))
        (device / "peer.key").rename(admitted.folder / "peer.key")
        return admitted

    def roster(self, peer: int) -> Roster:
        folder = self.folder / f"peer-{peer}"
        config = load(folder / "peer.toml", environment={})
        return Roster(config, load_credentials(config.security, folder, config.peers[peer].name))


@pytest.fixture
def kits(tmp_path: Path) -> Kits:
    return Kits(tmp_path / "kits")


def introduction_of(kits: Kits, peer: int) -> Newcomer:
    said = kits.roster(peer).introduction()
    assert said is not None
    return said


def test_a_newcomer_is_known_by_what_its_certificate_says(kits: Kits) -> None:
    garage, van = kits.sign("garage"), kits.sign("van", None, relay="peer-0")
    assert (garage.index, van.index) == (2, 3)
    zero = kits.roster(0)
    assert zero.introduction() is None, "everybody lists it"
    newcomers = {peer: introduction_of(kits, peer) for peer in (2, 3)}
    for peer, newcomer in newcomers.items():
        zero.check(peer, newcomer)
        zero.check_today(newcomer)
    assert zero.introduce(newcomers) == [2, 3]
    assert zero.introduce(newcomers) == []
    assert (zero.index_of("garage"), zero.name(3), zero[2].advertise) == (2, "van", "10.0.0.9:7700")
    # Whoever joins dials those that were there, and is told of by nobody's file.
    assert zero.neighbor(2) == Neighbor(2, "garage", "10.0.0.9:7700", dial=False, calls="10.0.0.1:7700")
    assert kits.roster(2).neighbor(0).dial
    relay = zero.relay_of(3)
    assert relay is not None
    assert (relay.name, relay.address) == ("peer-0", "10.0.0.1:7700")
    assert zero.names == ["peer-0", "peer-1", "garage", "van"]


def test_nobody_can_say_of_a_newcomer_what_the_ca_did_not_sign(kits: Kits, tmp_path: Path) -> None:
    kits.sign("garage")
    other = Kits(tmp_path / "others" / "kits")
    other.sign("garage")
    zero, true = kits.roster(0), introduction_of(kits, 2)
    lies: list[tuple[int, Newcomer, str]] = [
        (3, true, "that of peer 2, 'garage'"),
        (2, replace(true, name="attic"), "that of peer 2, 'garage'"),
        (2, replace(true, advertise="192.0.2.66:7700"), "or elsewhere"),
        (2, replace(true, relay="peer-1"), "or elsewhere"),
        (2, replace(true, name="peer-1"), "another 'peer-1' in everybody's list"),
        (2, replace(true, name="two words"), "no peer can have such a name"),
        (2, replace(true, advertise="nowhere"), "not an address with a port"),
        (2, replace(true, certificate=b""), "does not prove whose certificate"),
        (2, introduction_of(other, 2), "this run's CA did not sign"),
    ]
    for peer, newcomer, words in lies:
        with pytest.raises(SottoError, match=words):
            zero.check(peer, newcomer)


def test_a_peer_refuses_a_notice_of_a_newcomer_that_the_ca_did_not_sign(kits: Kits, tmp_path: Path) -> None:
    kits.sign("garage")
    other = Kits(tmp_path / "others" / "kits")
    other.sign("garage")
    folder = kits.folder / "peer-0"
    peer = open_peer(load(folder / "peer.toml", environment={}), folder)
    try:
        assert isinstance(peer.loop, RoundLoop)
        participant = peer.loop.participant

        def hear(newcomer: Newcomer) -> None:
            change = Change(ChangeKind.JOIN, 2, 1, 40, newcomer=newcomer)
            participant.judged(1, membership_codec.encode(change))

        true = introduction_of(kits, 2)
        hear(true)
        lies = [replace(true, advertise="192.0.2.66:7700"), replace(true, name="attic"), introduction_of(other, 2)]
        for lie in lies:
            with pytest.raises(RemoteProtocolError, match=r"did not sign|or elsewhere"):
                hear(lie)
    finally:
        peer.close()


def test_a_revoked_newcomer_is_not_sponsored(kits: Kits) -> None:
    kits.sign("garage")
    said = introduction_of(kits, 2)
    revoke(kits.folder, "garage")
    zero = kits.roster(0)
    # What is announced already has to mean the same to everybody, whoever has heard of the list.
    zero.check(2, said)
    with pytest.raises(SecurityError, match="the certificate of 'garage' was revoked"):
        zero.check_today(said)


def test_a_caller_is_heard_under_a_number_that_is_free(kits: Kits) -> None:
    zero = kits.roster(0)
    assert zero.hear(1, "peer-1", is_member=False) is None, "everybody lists it"
    assert zero.hear(1, "peer-1", is_member=True) == zero.neighbor(1)
    assert zero.hear(1, "attic", is_member=True) is None
    assert zero.hear(0, "peer-0", is_member=True) is None, "it is this peer"
    assert zero.hear(2, "garage", is_member=False) == Neighbor(2, "garage", None, dial=False)
    assert zero.name(2) == "garage"
    assert 2 not in zero
    kits.sign("garage")
    zero.introduce({2: introduction_of(kits, 2)})
    with pytest.raises(HandshakeRefused, match="which is 'garage' here"):
        zero.hear(2, "attic", is_member=False)
    with pytest.raises(HandshakeRefused, match="which is 'peer-0' here"):
        zero.hear(zero.numbering.number(0, 1), "far", is_member=False)
    with pytest.raises(HandshakeRefused, match="this version knows 1024"):
        zero.hear(zero.numbering.number(500, MAX_INCARNATIONS), "far", is_member=False)


def test_whom_a_file_names_beyond_the_list_is_expected_until_it_is_introduced(kits: Kits) -> None:
    zero = kits.roster(0)
    zero.expect(PeerAddress(name="attic", advertise="10.0.0.8:7700"))
    zero.expect(PeerAddress(name="garage", advertise="10.0.0.9:7700"))
    assert (zero.expected, zero.index_of("garage")) == ({2, 3}, 3)
    # The file had them in another order than they were signed in: the certificate counts.
    kits.sign("garage")
    assert zero.hear(2, "garage", is_member=False) is not None
    zero.introduce({2: introduction_of(kits, 2)})
    assert (zero.expected, zero.index_of("garage"), zero.index_of("attic")) == (frozenset(), 2, None)
    zero.expect(PeerAddress(name="shed"))
    zero.forget("shed")
    zero.forget("garage")
    assert zero.names == ["peer-0", "peer-1", "garage"]


def test_a_certificate_and_a_file_that_do_not_belong_together(kits: Kits) -> None:
    kits.sign("garage")
    folder = kits.folder / "peer-2"
    config = load(folder / "peer.toml", environment={})
    access = load_credentials(config.security, folder, "garage")
    between = (*config.peers[:2], PeerAddress(name="shed", admitted=True), config.peers[2])
    with pytest.raises(SecurityError, match=r"made out to peer 2, and peer.index is 3"):
        Roster(config.model_copy(update={"peers": between, "peer": PeerOptions(index=3)}), access)


def test_a_number_is_given_away_once(kits: Kits) -> None:
    garage = kits.sign("garage")
    garage.folder.rename(kits.folder / "elsewhere")
    with pytest.raises(ConfigError, match="index 2 belongs to 'garage', whose folder peer-2 is missing"):
        kits.sign("attic")


def test_a_device_that_could_never_join_is_not_signed(tmp_path: Path) -> None:
    kits = tmp_path / "kits"
    write_cluster(kits, load(environment={}, overrides=["algorithm.name=ad-psgd"]), place_peers(2, [], 7700))
    request(tmp_path / "garage", "garage", None, 7700)
    with pytest.raises(ConfigError, match="garage cannot join: with ad-psgd members cannot change"):
        admit(kits, propose(kits, (tmp_path / "garage" / "request.pem").read_bytes()))
    assert not (kits / "peer-2").exists()


@pytest.mark.parametrize(
    ("host", "relay", "words"),
    [("10.0.0.9", "peer-0", "is not needed"), (None, "peer-7", "not a peer that others can")],
)
def test_a_relay_that_is_of_no_use_is_refused(kits: Kits, host: str | None, relay: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kits.sign("van", host, relay=relay)
