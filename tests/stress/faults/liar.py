"""A member that lies, over an honest core: what it trains, mixes and journals is what an honest peer would.

Its tongue stands between that core and the streams. It adds frames that no honest peer sends, leaves out, repeats and
swaps those that one does, and takes no notice of refusals. What is refused is taken back, and the next honest frame has
its number, so that every good frame is sent some time. A two-faced liar also tells each neighbour of another model, of
which nothing says that it is wrong: what that brings the others is on the auditor's account.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from peer import wire
from peer.compress.payload import Dense, Payload, Sparse
from peer.errors import FrameError, LocalProtocolError
from peer.gossip.membership import Change, ChangeKind
from peer.gossip.mixing import whole
from peer.node import membership_codec
from peer.node.participant import Participant
from peer.wire.message import Message, MessageKind, RepairWish
from tests.state.failing_disk import FailingDisk
from tests.stress.faults.process import Surroundings, VirtualProcess
from tests.stress.faults.scenario import Scenario

_LIE_EVERY_S = (0.3, 3.0)
"""Mean seconds between two lies, drawn once for a run."""
_FAR = 1 << 62
_LARGEST_TWIST = 0.2


@dataclass
class _Entry:
    """One number of the stream to a neighbour, as it goes over the wire."""

    own: int | None
    """The core's number of it; None for a frame that was added."""
    frame: bytes


