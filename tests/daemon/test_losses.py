"""Real daemons on loopback, of which some are lost without a word, and no person declares it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from peer.daemon import rounds
from peer.errors import DeclaredLost, HandshakeRefused, SottoError
from peer.train.threads import use_one_thread
from tests.daemon.test_members import Devices

LOST_AFTER_S = 2.0
OPTIONS = (f"rounds.lost_after_s={LOST_AFTER_S}", "graph.kind=directed-ring")


@pytest.mark.slow
def test_the_others_go_on_without_a_device_that_is_lost_without_a_word(tmp_path: Path) -> None:
    """On a directed ring of five: most of them have no link to it, and ask it whether it is there."""
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=5, options=OPTIONS).run(_lose_one)


async def _lose_one(devices: Devices) -> None:
    await devices.train(*range(5), beyond=3)
    await devices.kill(3)
    rest = [0, 1, 2, 4]
    await devices.until(lambda: any(devices.status(0)["suspects"]))
    await devices.until(lambda: all(devices.members(peer) == [f"peer-{each}" for each in rest] for peer in rest))
    assert devices.standing(0, "peer-3") == "lost"
    # It comes back, finds the signed votes of the others, and ends.
    devices.start(3)
    await devices.fails(3, HandshakeRefused, "have declared this peer lost")
    await devices.stop(*rest)


@pytest.mark.slow
def test_votes_reach_those_from_which_the_lost_device_separates_the_voters(tmp_path: Path) -> None:
    use_one_thread()
    options = (*OPTIONS, "graph.kind=line")
    Devices(tmp_path / "kits", rounds=10_000, num_peers=5, options=options).run(_lose_the_middle)


async def _lose_the_middle(devices: Devices) -> None:
    await devices.train(*range(5), beyond=3)
    await devices.kill(2)
    rest = [0, 1, 3, 4]
    await devices.until(lambda: all(devices.members(peer) == [f"peer-{each}" for each in rest] for peer in rest))
    await devices.stop(*rest)


@pytest.mark.slow
def test_a_device_whose_disk_was_wiped_admits_it_and_the_others_go_on_without_it(tmp_path: Path) -> None:
    use_one_thread()
    # It is not to be declared lost before it has started again.
    options = (*OPTIONS, "rounds.lost_after_s=6")
    Devices(tmp_path / "kits", rounds=10_000, num_peers=5, options=options).run(_wipe_one)


async def _wipe_one(devices: Devices) -> None:
    await devices.train(*range(5), beyond=3)
    # The others may not keep what it has for good.
    await devices.until(lambda: devices.links(2).receipts_of(3)[0] > 0 and devices.links(4).durable_from(3) > 1)
    await devices.kill(3)
    state = devices.files[3].parent / "state"
    state.rename(state.with_name("gone"))
    devices.start(3)
    wiped = await devices.fails(3, DeclaredLost, "have declared this peer lost")
    assert wiped.loop.round == 0
    rest = [0, 1, 2, 4]
    await devices.until(lambda: all(devices.members(peer) == [f"peer-{each}" for each in rest] for peer in rest))
    # The state that is found again comes too late.
    shutil.rmtree(state)
    state.with_name("gone").rename(state)
    devices.start(3)
    await devices.fails(3, HandshakeRefused, "have declared this peer lost")
    await devices.stop(*rest)


def test_a_peer_that_never_came_is_not_called_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SAY_AWAY_S", 0.5)
    use_one_thread()

    async def story(devices: Devices) -> None:
        devices.start(0)
        await devices.until(lambda: "peer-1 has not come yet, and round 0 needs it" in caplog.text)
        assert "if it runs, `sotto doctor` tells what stands in the way" in caplog.text
        devices.start(1)
        assert await devices.tasks[0] == await devices.tasks[1] == 0
        assert "sotto remove" not in caplog.text
        for daemon in devices.daemons.values():
            daemon.close()

    Devices(tmp_path / "kits", rounds=3, num_peers=2).run(story)


@pytest.mark.slow
@pytest.mark.parametrize("num_peers", [2, 3, 5])
@pytest.mark.parametrize("votes", [True, False])
def test_those_that_are_no_majority_wait_for_an_operator(
    num_peers: int, votes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not members declare losses themselves: they name the command, and go on after it."""
    monkeypatch.setattr(rounds, "SAY_AWAY_S", 1.0)
    use_one_thread()
    options = ("graph.kind=complete", *([f"rounds.lost_after_s={LOST_AFTER_S}"] if votes else []))
    devices = Devices(tmp_path / "kits", rounds=150, num_peers=num_peers, options=options)
    devices.run(_lose_most, num_peers, votes, caplog)


async def _lose_most(devices: Devices, num_peers: int, votes: bool, caplog: pytest.LogCaptureFixture) -> None:
    await devices.train(*range(num_peers), beyond=3)
    rest, gone = range(num_peers // 2), range(num_peers // 2, num_peers)
    for peer in gone:
        await devices.kill(peer)
    caplog.clear()
    await devices.until(lambda: any(f"`sotto remove peer-{peer}`" in caplog.text for peer in gone))
    await asyncio.sleep(2 * LOST_AFTER_S)
    waited_in = devices.participant(0).round
    assert all(devices.participant(peer).membership.changes == () for peer in rest)
    for peer in gone:
        with pytest.raises(SottoError, match="the order of an operator"):
            await devices.ask(0, "remove", name=f"peer-{peer}")
        await devices.remove(0, f"peer-{peer}")
    for peer in rest:
        assert await devices.tasks[peer] == 0
        assert waited_in < devices.participant(peer).round == 150
        devices.daemons[peer].close()
