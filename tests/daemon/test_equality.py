"""Real daemons on loopback, of which one tells another a different story than the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import safetensors.numpy

from peer.node.told import check_equivocation
from peer.train.threads import use_one_thread
from tests.daemon.equivocation import TwoStories, tells_two_stories
from tests.daemon.test_members import Devices

LIAR, VICTIM = 3, 1
HONEST = (0, 1, 2)
ROUNDS = 90


def options(algorithm: str) -> tuple[str, ...]:
    graph = "star" if algorithm == "parameter-server" else "complete"
    return (f"algorithm.name={algorithm}", f"graph.kind={graph}", "training.label_adjustment=false")


def lie(devices: Devices, liar: int = LIAR) -> TwoStories:
    for peer in range(4):
        devices.start(peer)
    return tells_two_stories(devices.daemons[liar], VICTIM, range(13, 14))


def models(devices: Devices) -> list[bytes]:
    states = [devices.files[peer].parent / "state" / "model.safetensors" for peer in HONEST]
    return [b"".join(each.tobytes() for each in safetensors.numpy.load_file(file).values()) for file in states]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "lost_after"),
    [("low-rank", ()), ("compressed-allreduce", ()), ("allreduce", ("rounds.lost_after_s=60",))],
)
def test_who_tells_two_stories_is_out_and_the_others_hold_one_model(
    tmp_path: Path, algorithm: str, lost_after: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    use_one_thread()
    settings = (*options(algorithm), *lost_after)
    Devices(tmp_path / "kits", rounds=ROUNDS, num_peers=4, options=settings).run(_out)
    assert "peer-3 has signed that it told different things to different members" in caplog.text


async def _out(devices: Devices) -> None:
    lies = lie(devices)
    await devices.until(lambda: lies.told > 0)
    await devices.until(lambda: all(devices.standing(peer, "peer-3") == "lost" for peer in HONEST))
    devices.tasks[LIAR].cancel()
    await asyncio.wait([devices.tasks.pop(LIAR)])
    devices.daemons.pop(LIAR).close()
    assert [await devices.tasks[peer] for peer in HONEST] == [0, 0, 0]
    for peer in HONEST:
        (loss, *_) = (each for each in devices.participant(peer).membership.changes if each.subject == LIAR)
        check_equivocation(devices.daemons[(peer + 1) % 3].local.statements, LIAR, loss.equivocation)
        assert not devices.participant(peer).session.lost - {LIAR}
        devices.daemons[peer].close()
    assert len({*models(devices)}) == 1


@pytest.mark.slow
def test_who_lies_says_so_in_the_midst_of_a_round_that_the_others_hold_up(tmp_path: Path) -> None:
    """Rounds so fast that those of the lie are over before the liar may speak again: the others begin no further round
    until it has."""
    use_one_thread()
    settings = (*options("allreduce"), "rounds.lost_after_s=60")
    Devices(tmp_path / "kits", rounds=ROUNDS, num_peers=4, options=settings).run(_out_after_silence)


async def _out_after_silence(devices: Devices) -> None:
    lies = lie(devices)
    lies.hold_back_s = 2.0
    await devices.until(lambda: lies.told > 0)
    await devices.until(lambda: all(devices.standing(peer, "peer-3") == "lost" for peer in HONEST))
    await devices.stop(*HONEST, LIAR)


@pytest.mark.slow
def test_workers_whose_server_tells_two_stories_go_no_further_and_name_it(tmp_path: Path) -> None:
    """Nobody can take the place of the server, by which all notes pass: the run waits for a person."""
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=4, options=options("parameter-server")).run(_wait)


async def _wait(devices: Devices) -> None:
    lies, workers = lie(devices, liar=0), (1, 2, 3)
    await devices.until(lambda: lies.told > 0)
    await devices.until(lambda: all("peer-0" in str(devices.status(peer)["not_equal"]) for peer in workers))
    # The round under way ends; what follows would go on without end.
    assert await devices.settled(lambda: sum(devices.participant(peer).round for peer in workers)) < 3 * 200
    await devices.stop(*workers, 0)


@pytest.mark.slow
def test_who_signs_something_else_than_it_told_is_named_until_an_operator_removes_it(tmp_path: Path) -> None:
    """It has signed one story: nobody can prove to others what it told."""
    use_one_thread()
    Devices(tmp_path / "kits", rounds=10_000, num_peers=4, options=options("low-rank")).run(_remove)


async def _remove(devices: Devices) -> None:
    lies = lie(devices)
    lies.signs_both = False
    await devices.until(lambda: devices.is_there(VICTIM) and "peer-3" in devices.status(VICTIM)["not_equal"])
    assert devices.status(VICTIM)["not_equal"]["peer-3"] == "has signed something else than it told this peer"
    assert not [change for peer in HONEST for change in devices.participant(peer).membership.changes]
    answer = await devices.remove(0, "peer-3")
    await devices.until(lambda: all(devices.participant(peer).round > answer["from"] + 3 for peer in HONEST))
    devices.tasks[LIAR].cancel()
    await asyncio.wait([devices.tasks.pop(LIAR)])
    devices.daemons.pop(LIAR).close()
    await devices.stop(*HONEST)