class Tongue:
    """What the liar says to each neighbour. It outlives the processes of the liar."""

    def __init__(self, scenario: Scenario, account: Callable[[Participant, int, Message, Message], None]) -> None:
        """`account(core, receiver, honest, said)` is told of every message that was said in the place of another."""
        assert scenario.liar is not None
        self._account = account
        self.scenario, self.me = scenario, scenario.liar
        self.core: Participant | None = None
        """The honest peer behind it, in its present process."""
        self.lies: Counter[str] = Counter()
        """What was said that should not have been."""
        self.refusals: Counter[str] = Counter()
        """The sentences with which it was refused, without their numbers."""
        self.insists = False
        """Whether the core's messages are spoilt from now on, and said again however often they are refused."""
        self.is_waited_for = False
        """Whether somebody has refused what the core has to say, and cannot go on without it."""
        self._said: dict[int, list[_Entry]] = {}
        self._withheld = 0.0
        """Push-sum weight that was not given. The liar gives back no more, and tells of no more than there is: what it
        invents, an honest peer may hold one day, and its neighbours refuse it for having too much (SECURITY.md)."""

    def say(self, receiver: int, seq: int, frame: bytes) -> tuple[int, bytes]:
        """Return (number on the wire, bytes) of a frame of the core."""
        entries = self._entries(receiver)
        for number, entry in enumerate(entries, 1):
            if entry.own == seq:
                return number, entry.frame
        entries.append(_Entry(seq, self.twisted(receiver, frame)))
        return len(entries), entries[-1].frame

    def add(self, receiver: int, frame: bytes) -> int:
        """Add a frame that is none of the core's; return its number on the wire."""
        self._entries(receiver).append(_Entry(None, frame))
        return len(self._entries(receiver))

    def refused(self, receiver: int, number: int, problem: str) -> None:
        """Take back what a neighbour refused."""
        words = " ".join("#" if any(c.isdigit() for c in word) else word for word in problem.split()[:9])
        self.refusals[words] += 1
        entries = self._entries(receiver)
        if 0 < number <= len(entries):
            if entries[number - 1].own is None:
                del entries[number - 1]
            else:
                self.is_waited_for |= self.insists

    def own_upto(self, receiver: int, number: int) -> int:
        """Return the core's number for what a neighbour has up to a number on the wire."""
        own = [entry.own for entry in self._entries(receiver)[:number] if entry.own is not None]
        return max(own, default=0)

    def after(self, receiver: int, number: int, frames: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """Return what goes over the wire to a neighbour that has everything up to a number; `frames` are the core's."""
        own = [self.say(receiver, seq, frame) if seq else (0, frame) for seq, frame in frames]
        bare = [each for each in own if each[0] == 0]
        return [(at, each.frame) for at, each in enumerate(self._entries(receiver), 1) if at > number] + bare

    def earlier(self, receiver: int) -> list[tuple[int, bytes]]:
        """Return all that was said to a neighbour."""
        return [(at, each.frame) for at, each in enumerate(self._entries(receiver), 1)]

    def twisted(self, receiver: int, frame: bytes) -> bytes:
        """Return what a neighbour is told in the place of an honest frame: the same whenever it is asked for."""
        if self.insists and not membership_codec.is_notice(frame):
            return frame[: len(frame) // 2]
        if not self.scenario.is_two_faced or membership_codec.is_notice(frame):
            return frame
        try:
            message = wire.decode(frame, self.scenario.layout)
        except FrameError:
            return frame
        random = Random(f"twist {self.scenario.seed} {receiver} {message.round} {message.phase}")
        if message.kind is not MessageKind.GOSSIP or message.phase or random.random() < 0.5:
            return frame
        factor = 1.0 + random.uniform(-_LARGEST_TWIST, _LARGEST_TWIST)
        layers = _scaled(message.layers, factor)
        if layers is None:
            return frame
        push_weight = message.push_weight
        if self.scenario.spec.push_sum and message.mixing_weight > 0.0:
            # A receiver adds the weight that is told, times the mixing weight.
            room = max(0.0, min(self._withheld / message.mixing_weight, self.scenario.num_first - push_weight))
            more = min(push_weight * random.uniform(-_LARGEST_TWIST, _LARGEST_TWIST), room)
            self._withheld -= message.mixing_weight * more
            push_weight += more
        self.lies["another model for each"] += 1
        said = replace(message, layers=layers, push_weight=push_weight)
        assert self.core is not None
        self._account(self.core, receiver, message, said)
        return wire.encode(said, self.scenario.layout)

    def _entries(self, receiver: int) -> list[_Entry]:
        return self._said.setdefault(receiver, [])


def _scaled(layers: Payload, factor: float) -> Payload | None:
    """Return a payload of other values; None where it is of a kind that is left alone."""
    scaled: list[Dense | Sparse] = []
    for layer in layers:
        if isinstance(layer, Dense):
            scaled.append(_times(layer, factor))
        elif isinstance(layer, Sparse) and isinstance(layer.values, Dense):
            scaled.append(replace(layer, values=_times(layer.values, factor)))
        else:
            return None
    return tuple(scaled)


def _times(values: Dense, factor: float) -> Dense:
    return replace(values, values=values.values * values.values.dtype.type(factor))


class LyingProcess(VirtualProcess):
    """A process of the liar."""

    def __init__(self, world: Surroundings, me: int, disk: FailingDisk, tongue: Tongue) -> None:
        super().__init__(world, me, disk)
        self.tongue = tongue
        tongue.core = self.participant
        self.falsehoods: Mapping[str, Falsehood] = FALSEHOODS
        self.lots = Random(f"lies {world.scenario.seed} {world.now}")
        self._every_s = Random(f"lies {world.scenario.seed}").uniform(*_LIE_EVERY_S)

    def connect(self) -> None:
        super().connect()
        self._plan_lie()

    def put(self, receiver: int, seq: int, frame: bytes) -> None:
        if not seq:
            super().put(receiver, seq, frame)
            return
        number, said = self.tongue.say(receiver, seq, frame)
        streams, random = self.world.streams, self.lots
        if self.world.quiet or random.random() > 0.04:
            streams.send(self.me, receiver, number, said)
        elif random.random() < 0.5:
            # Left out: it comes when the receiver has refused what follows, or when the stream is dialled anew.
            self.tongue.lies["left out"] += 1
            self.later(random.uniform(0.5, 2.0), lambda: streams.reset(self.me, receiver))
        else:
            self.tongue.lies["said twice"] += 1
            streams.send(self.me, receiver, number, said)
            streams.send(self.me, receiver, number, said)

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        own = super().link_up(peer, self.tongue.own_upto(peer, remote_has))
        frames = self.tongue.after(peer, remote_has, own)
        if len(frames) > 1 and not self.world.quiet and self.lots.random() < 0.1:
            self.tongue.lies["in another order"] += 1
            frames[0], frames[1] = frames[1], frames[0]
        return frames

    def receipt(self, peer: int, upto: int) -> None:
        super().receipt(peer, self.tongue.own_upto(peer, upto))

    def _plan_lie(self) -> None:
        self.later(self.lots.expovariate(1.0 / self._every_s), self._lie)

    def _lie(self) -> None:
        if self.world.quiet:
            return
        self._plan_lie()
        world, random = self.world, self.lots
        receivers = [
            peer
            for peer in world.scenario.neighbors(self.me)
            if world.streams.is_up(self.me, peer) and not world.is_newcomer(peer)
        ]
        if not receivers:
            return
        receiver = random.choice(receivers)
        name = random.choice(tuple(self.falsehoods))
        try:
            said = self.falsehoods[name](Occasion(random, world.scenario, self.participant, receiver, self.tongue))
        except LocalProtocolError:
            return  # Not even a liar can write that.
        if said is None:
            return
        seq, frame = said
        if seq is None:
            seq = self.tongue.add(receiver, frame)
        self.tongue.lies[name] += 1
        world.note(f"{self.me} lies to {receiver}: {name}, number {seq}")
        world.streams.send(self.me, receiver, seq, frame)


@dataclass(frozen=True)
class Occasion:
    """What a falsehood is made from."""

    random: Random
    scenario: Scenario
    core: Participant
    receiver: int
    tongue: Tongue

    @property
    def round(self) -> int:
        """The round that the liar is in."""
        return self.core.round

    @property
    def me(self) -> int:
        return self.core.peer

    @property
    def is_late(self) -> bool:
        """Whether every peer has done some rounds."""
        return self.round > self.scenario.longest_lead + 2

    def message(self, **changes: object) -> bytes:
        """Return a message of the round after the one that the liar is in, with changes."""
        schedule = self.core.algorithm.node.schedule
        weights = (float(schedule.weight(t, self.receiver, self.me)) for t in (self.round + 1, self.round))
        mixing_weight = next((weight for weight in weights if weight), 0.0)
        honest = Message(
            MessageKind.GOSSIP, self.me, self.round + 1, mixing_weight=mixing_weight,
            layers=whole(self.core.algorithm.x.astype(np.float32), self.scenario.layout),
        )  # fmt: skip
        return wire.encode(replace(honest, **changes), self.scenario.layout)  # type: ignore[arg-type]

    def change(self, kind: ChangeKind, subject: int, issuer: int, effective: int) -> bytes:
        """Return the notice of a change."""
        heard = max(0, effective - 1) if kind is ChangeKind.LOST else 0
        return membership_codec.encode(Change(kind, subject, issuer, max(1, effective), heard))

    def other(self) -> int:
        """Return an honest peer that is not the receiver."""
        peers = [peer for peer in range(self.scenario.num_first) if peer not in (self.me, self.receiver)]
        return self.random.choice(peers)


Said = tuple[int | None, bytes]
"""(number on the wire, or None for the next, 0 for none; the frame)."""
Falsehood = Callable[[Occasion], Said | None]


def _numbered(make: Callable[[Occasion], bytes]) -> Falsehood:
    return lambda occasion: (None, make(occasion))


def _bare(make: Callable[[Occasion], bytes]) -> Falsehood:
    return lambda occasion: (0, make(occasion))


def _old_number_other_content(occasion: Occasion) -> Said | None:
    earlier = occasion.tongue.earlier(occasion.receiver)
    return (occasion.random.choice(earlier)[0], occasion.message(mixing_weight=2.0)) if earlier else None


def _said_again_under_a_new_number(occasion: Occasion) -> Said | None:
    rounds = [frame for _, frame in occasion.tongue.earlier(occasion.receiver) if frame[:2] == b"SV"]
    return (None, occasion.random.choice(rounds)) if rounds else None


def _garbage(occasion: Occasion) -> bytes:
    return occasion.random.choice((b"SV", b"SM", b"SV\x01", b"")) + occasion.random.randbytes(40)


def _huge(occasion: Occasion) -> bytes:
    return occasion.message(layers=whole(np.full(occasion.scenario.layout.size, 3e38, "f4"), occasion.scenario.layout))


def _repair(occasion: Occasion) -> bytes:
    wish = RepairWish(0, 8, occasion.random.choice((0, 1, 16)))
    round_ = occasion.random.choice((occasion.round, max(0, occasion.round - 1), _FAR))
    return occasion.message(
        kind=MessageKind.REPAIR_REQUEST, layers=(), wanted=(wish,), mixing_weight=0.0, round=round_
    )  # fmt: skip


FALSEHOODS: dict[str, Falsehood] = {
    "a weight of 2": _numbered(lambda o: o.message(mixing_weight=2.0)),
    "a weight of −1": _numbered(lambda o: o.message(mixing_weight=-1.0)),
    "a weight just above": _numbered(lambda o: o.message(mixing_weight=0.98765)),
    "u = 1e300": _numbered(lambda o: o.message(push_weight=1e300)),
    "u = 0": _numbered(lambda o: o.message(push_weight=0.0)),
    "u above all": _numbered(lambda o: o.message(push_weight=o.scenario.num_first + 1.0)),
    "huge numbers": _numbered(_huge),
    "round 2^62": _numbered(lambda o: o.message(round=_FAR)),
    "a round after the last": _numbered(lambda o: o.message(round=o.scenario.rounds + 1)),
    "a phase that is none": _numbered(lambda o: o.message(phase=o.random.choice((7, 100, 1 << 40)))),
    "another sender": _numbered(lambda o: o.message(sender=o.other())),
    "a pairwise message": _numbered(lambda o: o.message(kind=MessageKind.PAIR_REQUEST)),
    "said again under a new number": _said_again_under_a_new_number,
    "an old number, other content": _old_number_other_content,
    "bytes": _numbered(_garbage),
    "bytes without a number": _bare(_garbage),
    "a message without a number": _bare(lambda o: o.message()),
    "a request for a repair": _bare(_repair),
    "another leaves": _numbered(lambda o: o.change(ChangeKind.LEAVE, o.receiver, o.receiver, o.round + 9)),
    "itself left": lambda o: (None, o.change(ChangeKind.LEAVE, o.me, o.me, 1)) if o.is_late else None,
    "a third was lost": lambda o: (None, o.change(ChangeKind.LOST, o.other(), o.me, 1)) if o.is_late else None,
    "you are lost": _numbered(lambda o: o.change(ChangeKind.LOST, o.receiver, o.me, o.round + 9)),
    "a member joins": _numbered(lambda o: o.change(ChangeKind.JOIN, o.other(), o.me, o.round + 9)),
    "it leaves in round 2^62": _numbered(lambda o: o.change(ChangeKind.LEAVE, o.me, o.me, _FAR - 1)),
    "a change of nobody": _numbered(lambda o: o.change(ChangeKind.LOST, 1000, o.me, o.round + 9)),
}  # fmt: skip
"""What a liar says that no honest peer would, whatever the run: it must come to nothing."""
