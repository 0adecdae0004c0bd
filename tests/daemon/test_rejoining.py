"""Real daemons on loopback: devices that were declared lost, or whose disk was wiped, take part again."""

from __future__ import annotations

import asyncio
import datetime
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from peer.config.options import load
from peer.daemon.members import rejoining
from peer.daemon.process import Daemon
from peer.errors import DeclaredLost, HandshakeRefused, SecurityError
from peer.net.security.credentials import Credentials
from peer.ops.enrollment import revoke
from peer.state.metrics import MetricsStore
from peer.train.threads import use_one_thread
from tests.daemon.test_members import Devices
from tests.daemon.test_wrong_peers import own_authority

EVERYBODY = [f"peer-{peer}" for peer in range(4)]
OPTIONS = ("rounds.lost_after_s=2", "graph.kind=ring")


@pytest.mark.slow
def test_a_device_that_was_lost_takes_part_again(tmp_path: Path) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=4, options=OPTIONS).run(_lose_and_come_back)


@pytest.mark.slow
def test_where_nothing_is_signed_a_device_waits_for_a_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All others say that it is lost, and any of them could say so of anybody."""
    use_one_thread()
    devices = Devices(tmp_path / "kits", rounds=10_000, num_peers=4, mode="insecure", options=OPTIONS)
    devices.run(_wait_for_a_command, caplog)


async def _wait_for_a_command(devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    await devices.train(*range(4), beyond=3)
    await _lose(devices, 3)
    devices.start(3, rejoins=True)
    await devices.until(lambda: "say that this peer was declared lost, and none proves it" in caplog.text)
    assert "`sotto admin rejoin` on this device" in caplog.text
    assert devices.daemons[3].local.incarnation == 0
    assert not any(file.name.startswith("set-aside-") for file in (devices.files[3].parent / "state").iterdir())
    # What the command does.
    await devices.kill(3)
    rejoining.begin(1, load(devices.files[3], environment={}), devices.files[3].parent)
    devices.start(3, rejoins=True)
    await _everybody_is_back(devices, 1)
    await devices.stop(*range(4))


async def _lose_and_come_back(devices: Devices) -> None:
    await devices.train(*range(4), beyond=3)
    before = devices.participant(3).round
    await _lose(devices, 3)
    assert devices.standing(0, "peer-3") == "lost"
    devices.start(3, rejoins=True)
    await _everybody_is_back(devices, 1)
    assert devices.participant(3).peer == devices.participant(0).membership.numbering.number(3, 1)
    assert devices.standing(0, "peer-3") == "member"
    status = devices.status(3)
    assert (status["name"], status["incarnation"]) == ("peer-3", 1)
    since = status["rejoined_from"]
    await devices.until(lambda: devices.participant(3).round > since + 5)
    # The metrics of the device go on, and what it had is set aside.
    folder = devices.files[3].parent / "state"
    assert any(file.name.startswith("set-aside-") for file in folder.iterdir())
    await devices.until(lambda: _rounds(folder)[-1] > since)
    rounds = _rounds(folder)
    assert rounds[0] == 0
    assert since in rounds
    assert before <= max(round_ for round_ in rounds if round_ < since) + 1
    # Its second life is as durable as its first.
    weight = devices.participant(3).algorithm.u
    assert weight > 0
    await devices.kill(3)
    devices.start(3, rejoins=True)
    await devices.until(lambda: devices.is_there(3) and devices.participant(3).round > since + 8)
    assert devices.status(3)["incarnation"] == 1
    # It is lost once more, and comes back once more.
    await _lose(devices, 3)
    devices.start(3, rejoins=True)
    await _everybody_is_back(devices, 2)
    assert devices.status(3)["incarnation"] == 2
    await devices.stop(*range(4))


async def _lose(devices: Devices, peer: int) -> None:
    rest = sorted({*range(4)} - {peer})
    await devices.kill(peer)
    names = [f"peer-{each}" for each in rest]
    await devices.until(lambda: all(devices.members(each) == names for each in rest))


async def _everybody_is_back(devices: Devices, incarnation: int) -> None:
    """Wait until peer 3 is a member to all, as this incarnation."""
    await devices.until(lambda: devices.is_there(3) and devices.status(3).get("incarnation") == incarnation)
    number = devices.participant(0).membership.numbering.number(3, incarnation)
    await devices.until(
        lambda: all(number in (devices.participant(peer).membership.members or ()) for peer in range(4))
    )
    assert all(sorted(devices.members(peer)) == EVERYBODY for peer in range(4))


def _rounds(folder: Path) -> list[int]:
    metrics = MetricsStore(folder / "metrics.sqlite", read_only=True)
    try:
        return [record.round for record in metrics.rounds()]
    finally:
        metrics.close()


@pytest.mark.slow
def test_a_device_whose_disk_was_wiped_admits_it_and_takes_part_again(tmp_path: Path) -> None:
    use_one_thread()
    options = (*OPTIONS, "rounds.lost_after_s=6")
    Devices(tmp_path / "kits", rounds=10_000, num_peers=4, options=options).run(_wipe_and_come_back)


async def _wipe_and_come_back(devices: Devices) -> None:
    await devices.train(*range(4), beyond=3)
    await devices.until(lambda: devices.links(2).receipts_of(3)[0] > 0 and devices.links(0).receipts_of(3)[0] > 0)
    await devices.kill(3)
    shutil.rmtree(devices.files[3].parent / "state")
    await devices.until(lambda: "peer-3" in devices.status(0)["waiting_for"])
    devices.start(3, rejoins=True)
    await _everybody_is_back(devices, 1)
    assert devices.status(3)["incarnation"] == 1
    # Its disk is wiped once more after the others have declared it lost: it has forgotten which one it was.
    await _lose(devices, 3)
    shutil.rmtree(devices.files[3].parent / "state")
    devices.start(3, rejoins=True)
    await _everybody_is_back(devices, 2)
    assert devices.status(3)["incarnation"] == 2
    await devices.stop(*range(4))


@pytest.mark.slow
def test_an_operator_removes_a_device_and_it_takes_part_again(tmp_path: Path) -> None:
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=4).run(_remove_and_come_back)


async def _remove_and_come_back(devices: Devices) -> None:
    await devices.train(*range(4), beyond=3)
    await devices.kill(3)
    await devices.until(lambda: 3 in devices.participant(0).session.waiting_for)
    answer = await devices.remove(0, "peer-3")
    await devices.until(lambda: devices.participant(0).round > answer["from"])
    devices.start(3, rejoins=True)
    await _everybody_is_back(devices, 1)
    await devices.stop(*range(4))


@pytest.mark.slow
def test_a_device_ends_where_nobody_takes_part_again(tmp_path: Path) -> None:
    use_one_thread()
    devices = Devices(tmp_path / "kits", rounds=10_000, num_peers=4, options=(*OPTIONS, "rounds.rejoin=false"))
    devices.run(_stay_away)


async def _stay_away(devices: Devices) -> None:
    await devices.train(*range(4), beyond=3)
    await _lose(devices, 3)
    devices.start(3, rejoins=True)
    with pytest.raises(DeclaredLost, match="add the device again under another name"):
        async with asyncio.timeout(60):
            await devices.tasks.pop(3)
    assert isinstance(DeclaredLost("", incarnation=1), HandshakeRefused)
    await devices.stop(0, 1, 2)


def _revoke(devices: Devices) -> None:
    revoke(devices.kits, "peer-3")


def _revoke_behind_its_back(devices: Devices) -> None:
    revoke(devices.kits, "peer-3")
    # Whoever has the device does not tell it.
    devices.files[3].with_name("revoked.pem").unlink()


def _let_expire(devices: Devices) -> None:
    folder = devices.files[3].parent
    issued = own_authority([folder]).issue("peer-3", now=datetime.datetime(2001, 2, 3, tzinfo=datetime.UTC))
    for name in ("peer.pem", "peer.key"):
        (folder / name).unlink()
    issued.write(folder / "peer.pem", folder / "peer.key")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        pytest.param(_revoke, "the certificate of 'peer-3' was revoked on", id="revoked"),
        pytest.param(
            _revoke_behind_its_back,
            "does not allow it: the certificate of 'peer-3' was revoked on",
            id="revoked-behind-its-back",
        ),
        pytest.param(_let_expire, "peer.pem expired on 2003-02-04; issue a new one", id="expired"),
    ],
)
def test_a_device_whose_certificate_is_worth_nothing_does_not_take_part_again(
    tmp_path: Path, spoil: Callable[[Devices], None], sentence: str
) -> None:
    use_one_thread()
    devices = Devices(tmp_path / "kits", rounds=10_000, num_peers=4, options=OPTIONS)
    devices.run(_stay_out, spoil, sentence)


async def _try_to_come_back(devices: Devices) -> None:
    async with asyncio.timeout(60):
        devices.start(3, rejoins=True)
        await devices.tasks.pop(3)


def _revocations(daemon: Daemon) -> int:
    access = daemon.local.access
    assert isinstance(access, Credentials)
    assert access.revoked is not None
    return access.revoked.number


async def _stay_out(devices: Devices, spoil: Callable[[Devices], None], sentence: str) -> None:
    await devices.train(*range(4), beyond=3)
    await _lose(devices, 3)
    spoil(devices)
    if spoil is not _let_expire:
        # Each looks at its file now and then. Until then the device takes part again, and is thrown out later.
        await devices.until(lambda: all(_revocations(devices.daemons[peer]) for peer in range(3)))
    with pytest.raises(SecurityError, match=re.escape(sentence)):
        await _try_to_come_back(devices)
    # It had no need to give up what it has, and nobody has taken it in.
    names = [file.name for file in (devices.files[3].parent / "state").iterdir()]
    assert "incarnation.json" not in names
    assert not any(name.startswith("set-aside-") for name in names)
    reached = devices.participant(0).round
    await devices.until(lambda: all(devices.participant(peer).round > reached + 3 for peer in range(3)))
    assert [devices.standing(peer, "peer-3") for peer in range(3)] == ["lost"] * 3
    await devices.stop(*range(3))
