"""The fate of this peer, while neighbours refuse it or cannot be reached: it asks the members.

Nobody tells a peer that it was declared lost: its links are closed, and most members never had one to it. It asks them
for their status, which holds the proof of a loss (`node.loss_grounds`). Its training since is of no use to anybody, and
it may take part again as a newcomer (`rejoining`). Without proof, however many members claim the loss, it waits, and
says what its operator can do. The answers also give the members' numbers, which a peer that has missed some of the run
cannot know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from peer.daemon.local_peer import LocalPeer
from peer.daemon.members.member_links import MemberLinks
from peer.daemon.members.roster import Roster
from peer.daemon.neighbors import Neighbors
from peer.daemon.runtime import Runtime
from peer.errors import DeclaredLost, PeerUnreachable, RemoteError, SecurityError, SottoError
from peer.gossip.incarnations import MAX_INCARNATIONS
from peer.net.control import call_control
from peer.net.security.credentials import Access
from peer.node.loss_grounds import LossGrounds
from peer.node.membership_checks import check_own_loss
from peer.node.participant import Participant

log = logging.getLogger("sotto")

_ASK_TIMEOUT_S = 5.0
_ASK_EVERY_S = 2.0
_AWAY_S = 15.0
"""A neighbour that is away for so long is reason to ask, where the members do not declare losses themselves."""
_SAY_EVERY_S = 60.0
LOST_TOO_OFTEN = (
    f"it was declared lost {MAX_INCARNATIONS} times; add the device again under another name, and have a look at its"
    " network and power"
)


@dataclass(frozen=True)
class Answer:
    """A member's account of who takes part."""

    losses: Mapping[int, bytes]
    """Number of a lost peer → the frame that proves it."""
    numbers: Collection[int]
    """The members' numbers."""
    linked: bool = False
    """Whether it has a link to the device that asks: to another process of it, if that has none."""


async def status_of(name: str, address: str, access: Access | None) -> Mapping[str, Any] | None:
    """Return a member's status; an empty one if it refuses to answer, and None if it is not there."""
    try:
        return await call_control(address, "status", name=name, security=access, timeout_s=_ASK_TIMEOUT_S)
    except RemoteError as error:
        # A refusal is an answer, too.
        return None if isinstance(error, PeerUnreachable) else {}
    except SottoError:
        return None


async def ask_members(roster: Roster, access: Access | None) -> list[Answer]:
    """Return the accounts of all others that can be dialled of who takes part. Raises SecurityError where most of them
    refuse to answer: this peer is none of theirs any more, whatever became of its number."""
    entries = [roster[peer] for peer in roster.others]
    asked = [(entry.name, entry.advertise) for entry in entries if entry.advertise is not None]
    arguments = {"proofs": True, "name": roster.name(roster.me)}
    answers = await asyncio.gather(*(_ask(name, address, access, arguments) for name, address in asked))
    refusals = [answer for answer in answers if isinstance(answer, SecurityError)]
    if 2 * len(refusals) > len(asked):
        raise SecurityError(
            f"most members refuse to talk to this peer: {refusals[0]}; give it a certificate or token that they accept,"
            " and start it again"
        )
    return [answer for answer in answers if isinstance(answer, Answer)]


async def _ask(
    name: str, address: str, access: Access | None, arguments: Mapping[str, Any]
) -> Answer | SecurityError | None:
    try:
        status = await call_control(address, "status", arguments, name=name, security=access, timeout_s=_ASK_TIMEOUT_S)
    except SecurityError as error:
        return error
    except SottoError:
        return None
    return _read(status)


def _read(status: Mapping[str, Any]) -> Answer | None:
    """Return a status's account of who takes part; None if it has none."""
    if "losses" not in status or "numbers" not in status:
        return None
    losses = {int(peer): bytes.fromhex(proof) for peer, proof in status["losses"].items()}
    return Answer(losses, list(status["numbers"].values()), status.get("linked", False))


def next_incarnation(grounds: LossGrounds, own: int, answers: Collection[Answer]) -> int:
    """Return which incarnation follows those of a device whose loss is proven; that of the number `own` if none is."""
    numbering = grounds.numbering
    device, next_ = numbering.device(own), numbering.incarnation(own)
    for incarnation in range(MAX_INCARNATIONS):
        number = numbering.number(device, incarnation)
        if any(grounds.proves(answer.losses.get(number), number) for answer in answers):
            next_ = max(next_, incarnation + 1)
    return next_


@dataclass
class OwnLoss:
    """Asks about the fate of this peer for as long as it has reason to."""

    local: LocalPeer
    runtime: Runtime
    neighbors: Neighbors
    participant: Participant
    member_links: MemberLinks
    is_set_back: Callable[[], bool] = lambda: False
    """Returns whether this peer has reason to expect that it is lost, whoever is away."""
    _said_at: float = field(default=float("-inf"), init=False)

    async def watch(self) -> None:
        """Ask now and then. Raises DeclaredLost once somebody proves that this peer is lost, and SecurityError once
        most members refuse to say anything."""
        after_s = self.local.config.rounds.lost_after_s
        while True:
            if self.is_in_doubt(after_s):
                answers = await ask_members(self.local.roster, self.local.access)
                self._find_members(answers)
                claims = [frame for answer in answers if (frame := answer.losses.get(self.local.number)) is not None]
                if any(map(self._is_proof, claims)):
                    what_now = "" if self.local.rejoins else "; add the device again under another name"
                    following = next_incarnation(self.participant.membership.grounds, self.local.number, answers)
                    raise DeclaredLost(
                        "the other members have declared this peer lost, and go on without it: its state is of no use"
                        " to the run any more" + what_now,
                        incarnation=max(following, self.local.incarnation + 1),
                    )
                if claims and self.runtime.now() >= self._said_at + _SAY_EVERY_S:
                    self._said_at = self.runtime.now()
                    log.warning(
                        "%d of %d members say that this peer was declared lost, and none proves it: it waits. If"
                        " `sotto status` shows that they go on without it, stop it, and let it begin anew as a"
                        " newcomer: `sotto admin rejoin` on this device",
                        len(claims),
                        len(answers),
                    )
            await asyncio.sleep(_ASK_EVERY_S if after_s is None else min(_ASK_EVERY_S, max(0.2, after_s / 4)))

    def is_in_doubt(self, after_s: float | None) -> bool:
        if self.is_set_back():
            return True
        if not self.participant.membership.is_member:
            return not self.participant.membership.has_left
        if any(peer in self.neighbors.transport.refusals for peer in self.neighbors.all):
            return True
        away_s = self.neighbors.away_s(self.runtime.now(), self.runtime.began_at, self.participant.session.lost)
        # Some are never dialled by this peer, so that nobody refuses it.
        return max(away_s.values(), default=0.0) > (_AWAY_S if after_s is None else after_s)

    def _is_proof(self, frame: bytes) -> bool:
        """Return whether a frame proves that this peer is lost; the sender may lie."""
        try:
            check_own_loss(self.participant.membership, frame)
        except (SottoError, ValueError):
            return False
        return True

    def _find_members(self, answers: Collection[Answer]) -> None:
        """Call members under the numbers that they have now, until this peer is told of them as a member."""
        if self.participant.membership.is_member:
            return
        counts: dict[int, int] = {}
        for number in (number for answer in answers for number in answer.numbers):
            counts[number] = counts.get(number, 0) + 1
        found = (number for number, count in counts.items() if 2 * count > len(answers))
        if self.local.roster.met(found):
            self.member_links.drop_former()
            self.member_links.add_missing()
