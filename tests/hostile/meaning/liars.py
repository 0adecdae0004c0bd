"""A run of three honest peers in memory, whose frames a test replaces by lies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peer import gossip, wire
from peer.compress.layout import Layout
from peer.errors import RemoteProtocolError
from peer.node import membership_codec
from peer.wire.message import Message, MessageKind
from tests.node.durable_peers import ALGORITHMS, SIZES, TOP, World

LAYOUT = Layout.of_sizes(SIZES)
UNBIASED: tuple[str, dict[str, Any]] = ("qsgd", {"bits": 7, "unbiased": True})
SETTINGS: dict[str, dict[str, Any]] = {
    **ALGORITHMS,
    "allreduce": {},
    "parameter-server": {"compressor": UNBIASED},
    "d-psgd": {},
    "naive-quantized": {"compressor": UNBIASED},
    "sgp": {},
    "deep-squeeze": {"compressor": TOP, "averaging_rate": 0.2},
    "scsp": {"compressor": TOP, "averaging_rate": 0.2, "final_rounds": 2},
    "dcd-psgd": {"compressor": UNBIASED},
    "ecd-psgd": {"compressor": UNBIASED},
    "moniqua-d2": {**ALGORITHMS["moniqua"], "averaging_rate": 0.5},
}
"""Every algorithm with rounds whose peers hear each other."""
PUSH_SUM = ("sgp", "sparse-push", "scsp", "quant-sgp")
REPLICAS = ("quant-sgp", "choco-sgd", "dcd-psgd", "ecd-psgd")
SENDER, RECEIVER = 0, 1


class LiarWorld(World):
    """A world of any algorithm. Peer 0 sends lies to peer 1 when a test says so."""

    settings = SETTINGS

    def until(self, kind: MessageKind | None = None, *, at_round: int = 2) -> tuple[int, Message]:
        """Run until a message of this kind, by default that of the algorithm's rounds, from peer 0 waits to be read by
        peer 1; return its number and the message. It stays where it is."""
        kind = kind or gossip.ALGORITHMS[self.algorithm].message_kind
        for turn in range(30_000):
            waiting = self.queues[SENDER, RECEIVER]
            if waiting and not membership_codec.is_notice(waiting[0].frame):
                seq, frame, _ = waiting[0]
                last_codes = self.peers[RECEIVER].participant.last_codes
                before = None if last_codes is None else last_codes.of(SENDER)
                message = wire.decode(frame, LAYOUT, previous=before)
                if message.kind is kind and message.round >= at_round:
                    return seq, message
            self.now += turn % self.n == 0
            self.turn(turn % self.n)
        raise AssertionError(f"no {kind.name} of round {at_round} was sent")

    def refuses(self, seq: int, lie: Message | bytes, text: str) -> None:
        """Let peer 1 read a lie, and fail unless it names peer 0 for it, and nothing has come of it."""
        victim, disk = self.peers[RECEIVER], self.disks[RECEIVER]
        frame = lie if isinstance(lie, bytes) else wire.encode(lie, LAYOUT)
        session = victim.participant.session
        before = (len(disk.operations), victim.links.received(), session.waiting_for, session.inbox.unconsumed_counts())
        x, u = victim.participant.algorithm.x.tobytes(), victim.participant.algorithm.u
        with pytest.raises(RemoteProtocolError, match=text) as caught:
            victim.receive(SENDER, seq, frame, self.now)
        assert caught.value.peer == SENDER
        after = (len(disk.operations), victim.links.received(), session.waiting_for, session.inbox.unconsumed_counts())
        assert after == before
        assert (victim.participant.algorithm.x.tobytes(), victim.participant.algorithm.u) == (x, u)


def started(algorithm: str, **settings: Any) -> LiarWorld:
    world = LiarWorld(algorithm, **settings)
    world.start()
    return world


def finishes_like_an_honest_run(world: LiarWorld) -> None:
    """Let the honest frames come, and fail unless all ends with the bits of a run in which nobody lied."""
    world.run()
    honest = started(world.algorithm, late=world.late, rounds=world.rounds)
    honest.run()
    assert world.models() == honest.models()


def told(message: Message, **lies: Any) -> Message:
    """Return a message with lies in it."""
    return replace(message, **lies)
