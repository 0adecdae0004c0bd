"""A peer of a synchronous run that survives the end of its process: participant, links, journal and checkpoints.

No clock and no socket: the time is an argument, what is to be sent is returned, and files are behind a `Disk`. The
daemon drives it over gRPC; the fault simulator drives the same object over a network and a disk that fail on purpose.

Everything that changes the participant is in the journal before anything that came of it leaves: the frame of a
neighbour before it is applied, the own frames with a digest of the state before they are sent. So after a crash the
newest checkpoint and the journal after it lead back to where the peer was, with the decisions that it took by the clock
(whom it went on without, whom it left out, how much a bandwidth budget let it send), and what is sent again is the
journaled bytes.

What a neighbour may forget: a frame that would survive a power cut here. `sync` makes that so and returns the
receipts; with `durability = "power"` every round does so before it sends. Otherwise the driver calls it now and then,
and until it has, the neighbour keeps the frame: after a power cut the rounds since are repeated, to the same bits
unless the clock had a say in them.

Order of use: `open`; then for each round `step`, `begin`, and `receive` or `timer` until a deed carries a `finished`
round; `save` between rounds. These calls are for one thread. `publish` goes with the thread of `connected` and
`receipt`: it hands over what the last call made, and has to come before the next one. `sync` may run in any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash

from peer.errors import RemoteProtocolError, StateError
from peer.gossip.membership import Change, ChangeKind
from peer.gossip.silence import Silence
from peer.node import membership_codec
from peer.node.delivery import InLink, OutLink
from peer.node.participant import Parcel, Participant, Turn
from peer.round_record import RoundRecord
from peer.state.checkpoints import Checkpoint
from peer.state.disk import Disk
from peer.state.journal import (
    Announced,
    Begun,
    Journal,
    JournalContent,
    Lost,
    Receipt,
    Received,
    Record,
    Sent,
    TimedOut,
)
from peer.state.recovery import Recovery, StateFiles, gives_other_bits, journal_name
from peer.wire.message import Message, MessageKind

_SET_BACK_ROUNDS_MAX = 4096
"""More rounds than a power cut can undo: those since the last sync, of about a second."""
_EARLY_BYTES_MAX = 32 << 20
"""So much is kept of what a neighbour sends of rounds that are still far ahead after a power cut."""


OnRound: TypeAlias = Callable[[RoundRecord, list[Parcel]], None]
"""Is told of a round that is replayed, and of what was sent in it."""


@dataclass(kw_only=True)
class Deed:
    """What one call came to. It is on disk; `DurablePeer.publish` says what of it has to be sent."""

    parcels: list[tuple[Parcel, int]] = field(default_factory=list)
    """With its number; 0 outside the sequence."""
    finished: RoundRecord | None = None
    news: bool = False
    """Whether a change of the members was heard of: there may be other neighbours now."""
    receipts: dict[int, int] = field(default_factory=dict)
    """Neighbour → up to which number its frames would survive a power cut now."""


@dataclass(kw_only=True)
class PeerRecovery(Recovery):
    """What `open` found."""

    parcels: list[Parcel] = field(default_factory=list)
    """What was made in the round under way, if there is one."""


class DurablePeer:
    """One peer. See the module docstring for the order of calls."""

    def __init__(
        self,
        participant: Participant,
        disk: Disk,
        *,
        neighbors: Collection[int],
        identity: Mapping[str, str],
        durability: Literal["process", "power"] = "process",
        keep_checkpoints: int = 2,
        regular: int = 0,
        repeatable: bool = True,
    ) -> None:
        """`identity`: what a state has to agree with to belong to this peer (run, name, model, …). `regular`: see
        `Checkpoints`. `repeatable`: whether a local step that is computed again gives the same bits."""
        self.participant = participant
        self.files = StateFiles(disk, identity, keep=keep_checkpoints, regular=regular)
        self.out = {peer: OutLink() for peer in sorted(neighbors)}
        self.incoming = {peer: InLink() for peer in sorted(neighbors)}
        self.base_round = 0
        """The round of the checkpoint that the journal follows."""
        self.checkpoint_bytes = 0
        """Size of that checkpoint; 0 where there is none yet."""
        self._power = durability == "power"
        self._repeatable = repeatable
        self._journal: Journal
        policy = participant.session.late
        self._silence = None
        if policy is not None and participant.algorithm.spec.push_sum:
            self._silence = Silence(policy.silent_after_s)
        self.left_out: frozenset[int] = frozenset()
        """Receivers that got no weight in the last round, because they had not confirmed anything for long."""
        self._kept: dict[int, deque[tuple[int, bytes]]] = {peer: deque() for peer in self.out}
        """The newest frames of each neighbour, with number; those that wait for a later round are among them."""
        self._early: dict[int, deque[tuple[int, int, bytes]]] = {peer: deque() for peer in self.out}
        """(number, round, frame) of what follows the frames that were taken from a neighbour and is too far ahead for
        the session. It is in no journal, so that its sender keeps it too."""
        self._newest_early: dict[int, Message] = {}
        """The last message of those, which the next one may be told against."""
        self._furthest_round = 0
        """No honest neighbour was ahead of this round before this process began, nor needs to be held back after it."""
        self._remote_has = dict.fromkeys(self.out, 0)
        self._remote_durable = dict.fromkeys(self.out, 0)
        self._new_receipts: dict[int, int] = {}
        self._unsent: list[tuple[Parcel, int]] | None = None
        """Own frames that a replay made and the journal does not hold."""
        self._lock = threading.Lock()
        """Guards the links to the neighbours: receipts come on another thread than rounds."""

    # -- recovery ------------------------------------------------------------------------------------------------------

    def open(self, on_round: OnRound = lambda record, parcels: None) -> PeerRecovery:
        """Go back to where this peer was: load the newest whole checkpoint and replay the journal after it.

        `on_round` is told of every round that is replayed, right after its end, and what was made in it. Raises
        StateError if the state belongs to another peer or run, is damaged beyond what its copies can mend, or gives
        other bits than before.
        """
        recovery = PeerRecovery()
        checkpoint = self.files.load_newest(recovery.notices)
        if checkpoint is not None:
            self._restore(checkpoint)
            recovery.start_from(checkpoint)
            self.base_round = checkpoint.round
        last: JournalContent | None = None
        for round_ in self.files.chain(self.base_round):
            if self.participant.round != round_ or self.participant.session.in_round:
                raise StateError(
                    f"{journal_name(round_)}: follows round {round_}, but what is left before it leads to round "
                    f"{self.participant.round} only; restore the state folder from a copy, or start the run anew"
                )
            # A checkpoint was taken here; taking it applies what had come late.
            self.participant.session.absorb_late()
            last = self._replay(round_, recovery, on_round)
            self.base_round = round_
        assert last is not None
        self._journal = self.files.go_on(self.base_round, last)
        self.checkpoint_bytes = self.files.checkpoint_bytes(self.base_round)
        self._append_missing()
        missing = self._with_losses(Deed(), recovery.now)
        for parcel, seq in missing.parcels:
            if seq:
                self.out[parcel.receiver].push(parcel.frame)
        if missing.finished is not None:
            recovery.replayed_rounds += 1
            on_round(missing.finished, [parcel for parcel, _ in missing.parcels])
        # What was confirmed before the crash is confirmed again, from disk.
        self.sync()
        self.files.prune()
        self._furthest_round = self.participant.round + self.participant.session.max_lead + _SET_BACK_ROUNDS_MAX
        return recovery

    def _restore(self, checkpoint: Checkpoint) -> None:
        state, arrays = checkpoint.state, checkpoint.arrays
        self.participant.restore(state, arrays)
        for peer in self.participant.newcomers:
            self.meet(peer)
        # Before members could change, what waits in the inbox was left out of the count.
        counts_inbox = "received" in state
        last_seqs = state["received"] if counts_inbox else state["incoming"]
        for peer in self.out:
            self.incoming[peer].restore({"last_seq": last_seqs.get(str(peer), 0)})
            kept = state["out"].get(str(peer), {"next_seq": 1, "lengths": []})
            frames = _cut(arrays[f"out/{peer}"], kept["lengths"]) if kept["lengths"] else []
            self.out[peer].restore({"next_seq": kept["next_seq"], "frames": frames})
        waiting = state.get("inbox", [])
        if waiting:
            frames = _cut(arrays["inbox"], [length for _, _, length in waiting])
            for (peer, seq, _), frame in zip(waiting, frames, strict=True):
                record = Received(0.0, int(peer), int(seq), frame)
                self._take(record, is_counted=counts_inbox)
            self.participant.session.restore_deadlines(state["session"])

    def _replay(self, round_: int, recovery: PeerRecovery, on_round: OnRound) -> JournalContent:
        name, content = journal_name(round_), self.files.read_journal(round_, recovery.notices)
        made: list[tuple[Parcel, int]] | None = None
        for position, record in enumerate(content.records):
            if made is not None and not isinstance(record, Sent | Receipt):
                raise gives_other_bits(name, "frames that the journal does not hold")
            turn = Turn()
            match record:
                case Receipt(peer, upto):
                    self.receipt(peer, upto)
                    self._new_receipts.clear()
                case Sent():
                    self._replay_sent(name, record, made or [])
                    made = None
                case Begun(now, begun, variant, left_out):
                    if begun != self.participant.round:
                        raise gives_other_bits(name, f"round {self.participant.round}, not {begun}")
                    if not self._repeatable:
                        self._impose(content.records[position + 1 : position + 2])
                    if variant is not None:
                        self.participant.ready(now)
                        self.participant.use_variant(variant)
                    self.participant.step()
                    turn = self.participant.begin(now, frozenset(left_out))
                case Received(now, peer, seq):
                    self.meet(peer)
                    # Those that a checkpoint of this very round holds too are dropped.
                    if seq == 0 or seq > self.incoming[peer].last_seq:
                        # What was refused then is refused again.
                        with contextlib.suppress(RemoteProtocolError):
                            turn = self._take(record)
                case TimedOut(now):
                    turn = self.participant.timer(now)
                case Announced():
                    turn = self._learn(record)
                case Lost():
                    turn = self._lose(record)
            recovery.now = max(recovery.now, getattr(record, "now", 0.0))
            recovery.parcels += turn.parcels
            numbered = [pair for pair in self._numbered(turn) if pair[1]]
            if numbered or isinstance(record, Begun):
                made = numbered
            if turn.finished is not None:
                recovery.replayed_rounds += 1
                self._forget_used()
                parcels, recovery.parcels = recovery.parcels, []
                on_round(turn.finished, parcels)
        # What a crash kept from being journaled was not sent either.
        self._unsent = made
        return content

    def _replay_sent(self, name: str, record: Sent, made: list[tuple[Parcel, int]]) -> None:
        """Take the own frames of a record for what was just made; they have to be the same."""
        if self._repeatable:
            if record.digest != self._digest():
                raise gives_other_bits(name, f"another model in round {record.round}")
            if list(record.frames) != [(parcel.receiver, seq, parcel.frame) for parcel, seq in made]:
                raise gives_other_bits(name, f"other messages in round {record.round}")
        for receiver, seq, frame in record.frames:
            if self.out[receiver].push(frame) != seq:
                raise StateError(f"{name}: holds frame {seq} for peer {receiver}, where another one is next")

    def _append_missing(self) -> None:
        """Journal the own frames that the crash came before, and count them as made."""
        made, self._unsent = self._unsent, None
        if made is None:
            return
        frames = tuple((parcel.receiver, seq, parcel.frame) for parcel, seq in made)
        self._append(Sent(self.participant.round, self._digest(), frames))
        for parcel, _ in made:
            self.out[parcel.receiver].push(parcel.frame)

    def _impose(self, following: tuple[Record, ...]) -> None:
        """Let the coming step send what it sent before."""
        if following and isinstance(following[0], Sent):
            # Whoever was left out got another frame than the rest, with nothing in it.
            longest = max((frame for _, _, frame in following[0].frames), key=len, default=None)
            if longest is not None:
                self.participant.impose(longest)

    # -- rounds --------------------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds completed."""
        return self.participant.round

    @property
    def journal_bytes(self) -> int:
        """Size of the journal since the last checkpoint."""
        return self._journal.size

    def step(self) -> None:
        """Do the local step of the coming round: the expensive part."""
        self.participant.step()

    def begin(self, now: float) -> Deed:
        """Start the exchange of the round with the result of `step`. Raises StateError if the disk refuses."""
        budget = self.participant.budget
        variant = None if budget is None else budget.variant
        self.left_out = self._silent(now)
        record = Begun(now, self.participant.round, variant, tuple(sorted(self.left_out)))
        return self._done(self.participant.begin(now, self.left_out), record, always=True)

    def _silent(self, now: float) -> frozenset[int]:
        """Return the receivers that have confirmed nothing for too long to be given anything."""
        if self._silence is None:
            return frozenset()
        node = self.participant.algorithm.node
        with self._lock:
            links = {
                peer: (self.out[peer].acknowledged, self.out[peer].next_seq - 1)
                for peer in node.schedule.all_receivers(node.peer)
            }
        return self._silence.silent(links, now)

    def receive(self, peer: int, seq: int, frame: bytes, now: float) -> Deed:
        """Take a frame of a neighbour; one that was taken before is dropped.

        Raises RemoteProtocolError, which names the sender, if an honest peer would not have sent it (drop it and what
        follows it on that link), and StateError if the disk refuses.
        """
        link, early = self.incoming[peer], self._early[peer]
        following = link.last_seq + len(early) + 1
        if seq and seq < following:
            link.duplicates += 1
            return Deed()
        if seq > following:
            raise RemoteProtocolError(f"sent frame {seq} where {following} is next", peer=peer)
        if membership_codec.is_notice(frame):
            if not seq:
                raise RemoteProtocolError("told of a change of members without a number", peer=peer)
            if early:  # It follows what is kept.
                early.append((seq, early[-1][1], frame))
                return Deed()
            record, was_outsider = Received(now, peer, seq, frame), self.participant.is_outsider
            self._append_for_good(record)
            deed = self._done(self._take(record))
            if was_outsider and not self.participant.is_outsider:
                self._take_early(deed, now)
                return deed
            return self._with_losses(deed, now)
        message = self.participant.decode(peer, frame, before=self._newest_early.get(peer) if early else None)
        if (seq > 0) != (message.kind in (MessageKind.GOSSIP, MessageKind.NOTHING)):
            raise RemoteProtocolError(f"sent {message.kind.name} {'with' if seq else 'without'} a number", peer=peer)
        if message.kind is MessageKind.REPAIR_REQUEST:
            # Changes nothing here, and is repeated by whoever needs it.
            return self._done(self.participant.take(message, now))
        if message.kind is MessageKind.REPAIR and not self.participant.expects(message):
            return Deed()
        if seq and self._is_early(message.round) and message.round <= self._furthest_round:
            if not self.participant.is_outsider:
                self.participant.session.check(message)
            if sum(len(kept) for _, _, kept in early) + len(frame) <= _EARLY_BYTES_MAX:
                early.append((seq, message.round, frame))
                self._newest_early[peer] = message
                return Deed()
        # Journal first: what a peer has applied and then forgets is lost for everybody.
        record = Received(now, peer, seq, frame)
        self._append(record)
        return self._done(self._take(record, message))

    def timer(self, now: float) -> Deed:
        """Go on without late neighbours if `wake_at` has passed."""
        turn = self.participant.timer(now)
        if not turn.parcels and turn.finished is None:
            return Deed()
        return self._done(turn, TimedOut(now))

    def check_replicas(self) -> tuple[Deed, list[str]]:
        """Compare what neighbours said of their copies here with the copies; return the requests for layers that
        differ, with a sentence on each neighbour concerned. Between rounds."""
        parcels, sentences = self.participant.disagreements()
        return Deed(parcels=[(parcel, 0) for parcel in parcels]), sentences

    def announce(self, change: Change, now: float) -> Deed:
        """Announce a change of the members that `Participant.plan` returned. Raises StateError if the disk refuses."""
        record = Announced(now, membership_codec.encode(change))
        self._append_for_good(record)
        return self._with_losses(self._done(self._learn(record)), now)

    def publish(self, deed: Deed) -> list[tuple[int, int, bytes]]:
        """Hand the numbered frames of a deed to the links; return (receiver, number, frame) of what has to be sent to
        those that there is a connection to. Without one, `connected` will return it."""
        sends = []
        with self._lock:
            for parcel, seq in deed.parcels:
                peer = parcel.receiver
                if not seq:
                    sends.append((peer, 0, parcel.frame))
                    continue
                self.out[peer].push(parcel.frame)
                # After a power cut, rounds are repeated that a neighbour has already, or even has for good.
                if seq <= self._remote_durable[peer]:
                    self.out[peer].acknowledge(seq)
                if seq > self._remote_has[peer]:
                    sends.append((peer, seq, parcel.frame))
        return sends

    def _learn(self, record: Announced) -> Turn:
        """Take note of an own announcement that is in the journal."""
        num_peers = self.participant.algorithm.node.schedule.num_peers
        change = membership_codec.decode(record.frame, num_peers, sender=self.participant.peer)
        turn = self.participant.learn(change, record.now)
        self._begin_links_anew(turn)
        return turn

    def _with_losses(self, deed: Deed, now: float) -> Deed:
        """Go on without the peers that are lost by what a call came to."""
        for peer in self.participant.to_lose:
            with self._lock:
                record = Lost(now, peer, self.out[peer].acknowledged)
            self._append_for_good(record)
            following = self._done(self._lose(record), before=deed)
            deed.parcels += following.parcels
            deed.finished = deed.finished or following.finished
        return deed

    def _lose(self, record: Lost) -> Turn:
        """Go on without a lost peer. What it has not for good, as the record says, was never given."""
        peer = record.peer
        with self._lock:
            unreceived = [frame for _, frame in self.out[peer].unacknowledged(record.upto)]
            self._reset(peer)
        return self.participant.lose(peer, unreceived, record.now)

    def _begin_links_anew(self, turn: Turn) -> None:
        """Count from 1 with a peer that joins, whatever it was sent while it was none of the members."""
        news = turn.news
        if news is None or news.kind is not ChangeKind.JOIN or news.subject == self.participant.peer:
            return
        joins = [each for each in self.participant.changes if (each.kind, each.subject) == (news.kind, news.subject)]
        # Where two sponsors say so at the same time, the peer may have been heard since the first; and a newcomer may
        # hear from a member, or from that member itself, that it once joined.
        known = self.incoming.get(news.subject)
        if len(joins) == 1 and (known is None or known.last_seq == 0):
            with self._lock:
                self._reset(news.subject)

    def _reset(self, peer: int) -> None:
        self.out[peer], self.incoming[peer] = OutLink(), InLink()
        # Emptied, not replaced: the early ones may be what is just being taken.
        self._kept.setdefault(peer, deque()).clear()
        self._early.setdefault(peer, deque()).clear()
        self._newest_early.pop(peer, None)
        self._remote_has[peer] = self._remote_durable[peer] = 0
        self._new_receipts.pop(peer, None)

    def _take(self, record: Received, message: Message | None = None, *, is_counted: bool = False) -> Turn:
        """Apply a frame that is in the journal or in a checkpoint, and count it unless it is counted already. `message`
        is what it holds, if it was decoded."""
        if message is None:
            turn = self.participant.receive(record.peer, record.frame, record.now)
        else:
            turn = self.participant.take(message, record.now)
        self._begin_links_anew(turn)
        if record.seq:
            if not is_counted:
                self.incoming[record.peer].accept(record.seq)
            if not membership_codec.is_notice(record.frame):
                self._kept[record.peer].append((record.seq, record.frame))
        return turn

    def _done(self, turn: Turn, *records: Record, always: bool = False, before: Deed | None = None) -> Deed:
        """Journal what a call came to and return it; `before` is what came just before and is not published yet."""
        deed = Deed(parcels=self._numbered(turn, before), finished=turn.finished, news=turn.news is not None)
        frames = tuple((parcel.receiver, seq, parcel.frame) for parcel, seq in deed.parcels if seq)
        if frames or always:
            records = (*records, Sent(self.participant.round, self._digest(), frames))
        if records:
            self._append(*records)
        if self._power and frames:
            deed.receipts = self.sync()
        if turn.finished is not None:
            self._forget_used()
            self._take_early(deed, turn.finished.time_s)
        return deed

    def _is_early(self, round_: int) -> bool:
        """Whether a frame has to wait: this peer was set back, or others have heard that it joins and it has not."""
        return self.participant.is_outsider or self.participant.session.is_early(round_)

    def _take_early(self, deed: Deed, now: float) -> None:
        """Take the frames that had come too early and are not any more; between rounds nothing comes of them but what
        changes of the members do."""
        for peer, early in list(self._early.items()):
            while early and not self._is_early(early[0][1]):
                seq, _, frame = early.popleft()
                record = Received(now, peer, seq, frame)
                if membership_codec.is_notice(frame):
                    self._append_for_good(record)
                else:
                    self._append(record)
                turn = self._take(record)
                if turn.news is not None:
                    deed.parcels += self._done(turn, before=deed).parcels
                    deed.news = True
        self._with_losses(deed, now)

    def _numbered(self, turn: Turn, before: Deed | None = None) -> list[tuple[Parcel, int]]:
        with self._lock:
            following = {peer: link.next_seq for peer, link in self.out.items()}
        for parcel, seq in before.parcels if before is not None else ():
            following[parcel.receiver] = max(seq + 1, following[parcel.receiver])
        pairs = []
        for parcel in turn.parcels:
            seq = 0
            if parcel.sequenced:
                seq = following[parcel.receiver]
                following[parcel.receiver] += 1
            pairs.append((parcel, seq))
        return pairs

    def _append(self, *records: Record) -> None:
        with self._lock:
            receipts, self._new_receipts = self._new_receipts, {}
        self._journal.append(*(Receipt(peer, upto) for peer, upto in receipts.items()), *records)

    def _append_for_good(self, record: Record) -> None:
        """Journal what depends on when it came, and make it survive a power cut before anything comes of it: where in
        the own stream a change of members is passed on, and what a lost peer had, cannot come out otherwise once
        others have seen it."""
        self._append(record)
        self._journal.sync()

    def _forget_used(self) -> None:
        """Keep of what was received only what waits for a later round."""
        waiting = self.participant.session.unconsumed_counts()
        for peer, frames in list(self._kept.items()):
            while len(frames) > waiting.get(peer, 0):
                frames.popleft()

    def _digest(self) -> int:
        """Return XXH3-64 of x and u."""
        algorithm = self.participant.algorithm
        digest = xxhash.xxh3_64(np.ascontiguousarray(algorithm.x).view(np.uint8).data)
        digest.update(np.float64(algorithm.u).tobytes())
        return digest.intdigest()

    # -- neighbours ----------------------------------------------------------------------------------------------------

    def meet(self, peer: int) -> None:
        """Take up the links to a peer that was not known when this one began, if it is not met yet."""
        with self._lock:
            if peer not in self.out and peer != self.participant.peer:
                self._reset(peer)

    def connected(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """Return (number, frame) of what a neighbour needs that is connected and has our frames up to `remote_has` for
        good. Raises RemoteProtocolError if it has lost what it had."""
        with self._lock:
            link = self.out[peer]
            if remote_has < link.acknowledged:
                raise RemoteProtocolError(
                    f"it has our frames up to {remote_has}, but had those up to {link.acknowledged} for good before: "
                    "it lost its state, and they are gone; restore its state folder or start the run anew"
                )
            self._remote_has[peer] = remote_has
            self._acknowledge(peer, remote_has)
            frames = link.unacknowledged(remote_has)
        return frames + [(0, parcel.frame) for parcel in self.participant.requests_to(peer)]

    def receipt(self, peer: int, upto: int) -> None:
        """Take note that a neighbour has our frames up to `upto` for good."""
        with self._lock:
            self._acknowledge(peer, upto)

    def last_received(self, peer: int) -> int:
        """Return up to which number the frames of a neighbour would survive a power cut."""
        return self.incoming[peer].durable_seq

    def _acknowledge(self, peer: int, upto: int) -> None:
        self._remote_durable[peer] = max(upto, self._remote_durable[peer])
        # After a power cut a neighbour can know more of us than we do; that is acknowledged as it is repeated.
        known = min(upto, self.out[peer].next_seq - 1)
        if known > self.out[peer].acknowledged:
            self.out[peer].acknowledge(known)
            # Not needed to be right, but to keep no more after a restart than before.
            self._new_receipts[peer] = known

    # -- durability ----------------------------------------------------------------------------------------------------

    def sync(self) -> dict[int, int]:
        """Make everything journaled so far survive a power cut; return the new receipts (neighbour → number). Raises
        StateError."""
        with self._lock:
            marks = {peer: link.last_seq for peer, link in self.incoming.items()}
        self._journal.sync()
        return self._mark_durable(marks)

    def save(self, description: Mapping[str, Any], *, anew: bool = False) -> dict[int, int]:
        """Take a checkpoint, between rounds, and begin a new journal; return the new receipts. Raises StateError.

        Where there is a checkpoint of this round already, its journal is enough, and is synced; `anew` writes it once
        more, with what has come late since.
        """
        round_ = self.participant.round
        if round_ == self.base_round and self.checkpoint_bytes and not anew:
            return self.sync()
        state, arrays = self.participant.state()
        self._forget_used()
        with self._lock:
            marks = {peer: link.last_seq for peer, link in self.incoming.items()}
            kept = {
                peer: (link.next_seq, [frame for _, frame in link.unacknowledged(0)]) for peer, link in self.out.items()
            }
        for peer, (_, frames) in kept.items():
            if frames:
                arrays[f"out/{peer}"] = _joined(frames)
        inbox = [(peer, seq, frame) for peer, frames in list(self._kept.items()) for seq, frame in frames]
        if inbox:
            arrays["inbox"] = _joined([frame for _, _, frame in inbox])
        state |= {**description, **self.files.identity}
        state |= {
            "received": {str(peer): upto for peer, upto in marks.items()},
            "inbox": [[peer, seq, len(frame)] for peer, seq, frame in inbox],
            "out": {str(peer): {"next_seq": n, "lengths": [*map(len, frames)]} for peer, (n, frames) in kept.items()},
        }
        # Should the new checkpoint be damaged one day, the one before and this journal lead to the same state.
        self._journal.sync()
        self.files.checkpoints.save(Checkpoint(round_, state, arrays))
        self.checkpoint_bytes = self.files.checkpoint_bytes(round_)
        self._journal.close()
        self._journal = self.files.new_journal(round_)
        self.base_round = round_
        self.files.prune()
        return self._mark_durable(marks)

    def go_back(self, round_: int) -> int:
        """Delete what is newer than the last checkpoint at or before `round_`; return its round (0: the start). The
        peer is of no use after that: open another one."""
        self._journal.close()
        return self.files.go_back(round_)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _mark_durable(self, marks: Mapping[int, int]) -> dict[int, int]:
        receipts = {}
        with self._lock:
            for peer, upto in marks.items():
                if upto > self.incoming[peer].durable_seq:
                    self.incoming[peer].mark_durable(upto)
                    receipts[peer] = upto
        return receipts


def _joined(frames: list[bytes]) -> Any:
    return np.frombuffer(b"".join(frames), dtype=np.uint8)


def _cut(blob: Any, lengths: list[int]) -> list[bytes]:
    data, frames, start = blob.tobytes(), [], 0
    for length in lengths:
        frames.append(data[start : start + length])
        start += length
    return frames
