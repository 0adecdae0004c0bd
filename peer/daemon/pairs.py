"""The loop of a peer of an asynchronous run: gradient steps at its own pace, exchanges with one neighbour at a time.

A step: read the model, ask a neighbour for an exchange, compute the gradient in a worker thread; meanwhile neighbours
are answered and the own exchange is completed (`peer.daemon.pair_exchanges`); apply the gradient. Nothing waits for a
round:

- Only an exchange that is still open after the step is waited for, before the next read. If its partner goes away the
  request is sent again when it is back; after `rounds.abandon_after_s` it is given up.
- Where a limit of the device is reached, steps are held back, and the own exchanges with them.
- A neighbour that is down is not chosen. Without any neighbour the peer takes `rounds.max_skipped_rounds` more steps,
  then it waits for one, as it does before the first step.
- A peer that has taken all steps still answers, until everybody's last evaluation has come round; it leaves sooner if
  it has no neighbour for `transport.linger_s`, or hears nothing at all for `transport.give_up_after_s`.

`peer.node.durable_pair` decides what survives a crash: a peer that was killed repeats its calls to the same point, in
the middle of an exchange too, so that Σx moves by the gradient steps alone. A stop (`sotto stop`, SIGTERM) loses
nothing either: an open exchange is saved and resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from time import perf_counter

from peer.compress.payload import FloatArray
from peer.daemon.members.change_requests import FixedMembers
from peer.daemon.notes.evaluations import Models
from peer.daemon.operator.audit_log import EventLog
from peer.daemon.pair_exchanges import PairExchanges
from peer.daemon.parts import CommonParts
from peer.daemon.progress import SignedProgress
from peer.daemon.runtime import pace
from peer.daemon.saving import PairSaver
from peer.errors import PeerUnreachable
from peer.gossip.effects import Effects
from peer.node.durable_pair import DurablePair
from peer.node.local_steps import StepAbandoned
from peer.records import RoundRecord

log = logging.getLogger("sotto")


@dataclass
class PairLoop:
    """Takes one peer from step to step."""

    common: CommonParts
    _: KW_ONLY
    durable: DurablePair
    frames: PairExchanges
    requests: FixedMembers
    saver: PairSaver
    audit_log: EventLog | None
    progress: SignedProgress | None

    def __post_init__(self) -> None:
        """Take the parts out of `common`."""
        self.participant = self.durable.participant
        self._local, self._runtime, self._neighbors = self.common.local, self.common.runtime, self.common.neighbors
        self._config = self._local.config
        self._steps_alone = self._config.rounds.max_skipped_rounds
        """Steps in a row without a neighbour; none of them before the first has come."""
        self._shown_exchanges = -1
        """Number of exchanges behind the model that was evaluated last."""

    # -- steps ---------------------------------------------------------------------------------------------------------

    def helpers(self) -> Sequence[Coroutine[None, None, None]]:
        """Return the coroutine that answers the neighbours."""
        return (self.frames.answer(),)

    async def next_round(self) -> RoundRecord | None:
        """Return the record of the next step; None if there is none."""
        if self.round >= self._config.run.rounds:
            # Killed between the last step and its evaluation: that includes the exchange that is open.
            await self._until_closed()
            return None
        if not self.participant.in_iteration:  # After a crash it may be in the middle of one.
            waited_s = await self._until_ready()
            if self._runtime.stops:
                return None
            self._look_for_company()
            self.frames.perform(await self.frames.call(self.durable.read, waited_s))
        try:
            await self._runtime.work(self._compute)
        except StepAbandoned:
            return None
        effects = await self.frames.call(self._step)
        self.frames.perform(effects)
        self._steps_alone += 1
        self._look_for_company()
        if self.round == self._config.run.rounds:
            await self._until_closed()
        self._raise_failure()
        assert effects.record is not None
        # Steps in the journal need not be trained again.
        trained_s = 0.0 if self._local.steps_are_recorded else effects.record.train_s
        self.common.cadence.add_round(trained_s + effects.record.gossip_s)
        return effects.record

    def _look_for_company(self) -> None:
        # Also before a step: a neighbour that is gone after it has been there.
        if self._neighbors.reachable():
            self._steps_alone = 0

    def _compute(self) -> None:
        started = perf_counter()
        # Nothing of it is journaled, since it can be computed again.
        self.participant.compute()
        pace(self._config.peer, started, self._config.limits.processor_share)

    def _step(self) -> Effects:
        effects = self.durable.step(self._runtime.now())
        # Taken in any case: the participant keeps them until then.
        events = self.participant.take_events()
        if self.audit_log is not None:
            self.audit_log.write(events, self.participant.gradient)
        return effects

    async def _until_ready(self) -> float:
        """Wait until the next step may begin; return for how long, in seconds."""
        began = self._runtime.now()
        while not self._runtime.stops and not (
            self.participant.can_read
            and self._may_go_on()
            # Neighbours are answered in any case.
            and (self.common.limits is None or await self.common.limits.may_begin(self._runtime.now()))
        ):
            await self._wait()
        return self._runtime.now() - began

    async def _until_closed(self) -> None:
        """Wait until the own exchange is over: the last evaluation includes it, and nobody is asked after that."""
        while not self._runtime.stops and self.participant.open_partner is not None:
            await self._wait()

    async def _wait(self) -> None:
        """Wait until something happens. Raises PeerUnreachable or HandshakeRefused once that is in vain."""
        await self.frames.abandon_the_lost()
        self._give_up_on_the_lost()
        await self._runtime.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.frames.failure is not None:
            raise self.frames.failure

    def _may_go_on(self) -> bool:
        """Whether there is a neighbour, or has been one recently, and this peer was not set back."""
        if self.progress is not None and self.progress.is_set_back:
            return False
        is_alone = bool(self._neighbors.all) and not self._neighbors.reachable()
        return not is_alone or self._steps_alone < self._config.rounds.max_skipped_rounds

    def _give_up_on_the_lost(self) -> None:
        is_set_back = self.progress is not None and self.progress.is_set_back
        if is_set_back or self.round >= self._config.run.rounds or self._may_go_on():
            return
        now = self._runtime.now()
        self._neighbors.give_up_if_refused(self._neighbors.all, now)
        silent = min(self._neighbors.silent_s(peer, now, self._runtime.began_at) for peer in self._neighbors.all)
        if silent > self._config.transport.give_up_after_s:
            problems = (self._neighbors.problem(peer) for peer in self._neighbors.all)
            reason = next(filter(None, problems), "are they running, and are their addresses right?")
            raise PeerUnreachable(f"no neighbour has been there for {silent:.0f} s; {reason}")

    # -- the end -------------------------------------------------------------------------------------------------------

    async def save_at_end(self) -> None:
        """Save the state after a stop; after the last step that is done when nobody needs this peer any more."""
        if self._runtime.stops:
            # Answers after the checkpoint would be forgotten.
            await self.frames.stop_answering()
            if self.participant.in_iteration:
                # The local step was abandoned: it begins anew, from the journal, when this peer is started again.
                await self.saver.sync()
            else:
                await self.saver.checkpoint()

    async def linger(self) -> None:
        """Answer until everybody's last evaluation has come, or the others are gone."""
        options = self._config.transport
        began_at = company_at = self._runtime.now()
        while not self._runtime.stops and not self._all_have_finished():
            now = self._runtime.now()
            if self._neighbors.reachable():
                company_at = now
            silent, alone = now - max(began_at, self._neighbors.last_heard_at), now - company_at
            if silent > options.give_up_after_s or alone > options.linger_s:
                log.warning("not everybody's last evaluation has come, and nothing was heard for %.0f s", silent)
                break
            await self._runtime.wait()
            self._raise_failure()
        await self.frames.stop_answering()
        # Exchanges since the last step belong to its row.
        record, last = self.participant.closing_record(), self.common.metrics.last_round
        if record is not None and last is not None:
            self.common.metrics.put_round(replace(record, protobuf_bytes=last.protobuf_bytes), self._config.run.rounds)
        if self.participant.algorithm.staleness.exchanges != self._shown_exchanges:
            await self._evaluate_again()
        await self.saver.checkpoint()

    async def answer(self) -> None:
        """Do nothing: once everybody has finished, nobody asks for an exchange."""

    def _all_have_finished(self) -> bool:
        return self.common.evaluations.finished() >= set(self.members) or self._neighbors.all_have_left

    async def _evaluate_again(self) -> None:
        """Put the accuracy of the model that is left behind in the place of that after the last step: it has been
        averaged with others since. The others keep what they heard."""
        models = await self.models()
        for split in self.common.own.splits:
            found = await self._runtime.work(self.common.own.measure_split, self.round, models.z, split)
            self.common.evaluations.restore([found])

    # -- what others look at -------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Steps taken."""
        return self.participant.round

    @property
    def has_left(self) -> bool:
        """Whether it left the run, as nobody can."""
        return False

    @property
    def members(self) -> Collection[int]:
        """All peers."""
        return range(self._local.setup.num_peers)

    def linked(self) -> Sequence[int]:
        """Return the peers to be linked to."""
        return self._neighbors.all

    async def models(self) -> Models:
        """Return the models to evaluate and save."""

        def copy() -> tuple[FloatArray, int]:
            algorithm = self.participant.algorithm
            return algorithm.x.copy(), algorithm.staleness.exchanges

        x, self._shown_exchanges = await self.frames.call(copy)
        return Models(x, x, self.participant.algorithm.u)

    def figures(self) -> Mapping[str, object]:
        """Return the fields of `sotto status` for pairs alone."""
        staleness, partner = self.participant.algorithm.staleness, self.participant.open_partner
        return {
            "exchanges": staleness.exchanges,
            "staleness": staleness.exchanges_between / max(1, staleness.steps),
            "most_staleness": staleness.most_exchanges_between,
            "open_exchange": None if partner is None else self._local.roster.name(partner),
        }

    def link_figures(self, peer: int) -> Mapping[str, object]:
        """Return nothing: what is unacknowledged has no number here."""
        return {}
