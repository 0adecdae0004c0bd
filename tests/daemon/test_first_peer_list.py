"""What a file means whose list of peers is not the one that the run began with."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.config.options import Config, PeerAddress, PeerOptions, load
from peer.daemon.members import first_peer_list
from peer.errors import ConfigError, StateError
from peer.state.disk import Disk

NAMES = ("ada", "ben", "cleo")


def config_of(*names: str, own: str, **sections: object) -> Config:
    peers = tuple(PeerAddress(name=name, advertise=f"{name}:7700") for name in names)
    return Config(peers=peers, peer=PeerOptions(index=names.index(own)), **sections)  # type: ignore[arg-type]


def added(settled: Config) -> tuple[str, ...]:
    """Return the names that the file lists and the run did not begin with."""
    return tuple(peer.name for peer in settled.peers if peer.admitted)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The folder of ben, whose run began with the three."""
    (tmp_path / "state").mkdir()
    first_peer_list.keep(Disk(tmp_path / "state"), config_of(*NAMES, own="ben").peers)
    return tmp_path


def test_without_a_state_the_file_says_it_all(tmp_path: Path) -> None:
    config = config_of(*NAMES, own="ben")
    assert first_peer_list.settle(config, tmp_path) == config


def test_numbers_stay_when_an_entry_is_taken_out(begun: Path) -> None:
    settled = first_peer_list.settle(config_of("ben", "cleo", own="ben"), begun)
    assert [peer.name for peer in settled.peers] == [*NAMES]
    assert (settled.peer.index, added(settled)) == (1, ())
    assert settled.run_digest() == config_of(*NAMES, own="ada").run_digest()


def test_whoever_is_added_gets_a_number_after_all_others_and_changes_no_job(begun: Path) -> None:
    settled = first_peer_list.settle(config_of("dan", *NAMES, own="ben"), begun)
    assert [peer.name for peer in settled.peers] == [*NAMES, "dan"]
    assert settled.peers[3].admitted
    assert (settled.num_listed, added(settled)) == (3, ("dan",))
    assert settled.run_digest() == config_of(*NAMES, own="ada").run_digest()
    # The list of the start is kept, whatever is in the file later.
    first_peer_list.keep(Disk(begun / "state"), settled.peers)
    assert first_peer_list.settle(config_of(*NAMES, own="ben"), begun).num_peers == 3


def test_addresses_are_those_of_the_file(begun: Path) -> None:
    config = config_of(*NAMES, own="ben")
    moved = config.peers[2].model_copy(update={"advertise": "elsewhere:7700"})
    settled = first_peer_list.settle(config.model_copy(update={"peers": (*config.peers[:2], moved)}), begun)
    assert settled.peers[2].advertise == "elsewhere:7700"


def test_the_state_of_another_run_is_refused(begun: Path) -> None:
    with pytest.raises(StateError, match="its list of peers does not include 'eve'; if this device was renamed"):
        first_peer_list.settle(config_of("eve", "dan", own="eve"), begun)
    (begun / "state" / first_peer_list.PEER_LIST.name).write_text('[{"name": 7}]')
    with pytest.raises(StateError, match="restore it from a copy, or delete it if"):
        first_peer_list.settle(config_of(*NAMES, own="ben"), begun)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("training.learning_rate=0.5", "training.learning_rate"),
        ("run.rounds=7", "run.rounds"),
        ("peer.listen=0.0.0.0:1", "peer.listen"),
    ],
)
def test_whatever_else_changed_is_named(override: str, key: str) -> None:
    old = load(environment={}).model_copy(update={"peers": config_of(*NAMES, own="ada").peers})
    new = load(environment={}, overrides=[override]).model_copy(update={"peers": old.peers})
    first_peer_list.refuse_other_changes(old, old)
    with pytest.raises(
        ConfigError, match=rf"{key}: .*only entries of \[\[peers\]\] can be added or removed"
    ) as refusal:
        first_peer_list.refuse_other_changes(old, new)
    assert refusal.value.exit_code == 2


def test_an_entry_that_changed_and_the_own_one_are_named() -> None:
    old, moved = config_of(*NAMES, own="ben"), PeerAddress(name="cleo", advertise="elsewhere:1")
    with pytest.raises(ConfigError, match=r"peers\.cleo\.advertise"):
        first_peer_list.refuse_other_changes(old, old.model_copy(update={"peers": (*old.peers[:2], moved)}))
    with pytest.raises(ConfigError, match="is the place of 'cleo' in the new list, but this peer is 'ben'"):
        first_peer_list.refuse_other_changes(old, old.model_copy(update={"peers": (old.peers[0], old.peers[2])}))
    first_peer_list.refuse_other_changes(old, config_of("ben", "cleo", own="ben"))
