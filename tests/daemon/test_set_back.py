"""Real daemons on loopback: a device is put back to an earlier state, by its backup, a snapshot or a copied folder."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from peer.config.options import SecurityOptions, load
from peer.daemon import neighbors
from peer.daemon.members.rejoining import give_up
from peer.errors import DeclaredLost, StateBehind
from peer.net.security.certificates import Role
from peer.net.security.credentials import Credentials, load_credentials
from peer.net.security.orders import loss_order
from peer.node.progress import decode_progress
from peer.ops.rollback import newest_common_round
from peer.ops.rollback import put_back as roll_back
from peer.train.threads import use_one_thread
from tests.daemon.test_members import Devices

RING = "graph.kind=ring"


def folder(devices: Devices, peer: int) -> Path:
    return devices.files[peer].parent / "state"


async def put_back(devices: Devices, peer: int) -> None:
    """Stop a peer, copy its state folder, let it train on, and put the copy in its place."""
    await devices.kill(peer)
    others = [each for each in devices.daemons if each != peer]
    sent = {each: devices.links(each).receipts_of(peer)[1] for each in others if not signs(devices, each)}
    copy = devices.kits.parent / "copy"
    shutil.copytree(folder(devices, peer), copy)
    devices.start(peer)
    await devices.until(lambda: devices.is_there(peer))
    before = devices.daemons[peer].loop.round
    await trains_on(devices, peer)
    await devices.until(lambda: any(is_known_beyond(devices, each, peer, before, sent.get(each, 0)) for each in others))
    await devices.kill(peer)
    shutil.rmtree(folder(devices, peer))
    copy.rename(folder(devices, peer))


def signs(devices: Devices, peer: int) -> bool:
    """Whether a peer signs how far it is."""
    return devices.daemons[peer].parts.loop.progress is not None


def is_known_beyond(devices: Devices, at: int, peer: int, round_: int, sent: int) -> bool:
    """Whether a neighbour keeps the signed word of a peer that it completed a round after `round_`; where nobody signs
    anything, whether it has let go of frames after the first `sent`, which it would send again until then."""
    progress = devices.daemons[at].parts.loop.progress
    if progress is None:
        return devices.links(at).receipts_of(peer)[0] > sent
    said = progress.told_to(peer).shown
    return bool(said) and decode_progress(said)[1].round > round_


async def trains_on(devices: Devices, *peers: int) -> None:
    """Wait until peers have gone on by more rounds than they go on for without signing how far they are."""
    reached = max(devices.daemons[peer].loop.round for peer in peers)
    await devices.until(lambda: all(devices.daemons[peer].loop.round > reached + 25 for peer in peers))


async def is_back(devices: Devices, peer: int, *others: int) -> None:
    """Wait until a device takes part again as its next incarnation, and check that nobody was accused."""
    await devices.until(lambda: devices.is_there(peer) and devices.status(peer).get("incarnation") == 1)
    former, number = peer, devices.participant(others[0]).membership.numbering.number(peer, 1)
    everybody = (peer, *others)
    await devices.until(
        lambda: all(number in (devices.participant(each).membership.members or ()) for each in everybody)
    )
    await trains_on(devices, *everybody)
    for each in everybody:
        offences = devices.daemons[each].neighbors.transport.offences
        assert [offences.count(other) for other in (former, number, *others)] == [0] * (2 + len(others))
    assert any(file.name.startswith("set-aside-") for file in folder(devices, peer).iterdir())


def waits(devices: Devices, peer: int, sentence: str) -> bool:
    """Whether a peer that was set back goes on running, and waits for what this sentence says."""
    return devices.is_there(peer) and sentence in str(devices.status(peer).get("set_back"))


async def order_removal(devices: Devices, at: int, name: str) -> None:
    """Remove a peer as `sotto remove` does."""
    options = SecurityOptions(certificate="operator.pem", key="operator.key")
    operator = load_credentials(options, devices.kits, None, role=Role.OPERATOR)
    assert isinstance(operator, Credentials)
    order = loss_order(name, devices.daemons[at].local.config.run.name, operator)
    await devices.ask(at, "remove", name=name, order=order.hex())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_peers", "options"),
    [
        (3, ()),
        (3, ("rounds.lost_after_s=60",)),
        (5, (RING, "algorithm.name=d-psgd")),
        (8, (RING,)),
    ],
)
def test_a_device_that_was_put_back_admits_it_and_takes_part_again(
    tmp_path: Path, num_peers: int, options: tuple[str, ...]
) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=num_peers, options=options).run(_put_back, num_peers)


async def _put_back(devices: Devices, num_peers: int) -> None:
    await devices.train(*range(num_peers), beyond=3)
    await put_back(devices, 2)
    devices.start(2, rejoins=True)
    await is_back(devices, 2, *(peer for peer in range(num_peers) if peer != 2))
    await devices.stop(*range(num_peers))


@pytest.mark.slow
def test_what_neighbours_know_survives_their_restart(tmp_path: Path) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3, options=(RING,)).run(_put_back_with_everybody_away)


async def _put_back_with_everybody_away(devices: Devices) -> None:
    await devices.train(*range(3), beyond=3)
    await put_back(devices, 2)
    # They have seen it go: a power cut later they know it still.
    await devices.until(lambda: all((folder(devices, peer) / "progress.json").exists() for peer in (0, 1)))
    await asyncio.sleep(1.5)
    for peer in (0, 1):
        await devices.kill(peer)
    for peer in (0, 1):
        devices.start(peer)
    devices.start(2, rejoins=True)
    await is_back(devices, 2, 0, 1)
    await devices.stop(*range(3))


@pytest.mark.slow
def test_two_devices_with_one_copy_do_not_take_part_both(tmp_path: Path) -> None:
    use_one_thread()
    # What is waited for comes with time, not with rounds.
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3, options=("peer.min_step_s=0.05",)).run(_copy)


async def _copy(devices: Devices) -> None:
    await devices.train(*range(3), beyond=3)
    await devices.kill(0)
    kit = devices.files[0].parent
    copy = kit.with_name("copied")
    shutil.copytree(kit, copy)
    devices.start(0)
    await devices.until(lambda: devices.is_there(0))
    before = devices.daemons[0].loop.round
    await trains_on(devices, 0, 1, 2)
    # While they could send again what the copy lacks, it would go on as well as the other one.
    await devices.until(lambda: all(is_known_beyond(devices, each, 0, before, 0) for each in (1, 2)))
    # It dials the others, and listens elsewhere.
    config = copy / "peer.toml"
    config.write_text(re.sub(r"(?m)^(listen = .*):\d+", rf"\g<1>:{devices.ports[3]}", config.read_text(), count=1))
    devices.files.append(config)
    devices.start(3, rejoins=True)
    await devices.until(lambda: waits(devices, 3, "from another process"))
    # Nor has it taken the place of the other one.
    await trains_on(devices, 0, 1, 2)
    assert "incarnation" not in devices.status(0)
    # That one is given up: its copy is what is left, and takes part again.
    await devices.kill(0)
    await devices.until(lambda: devices.is_there(3) and devices.status(3).get("incarnation") == 1)
    await devices.kill(3)
    await devices.stop(1, 2)


@pytest.mark.slow
def test_of_two_peers_one_waits_for_the_operator(tmp_path: Path) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=2).run(_put_back_one_of_two)


async def _put_back_one_of_two(devices: Devices) -> None:
    await devices.train(0, 1, beyond=3)
    await put_back(devices, 1)
    devices.start(1, rejoins=True)
    await devices.until(lambda: waits(devices, 1, "`sotto remove peer-1` on the other device"))
    assert devices.participant(0).membership.changes == ()
    await order_removal(devices, 0, "peer-1")
    # The other one goes on alone.
    await devices.until(lambda: devices.participant(0).membership.members == (0,))
    reached = devices.daemons[0].loop.round
    await devices.until(lambda: devices.daemons[0].loop.round > reached + 3)
    await devices.stop(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("algorithm.name=ad-psgd", "graph.kind=complete"), "`sotto admin rollback --round N`"),
        (("rounds.rejoin=false",), "`sotto remove peer-2` on another device, and add"),
    ],
)
def test_where_nobody_takes_part_again_it_waits_and_names_the_command(
    tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3, options=options).run(_put_back_and_wait, sentence)


async def _put_back_and_wait(devices: Devices, sentence: str) -> None:
    for peer in range(3):
        devices.start(peer)
    await devices.until(lambda: all(devices.daemons[peer].loop.round > 3 for peer in range(3)))
    await put_back(devices, 2)
    devices.start(2, rejoins=True)
    await devices.until(lambda: waits(devices, 2, sentence))
    before = devices.daemons[2].loop.round
    await asyncio.sleep(1.0)
    assert devices.daemons[2].loop.round == before
    await devices.stop(2, 0, 1)


@pytest.mark.slow
def test_where_nothing_is_signed_it_waits_for_a_command_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(neighbors, "_REFUSED_S", 1.0)
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3, mode="insecure").run(_put_back_unsigned, caplog)


async def _put_back_unsigned(devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    await devices.train(*range(3), beyond=3)
    await put_back(devices, 2)
    devices.start(2)
    await devices.until(lambda: "`sotto admin rejoin`" in caplog.text)
    await devices.kill(2)
    assert give_up(load(devices.files[2], environment={}), devices.files[2].parent) == 1
    await devices.ask(0, "remove", name="peer-2")
    devices.start(2)
    await is_back(devices, 2, 0, 1)
    await devices.stop(*range(3))


@pytest.mark.slow
def test_a_state_that_was_put_back_on_purpose_is_no_lost_one(tmp_path: Path) -> None:
    use_one_thread()
    options = ("state.checkpoint_every_rounds=10",)
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3, options=options).run(_roll_back)


async def _roll_back(devices: Devices) -> None:
    await devices.train(*range(3), beyond=30)
    for peer in range(3):
        await devices.kill(peer)
    folders = [folder(devices, peer) for peer in range(3)]
    roll_back(folders, newest_common_round(folders, 25))
    await devices.train(*range(3), beyond=40)
    assert all(devices.participant(peer).membership.changes == () for peer in range(3))
    await devices.stop(*range(3))


@pytest.mark.slow
def test_what_a_neighbour_says_that_it_has_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(neighbors, "_REFUSED_S", 1.0)
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3, options=(RING,)).run(_claim, monkeypatch, caplog)


async def _claim(devices: Devices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In a run that begins, peer 1 says "I have seven of your frames" on each connection, and ends it."""
    for peer in range(3):
        devices.start(peer)

    def ends(peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        raise StateBehind("I have seven of your frames")

    liar = devices.daemons[1].parts.incoming
    liar.last_received = lambda peer: 7  # type: ignore[method-assign]
    liar.link_up = ends  # type: ignore[method-assign]
    await devices.until(lambda: "peer-1 ends each connection" in caplog.text)
    await asyncio.sleep(2.0)
    assert not devices.tasks[0].done()
    assert not devices.tasks[2].done()
    # A lost peer on a busy machine needs longer than a second to hear why it is refused.
    monkeypatch.undo()
    await order_removal(devices, 0, "peer-1")
    await devices.fails(1, DeclaredLost, "have declared this peer lost")
    await trains_on(devices, 0, 2)
    await devices.stop(0, 2)
