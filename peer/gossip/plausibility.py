"""How far one message may move a model: what no honest message does is refused before anything of it is kept.

`value_bounds` asks whether numbers can be added up at all. Here the question is what they do to the model. A message
reaches as far as the norm of the model that it brings, of the difference that it adds to a copy, or of the step that
its gradient alone would be (`Algorithm.reach`). It may reach

    TIMES · f + ROOM · max(√(2 guard.max_loss), √n)

with n the number of numbers of the model, and f what is known already: the furthest that a message of its sender or an
own one has reached so far, or the norm of the own model. The first term covers what has been trained for a while:
everybody began at one model, and mixes since. The second is the norm of a model, or a step, by which predictions from
features of size 1 change as much as the largest loss allows with which a peer goes on; or by which each number changes
by 1, as hundreds of a script's steps between two exchanges might, before the own ones are taken. It covers what says
nothing of others: a model that is still zero, own data that are easy, small or few, a newcomer whose data are not.

A peer asks its own messages first, and ends as one that diverged rather than send what reaches further than HALF of
that beside what it sent before. A receiver knows at least as much of a sender as it heard of it, so that peers that
diverge end by their own guard, alone or together, and accuse nobody. HALF is also what leaves room for a lie: a message
counts at most half in a mean, so that one that others let by does not end its receivers by what they send next.

How large own gradients are is left aside on purpose: those of a device with a hundred times the samples, or another
unit, are as many times as long, and honest. A message is refused or taken whole: a part of it would be mass made or
lost. What is in a journal is not asked again, since what others were sent rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from peer.compress.base import Compressor
from peer.compress.bound import BoundedCompressor
from peer.errors import LOWER_RATE, DivergenceError, RemoteProtocolError
from peer.gossip.base import AlgorithmSpec, Memory, NodeContext
from peer.wire.message import Message

TIMES = 8.0
"""So many times as far as what is known already a message may reach."""
ROOM = 2.0
"""So many times the largest error that the guard lets a peer go on with, or a change of each number by 1."""
HALF = 0.5
"""This share of what receivers let by a peer sends."""
BURST = 0.25
"""What came late adds W (x_j − x_i) for each of the rounds that two peers went on without each other: after k rounds
up to k W times the distance that they have come to, and the first term is as many times this larger."""

REMEMBERED = 16
"""Rounds for which it is known who moved the model further than an honest peer would have."""


class Reaches:
    """How far the messages of each peer have moved models so far."""

    def __init__(self, node: NodeContext, *, spread: float = 1.0, skips: int = 0) -> None:
        """`spread`: see `spread_of`. `skips`: how many rounds peers may go on without each other where what they missed
        is added up later, and is no mean of models."""
        self._me, self._largest_loss = node.peer, node.largest_loss
        self._times = spread * TIMES * (1.0 + BURST * skips)
        self._room = spread * ROOM * max(math.sqrt(2.0 * node.largest_loss), math.sqrt(node.layout.size))
        self._furthest = {node.peer: 0.0}
        """Peer → the furthest that a message of it has reached; of the own ones, and of the own model."""
        self.is_replaying = False
        """Whether what is heard and sent now is in the journal: it is not asked again."""
        self._suspect: tuple[int, int, float] | None = None
        """(Round, sender, reach) of the last message that the sender would have kept to itself if it were honest."""

    def allowed(self, sender: int, own_norm: float = 0.0) -> float:
        """Return how far a message may reach. `own_norm`: of the own model now, ‖z‖₂."""
        return self._times * max(self._furthest.get(sender, 0.0), self._furthest[self._me], own_norm) + self._room

    def check(self, message: Message, reach: float, own_norm: Callable[[], float]) -> None:
        """Refuse a message that reaches too far. The norm costs a pass over the model, and is hardly ever needed."""
        if self.is_replaying or reach <= self.allowed(message.sender):
            return
        if not reach <= self.allowed(message.sender, own_norm()):
            raise RemoteProtocolError(
                f"sent what no honest peer does in round {message.round}: it moves a model by {reach:.3g}, and "
                f"{self.allowed(message.sender, own_norm()):.3g} is let by",
                peer=message.sender,
            )

    def note(self, t: int, message: Message, reach: float) -> None:
        """Take note of how far a neighbour's message moves the model in the own round t."""
        sender, allowed = message.sender, self.allowed(message.sender)
        if reach > HALF * allowed:
            self._suspect = t, sender, reach
        # A journal of an earlier release may hold any number.
        self._furthest[sender] = max(self._furthest.get(sender, 0.0), min(reach, allowed))

    def check_own(self, message: Message, reach: float) -> None:
        """Raise DivergenceError rather than send what others might refuse."""
        allowed = HALF * self.allowed(self._me)
        if not (reach <= allowed or self.is_replaying):
            raise DivergenceError(
                f"what was to be sent in round {message.round} moves a model by {reach:.3g}, and guard.max_loss "
                f"{self._largest_loss:g} leaves room for {allowed:.3g}; {LOWER_RATE}"
            )
        self.note_own(min(reach, allowed))

    def note_own(self, reach: float) -> None:
        """Take note of how far an own message, or the own model, reaches."""
        self._furthest[self._me] = max(self._furthest[self._me], reach)

    def suspicion(self, t: int, name_of: Callable[[int], str]) -> str:
        """Return what is to be said of others behind a reason to stop in round t; mostly nothing."""
        if self._suspect is None or self._suspect[0] < t - REMEMBERED:
            return ""
        round_, sender, reach = self._suspect
        return f"; a message of {name_of(sender)} moved the model by {reach:.3g} in round {round_}, unusually far"

    def state(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return what must survive a crash."""
        return {"reaches": np.array([*self._furthest.items()])}

    def restore(self, state: Mapping[str, npt.NDArray[Any]], own_norm: Callable[[], float]) -> None:
        """Take back what `state` returned. Releases before 0.3 kept nothing but the own model."""
        known = state.get("reaches", ((self._me, own_norm()),))
        self._furthest.update((int(peer), float(reach)) for peer, reach in known)


def spread_of(spec: AlgorithmSpec, compressors: Iterable[Compressor], sizes: Iterable[int]) -> float:
    """Return how many times as long as what it stands for the payload of an honest message can be, for layers of these
    sizes. Where errors are gathered, 1/√δ: a number that waits for 1/δ rounds is sent that many times as large, with δ
    of all numbers. Elsewhere √(1 + ω), by the noise of unbiased codes."""
    if not spec.compresses or spec.modulo:
        return 1.0
    largest = max(sizes)
    bounds = [cast(BoundedCompressor, compressor).error_bound(largest) for compressor in compressors]
    if spec.memory is Memory.ERRORS:
        return 1.0 / math.sqrt(min(bound.contraction or 1.0 for bound in bounds))
    return math.sqrt(1.0 + max(bound.variance or 0.0 for bound in bounds))
