"""Saving the state of a running peer, with rounds and without: checkpoints, and syncs between them.

`peer.node.durable` and `peer.node.durable_pair` decide what is written; this module decides when, and in which thread.
"""

from __future__ import annotations

import asyncio

from peer.daemon.notes.evaluations import stored
from peer.daemon.operator.audit_log import EventLog
from peer.daemon.pair_exchanges import PairExchanges
from peer.daemon.parts import CommonParts
from peer.daemon.round_frames import RoundFrames
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from peer.node.local_steps import RecordedSteps

_SYNC_EVERY_S = 1.0


class RoundSaver:
    """Saves a peer of a run in rounds."""

    def __init__(self, common: CommonParts, durable: DurablePeer, frames: RoundFrames) -> None:
        self.is_at_rest = False
        """Whether no round is under way, and all is done that follows from the last one. The loop says so."""
        self._common, self._durable, self._frames = common, durable, frames

    async def checkpoint(self, *, anew: bool = False) -> None:
        """Save the state, between rounds; `anew` even where there is a checkpoint of this round."""
        # The rounds before a checkpoint are never repeated, so that their rows have to be there.
        self._common.metrics.flush()
        description = self._common.local.describe(self._common.runtime.now())

        def save() -> dict[int, int] | None:
            # Asked in the worker: a frame that was taken before it may have begun a round.
            in_round = self._durable.participant.session.in_round
            return None if in_round else self._durable.save(description, anew=anew)

        receipts = await self._common.runtime.work(save)
        steps = self._durable.participant.local_steps
        if receipts is not None:
            self._frames.confirm(receipts)
        if receipts is None or (isinstance(steps, RecordedSteps) and not steps.can_be_saved):
            # Of a script, the state when a round begins is noted only where it is known by then that it is saved.
            self._common.cadence.snapshot_wanted = True
            return
        self._common.cadence.saved()

    async def take_snapshot(self) -> None:
        """Save the state now, or at the end of the round under way."""
        if self.is_at_rest:
            await self.checkpoint()
        else:
            self._common.cadence.snapshot_wanted = True

    async def sync(self) -> None:
        """Make what was journaled survive a power cut, and tell the neighbours what they may forget."""
        self._frames.confirm(await self._common.runtime.sync(self._durable.sync))

    def close(self) -> None:
        """Close the journal."""
        self._durable.disk_state.close()


class PairSaver:
    """Saves a peer of a run in pairs."""

    def __init__(
        self, common: CommonParts, durable: DurablePair, exchanges: PairExchanges, audit_log: EventLog | None
    ) -> None:
        self._common, self._durable, self._exchanges, self._audit_log = common, durable, exchanges, audit_log

    async def checkpoint(self) -> None:
        """Save the state, between steps."""
        # The steps before a checkpoint are never repeated, so that their rows have to be there.
        self._common.metrics.flush()
        description = self._common.local.describe(self._common.runtime.now())
        # Those that have finished by then cannot be asked again.
        description["evaluations"] = [*map(stored, self._common.evaluations.newest.values())]
        await self._exchanges.call(self._save, description)
        self._common.cadence.saved()

    def _save(self, description: dict[str, object]) -> None:
        # Before the state, which holds the events that were not taken.
        events = self._durable.participant.take_events()
        if self._audit_log is not None:
            self._audit_log.write(events)
            description["ledger"] = self._audit_log.position()
        self._durable.save(description)

    async def take_snapshot(self) -> None:
        """Let the end of the step under way take it: until then the training state is in flux."""
        self._common.cadence.snapshot_wanted = True

    async def sync(self) -> None:
        """Make what was journaled survive a power cut."""
        await self._common.runtime.sync(self._durable.sync)

    def close(self) -> None:
        """End the thread of the exchanges, and close journal and audit log."""
        self._exchanges.close()
        self._durable.disk_state.close()
        if self._audit_log is not None:
            self._audit_log.close()


async def sync_now_and_then(saver: RoundSaver | PairSaver) -> None:
    """Bound what a power cut costs, and let neighbours forget what is safe here. Without end."""
    while True:
        await asyncio.sleep(_SYNC_EVERY_S)
        await saver.sync()
