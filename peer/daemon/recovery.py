"""The return of a daemon to its peer's last state: the participant from checkpoint and journal, then the metrics.

Rows of metrics are written with less care than the journal, so that a crash may have kept some out. The rounds that are
repeated make them again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from peer.daemon.notes.evaluations import Models, parse_stored
from peer.daemon.operator.audit_log import AuditLog, EventLog
from peer.daemon.parts import CommonParts
from peer.errors import StateError
from peer.gossip.effects import Effects
from peer.gossip.membership import Change, ChangeKind
from peer.node.disk_state import PeerRecovery
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from peer.node.local_steps import RecordedSteps
from peer.records import RoundRecord
from peer.state.metrics import EvaluationRecord

log = logging.getLogger("sotto")


class _MissingRows:
    """The rows that a crash kept out of the metrics."""

    def __init__(self, common: CommonParts) -> None:
        self._common, self._store = common, common.local.metrics
        self._evaluated = [record for record in self._store.evaluations() if record.peer == common.local.index]
        self._rounds: set[int] | None = None

    def lack(self, round_: int) -> bool:
        """Return whether the row of a round is missing. Ask in ascending order."""
        if self._rounds is None:
            self._rounds = {known.round for known in self._store.rounds(after=round_ - 1)}
        return round_ not in self._rounds

    def add(self, record: RoundRecord, models: Callable[[], Models], *, with_links: bool) -> Sequence[EvaluationRecord]:
        """Write the row of a round that was repeated, those of its links if their frames were counted, and evaluate the
        model after it, where these are missing; return its evaluation, if it has one."""
        if self.lack(record.round):
            self._common.metrics.put_repeated_round(record, with_links=with_links)
        done = record.round + 1
        found = [each for each in self._evaluated if each.round == done]
        if self._common.evaluations.is_due(done) and not found:
            found = self._common.own.measure(done, models())
            self._common.metrics.put_evaluations(found)
        return found


def recover_rounds(common: CommonParts, durable: DurablePeer, audit_log: AuditLog | None) -> Effects:
    """Go back to where a peer of a run in rounds was; return its open effects: the time to wake up. A script that
    repeats its steps hears of the rounds again. Raises StateError, with the folder."""
    participant, missing = durable.participant, _MissingRows(common)
    local, neighbors, evaluations, watcher = common.local, common.neighbors, common.evaluations, common.watcher

    def on_round(effects: Effects) -> None:
        record = effects.record
        assert record is not None
        if missing.lack(record.round):
            for outgoing in effects.frames:
                neighbors.traffic.handed_over(outgoing)
        algorithm = participant.algorithm
        is_again = isinstance(local.trainer, RecordedSteps) and not local.trainer.was_recalled
        if is_again:
            watcher.round_done(record)
        found = missing.add(record, lambda: Models(participant.model(), algorithm.x, algorithm.u), with_links=True)
        for each in found if is_again else ():
            watcher.evaluated(each, local.name)
        if audit_log is not None:
            audit_log.close_round(record.round, algorithm)

    recovery = _reopened(common, durable, lambda: durable.open(on_round), "round", lambda: participant.session.in_round)
    for outgoing in recovery.effects.frames:
        neighbors.traffic.handed_over(outgoing)
    # Others may have left by the time that anybody asks them.
    known = local.metrics.evaluations()
    if local.incarnation:
        # The metrics are of devices: results of this one from before its loss stay under its first number.
        since = _joined_at(participant.membership.changes, local.number)
        known = [
            replace(each, peer=local.number) if each.peer == local.index and each.round > since else each
            for each in known
        ]
    evaluations.restore(record for record in known if record.peer >= 0 and evaluations.is_shared(record.round))
    return recovery.effects


def recover_pairs(common: CommonParts, durable: DurablePair, audit_log: EventLog | None) -> Effects:
    """Go back to where a peer of a run in pairs was; return its open effects: the time to wake up, and a request
    without an answer, which need not be sent. Raises StateError, with the folder."""
    participant, missing = durable.participant, _MissingRows(common)

    def on_load(state: Mapping[str, Any]) -> None:
        # Entries after the checkpoint are logged again as the journal is repeated.
        if audit_log is not None:
            audit_log.go_back(state.get("ledger", [0, 0]))

    def on_step(effects: Effects) -> None:
        assert effects.record is not None
        events, algorithm = participant.take_events(), participant.algorithm
        if audit_log is not None:
            audit_log.write(events, participant.gradient)
        missing.add(effects.record, lambda: Models(algorithm.x, algorithm.x, algorithm.u), with_links=False)

    recovery = _reopened(
        common, durable, lambda: durable.open(on_step, on_load), "step", lambda: participant.in_iteration
    )
    common.evaluations.restore(map(parse_stored, recovery.state.get("evaluations", [])))
    return recovery.effects


def _joined_at(changes: Iterable[Change], peer: int) -> float:
    """Return the round from which on a peer that joined is a member; infinity for one that has yet to join."""
    joins = (change for change in changes if change.kind is ChangeKind.JOIN and change.subject == peer)
    return next((float(change.effective) for change in joins), float("inf"))


def _reopened(
    common: CommonParts,
    durable: DurablePeer | DurablePair,
    reopen: Callable[[], PeerRecovery],
    noun: str,
    is_under_way: Callable[[], bool],
) -> PeerRecovery:
    """Read checkpoint and journal, let clock, log and metrics follow, and say where the peer goes on. `is_under_way`:
    whether it is within a `noun`. Raises StateError, with the folder."""
    started, local = time.perf_counter(), common.local
    try:
        recovery = reopen()
    except StateError as error:
        raise StateError(f"{local.folder.directory}: {error}") from None
    seconds = time.perf_counter() - started
    for sentence in recovery.notices:
        log.warning("%s: %s", local.folder.directory, sentence)
    common.runtime.continue_from(recovery.now)
    # The rows of a device from before its loss stay: it takes part again in later rounds.
    if durable.round or not local.incarnation:
        local.metrics.drop_after(durable.round - 1)
    if not durable.round and not is_under_way():
        seconds = 0.0  # It is new.
    else:
        text = "%s continues at %s %d: checkpoint of %s %d and %d %ss of its journal, read in %.1f s"
        came_from = (noun, recovery.checkpoint_round, recovery.replayed_rounds, noun)
        log.info(text, local.name, noun, durable.round, *came_from, seconds)
    common.cadence.add_round(seconds)
    return recovery
