"""Real daemons on loopback: one joins the run, one leaves it, one is lost, and the others end it.

All in one process, so that the libraries are loaded once; each has its own rounds, journal, certificate and port.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peer.config import load
from peer.daemon import open_peer
from peer.errors import SottoError
from peer.init import place_peers, write_cluster
from peer.synchronous import SynchronousDaemon
from peer.train.threads import use_one_thread

OPTIONS = (
    "run.rounds=90",
    "graph.kind=exponential",
    "training.precision=float32",
    "training.batch_size=2",
    "evaluation.every_rounds=0",
    "transport.backoff_max_s=0.3",
    "transport.linger_s=5",
)


class Devices:
    """Four kits, the last of which joins later, and the daemons that run from them."""

    def __init__(self, kits: Path, algorithm: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = min(int(probe.getsockname()[1]), 65000)
        config = load(environment={}, overrides=[*OPTIONS, f"algorithm.name={algorithm}"])
        self.files = write_cluster(kits, config, place_peers(4, (), port), join_later=1)
        self.daemons: dict[int, SynchronousDaemon] = {}
        self.tasks: dict[int, asyncio.Task[int]] = {}

    def start(self, peer: int) -> None:
        daemon = open_peer(load(self.files[peer], environment={}), self.files[peer].parent)
        assert isinstance(daemon, SynchronousDaemon)
        self.daemons[peer], self.tasks[peer] = daemon, asyncio.create_task(daemon.main())

    async def kill(self, peer: int) -> None:
        self.tasks[peer].cancel()
        await asyncio.wait([self.tasks[peer]])
        self.daemons[peer].close()

    async def ask(self, peer: int, verb: str, **arguments: Any) -> dict[str, Any]:
        return await self.daemons[peer].control(verb, arguments)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            for task in self.tasks.values():
                if task.done() and not task.cancelled():
                    assert task.result() == 0
            await asyncio.sleep(0.02)

    def members(self, peer: int) -> list[str]:
        found: list[str] = self.daemons[peer].status()["members"]
        return found


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["quant-sgp"])
def test_a_device_joins_one_leaves_and_one_is_lost(tmp_path: Path, algorithm: str) -> None:
    use_one_thread()
    asyncio.run(_join_leave_and_lose(Devices(tmp_path / "kits", algorithm)))


async def _join_leave_and_lose(devices: Devices) -> None:
    for peer in range(4):
        devices.start(peer)
    zero, joiner = devices.daemons[0], devices.daemons[3]
    await devices.until(lambda: joiner.participant.round > 0 and joiner.participant.is_member)
    with pytest.raises(SottoError, match="peer-3 lives"):
        await devices.ask(3, "remove", name="peer-3")
    answer = await devices.ask(1, "leave")
    assert answer["from"] > answer["round"]
    assert await devices.tasks[1] == 0
    assert (devices.files[1].parent / "state" / "model.safetensors").exists()
    await devices.until(lambda: devices.members(0) == ["peer-0", "peer-2", "peer-3"])
    weight = sum(devices.daemons[peer].participant.algorithm.u for peer in (0, 2, 3))
    assert weight == pytest.approx(3.0, abs=1.0)  # They are not in the same round.
    await devices.kill(2)
    await devices.until(lambda: 2 in zero.participant.session.waiting_for)
    answer = await devices.ask(0, "remove", name="peer-2")
    await devices.until(lambda: zero.participant.round > answer["from"] + 3)
    assert devices.members(0) == ["peer-0", "peer-3"]
    # What is in the journal leads the newcomer back to where it was.
    await devices.kill(3)
    devices.start(3)
    assert await devices.tasks[0] == await devices.tasks[3] == 0
    assert zero.participant.round == devices.daemons[3].participant.round == 90
    for peer in (0, 1, 3):
        devices.daemons[peer].close()
