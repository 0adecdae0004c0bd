"""A cluster that falls apart, and whose members declare losses themselves (`rounds.lost_after_s`).

The peers, disks and streams are those of the other scenarios, with their kills and delays. Links between parts of the
cluster are cut, for shorter and longer than a peer is waited for: in halves, one against the rest, in three parts. In
half of the seeds, one member lies about losses: it votes for every other one and for itself, and announces losses
without votes, with its own vote several times, with forged ones and with old ones. Whoever asks it what became of it is
answered with such losses.

Whoever finds the proof that it was declared lost takes part again under its next number (`gossip.incarnations`); so
does a device whose disk is wiped, once most members take it for lost. The liar tells of such things, too.

What has to hold: no two peers complete one round with other members; whom anybody takes for lost, a strict majority has
voted for, by signatures that nobody can forge, also by whom it takes itself for lost; nobody refuses what an honest one
announces; two incarnations of a device are never members of one round; and once
all is well, those that are not lost come to the last round.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from random import Random

from peer.compress.payload import FloatArray
from peer.errors import ConfigError, RemoteProtocolError, SecurityError, SponsorLost
from peer.gossip.effects import Effects
from peer.gossip.incarnations import MAX_INCARNATIONS, Numbering
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.node import membership_codec
from peer.node.loss_grounds import LossGrounds
from peer.node.loss_votes import LOST, ORDER, LossVote, decode_vote
from peer.node.membership_checks import check_own_loss
from peer.node.membership_planning import plan_change
from peer.node.participant import Participant
from peer.node.statements import OwnWords, sealed, unsealed
from peer.proto.sottovoce.v1.membership_pb2 import LossOrder
from peer.proto.sottovoce.v1.membership_pb2 import LossVote as VoteMessage
from peer.proto.sottovoce.v1.statement_pb2 import Proof
from tests.state.failing_disk import FailingDisk
from tests.stress.faults.invariants import Auditor, InvariantBroken
from tests.stress.faults.liar import Falsehood, LyingProcess, Occasion, Tongue
from tests.stress.faults.plan import Plan, plan_for
from tests.stress.faults.process import VirtualProcess
from tests.stress.faults.scenario import CASES, Case, Happening, Scenario
from tests.stress.faults.world import Outcome, World

LOST_AFTER_S = 4.0
_LOOK_EVERY_S = 0.5
_ASK_AGAIN_S = 5.0
_OPERATOR_AFTER_S = 15.0
"""So long an operator waits for the members to declare a device lost that has no disk any more."""
OPERATOR = -1
_ABLE = tuple(case for case in CASES if not case.late)


@dataclass(frozen=True)
class DividedScenario(Scenario):
    """One run, a function of its seed."""

    @cached_property
    def case(self) -> Case:
        return _ABLE[self.seed % len(_ABLE)]

    @cached_property
    def num_first(self) -> int:
        if self.graph_kind.startswith("four-node"):
            return 4
        return Random(f"divided {self.seed}").choice((3, 3, 4, 4, 5, 6) if self.lies else (2, 3, 4, 4, 5, 6))

    @cached_property
    def happenings(self) -> tuple[Happening, ...]:
        return ()

    @property
    def members_can_change(self) -> bool:
        return True

    @property
    def somebody_is_lost(self) -> bool:
        return True

    @property
    def is_two_faced(self) -> bool:
        return False


class Notary:
    """`Statements` of one peer: signatures with a key that the test shares and no peer has."""

    def __init__(self, seed: int, peer: int, numbering: Numbering, counters: Counter[int], cast: set[LossVote]) -> None:
        """`cast`: takes all votes that were signed."""
        self._numbering = numbering
        self._seed, self._peer, self._counters, self._cast = seed, peer, counters, cast

    def sign(self, topic: str, statement: bytes) -> bytes:
        self._counters[self._peer] += 1
        counter = self._counters[self._peer]
        said = sealed(
            statement, Proof(counter=counter, signature=self._signature(self._peer, topic, counter, statement))
        )
        if topic == LOST:
            self._cast.add(decode_vote(said))
        return said

    def notice(self, change: Change) -> bytes:
        """Return the frame that tells of a change, signed."""
        return OwnWords(self, membership_codec.MAGIC).signed(membership_codec.encode(change))

    def check(self, topic: str, issuer: int, said: bytes) -> bool:
        statement, proof = unsealed(said)
        if proof is None:
            raise SecurityError("it is not signed")
        if not hmac.compare_digest(proof.signature, self._signature(issuer, topic, proof.counter, statement)):
            raise SecurityError("its signature is another's")
        return True

    def check_order(self, topic: str, said: bytes) -> bool:
        statement, proof = unsealed(said)
        if proof is None or not hmac.compare_digest(
            proof.signature, self._signature(OPERATOR, topic, proof.counter, statement)
        ):
            raise SecurityError("no operator has said it")
        return True

    def order(self, subject: int) -> bytes:
        """Return what an operator says who knows that a peer is lost for good."""
        incarnation = self._numbering.incarnation(subject)
        name = f"peer-{self._numbering.device(subject)}"
        statement = LossOrder(name=name, incarnation=incarnation).SerializeToString(deterministic=True)
        return sealed(statement, Proof(counter=1, signature=self._signature(OPERATOR, ORDER, 1, statement)))

    def _signature(self, peer: int, topic: str, counter: int, statement: bytes) -> bytes:
        # A device has one certificate, whichever of its incarnations it is.
        key = f"{self._seed} {peer if peer == OPERATOR else self._numbering.device(peer)}".encode()
        return hmac.digest(key, f"{topic} {counter} ".encode() + statement, hashlib.sha256)


class Observer(Auditor):
    """Watches who goes on with whom."""

    def __init__(self, scenario: DividedScenario, cast: set[LossVote]) -> None:
        super().__init__(scenario)
        self._cast = cast
        self._views: dict[int, tuple[int, ...]] = {}
        """Round → its members, for all that have completed it."""
        self._done = dict.fromkeys(range(scenario.num_first), 0)
        self.lost: dict[int, set[int]] = {}
        """Lost peer → who takes it for lost."""

    @property
    def completed(self) -> int:
        staying = [done for peer, done in self._done.items() if peer not in self.lost]
        return min(staying, default=0)

    @property
    def furthest(self) -> int:
        return max(self._done.values())

    def began(self, peer: int) -> None: ...

    def stepped(self, participant: Participant, round_: int, rate: float, gradient: FloatArray) -> None: ...

    def observed(self, participant: Participant, what: str, round_: int, other: int, frame: bytes) -> None: ...

    def put_on_stream(self, sender: int, receiver: int, seq: int, frame: bytes) -> None: ...

    def round_done(self, participant: Participant) -> None:
        peer, t = participant.peer, participant.round - 1
        views = participant.algorithm.node.schedule
        members = views.membership.members(t)  # type: ignore[union-attr]
        if self._views.setdefault(t, members) != members:
            raise InvariantBroken(f"peer {peer} completed round {t} with {members}, and others with {self._views[t]}")
        if len({*map(self.scenario.numbering.device, members)}) < len(members):
            raise InvariantBroken(f"one device takes part twice in round {t}: {members}")
        self._done[peer] = participant.round
        self.note_losses(participant)

    def note_losses(self, participant: Participant) -> None:
        """Check what a peer believes of losses. One that is no member yet may hear of a loss before it hears of those
        that went before: it is checked once it has heard that it joins, which it is told last."""
        if participant.membership.is_outsider:
            return
        for change in participant.membership.changes:
            former = self.scenario.numbering.former(change.subject)
            if change.kind is ChangeKind.JOIN and former is not None:
                if former not in self.lost:
                    raise InvariantBroken(f"peer {participant.peer} believes {change}, and nobody lost peer {former}")
                continue
            if change.kind is not ChangeKind.LOST:
                raise InvariantBroken(f"peer {participant.peer} believes {change}")
            if participant.peer in self.lost.setdefault(change.subject, set()):
                continue
            self.lost[change.subject].add(participant.peer)
            self.check_grounds(participant, change)

    def check_grounds(self, participant: Participant, change: Change) -> None:
        """Check that an operator or a strict majority of the members has really decided a loss."""
        views = participant.algorithm.node.schedule
        votes = [decode_vote(vote) for vote in change.votes]
        genuine = {vote.voter for vote in votes if vote in self._cast and vote.subject == change.subject}
        for vote in () if change.ordered else votes:
            members = views.membership.members(vote.round)  # type: ignore[union-attr]
            if 2 * len(genuine.intersection(members) - {change.subject}) <= len(members):
                raise InvariantBroken(f"{sorted(genuine)} of {members} declared peer {change.subject} lost")
        if not votes and not change.ordered:
            raise InvariantBroken(f"peer {participant.peer} takes {change.subject} for lost without grounds")

    def finish(self, participants: object) -> None:
        pass


class DividedProcess(VirtualProcess):
    """A process that does what `peer.daemon.members.loss_watch` does."""

    def __init__(self, world: DividedWorld, me: int, disk: FailingDisk) -> None:
        self.notary = world.notary(me)
        self.cluster = world
        super().__init__(world, me, disk)
        self.votes = self.participant.membership.loss_votes(self.notary, after_s=LOST_AFTER_S)
        self._up_at = dict.fromkeys(world.scenario.neighbors(me), world.now)
        self._asked_at = float("-inf")

    def statements(self) -> Notary:
        return self.notary

    def connect(self) -> None:
        super().connect()
        self.later(_LOOK_EVERY_S * self.random.uniform(0.5, 1.5), self._look)

    def hear_note(self, source: int, note: bytes) -> None:
        """Take a vote of a neighbour."""
        membership = self.participant.membership
        try:
            if self.votes.hear(note, self.participant.round, membership.longest_lead):
                self.cluster.tell_all(self.me, note, besides=source)
        except RemoteProtocolError as error:
            if self.cluster.tongue is None or error.peer != self.cluster.tongue.me:
                raise InvariantBroken(f"peer {self.me} takes the vote of an honest peer for a lie: {error}") from None
            self.cluster.tongue.refusals[error.problem] += 1

    def _look(self) -> None:
        self.later(_LOOK_EVERY_S * self.random.uniform(0.5, 1.5), self._look)
        world, membership = self.cluster, self.participant.membership
        world.observer.note_losses(self.participant)
        if not membership.is_member:
            self._ask_to_join()
            return
        world.joined(self.me)
        for peer in membership.members or ():
            if peer != self.me:
                self._up_at.setdefault(peer, world.now)
        for peer in self._up_at:
            if world.streams.is_up(self.me, peer):
                self._up_at[peer] = world.now
        away = {peer: world.now - at for peer, at in self._up_at.items() if peer not in self.participant.session.lost}
        if any(seconds > LOST_AFTER_S for seconds in away.values()) and self._finds_itself_lost():
            world.come_back(self.me, "finds that it was declared lost")
            return
        for note in self.votes.look(self.participant.round, membership.longest_lead, away, world.now):
            world.tell_all(self.me, note)
        for subject, votes in self.votes.decided(world.now) if self.is_free else ():
            try:
                change = plan_change(membership, ChangeKind.LOST, subject, votes=votes)
            except ConfigError as error:
                world.note(f"{self.me} does not announce that {subject} is lost: {error}")
                continue
            world.note(f"{self.me} announces {change}")
            world.changes["was declared lost"] += 1
            self.do(lambda change=change: self.peer.announce(change, self.now()), self.plan_timer)  # type: ignore[misc]
            break

    def do(self, call: Callable[[], Effects], then: Callable[[], None]) -> None:
        try:
            super().do(call, then)
        except SponsorLost:
            self.cluster.is_of_no_use(self.me, "has joined and got no model")

    def _finds_itself_lost(self) -> bool:
        """Whether a member that can be reached proves it: as `peer.daemon.members.own_loss`."""
        for answer in self.cluster.answers(self.me):
            if (proof := answer.get(self.me)) is not None:
                try:
                    check_own_loss(self.participant.membership, proof)
                except (SecurityError, RemoteProtocolError):
                    continue
                numbers = self.cluster.scenario.numbering.stride * MAX_INCARNATIONS
                shown = membership_codec.decode(proof, numbers, sender=self.me)
                self.cluster.observer.check_grounds(self.participant, shown)
                return True
        return False

    def _ask_to_join(self) -> None:
        """Ask a member to announce that this peer takes part again: as `peer.daemon.members.joining`."""
        world = self.cluster
        if world.now < self._asked_at + _ASK_AGAIN_S or not self.participant.membership.is_outsider:
            return
        connected = [each for each in world.present() if each.me != self.me and world.streams.is_up(self.me, each.me)]
        able = [each for each in connected if each.is_free and each.participant.membership.is_member]
        if able and world.let_join(self.random.choice(able), self.me):
            self._asked_at = world.now


class LyingMember(LyingProcess, DividedProcess):
    """A process of the liar: it lies about losses alone."""

    def __init__(self, world: DividedWorld, me: int, disk: FailingDisk, tongue: Tongue) -> None:
        super().__init__(world, me, disk, tongue)
        self.falsehoods = _declarations(self)

    def connect(self) -> None:
        super().connect()
        self.later(1.0, self._vote_for_all)

    def _vote_for_all(self) -> None:
        if not self.world.quiet:
            self.later(2.0, self._vote_for_all)
            for subject in range(self.world.scenario.num_first):
                self.cluster.tell_all(self.me, vote(self.notary, self.me, subject, self.participant.round))
                self.tongue.lies["a vote for its own loss" if subject == self.me else "a vote against everybody"] += 1

    def answer(self, asker: int) -> Mapping[int, bytes]:
        """Return that whoever asks is lost: by the own word, the own vote, or all votes on it that were ever cast."""
        heard = sorted(each.said for each in self.cluster.cast if each.subject == asker)
        own = vote(self.notary, self.me, asker, self.participant.round)
        grounds = self.lots.choice(((), (own,), (own,) * 5, tuple(heard[-8:])))
        change = Change(ChangeKind.LOST, asker, self.me, self.participant.round + 9, votes=grounds)
        self.tongue.lies["an answer that the asker is lost"] += 1
        return {asker: self.notary.notice(change)}


def vote(notary: Notary, voter: int, subject: int, round_: int) -> bytes:
    """Return a vote that `notary` signs, whoever the voter is said to be."""
    message = VoteMessage(voter=voter, subject=subject, round=round_)
    return notary.sign(LOST, message.SerializeToString(deterministic=True))


def _declarations(liar: LyingMember) -> Mapping[str, Falsehood]:
    """Return what a member says of losses that no honest one would."""

    def loss(occasion: Occasion, votes: tuple[bytes, ...], subject: int | None = None) -> tuple[None, bytes]:
        effective = occasion.round + 4 * occasion.scenario.longest_lead + 4
        about = occasion.other() if subject is None else subject
        change = Change(ChangeKind.LOST, about, liar.me, effective, occasion.round, votes=votes)
        return None, liar.notary.notice(change)

    def own_votes(occasion: Occasion) -> tuple[None, bytes]:
        subject = occasion.other()
        return loss(occasion, (vote(liar.notary, liar.me, subject, occasion.round),) * 5, subject)

    def forged_votes(occasion: Occasion) -> tuple[None, bytes]:
        subject, others = occasion.other(), range(occasion.scenario.num_first)
        return loss(occasion, tuple(vote(liar.notary, other, subject, occasion.round) for other in others), subject)

    def heard_votes(occasion: Occasion) -> tuple[None, bytes]:
        """With all votes that were ever cast, whomever they are about."""
        return loss(occasion, tuple(each.said for each in sorted(liar.cluster.cast, key=lambda each: each.said))[:8])

    def join(occasion: Occasion, number: int) -> tuple[None, bytes]:
        # Before any loss counts that is announced from now on: else this might be true when it is heard.
        effective = occasion.round + 2 * occasion.scenario.longest_lead + 2
        change = Change(ChangeKind.JOIN, number, liar.me, effective, newcomer=occasion.scenario.newcomer(number))
        return None, liar.notary.notice(change)

    def of_a_member(occasion: Occasion) -> tuple[None, bytes] | None:
        numbering, members = occasion.scenario.numbering, liar.participant.membership.members or ()
        lost = liar.cluster.observer.lost
        others = [peer for peer in members if peer not in (liar.me, occasion.receiver) and peer not in lost]
        if not others:
            return None
        return join(occasion, occasion.random.choice(others) + numbering.stride)

    def of_another_number(occasion: Occasion) -> tuple[None, bytes]:
        return join(occasion, occasion.scenario.numbering.number(occasion.other(), MAX_INCARNATIONS - 1))

    def heard_before(occasion: Occasion) -> tuple[None, bytes] | None:
        """What an earlier incarnation said of members, as if its device said so now."""
        said = [change for change in liar.participant.membership.changes if change.told and change.issuer != liar.me]
        lost = [change for change in said if change.issuer in liar.participant.session.lost]
        if not lost:
            return None
        change = occasion.random.choice(lost)
        _, proof = unsealed(change.told[len(membership_codec.MAGIC) :])
        assert proof is not None
        now = replace(change, issuer=change.issuer + occasion.scenario.numbering.stride, told=b"")
        statement = membership_codec.encode(now)[len(membership_codec.MAGIC) :]
        return None, membership_codec.MAGIC + sealed(statement, proof)

    def of_others(occasion: Occasion) -> tuple[None, bytes]:
        issuer = (occasion.receiver + 1) % occasion.scenario.num_first
        change = Change(ChangeKind.LOST, occasion.other(), issuer, occasion.round + 40, occasion.round)
        return None, membership_codec.encode(change)

    return {
        "a loss without votes": lambda occasion: loss(occasion, ()),
        "a loss by its own vote": own_votes,
        "a loss by forged votes": forged_votes,
        "a loss by votes that it heard": heard_votes,
        "a loss in the name of another": of_others,
        "a member takes part again": of_a_member,
        "a number that nobody can have": of_another_number,
        "the words of a lost peer as those of its device": heard_before,
    }


class DividedWorld(World):
    """Peers whose links fall apart."""

    def __init__(self, scenario: DividedScenario, plan: Plan | None = None) -> None:
        plan = plan or plan_for(scenario)
        # Cuts of its own stand in the place of those of the plan; a damaged checkpoint is another subject.
        super().__init__(scenario, replace(plan, cut_every_s=None, damage_chance=0.0, durability="power"))
        self._counters: Counter[int] = Counter()
        self.cast: set[LossVote] = set()
        self.auditor = self.observer = Observer(scenario, self.cast)
        self._waiting: set[int] = set()
        """Numbers of devices that want to take part again and are no members yet."""
        self._sponsors: dict[int, set[int]] = {}
        """Number of a device that takes part again → who announced that."""
        self._wiped: set[int] = set()
        self._quiet_since = 0.0

    def notary(self, peer: int) -> Notary:
        """Return what signs for a peer."""
        return Notary(self.scenario.seed, peer, self.scenario.numbering, self._counters, self.cast)

    def tell_all(self, me: int, note: bytes, besides: int | None = None) -> None:
        """Send a note to all neighbours that are connected; any of them may be lost."""
        for other in [*self.processes]:
            pair = (min(me, other), max(me, other))
            if other != besides and self.streams.is_up(me, other) and self.random.random() < 0.95:
                delay_s = self.streams.conditions[pair].delay_s

                def arrive(other: int = other, pair: tuple[int, int] = pair) -> None:
                    process = self.processes[other]
                    is_cut = self.streams.conditions[pair].cut_until > self.now
                    if isinstance(process, DividedProcess) and self.streams.is_up(other, me) and not is_cut:
                        process.hear_note(me, note)

                self.at(self.now + delay_s * self.random.uniform(0.5, 1.0), arrive)

    def process(self, me: int, tongue: Tongue | None) -> VirtualProcess:
        disk = self.disks[me]
        return DividedProcess(self, me, disk) if tongue is None else LyingMember(self, me, disk, tongue)

    def plan_faults(self) -> None:
        super().plan_faults()
        self.plan_fault(Random(f"cuts {self.scenario.seed}").uniform(6.0, 20.0), self._divide)
        if Random(f"wipes {self.scenario.seed}").random() < 0.5:
            self.plan_fault(Random(f"wiped {self.scenario.seed}").uniform(20.0, 60.0), self._wipe)

    def _divide(self) -> None:
        """Let the cluster fall into two or three parts for a while."""
        random, peers = self.random, [peer for peer in self.processes if peer not in self.gone]
        parts = min(len(peers), random.choice((2, 2, 3)))
        part_of = {peer: random.randrange(parts) for peer in peers}
        if random.random() < 0.4:
            part_of = dict.fromkeys(peers, 0) | {random.choice(peers): 1}
        sizes = sorted(Counter(part_of.values()).values(), reverse=True)
        if len(sizes) == 1:
            return
        until = self.now + LOST_AFTER_S * random.choice((0.5, 1.2, 3.0, 6.0))
        self.faults[f"divided {'–'.join(map(str, sizes))}"] += 1
        self.note(f"divided into {part_of} until {until:.3f}")
        for pair in self.streams.conditions:
            if part_of.get(pair[0]) != part_of.get(pair[1]):
                self.streams.cut(pair, until)

    def _is_over(self) -> bool:
        self._events += 1
        if self._events % 32 or self.auditor.completed < self.scenario.rounds:
            return False
        unknown = {me for me in self.processes if self._is_unknown(me)}
        is_over = all(
            (process := self.processes[me]) is not None and not process.participant.session.in_round
            for me in self.processes.keys() - self.observer.lost.keys() - self._waiting - unknown
        )
        for me in sorted(unknown - self._waiting - self.gone) if is_over else ():
            self.changes["lost its sponsor before anybody heard of it"] += 1
            self.end(me, "waits in vain")
        return is_over

    def _is_unknown(self, me: int) -> bool:
        """Whether a device was let in again by a member that was lost before another one heard of it: nobody counts on
        it, and it waits for its sponsor, or has lost its disk as well, until its operator starts it anew."""
        joins = ((each.kind, each.subject) for other in self.present() if other.me != me for each in _changes(other))
        return me >= self.scenario.num_first and (ChangeKind.JOIN, me) not in joins

    def present(self) -> list[VirtualProcess]:
        return [each for each in super().present() if each.me not in self.observer.lost]

    # -- coming back ---------------------------------------------------------------------------------------------------

    def _is_reachable(self, me: int, other: int) -> bool:
        condition = self.streams.conditions.get((min(me, other), max(me, other)))
        return condition is not None and condition.cut_until <= self.now

    def answers(self, me: int) -> list[Mapping[int, bytes]]:
        """Return what the members that can be reached say of losses."""
        members = [each for each in self.present() if each.participant.membership.is_member]
        return [
            each.answer(me)
            if isinstance(each, LyingMember) and not self.quiet
            else each.participant.membership.proofs_of_loss()
            for each in members
            if each.me != me and self._is_reachable(me, each.me)
        ]

    def come_back(self, me: int, why: str) -> None:
        """End what is lost for good, and let its device take part again."""
        numbering = self.scenario.numbering
        number = me + numbering.stride
        if me in self.gone or not numbering.is_possible(number):
            return
        self.end(me, why)
        self._waiting.add(number)
        self.changes["took part again"] += 1
        self.disks[number] = disk = FailingDisk(Random(f"disk {self.scenario.seed} {number}"))
        disk.operation_s, disk.sync_s = (0.0, 0.0) if self.quiet else (self.plan.operation_s, self.plan.sync_s)
        like = self.streams.conditions[min(self.streams.conditions)]
        for other in self.processes:
            if other not in self.gone:
                self.streams.add((min(number, other), max(number, other)), like)
        self.processes[number] = None
        self.at(self.now + self.plan.restart_s * self.random.uniform(0.2, 1.5), lambda: self.start_process(number))

    def let_join(self, sponsor: VirtualProcess, number: int) -> bool:
        """Let a member announce that a device takes part again; return whether it does."""
        is_announced = self.announced(sponsor, ChangeKind.JOIN, number)
        if is_announced:
            self._sponsors.setdefault(number, set()).add(sponsor.me)
        return is_announced

    def refused(self, process: VirtualProcess, peer: int, seq: int, error: RemoteProtocolError) -> None:
        """A peer refused a frame of another. It may, where that one was let in by nobody but peers whose loss is proven
        (`Observer.check_grounds`) and whose word came to no other in time: the rounds have gone on without it."""
        sponsors = self._sponsors.get(peer, set())
        is_known = any((each.kind, each.subject) == (ChangeKind.JOIN, peer) for each in _changes(process))
        if sponsors and not is_known and sponsors <= process.participant.session.lost:
            self.note(f"{process.me} refuses {seq} of {peer}, whose sponsor was lost: {error}")
            return
        super().refused(process, peer, seq, error)

    def joined(self, number: int) -> None:
        """Take note that a device is a member again, if that is what it is."""
        if number in self._waiting:
            self._waiting.discard(number)
            self.changes["was a member again"] += 1

    def _wipe(self) -> None:
        """Let a device lose its disk: it waits until most of the others take it for lost. Of two devices, or where two
        were wiped at once, the rest might be no majority."""
        members = [each for each in self.present() if each.participant.membership.is_member]
        able = [each.me for each in members if each.me != self.scenario.liar]
        has_time = self.observer.furthest + 8 * self.scenario.longest_lead + 8 < self.scenario.rounds
        if len(members) < 3 or not able or not has_time or self._wiped - self.observer.lost.keys():
            return
        self.faults["disk wiped"] += 1
        self.is_of_no_use(self.random.choice(able), "loses its disk")

    def is_of_no_use(self, me: int, why: str) -> None:
        """End a member that has nothing of what the others count on: it waits until its loss is proven to it."""
        self._wiped.add(me)
        self.end(me, why)
        self._ask_for_the_wiped(me)

    def _ask_for_the_wiped(self, me: int) -> None:
        grounds = LossGrounds(
            membership=Membership(tuple(range(self.scenario.num_first))),
            statements=self.notary(me),
            numbering=self.scenario.numbering,
            name_of=self.scenario.name_of,
            counts_votes=True,
        )
        # A device without its state knows no members but the first: where others have decided, an operator knows them.
        counts = any(self._counts_on(process, me) for process in self.present())
        if any(grounds.proves(answer.get(me), me) for answer in self.answers(me)) or (
            self._operator_decides and not counts
        ):
            self.gone.discard(me)
            self.come_back(me, "is known to be lost")
        else:
            if self._operator_decides:
                self._order(me)
            self.ask(lambda: self._ask_for_the_wiped(me), 1.0)

    def make_peace(self) -> None:
        super().make_peace()
        self._quiet_since = self.now
        self._settle_disagreements()

    def _settle_disagreements(self) -> None:
        """Let an operator declare a device lost that has ended, where members did not hear of that: they may have
        believed another loss first, with which those that are left are no majority; or the liar has shown the votes of
        a majority to that device alone."""
        if self._operator_decides:
            for me in sorted(self.gone - self._wiped):
                if any(self._counts_on(process, me) for process in self.present()):
                    self._order(me)
        self.ask(self._settle_disagreements, 1.0)

    @property
    def _operator_decides(self) -> bool:
        """Whether the members had the time to decide for themselves what they can."""
        return self.quiet and self.now > self._quiet_since + _OPERATOR_AFTER_S

    def _counts_on(self, process: VirtualProcess, me: int) -> bool:
        """Whether a process is a member that waits for a peer, or will."""
        return process.participant.membership.is_member and not self.goes_on_without(process, me)

    def _order(self, me: int) -> None:
        """Let an operator declare a device lost that has ended."""
        for process in self.present():
            if any(change.subject == me and change.ordered for change in process.participant.membership.changes):
                return
            if not process.is_free or not self._counts_on(process, me):
                continue
            ordered = self.notary(process.me).order(me)
            try:
                change = plan_change(process.participant.membership, ChangeKind.LOST, me, ordered=ordered)
            except ConfigError as error:
                self.note(f"{process.me} does not announce that {me} is lost: {error}")
                continue
            self.note(f"{process.me} announces for the operator {change}")
            self.changes["was declared lost by the operator"] += 1
            peer, now = process.peer, process.now()
            process.do(partial(peer.announce, change, now), process.plan_timer)
            return

    def outcome(self) -> Outcome:
        """Run to the end. Raises SimulationFailed."""
        outcome = self.run()
        outcome.changes["was lost"] = len(self.observer.lost)
        return outcome


def _changes(process: VirtualProcess) -> tuple[Change, ...]:
    return process.participant.membership.changes


def simulate_divided(seed: int, rounds: int = 100, *, lies: bool = False) -> Outcome:
    """Run one seed; `lies`: with one member that lies. Raises SimulationFailed."""
    return DividedWorld(DividedScenario(seed, rounds, lies)).outcome()
