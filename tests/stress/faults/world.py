"""One simulated run from its first round to its last, with everything that goes wrong in it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from peer.errors import ConfigError, RemoteProtocolError
from peer.gossip.membership import ChangeKind
from peer.gossip.views import ViewSchedule
from peer.simulate.network import Agenda
from peer.state.checkpoints import Checkpoints, checkpoint_name
from peer.state.recovery import journal_name
from tests.state.failing_disk import FailingDisk
from tests.stress.faults.invariants import Auditor, InvariantBroken
from tests.stress.faults.liar import LyingProcess, Tongue
from tests.stress.faults.plan import Plan, plan_for
from tests.stress.faults.process import VirtualProcess
from tests.stress.faults.scenario import Happening, Scenario
from tests.stress.faults.streams import Streams

_TRACE = 60
"""Events that a failure shows."""
_QUIET_SHARE = 0.9
"""After this part of the rounds nothing goes wrong any more."""
_DISTURBED_ROUND_S = 2.0
"""… nor after this many virtual seconds for each round of the run."""
_QUIET_ROUND_S = 2.0
_ASK_EVERY_S = 0.5
"""About how often a peer that wants to join, or an operator who knows of a loss, asks somebody to announce it."""
_ASK_AGAIN_S = 5.0
"""So long a peer that wants to join waits for what comes of it."""
_QUIET_S = 60.0
"""In peace a round takes no longer than this, and the run to settle in the end: else it is stuck."""


@dataclass(kw_only=True)
class Outcome:
    """What one seed came to."""

    seed: int
    algorithm: str
    late: bool
    rounds: int
    """Rounds that all peers completed."""
    virtual_s: float
    duplicates: int = 0
    """Frames that came again and were dropped."""
    faults: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    """What happened to the members."""
    lies: Counter[str] = field(default_factory=Counter)
    """What the liar said, if there is one."""
    refusals: Counter[str] = field(default_factory=Counter)
    """With which words that was refused."""


class SimulationFailed(Exception):
    """A seed for which something did not hold: the text has all that is needed to look into it."""

    def __init__(self, scenario: Scenario, plan: Plan, problem: str, trace: list[str]) -> None:
        self.seed, self.problem = scenario.seed, problem
        lines = [
            f"seed {scenario.seed}: {problem}",
            f"{scenario.case}, {scenario.num_first} peers, {scenario.rounds} rounds"
            + (f", peer {scenario.liar} lies" + scenario.is_two_faced * ", two-faced" if scenario.lies else ""),
            *map(str, scenario.happenings),
            f"{scenario.compressor}, {scenario.late_policy}",
            str(plan),
            "the last that happened:",
            *trace,
        ]
        super().__init__("\n  ".join(lines))


class World:
    """Peers, their disks, the streams between them, and misfortune. Implements `streams.Schedule`."""

    def __init__(self, scenario: Scenario, plan: Plan | None = None) -> None:
        self.scenario = scenario
        self.plan = plan or plan_for(scenario)
        self.random = Random(f"world {scenario.seed}")
        self.auditor = Auditor(scenario)
        self.now = 0.0
        self.quiet = False
        self.duplicates = 0
        """Frames that came again, to processes that have ended."""
        self.faults: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()
        self.gone: set[int] = set()
        """Peers whose process never comes back."""
        peers = range(scenario.num_peers)
        self.disks = {peer: FailingDisk(Random(f"disk {scenario.seed} {peer}")) for peer in peers}
        self.processes: dict[int, VirtualProcess | None] = dict.fromkeys(peers)
        self.streams = Streams(
            [(a, b) for a in peers for b in scenario.neighbors(a) if a < b], self, Random(f"streams {scenario.seed}")
        )
        self.tongue = Tongue(scenario, self.auditor.told_otherwise) if scenario.lies else None
        self._cut_off: int | None = None
        """Who lives on although it is given up for lost."""
        self._agenda: Agenda[Callable[[], None]] = Agenda()
        self.trace: deque[str] = deque(maxlen=_TRACE)
        """The last that happened."""
        self._events = 0
        self.started: set[int] = set()
        self._open_happenings = len(scenario.happenings)
        """So many have not come to their end."""

    def run(self) -> Outcome:
        """Run to the end. Raises SimulationFailed."""
        try:
            self.run_to_the_end()
        except Exception as error:
            # Whatever it is, the seed and what led to it are what one needs to know.
            kind = "" if isinstance(error, InvariantBroken) else f"{type(error).__name__}: "
            raise SimulationFailed(self.scenario, self.plan, f"{kind}{error}", list(self.trace)) from error
        return Outcome(
            seed=self.scenario.seed,
            algorithm=self.scenario.case.algorithm,
            late=self.scenario.case.late,
            rounds=self.auditor.completed,
            virtual_s=self.now,
            duplicates=self.duplicates + sum(process.duplicates for process in self.processes.values() if process),
            faults=self.faults,
            changes=self.changes,
            lies=self.liar_said,
            refusals=self.tongue.refusals if self.tongue else Counter(),
        )

    @property
    def liar_said(self) -> Counter[str]:
        """What the liar has said so far."""
        return self.tongue.lies if self.tongue is not None else Counter()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self._agenda.add(time_s, action)

    def note(self, text: str) -> None:
        """Remember an event for the report of a failure."""
        self.trace.append(f"{self.now:9.3f} {text}")

    def died(self, process: VirtualProcess, how: str) -> None:
        """A process is gone; it is started again after a while."""
        me, disk, random = process.me, self.disks[process.me], self.random
        process.alive = False
        self.processes[me] = None
        self.duplicates += process.duplicates
        self.streams.end(me)
        self.faults["process ended"] += 1
        if not self.quiet and random.random() < self.plan.power_share:
            disk.lose_power()
            self.faults["power lost"] += 1
            how += ", power lost"
        self.note(f"{me} {how}")
        if not self.quiet and random.random() < self.plan.damage_chance and self._damage_checkpoint(disk):
            self.note(f"{me}: the newest checkpoint is damaged")
        if me not in self.gone:
            self.at(self.now + self.plan.restart_s * random.uniform(0.2, 1.5), lambda: self.start_process(me))

    def is_newcomer(self, peer: int) -> bool:
        """Return whether a peer is about to join, or waits to hear that it is."""
        process = self.processes[peer]
        if process is None or peer < self.scenario.num_first:
            return peer >= self.scenario.num_first  # What is on its way to one that ended waits until it starts again.
        views, t = process.participant.algorithm.node.schedule, process.participant.round
        assert isinstance(views, ViewSchedule)
        return not t or peer not in views.membership.members(t)

    def found_refused(self, process: VirtualProcess, notice: str) -> None:
        """A peer finds in its own files what it refuses: neither an honest frame is that, nor is a lie ever kept."""
        raise InvariantBroken(f"peer {process.me} kept what it refuses: {notice}")

    def refused(self, process: VirtualProcess, peer: int, seq: int, error: RemoteProtocolError) -> None:
        """A peer refused a frame of another, though only one lies here."""
        if peer in process.participant.session.lost:
            return
        if self.tongue is not None and peer == self.tongue.me:
            self.note(f"{process.me} refuses {seq} of the liar: {error}")
            self.tongue.refused(process.me, seq, error.problem)
            return
        raise InvariantBroken(f"peer {process.me} takes an honest message for a lie: {error}")

    def run_to_the_end(self) -> None:
        scenario, plan = self.scenario, self.plan
        for disk in self.disks.values():
            disk.operation_s, disk.sync_s = plan.operation_s, plan.sync_s
        for condition in self.streams.conditions.values():
            condition.delay_s, condition.rate_bytes_s = plan.delay_s, plan.rate_bytes_s
            condition.spike_chance, condition.spike_s = plan.spike_chance, plan.spike_s
        for me in range(scenario.num_first):
            self.at(0.0, lambda me=me: self.start_process(me))  # type: ignore[misc]
        for happening in scenario.happenings:
            self._plan_happening(happening)
        self.plan_faults()
        deadline = float("inf")
        while not self._is_over():
            if not self._agenda:
                raise InvariantBroken("nothing happens any more, and the run is not over")
            self.now, action = self._agenda.pop()
            action()
            if not self.quiet and (
                self.auditor.completed >= _QUIET_SHARE * scenario.rounds
                or self.now > _DISTURBED_ROUND_S * scenario.rounds
            ):
                self.make_peace()
                left = scenario.rounds - self.auditor.completed
                deadline = self.now + _QUIET_S + _QUIET_ROUND_S * left
            if self.now > deadline:
                waiting = {p.me: (p.participant.round, p.participant.session.waiting_for) for p in self.present()}
                raise InvariantBroken(f"stuck though all is well: (round, waits for) of each peer: {waiting}")
        for process in self.present():
            process.wind_up()
        self.auditor.finish([process.participant for process in self.present()])

    def _is_over(self) -> bool:
        self._events += 1
        if self._events % 32 or self.auditor.completed < self.scenario.rounds:
            return False
        if self._open_happenings:
            return False
        expected = [me for me in range(self.scenario.num_peers) if me not in self.gone and me in self.started]
        return all((process := self.processes[me]) is not None and process.is_settled for me in expected)

    def present(self) -> list[VirtualProcess]:
        """Return the processes that run and that others may hear."""
        return [each for each in self.processes.values() if each is not None and each.me != self._cut_off]

    def start_process(self, me: int) -> None:
        if me in self.gone:
            return
        self.started.add(me)
        self.processes[me] = process = self.process(me, self.tongue if me == self.scenario.liar else None)
        process.start()

    def process(self, me: int, tongue: Tongue | None) -> VirtualProcess:
        """Return a process of a peer, not started yet; `tongue`: of the liar, if it is that."""
        disk = self.disks[me]
        return VirtualProcess(self, me, disk) if tongue is None else LyingProcess(self, me, disk, tongue)

    # -- members -------------------------------------------------------------------------------------------------------

    def _plan_happening(self, happening: Happening) -> None:
        """Let it begin when somebody has come so far."""

        def wait() -> None:
            if self.auditor.furthest < happening.at_round:
                self.at(self.now + 0.2 * self.random.random(), wait)
            elif happening.kind is ChangeKind.LEAVE:
                self._let_leave(happening.subject)
            elif happening.kind is ChangeKind.JOIN:
                self.start_process(happening.subject)
                self._let_join(happening.subject)
            else:
                self._lose(happening)

        self.at(0.0, wait)

    def ask(self, again: Callable[[], None], after_s: float = _ASK_EVERY_S) -> None:
        self.at(self.now + after_s * self.random.uniform(0.5, 1.5), again)

    def _let_leave(self, subject: int) -> None:
        process = self.processes[subject]
        if subject not in self.gone and (process is None or not process.is_free):
            self.ask(lambda: self._let_leave(subject), 0.05)
        elif process is None or process.participant.round >= self.scenario.rounds:
            self._end_happening(None)
        elif any(each.subject == subject for each in process.participant.membership.changes):
            if process.participant.membership.has_left and process.is_settled:
                self.end(subject, "has left")
                self._end_happening("left")
            else:
                self.ask(lambda: self._let_leave(subject))
        elif self.announced(process, ChangeKind.LEAVE, subject):
            # The process may end before that is on its disk.
            self.ask(lambda: self._let_leave(subject))
        else:
            self._end_happening(None)

    def _let_join(self, subject: int, asked_at: float = float("-inf")) -> None:
        process = self.processes[subject]
        if process is not None and (process.participant.round or process.participant.membership.changes):
            self._end_happening("joined")
            return
        lost = self.scenario.lost_subject(self.scenario.happenings)
        members = [
            each
            for each in self.present()
            if each.participant.membership.is_member
            and each.is_free
            and self.streams.is_up(subject, each.me)
            # Without push-sum there is no joining where the sponsor is lost before it has given a model.
            and (self.scenario.spec.push_sum or each.me != lost)
        ]
        if self.auditor.completed >= self.scenario.rounds:
            self.gone.add(subject)
            self._end_happening(None)
            return
        if members and self.now > asked_at + _ASK_AGAIN_S:
            sponsor = self.random.choice(members)
            if all(each.subject != subject for each in sponsor.participant.membership.changes):
                self.announced(sponsor, ChangeKind.JOIN, subject)
                asked_at = self.now
        self.ask(lambda: self._let_join(subject, asked_at), 0.1)

    def _lose(self, happening: Happening) -> None:
        """End a peer for good, or cut it off; then let an operator tell a member."""
        subject = happening.subject
        has_time = self.auditor.furthest + 4 * self.scenario.longest_lead + 4 < self.scenario.rounds
        is_member = any(subject in members for members in self.auditor.membership.coming(self.auditor.furthest))
        if not is_member or not has_time:
            if has_time and subject >= self.scenario.num_first and subject not in self.gone:
                self.ask(lambda: self._lose(happening))  # It has not joined yet.
            else:
                self._end_happening(None)
            return
        self.changes["was lost"] += 1
        if happening.is_alive and self.tongue is not None and subject == self.tongue.me:
            self.tongue.insists, self._cut_off = True, subject
            self.changes["insisted on what was refused"] += 1
        elif happening.is_alive:
            self._cut_off = subject
            self.note(f"{subject} is cut off for ever")
            for pair in self.streams.conditions:
                if subject in pair:
                    self.streams.cut(pair, float("inf"))
        else:
            self.end(subject, "is gone for good")
        # Where peers hear of it between rounds, some still have to be between rounds.
        self.ask(lambda: self._declare_lost(subject), 0.05 if self.scenario.has_budgets else 3.0)

    def _declare_lost(self, subject: int) -> None:
        members = [each for each in self.present() if each.participant.membership.is_member]
        if self.tongue is not None and self.tongue.insists and not self.tongue.is_waited_for:
            self.ask(lambda: self._declare_lost(subject))
            return
        if members and all(self.goes_on_without(each, subject) for each in members):
            self.end(subject, "is out of the run")
            self._cut_off = None
            self._end_happening(None)
            return
        able = [each for each in members if each.is_free]
        lost = ((change.kind, change.subject) for each in members for change in each.participant.membership.changes)
        if able and (ChangeKind.LOST, subject) not in lost:
            self.announced(self.random.choice(able), ChangeKind.LOST, subject)
        self.ask(lambda: self._declare_lost(subject))

    @staticmethod
    def goes_on_without(process: VirtualProcess, peer: int) -> bool:
        """Return whether a process waits for nothing of a peer any more."""
        participant = process.participant
        views = participant.algorithm.node.schedule
        assert isinstance(views, ViewSchedule)
        return peer in participant.session.lost or not views.membership.is_coming(peer, participant.round)

    def end(self, me: int, how: str) -> None:
        """End a process that does not come back."""
        self.gone.add(me)
        self.streams.give_up(me)
        if (process := self.processes[me]) is not None:
            self.died(process, how)

    def announced(self, process: VirtualProcess, kind: ChangeKind, subject: int) -> bool:
        """Let a peer announce a change; return whether it can."""
        try:
            process.announce(kind, subject)
        except ConfigError as error:
            self.note(f"{process.me} does not announce {kind.name} of {subject}: {error}")
            self.changes["was refused a change"] += 1
            return False
        return True

    def _end_happening(self, what: str | None) -> None:
        self._open_happenings -= 1
        if what is not None:
            self.changes[what] += 1

    # -- misfortune ----------------------------------------------------------------------------------------------------

    def plan_faults(self) -> None:
        plan = self.plan
        for every_s, what in (
            (plan.kill_every_s, self._kill),
            (plan.break_every_s, self._break_link),
            (plan.cut_every_s, self._cut),
            (plan.full_every_s, self._fill_disk),
            (plan.slow_disk_every_s, self._slow_disk),
            (plan.slow_peer_every_s, self._slow_peer),
            (plan.clock_jump_every_s, self._jump_clock),
        ):
            if every_s is not None:
                self.plan_fault(every_s, what)

    def plan_fault(self, every_s: float, what: Callable[[], None]) -> None:
        def happen() -> None:
            if not self.quiet:
                what()
                self.plan_fault(every_s, what)

        self.at(self.now + self.random.expovariate(1.0 / every_s), happen)

    def _some_process(self) -> VirtualProcess | None:
        numbers = [*self.processes]
        return self.processes[numbers[self.random.randrange(len(numbers))]]

    def _kill(self) -> None:
        process = self._some_process()
        if process is None:
            return
        if self.random.random() < self.plan.kill_in_write:
            disk = self.disks[process.me]
            disk.end_at = len(disk.operations) + self.random.randrange(12)
            self.faults["kill in a write"] += 1
        else:
            self.faults["kill"] += 1
            self.died(process, "killed")

    def _break_link(self) -> None:
        self.faults["stream broken"] += 1
        pair = self.random.choice(list(self.streams.conditions))
        self.note(f"the stream between {pair[0]} and {pair[1]} breaks")
        self.streams.break_link(pair)

    def _cut(self) -> None:
        random, pairs = self.random, list(self.streams.conditions)
        until = self.now + self.plan.cut_s * random.uniform(0.2, 1.5)
        if random.random() < self.plan.partition_chance:
            side = {peer for peer in range(self.scenario.num_peers) if random.random() < 0.5}
            pairs = [pair for pair in pairs if (pair[0] in side) != (pair[1] in side)]
            self.faults["partition"] += 1
        else:
            pairs = [random.choice(pairs)]
            self.faults["link cut"] += 1
        self.note(f"nothing crosses between {pairs} until {until:.3f}")
        for pair in pairs:
            self.streams.cut(pair, until)

    def _fill_disk(self) -> None:
        peer = self.random.randrange(self.scenario.num_peers)
        disk = self.disks[peer]
        disk.fill(self.random.choice((0, 10, 100, 1000)))
        self.faults["disk full"] += 1
        self.note(f"the disk of {peer} is full")

        def free() -> None:
            disk.capacity_bytes = None
            self.note(f"the disk of {peer} has room again")

        self.at(self.now + self.plan.full_s * self.random.uniform(0.2, 2.0), free)

    def _slow_disk(self) -> None:
        disk, plan = self.disks[self.random.randrange(self.scenario.num_peers)], self.plan
        disk.operation_s, disk.sync_s = 0.02, self.random.choice((0.1, 1.0))
        self.faults["slow disk"] += 1

        def mend() -> None:
            disk.operation_s, disk.sync_s = plan.operation_s, plan.sync_s

        self.at(self.now + self.random.uniform(0.5, 3.0), mend)

    def _slow_peer(self) -> None:
        process = self._some_process()
        if process is not None:
            process.slow = self.random.choice((4.0, 20.0))
            self.faults["slow peer"] += 1

            def recover() -> None:
                process.slow = 1.0

            self.at(self.now + self.random.uniform(0.2, 2.0), recover)

    def _jump_clock(self) -> None:
        process = self._some_process()
        if process is not None:
            jump = self.random.choice((-3.0, -0.2, 0.2, 5.0, 3600.0))
            process.clock_jumped_s += jump
            self.faults["clock jump"] += 1
            self.note(f"the clock of {process.me} jumps by {jump:g} s")

    def _damage_checkpoint(self, disk: FailingDisk) -> bool:
        """Flip a bit of the newest checkpoint, if there is one before it to go back to, whose journal was not deleted
        yet: with two that are kept, one at a time may be damaged."""
        rounds = Checkpoints(disk).rounds()
        if len(rounds) < 2 or journal_name(rounds[-2]) not in disk.names():
            return False
        newest = checkpoint_name(rounds[-1])
        at, bit = divmod(self.random.randrange(8 * disk.size(newest)), 8)
        disk.change(newest, at, 1 << bit)
        self.faults["checkpoint damaged"] += 1
        return True

    def make_peace(self) -> None:
        """Let nothing go wrong from now on."""
        self.quiet = True
        self.note("from here on all is well")
        for disk in self.disks.values():
            disk.restart()
            disk.operation_s = disk.sync_s = 0.0
        for condition in self.streams.conditions.values():
            if condition.cut_until < float("inf"):
                condition.cut_until = min(condition.cut_until, self.now)
            condition.spike_chance = 0.0
        for process in self.processes.values():
            if process is not None:
                process.slow = 1.0


def simulate(seed: int, rounds: int = 100, *, lies: bool = False, name: str | None = None) -> Outcome:
    """Run one seed; `lies`: with one member that lies; `name`: see `Scenario`. Raises SimulationFailed."""
    return World(Scenario(seed, rounds, lies, name)).run()
