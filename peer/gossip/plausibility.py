"""How far one message may move a model: what no honest message does is refused before anything of it is kept.

`value_bounds` asks whether numbers can be added up at all. Here the question is what they do to the model. A message
reaches as far as the norm of the model that it brings, of the copy that its difference changes, or of the own model
and a step along its gradient (`Algorithm.reach`); a small difference or step reaches as far as it is long. It may reach

    f + room left to its sender

with f what is known already: the furthest that a message of its sender or an own one has reached so far, or the norm of
the own model. The room of a sender is max(√(2 guard.max_loss), STEP √n, f), n being how many numbers a model has: the
norm of a model by which predictions from features of size 1 change as much as the largest loss allows with which a peer
goes on; or a change of each number by STEP, as hundreds of a script's steps between two exchanges might, before the own
ones are taken. It covers what says nothing of others: a model that is still zero, own data that are easy, small or few.

What a message reaches beyond f uses room up, and little of it comes back with each message. Whoever takes all of it in
every round is thus refused from the second on. f covers what has been trained for a while, since everybody began at one
model and mixes since: to reach as far again costs nothing.

A peer asks its own messages first, and ends as one that diverged rather than send what uses up more than HALF of its
own room. HALF is what leaves room for a lie: a message counts at most half in a mean, so that one that others let by
does not end its receivers by what they send next. How far its own model has come, receivers need not know: one that was
moved far itself counts what it was sent, and nothing else. A peer therefore keeps such an account for each receiver
(SENT), and ends before it uses up more than SURE of that room. Any receiver knows at least as much, so that peers that
diverge end by their own guard, alone or together, and accuse nobody.

A gradient at a model that was moved far is often as much too long. A peer whose model a message has moved unusually far
(UNUSUAL) does not end: it shortens its own change, a step, a compressed difference, or what D² extrapolates, so that
its model stays within HALF of the room, and no loss ends it. What it was sent is never shortened.

Where all hold one model (`AlgorithmSpec.tells_all`), messages are steps. f follows the own model then, also where a lie
has moved it, since all are there, and the room does not grow with it: whoever lies in every round moves the model by
little in each. A sum of contributions counts twice, for what one liar has added to it, and its owner shortens it if
need be (`PartitionedAllReduce`).

How large own gradients are is left aside on purpose: those of a device with a hundred times the samples, or another
unit, are as many times as long, and honest. A message is refused or taken whole: a part of it would be mass made or
lost. What is in a journal is not asked again, since what others were sent rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.float_types import KEPT_AT_ONCE, are_floats, floats_of
from peer.compress.norms import sum_of_squares
from peer.compress.payload import FloatArray, Kept
from peer.errors import LOWER_RATE, DivergenceError, RemoteProtocolError
from peer.wire.message import Message

STEP = 2.0
"""By so much each number may change at once."""
REGAINED = 1.0 / 64.0
"""This share of what a sender has used up of its room comes back with each of its messages."""
HALF = 0.5
"""This share of what receivers let by a peer sends."""
UNUSUAL = 0.125
"""Whoever uses up this share of its room moves a model unusually far."""
OWN_MODEL = -1
"""Stands for the own model in the place of a peer."""
SENT = -2
"""SENT − j stands for what was sent to peer j, as one knows it who knows nothing else."""
SURE = 0.75
"""This share of its room a peer uses up towards each receiver, whose measure may be a little longer."""
REMEMBERED = 64
"""Rounds for which it is known who moved the model further than an honest peer would have."""


class Reaches:
    """How far the messages of each peer have moved models so far."""

    def __init__(
        self, me: int, size: int, largest_loss: float, *, one_model: bool = False, spread: float = 1.0
    ) -> None:
        """`size`: how many numbers a model has. `largest_loss`: `guard.max_loss`. `one_model`: whether all hold one.
        `spread`: how many times as long as what it stands for a payload can be."""
        self.me, self._largest_loss = me, largest_loss
        least = max(math.sqrt(2.0 * largest_loss), STEP * math.sqrt(size))
        self._small, self._times = REGAINED * least / spread, spread
        self._least_room, self._one_model = spread * least, one_model
        self._furthest = {OWN_MODEL: 0.0}
        """Peer → the furthest that a message of it has reached, and the furthest of the own model."""
        self._spent: dict[int, float] = {}
        """Peer → how much of its room is used up."""
        self.is_replaying = False
        """Whether what is heard and sent now is in the journal: it is not asked again."""
        self._suspect = (-math.inf, 0, 0.0)
        """(Round, sender, reach) of the last message that moved the model unusually far. The round is a later one where
        own changes had to be shortened since."""
        self._shortens = True
        self._judged_in = -1
        """The last round of which `share_of_step` has judged what is sent."""
        self.has_shortened = False
        """Whether an own change was shortened since this process began."""

    def allowed(self, sender: int, own_norm: float = 0.0, share: float = 1.0) -> float:
        """Return how far a message may reach; of OWN_MODEL, how far others may move the own model, and HALF of the room
        by own changes. `own_norm`: of the own model now, ‖z‖₂. `share`: of the room."""
        own = self._furthest[OWN_MODEL] if sender > SENT else 0.0
        known = max(self._furthest.get(sender, 0.0), own, own_norm)
        room = max(self._least_room, 0.0 if self._one_model else own)
        return known + max(share * room - self._spent.get(sender, 0.0), 0.0)

    def check(self, t: int, message: Message, reach: float, own_norm: Callable[[], float]) -> None:
        """Refuse in the own round t a message that reaches too far. The norm costs a pass over the model, and is hardly
        ever needed."""
        if self.is_replaying or reach <= self.allowed(message.sender):
            return
        # What the own model was moved to does not count.
        allowed = self.allowed(message.sender, own_norm() if self.counts_own(t) else 0.0)
        if not reach <= allowed:
            raise RemoteProtocolError(
                f"sent what no honest peer does in round {message.round}: it moves a model by {reach:.3g}, and "
                f"{allowed:.3g} is let by",
                peer=message.sender,
            )

    def note(self, t: int, sender: int, reach: float, *, is_sum: bool = False) -> None:
        """Take note of how far a neighbour's message moves the model in the own round t. `is_sum`: it belongs to a sum
        of what all gave."""
        if reach > self.allowed(sender, share=HALF / math.sqrt(self._times) if is_sum else UNUSUAL / self._times):
            self._suspect = t, sender, reach
        self._charge(sender, reach)

    def is_free(self, sender: int, length: float) -> bool:
        """Return whether a change is so small that what it leads to need not be asked: no longer than what comes back
        of the room with each message, of a sender that has not used up much of its own."""
        spent = self._spent.get(sender, 0.0)
        if sender == self.me:
            spent = max((each for peer, each in self._spent.items() if peer <= SENT), default=spent)
        return not length or (length <= self._small and spent <= HALF * self._least_room)

    def lets_by(self, t: int, sender: int, model: FloatArray, own: FloatArray, distance: float) -> bool:
        """Return whether a neighbour's model passes that could be read only now, also in a replay, and take note.
        `own`: the own one, at that distance."""
        if distance <= self._small:
            return True
        reach = norm_of(model)
        passes = not self._shortens or reach <= self.allowed(sender, norm_of(own) if self.counts_own(t) else 0.0)
        if passes:
            self.note(t, sender, reach)
        return passes

    def check_own(self, t: int, reach: float, own_norm: Callable[[], float], receivers: Iterable[int]) -> None:
        """Raise DivergenceError rather than send in round t what others might refuse."""
        # What it was sent moved the model, and is not shortened.
        sender, share = (self.me, HALF) if self.counts_own(t) else (OWN_MODEL, 1.0)
        if not reach <= self.allowed(sender, share=share):
            self.require(t, reach, self.allowed(sender, own_norm() if self._one_model else 0.0, share))
        # A receiver whose model was moved far counts what it was sent, and nothing else.
        for sent in () if self._one_model else (SENT - each for each in receivers):
            self._furthest.setdefault(sent, self._furthest[OWN_MODEL])
            self.require(t, reach, self.allowed(sent, share=SURE))
            self._charge(sent, reach)
        self._charge(self.me, reach)
        self.note_own(t, self._furthest[self.me])

    def require(self, t: int, reach: float, allowed: float) -> None:
        """Raise DivergenceError if what is to be sent in round t reaches further than allowed."""
        if not (reach <= allowed or self.is_replaying):
            raise DivergenceError(
                f"what was to be sent in round {t} moves a model by {reach:.3g}, and guard.max_loss "
                f"{self._largest_loss:g} leaves room for {allowed:.3g}; {LOWER_RATE}"
            )

    def _charge(self, peer: int, reach: float) -> None:
        """Take what a message exceeds from the room of its sender, of which a little comes back with each message."""
        if self._spent.get(peer) == 0.0 and reach <= self._furthest[peer]:
            return
        known, lasting = self.allowed(peer, share=0.0), reach
        if reach > known:
            # A journal of an earlier release may hold any number.
            reach = min(reach, self.allowed(peer))
            lasting = min(reach, self.allowed(peer, share=HALF))
        self._spent[peer] = (1.0 - REGAINED) * (self._spent.get(peer, 0.0) + max(reach - known, 0.0))
        self._furthest[peer] = max(self._furthest.get(peer, 0.0), lasting)

    def note_own(self, t: int, reach: float) -> None:
        """Take note of how far the own model reaches in round t, unless others moved it there."""
        if self.counts_own(t):
            self._furthest[OWN_MODEL] = max(self._furthest[OWN_MODEL], reach)

    def counts_own(self, t: int) -> bool:
        """Return whether where the own model is in round t says how far others may reach: where all hold one model, or
        nobody moved it there."""
        return self._one_model or not self.is_misled(t)

    def is_misled(self, t: int) -> bool:
        """Return whether a message has moved the model unusually far, not long before round t."""
        return self._suspect[0] >= t - REMEMBERED

    def share_within(self, t: int, x: Kept | None, change: Callable[[], FloatArray]) -> float:
        """Return the largest share s of an own change of x in round t, at most 1, with ‖x + s change‖ ≤ max(l, ‖x‖), l
        what own messages may reach. Nothing is computed unless the model was moved unusually far. `x`: None for 0."""
        if not (self._shortens and self.is_misled(t)):
            return 1.0
        by, limit = change(), self.allowed(OWN_MODEL, share=HALF)
        length = 0.0 if x is None else norm_of(x)
        along = 0.0 if x is None else float(np.dot(floats_of(x).astype(np.float64), by.astype(np.float64)))
        square, left = sum_of_squares(by), max(limit**2 - length**2, 0.0)
        if square + 2.0 * along <= left:
            return 1.0
        self._note_shortened(t)
        root = math.sqrt(along**2 + square * left)
        return left / (along + root) if along > 0.0 else (root - along) / square

    def has_judged(self, t: int) -> bool:
        """Return whether `share_of_step` has seen to it that what is sent in round t reaches no further than it may."""
        return self._judged_in == t

    def share_of_step(self, t: int, x: FloatArray, length: float) -> float:
        """Do as `share_within` does, in any round, for a change of that length of which others do not know where it
        leads: ‖x‖ and the length of the share are at most l, or the share is small. `check_own` is left out.
        Raises DivergenceError if the whole room is too small, and nobody moved the model."""
        if not self._shortens:
            return 1.0
        self._judged_in = t
        if length <= 0.9 * self._small:
            return 1.0
        norm = norm_of(x)
        self.note_own(t, norm)
        if not self.is_misled(t):
            self.require(t, norm + length, self.allowed(self.me))
        # Codes may lengthen it a little.
        share = min(0.9 * max(self.allowed(self.me, share=HALF) - norm, self._small) / length, 1.0)
        if share < 1.0 and self.is_misled(t):
            self._note_shortened(t)
        if not self.is_free(self.me, share * length):
            self._charge(self.me, norm + share * length)
        return share

    def _note_shortened(self, t: int) -> None:
        self._suspect, self.has_shortened = (t, *self._suspect[1:]), True

    def suspicion(self, t: int, name_of: Callable[[int], str]) -> str:
        """Return what is to be said of others behind a reason to stop in round t; mostly nothing."""
        _, sender, reach = self._suspect
        if not self.is_misled(t) or (reach <= self.allowed(OWN_MODEL, share=HALF) and not self.has_shortened):
            return ""
        return f"; a message of {name_of(sender)} moved the model by {reach:.3g}, unusually far"

    def state(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return what must survive a crash."""
        known = [(peer, reach, self._spent.get(peer, 0.0)) for peer, reach in self._furthest.items()]
        return {"reaches": np.array(known)} | ({"suspect": np.array(self._suspect)} if self._shortens else {})

    def restore(self, state: Mapping[str, npt.NDArray[Any]], own_norm: Callable[[], float]) -> None:
        """Take back what `state` returned. Releases before 0.3 kept nothing but the own model. Without a suspect a
        journal follows in which nothing was shortened: then nothing is."""
        self._furthest[OWN_MODEL] = own_norm()
        for peer, reach, *spent in state.get("reaches", ()):
            self._furthest[int(peer)], self._spent[int(peer)] = float(reach), float(spent[0]) if spent else 0.0
        self._shortens = "suspect" in state
        if self._shortens:
            t, sender, reach = state["suspect"]
            self._suspect = float(t), int(sender), float(reach)


def norm_of(x: Kept) -> float:
    """Return ‖x‖₂."""
    if are_floats(x):
        return math.sqrt(sum_of_squares(x))
    blocks = (x[start : start + KEPT_AT_ONCE] for start in range(0, x.size, KEPT_AT_ONCE))
    return math.sqrt(sum(sum_of_squares(floats_of(block)) for block in blocks))
