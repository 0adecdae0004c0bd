"""The loop of a peer of an asynchronous run: gradient steps at its own pace, exchanges with one neighbour at a time.

A step: read the model, ask a neighbour for an exchange, compute the gradient in one worker thread; meanwhile a second
worker answers neighbours and completes the own exchange; apply the gradient. Everything that touches the pair node
happens in that second worker, one call after the other. Nothing waits for a round:

- Only an exchange that is still open after the step is waited for, before the next read. If its partner goes away the
  request is sent again when it is back; after `rounds.abandon_after_s` it is given up.
- A neighbour that is down is not chosen. Without any neighbour the peer takes `rounds.max_skipped_rounds` more steps,
  then it waits for one; so it does before the first step.
- Who has taken all steps still answers, until everybody's last evaluation has come round; it leaves sooner if it has no
  neighbour for `transport.linger_s`, or hears nothing at all for `transport.give_up_after_s`.

Frames are not numbered: exchanges have numbers of their own, requests are repeated after a reconnect, and each has one
outcome. What survives a crash is the knowledge of `peer.node.durable_pair`: a peer that was killed repeats its calls to
where it was, in the middle of an exchange too, so that Σx moves by the gradient steps alone. A stop (`sotto stop`,
SIGTERM) loses nothing either: what is open is saved and taken up again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from peer.compress.payload import FloatArray
from peer.config import Config
from peer.daemon.audit_log import EventLog
from peer.daemon.base import Daemon, evaluation_note, parse_evaluation
from peer.errors import PeerUnreachable, RemoteProtocolError, StateError
from peer.gossip.effects import Effects, OutgoingFrame
from peer.node.durable_pair import DurablePair
from peer.node.pair_participant import PairParticipant
from peer.round_record import RoundRecord
from peer.run_summary import evaluation_record
from peer.state.metrics import EvaluationRecord

log = logging.getLogger("sotto")

T = TypeVar("T")

_WAITING_FRAMES_MAX = 16
"""Frames of one neighbour that wait to be looked at: an honest one has one request and one answer on its way."""


class AsynchronousDaemon(Daemon):
    """One peer of a run without rounds."""

    participant: PairParticipant

    def __init__(self, config: Config, base: Path, reread: Callable[[], Config] | None = None) -> None:
        """Read data and checkpoint. Raises SottoError."""
        super().__init__(config, base, reread)
        config = self.config
        self.participant = self.setup.pair_participant(
            self.me, self.trainer, self.trainer.layout, self.trainer.initial_vector()
        )
        self.durable = DurablePair(self.participant, self.folder.disk, **self._durability())
        self.audit_log = EventLog(self.folder.directory / "ledger") if config.state.ledger else None
        self._pair_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exchange")
        self._pending: deque[tuple[int, bytes | None]] = deque()
        """(neighbour, frame), or (neighbour, None) where its connection broke."""
        self._arrived = asyncio.Event()
        self._open: OutgoingFrame | None = None
        """The own request without an answer; it is in the journal."""
        self._wake_at: float | None = None
        """When the participant wants to ask again."""
        self._steps_alone = config.rounds.max_skipped_rounds
        """Steps in a row without a neighbour; none of them before the first has come."""
        self._away_since: dict[int, float] = {}
        self._heard_at = 0.0
        self._evaluated_exchanges = -1
        self._leaving = False
        self._answered = asyncio.Event()
        self._recover()

    def close(self) -> None:
        """Release files and threads."""
        self._pair_worker.shutdown(wait=True, cancel_futures=True)
        if self.audit_log is not None:
            self.audit_log.close()
        super().close()

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _rounds(self) -> None:
        self._heard_at = self._now()
        while self.participant.round < self.config.run.rounds:
            if not self.participant.in_iteration:  # After a crash it may be in the middle of one.
                waited_s = await self._until_ready()
                if self._stop.is_set():
                    return
                self._perform(await self._exchange(self.durable.read, waited_s))
            await self._work(self._compute)
            effects = await self._exchange(self._step)
            self._perform(effects)
            self._steps_alone = 0 if any(map(self._is_reachable, self.neighbors)) else self._steps_alone + 1
            if self.participant.round == self.config.run.rounds:
                await self._until_closed()
            assert effects.record is not None
            self._to_replay_s += effects.record.train_s + effects.record.gossip_s
            await self._after_round(effects.record)
        if self._diverged is None and self._own_last_evaluation() is None:
            # Killed between the last step and its evaluation: the others wait for that.
            await self._until_closed()
            await self._evaluate(self.config.run.rounds)

    def _own_last_evaluation(self) -> EvaluationRecord | None:
        known = self.evaluations.get((self.me, "test"))
        return known if known is not None and known.round == self.config.run.rounds else None

    def _compute(self) -> None:
        started = perf_counter()
        self.durable.compute()
        self._pace(started)

    def _step(self) -> Effects:
        effects = self.durable.step(self._now())
        self._log_step()
        return effects

    def _log_step(self) -> None:
        events = self.participant.take_events()
        if self.audit_log is not None:
            self.audit_log.write(events, self.participant.gradient)

    async def _until_ready(self) -> float:
        """Wait until the next step may begin; return for how long, in seconds."""
        began = self._now()
        while not self._stop.is_set() and not (self.participant.can_read and self._may_go_on()):
            await self._abandon_the_lost()
            await self._wait(None)
        return self._now() - began

    async def _until_closed(self) -> None:
        """Wait until the own exchange is over: what is evaluated last includes it, and nobody is asked after that."""
        while not self._stop.is_set() and self.participant.open_partner is not None:
            await self._abandon_the_lost()
            await self._wait(None)

    def _may_go_on(self) -> bool:
        """Whether there is a neighbour, or has been one recently."""
        alone = not any(map(self._is_reachable, self.neighbors))
        return not self.neighbors or not alone or self._steps_alone < self.config.rounds.max_skipped_rounds

    def _is_reachable(self, peer: int) -> bool:
        return self.transport.is_up(peer) and peer not in self._gone

    async def _abandon_the_lost(self) -> None:
        """Give up the open exchange if its partner has been away for too long."""
        partner = self.participant.open_partner
        if partner is None or self.transport.is_up(partner):
            return
        away = self._now() - self._away_since.setdefault(partner, self._now())
        if away > self.config.rounds.abandon_after_s:
            log.warning("%s has been away for %.0f s: its exchange is given up", self.roster.name(partner), away)
            self._perform(await self._exchange(self.durable.abandon, partner))

    def _give_up_on_the_lost(self) -> None:
        if self.participant.round >= self.config.run.rounds or self._may_go_on():
            return
        self._give_up_if_refused(self.neighbors)
        now = self._now()
        silent = min(now - self._last_seen.setdefault(peer, self._previous_time_s) for peer in self.neighbors)
        if silent > self.config.transport.give_up_after_s:
            reasons = [*self.transport.refusals.values(), *self.transport.problems.values()]
            reason = reasons[0] if reasons else "are they running, and are their addresses right?"
            raise PeerUnreachable(f"no neighbour has been there for {silent:.0f} s; {reason}")

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def _helpers(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._helpers(), self._answer()]

    async def _answer(self) -> None:
        """Take what comes from the neighbours, and ask again when a pause is over, until this peer leaves."""
        while not self._leaving:
            wake_at = self._wake_at
            if self._pending:
                await self._take(*self._pending.popleft())
            elif wake_at is not None and self._now() >= wake_at:
                self._perform(await self._exchange(self.durable.timer, self._now()))
            else:
                timeout = 1.0 if wake_at is None else min(1.0, wake_at - self._now())
                try:
                    async with asyncio.timeout(timeout):
                        await self._arrived.wait()
                except TimeoutError:
                    continue
                self._arrived.clear()
        self._answered.set()

    async def _take(self, peer: int, frame: bytes | None) -> None:
        if frame is None:
            self._perform(await self._exchange(self.durable.disconnected, peer))
            return
        try:
            effects = await self._exchange(self.durable.receive, peer, frame, self._now())
        except RemoteProtocolError as error:
            log.error("dropped a message: %s", error)
            self._pending = deque(item for item in self._pending if item[0] != peer)
            self.transport.reset(peer, str(error))
            return
        self._perform(effects)

    async def _exchange(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a call on the pair node returns; what is to be sent then is in the journal."""
        reachable = frozenset(filter(self._is_reachable, self.neighbors))
        return await asyncio.get_running_loop().run_in_executor(
            self._pair_worker, self._call, reachable, function, arguments
        )

    def _call(self, reachable: frozenset[int], function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        self.participant.reachable = reachable
        return function(*arguments)

    def _perform(self, effects: Effects) -> None:
        self._open, self._wake_at = effects.open_request, effects.wake_at
        for outgoing in effects.frames:
            self._count(outgoing)
            if self.transport.is_up(outgoing.receiver):
                self.transport.send(outgoing.receiver, 0, outgoing.frame)
        self._wake.set()
        self._arrived.set()

    async def _stop_answering(self) -> None:
        self._leaving = True
        self._arrived.set()
        await self._answered.wait()

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _save_at_end(self) -> None:
        if self._stop.is_set():
            # What is answered after the checkpoint would be forgotten.
            await self._stop_answering()
            await self._checkpoint()

    async def _linger(self) -> None:
        options = self.config.transport
        self._heard_at = company_at = self._now()
        while not self._stop.is_set() and not self._all_have_finished():
            if any(map(self._is_reachable, self.neighbors)):
                company_at = self._now()
            silent, alone = self._now() - self._heard_at, self._now() - company_at
            if silent > options.give_up_after_s or alone > options.linger_s:
                log.warning("not everybody's last evaluation has come, and nothing was heard for %.0f s", silent)
                break
            await self._wait(None)
        await self._stop_answering()
        record = self.participant.closing_record()
        if record is not None and self._last_put is not None:
            self._put_round(replace(record, protobuf_bytes=self._last_put.protobuf_bytes), self.config.run.rounds)
        if self.participant.algorithm.staleness.exchanges != self._evaluated_exchanges:
            await self._evaluate_again()
        await self._checkpoint()

    async def _evaluate_again(self) -> None:
        """Put the accuracy of the model that is left behind in the place of that after the last step: it has been
        averaged with others since."""
        x, _ = await self._models()
        for peer, split in list(self.evaluations):
            if peer == self.me:
                found = await self._work(self.trainer.evaluate, x, split)
                self.evaluations[peer, split] = evaluation_record(self.me, self.participant.round, split, found)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    async def _checkpoint(self) -> None:
        # The steps before a checkpoint are never repeated, so that their rows have to be there.
        self.metrics.flush()
        await self._exchange(self._save)
        self._to_replay_s, self._snapshot_wanted = 0.0, False

    def _save(self) -> None:
        # Before the state, which holds the events that were not taken.
        events = self.participant.take_events()
        description = self._description()
        description["evaluations"] = [evaluation_note(record) for record in list(self.evaluations.values())]
        if self.audit_log is not None:
            self.audit_log.write(events)
            description["ledger"] = self.audit_log.position()
        self.durable.save(description)

    async def _take_snapshot(self) -> None:
        # The end of the step takes it: until then the training state is in flux.
        self._snapshot_wanted = True

    def _recover(self) -> None:
        """Go back to where this peer was, and fill in the rows that a crash kept out of the metrics."""
        started = perf_counter()
        rounds = {record.round for record in self.metrics.rounds()}
        evaluated = {record.round for record in self.metrics.evaluations() if record.peer == self.me}

        def on_load(state: Mapping[str, Any]) -> None:
            if self.audit_log is not None:
                self.audit_log.go_back(state.get("ledger", [0, 0]))

        def on_step(effects: Effects) -> None:
            assert effects.record is not None
            self._log_step()
            done = effects.record.round + 1
            if effects.record.round not in rounds:
                self.metrics.put(effects.record)
            if self._is_evaluated(done) and done not in evaluated:
                x = self.participant.algorithm.x
                self.metrics.put(*self._judge(done, x, x))

        try:
            recovery = self.durable.open(on_step, on_load)
        except StateError as error:
            raise StateError(f"{self.folder.directory}: {error}") from None
        for notice in recovery.notices:
            log.warning("%s: %s", self.folder.directory, notice)
        self._open, self._wake_at = recovery.effects.open_request, recovery.effects.wake_at
        self._previous_time_s = recovery.now
        self.metrics.drop_after(self.participant.round - 1)
        for note in recovery.state.get("evaluations", []):
            # Others may have left by the time that this peer has finished once more.
            record = parse_evaluation(note.encode(), self.roster)
            self.evaluations[record.peer, record.split] = record
        if self.participant.round or self.participant.in_iteration:
            self._to_replay_s = perf_counter() - started
            log.info(
                "%s goes on from step %d: the checkpoint of step %d and %d steps of its journal, in %.1f s",
                self.name,
                self.participant.round,
                recovery.checkpoint_round,
                recovery.replayed_rounds,
                self._to_replay_s,
            )

    # -- what the transport calls -------------------------------------------------------------------------------------

    def _frames_to_send(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        self._away_since.pop(peer, None)
        return [(0, self._open.frame)] if self._open is not None and self._open.receiver == peer else []

    def link_down(self, peer: int, reason: str) -> None:
        """A link ended; the transport dials again by itself."""
        super().link_down(peer, reason)
        self._away_since[peer] = self._now()
        # Whatever waits will be asked for again.
        self._pending = deque(item for item in self._pending if item[0] != peer)
        self._pending.append((peer, None))
        self._arrived.set()

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        """A whole frame came."""
        if seq:
            raise RemoteProtocolError("it numbers its frames, as nobody does in an asynchronous run")
        if sum(sender == peer for sender, _ in self._pending) >= _WAITING_FRAMES_MAX:
            raise RemoteProtocolError("it sends more than it is asked for")
        self._last_seen[peer] = self._heard_at = self._now()
        self._pending.append((peer, frame))
        self._arrived.set()
        return None

    def receipt(self, peer: int, upto: int) -> None:
        """A neighbour confirms frames, of which there are none."""
        raise RemoteProtocolError("it confirms numbered frames, which nobody sends in an asynchronous run")

    def last_received(self, peer: int) -> int:
        """Return 0: frames are not numbered."""
        return 0

    def bulletin_received(self, peer: int, topic: str, data: bytes) -> None:
        """A note that is passed on from peer to peer."""
        self._heard_at = self._now()
        super().bulletin_received(peer, topic, data)

    # -- what the base class asks for ---------------------------------------------------------------------------------

    async def _models(self) -> tuple[FloatArray, FloatArray]:
        x = await self._exchange(self.participant.algorithm.x.copy)
        return x, x

    async def _evaluate(self, done: int) -> None:
        self._evaluated_exchanges = self.participant.algorithm.staleness.exchanges
        await super()._evaluate(done)

    async def _close_round(self, record: RoundRecord) -> None:
        """Do nothing: the events were logged with the step."""

    def _figures(self) -> dict[str, Any]:
        staleness, partner = self.participant.algorithm.staleness, self.participant.open_partner
        return {
            "exchanges": staleness.exchanges,
            "staleness": staleness.exchanges_between / max(1, staleness.steps),
            "most_staleness": staleness.most_exchanges_between,
            "open_exchange": None if partner is None else self.roster.name(partner),
        }
