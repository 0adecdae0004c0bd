"""Real daemons on loopback, of which one sends numbers that no honest peer does: it is named, and a removal goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import patch

import pytest

from peer.gossip.effects import OutgoingFrame, Send
from peer.train.threads import use_one_thread
from tests.daemon.test_members import Devices
from tests.stress.plausible import blown_up

LIAR, VICTIM = 2, 0
HONEST = (0, 1)


def test_a_run_that_waits_for_an_honest_message_names_the_sender_and_goes_on_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_one_thread()
    options = ("algorithm.name=d-psgd", "graph.kind=complete")
    Devices(tmp_path / "kits", rounds=10_000, num_peers=3, options=options).run(_remove, caplog)


async def _remove(devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    await devices.train(*HONEST, LIAR, beyond=3)
    liar = devices.participant(LIAR)
    encode = liar._encode

    def lie(sends: list[Send]) -> list[OutgoingFrame]:
        return encode([Send(receiver, blown_up(message, 1e6)) for receiver, message in sends])

    with patch.object(liar, "_encode", lie):
        await _name_and_remove(devices, caplog)


async def _name_and_remove(devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    await devices.until(lambda: "peer-2 broke the protocol: sent what no honest peer does" in caplog.text)
    await devices.settled(lambda: sum(devices.participant(peer).round for peer in HONEST))
    # The liar goes on lying, until it hears that it is out.
    liar = devices.tasks.pop(LIAR)
    answer = await devices.remove(VICTIM, "peer-2")
    await devices.until(lambda: all(devices.participant(peer).round > answer["from"] + 3 for peer in HONEST))
    liar.cancel()
    await asyncio.wait([liar])
    devices.daemons.pop(LIAR).close()
    await devices.stop(*HONEST)
