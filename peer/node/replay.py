"""The replay of a journal: a peer repeats its calls, and has to reach the same bits.

The journal holds the peer's inputs (a frame, a time, a decision taken by the clock), each followed by checksums of the
resulting frames and a digest of the state. Everything in between is computed again. If the frames differ from those
that the neighbours were sent, going on would be silent corruption: the replay stops with a StateError instead. If
arithmetic is not repeatable (a GPU), the journal holds the frames themselves. They are imposed on the algorithm, and
differences by rounding stay inside this peer. The same is done from the first step on that a training script repeats to
another result than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from peer.errors import RemoteProtocolError, StateError
from peer.gossip.effects import Effects, OutgoingFrame
from peer.node import membership_codec
from peer.node.disk_state import OnRound, PeerRecovery
from peer.node.local_steps import LocalSteps, RecordedSteps
from peer.node.recorded_peer import RecordedPeer
from peer.state.journal import (
    FULL_WIDTH,
    Announced,
    Begun,
    Checked,
    Lost,
    Receipt,
    Received,
    Record,
    Sent,
    Signed,
    Stepped,
    TimedOut,
)
from peer.state.recovery import gives_other_bits
from peer.wire.message import MessageKind


def recall_step(name: str, local_steps: LocalSteps, record: Stepped) -> None:
    """Give the coming local step the result in a record of the journal `name`. Raises StateError."""
    if not isinstance(local_steps, RecordedSteps):
        raise StateError(f"{name}: holds steps of a loop of its own; start the script that ran it")
    local_steps.recall(record.arrays)


class Replay:
    """Takes a `RecordedPeer` through its journals."""

    def __init__(self, peer: RecordedPeer, recovery: PeerRecovery, on_round: OnRound, *, repeatable: bool) -> None:
        """`repeatable`: whether a local step that is computed again gives the same bits."""
        self._peer, self._participant = peer, peer.participant
        self._recovery, self._on_round = recovery, on_round
        self._repeatable = repeatable
        self.has_script_steps = False
        """Whether the journals leave steps out that a training script repeats."""
        self.unsent: Sequence[OutgoingFrame] | None = None
        """Own numbered frames that were just made, while the record of their sending has yet to come. At the end of the
        last journal, frames that the crash kept from the journal, so that nobody has them; None if there are none."""

    def run(self, name: str, round_: int, records: Sequence[Record]) -> None:
        """Repeat the journal of a file that follows the checkpoint of a round. Raises StateError."""
        if self._participant.round != round_ or self._participant.session.in_round:
            raise StateError(
                f"{name}: follows round {round_}, but what is left before it leads to round "
                f"{self._participant.round} only; restore the state folder from a copy, or start the run anew"
            )
        # A checkpoint was taken here; taking it applies late messages.
        self._participant.absorb_late()
        self.unsent = None
        stepped: Stepped | None = None
        for position, record in enumerate(records):
            if self.unsent is not None and not isinstance(record, Sent | Checked | Receipt | Signed):
                raise gives_other_bits(name, "frames that the journal does not hold")
            match record:
                case Receipt(peer, upto):
                    self._peer.links.acknowledge(peer, upto)
                    self._peer.links.take_new_receipts()  # They are in the journal.
                case Sent() | Checked():
                    self._check_sent(name, record)
                case Signed():
                    pass  # The record before it has said it again.
                case Stepped():
                    # Where a crash cut off the round that it began, the step is done again, and is journaled again.
                    stepped = record
                case Begun():
                    self._recall_words(records[position + 1 :])
                    if stepped is not None:
                        recall_step(name, self._participant.local_steps, stepped)
                        self.has_script_steps |= stepped.is_repeated
                        stepped = None
                    self._performed(record, self._begin(name, record, records[position + 1 :]))
                case _:
                    self._recall_words(records[position + 1 :])
                    self._performed(record, self._repeat(name, record))
        self._participant.membership.own_words.recall((), is_all=False)

    def _begin(self, name: str, record: Begun, following: Sequence[Record]) -> Effects:
        if record.round != self._participant.round:
            raise gives_other_bits(name, f"round {self._participant.round}, not {record.round}")
        if record.variant not in (None, FULL_WIDTH):
            self._participant.ready(record.now)
            self._participant.use_variant(record.variant)
        self._participant.step()
        steps = self._participant.local_steps
        if self._repeatable and isinstance(steps, RecordedSteps) and steps.differs:
            self._repeatable = False
            saved = ", and every round is saved from now on" if steps.records_all else ""
            self._recovery.notices.append(
                f"{name}: nothing is lost, but the steps of round {record.round} are taken once more, and come out"
                " otherwise: a DataLoader that is not in keep, for one, begins a new pass. What neighbours were sent"
                f" counts{saved}; for equal bits put all in keep that the script draws from, as StatefulDataLoader"
            )
        if not self._repeatable:
            self._impose(following)
        return self._peer.begin(record)

    def _repeat(self, name: str, record: Record) -> Effects:
        match record:
            case Received():
                return self._take(name, record)
            case TimedOut():
                return self._peer.time_out(record)
            case Announced():
                return self._peer.announce(record)
            case Lost():
                return self._peer.lose(record)
        raise StateError(f"a journal of a run with rounds holds {type(record).__name__}; use another state.directory")

    def _take(self, name: str, record: Received) -> Effects:
        """Take a frame again. Earlier releases journaled frames before they judged them. One that no honest peer sends
        is left out, with those that follow it on its stream, so that its sender is asked for the honest one."""
        sender, seq = record.peer, record.seq
        self._peer.links.meet(sender)
        last = self._peer.links.incoming[sender].last_seq
        # Those that a checkpoint of this very round holds too are dropped.
        if seq and not last < seq <= last + 1:
            return self._participant.unchanged()
        try:
            return self._peer.take(record)
        except RemoteProtocolError as error:
            self._recovery.notices.append(f"{name}: left out a frame that is refused: {error}")
            return self._participant.unchanged()

    def _performed(self, record: Record, effects: Effects) -> None:
        """Note the effects of a call."""
        recovery = self._recovery
        recovery.now = max(recovery.now, getattr(record, "now", 0.0))
        effects.frames = self._peer.links.numbered(effects.frames)
        made = [outgoing for outgoing in effects.frames if outgoing.seq]
        # The beginning of a round is followed by a record of its frames in any case, for its digest.
        if made or isinstance(record, Begun):
            self.unsent = made
        recovery.effects.extend(effects)
        if effects.finished is not None:
            recovery.replayed_rounds += 1
            self._peer.forget_used()
            ended, recovery.effects = recovery.effects, self._participant.unchanged()
            self._on_round(ended)

    def _recall_words(self, following: Sequence[Record]) -> None:
        """Make the coming call repeat its statements about members. Those that the crash kept from the journal are
        signed anew."""
        belong = list(takewhile(lambda each: isinstance(each, Sent | Checked | Receipt | Signed), following))
        self._participant.membership.own_words.recall(
            (each.frame for each in belong if isinstance(each, Signed)),
            is_all=any(isinstance(each, Sent | Checked) for each in belong),
        )

    def _check_sent(self, name: str, record: Sent | Checked) -> None:
        """Check that the own frames just made are those of a record, and count them as sent."""
        frames = tuple((made.receiver, made.seq, made.frame) for made in self.unsent or ())
        if self._repeatable or isinstance(record, Checked):
            again = Sent(record.round, self._peer.digest(), frames)
            steps = self._participant.local_steps
            # Where a script's optimizer makes the model, the others have the frames alone.
            by_script = isinstance(steps, RecordedSteps) and steps.rule_of_mean is not None
            if record.digest != again.digest and not by_script:
                raise gives_other_bits(name, f"another model in round {record.round}")
            if record.frames != (again if isinstance(record, Sent) else Checked.of(again)).frames:
                raise gives_other_bits(name, f"other messages in round {record.round}")
        for receiver, seq, frame in record.frames if isinstance(record, Sent) else frames:
            if self._peer.links.push(receiver, frame) != seq:
                raise StateError(f"{name}: holds frame {seq} for peer {receiver}, where another one is next")
        self.unsent = None

    def _impose(self, following: Sequence[Record]) -> None:
        """Make the coming round send its former frames."""
        if self._participant.algorithm.message_kind is MessageKind.PART:
            # Every receiver got a part of its own; parts of later phases depend on messages from others.
            for record in takewhile(lambda each: not isinstance(each, Begun), following):
                for receiver, _, frame in record.frames if isinstance(record, Sent) else ():
                    if not membership_codec.is_notice(frame):
                        self._participant.impose(receiver, frame)
        elif following and isinstance(following[0], Sent):
            # Receivers left out got another frame than the rest, with nothing in it.
            longest = max(following[0].frames, key=lambda each: len(each[2]), default=None)
            if longest is not None:
                self._participant.impose(longest[0], longest[2])
