"""The loop of a peer of a synchronous run: three inputs (a local step done, a message, a timer), one ordered way to
perform outcomes.

Training, compression and decoding run in one worker thread. What a neighbour may forget is decided by checkpoints: a
frame counts as received for good only once a checkpoint that includes its effect is on disk, and until then its sender
keeps it. A peer that was killed starts again from its checkpoint, asks for the frames after it, and repeats the rounds
since; with `late = "wait"` it computes the very same bits, so that nobody can tell.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from peer.compress.payload import FloatArray
from peer.config import Config
from peer.daemon import Daemon
from peer.decisions import DecisionLog
from peer.errors import PeerUnreachable, RemoteProtocolError, StateError
from peer.ledger import Ledger
from peer.link import InLink, OutLink
from peer.metrics import RoundRecord
from peer.participant import Parcel, Participant, Turn
from peer.store import Checkpoint

log = logging.getLogger("sotto")

_UNDURABLE_BYTES_MAX = 64 << 20
"""Take a checkpoint early when neighbours have to keep more than this for us."""
_BACKLOG_BYTES_MAX = 256 << 20
"""Start no further round while a neighbour has this much unacknowledged from us."""
_NOTABLE_WAIT_S = 0.05
"""A budget makes every peer wait a moment now and then; only what is longer is worth a line in the log."""
_STOP_GRACE_S = 5.0
"""After SIGTERM: how long to wait for the neighbours of the round under way."""


class SynchronousDaemon(Daemon):
    """One peer of a run that goes in rounds."""

    participant: Participant

    def __init__(self, config: Config, base: Path) -> None:
        """Read data and checkpoint. Raises SottoError."""
        super().__init__(config, base)
        self.ledger = Ledger(self.folder.directory / "ledger") if config.state.ledger else None
        self.participant = self.job.participant(
            self.me,
            self.trainer,
            self.trainer.layout,
            self.trainer.initial_vector(),
            observe=None if self.ledger is None else self.ledger.observe,
        )
        self.out = {peer: OutLink() for peer in self.neighbors}
        self.incoming = {peer: InLink() for peer in self.neighbors}
        self._pending: deque[tuple[int, int, bytes]] = deque()
        self._undurable_bytes = 0
        self._remote_durable: dict[int, int] = {}
        self._remote_has: dict[int, int] = {}
        self._decisions: DecisionLog | None = None
        self._said_that_it_slows_down = False
        if self.participant.budget is not None:
            self._decisions = DecisionLog(self.folder.directory / "decisions.txt")
            try:
                self.participant.budget.replay(self._decisions.read())
            except ValueError as error:
                raise StateError(f"{self.folder.directory}: decisions.txt does not fit this run: {error}") from None
        self._restore()

    def close(self) -> None:
        """Release files and threads."""
        super().close()
        if self._decisions is not None:
            self._decisions.close()

    async def _rounds(self) -> None:
        while self.participant.round < self.config.run.rounds and not self._stop.is_set():
            await self._wait_for_room()
            await self._keep_to_budget()
            if self._stop.is_set():
                return
            record = self._perform(await self._work(self._step_and_begin))
            while record is None:
                if not self._pending:
                    await self._wait(self.participant.wake_at)
                if self._diverged is not None or self._stopping_in_vain():
                    # The round cannot end: what is on disk is the last checkpoint, and it is repeated from there.
                    return
                record = await self._take_frames()
            await self._after_round(record)

    def _step_and_begin(self) -> Turn:
        started = time.perf_counter()
        self.participant.step()
        self._pace(started)
        return self.participant.begin(self._now())

    async def _take_frames(self) -> RoundRecord | None:
        """Give the waiting frames, and the timer if it is due, to the participant; return the record of a round that
        this completed."""
        while self._pending:
            peer, seq, frame = self._pending.popleft()
            if seq:
                self.transport.taken(peer, seq)
            if seq and seq <= self.incoming[peer].last_seq:
                self.incoming[peer].accept(seq)  # Counts the duplicate.
                continue
            try:
                turn = await self._work(self.participant.receive, peer, frame, self._now())
                if seq:
                    self.incoming[peer].accept(seq)
            except RemoteProtocolError as error:
                log.error("dropped a message: %s", error)
                # What follows it on this link makes no sense without it; the reconnect asks for it again.
                self._pending = deque(item for item in self._pending if item[0] != peer)
                self.transport.reset(peer, str(error))
                continue
            self._undurable_bytes += len(frame)
            record = self._perform(turn)
            if record is not None:
                return record
        wake_at = self.participant.wake_at
        if wake_at is not None and self._now() >= wake_at:
            return self._perform(await self._work(self.participant.timer, self._now()))
        return None

    def _perform(self, turn: Turn) -> RoundRecord | None:
        for parcel in turn.parcels:
            self._send(parcel)
        return turn.finished

    def _send(self, parcel: Parcel) -> None:
        peer = parcel.receiver
        self._count(parcel)
        if not parcel.sequenced:
            if self.transport.is_up(peer):
                self.transport.send(peer, 0, parcel.frame)
            return
        seq = self.out[peer].push(parcel.frame)
        # After we were killed and repeat rounds, a neighbour may have this already, or even have it for good.
        if seq <= self._remote_durable.get(peer, 0):
            self.out[peer].acknowledge(seq)
        if seq > self._remote_has.get(peer, 0) and self.transport.is_up(peer):
            self.transport.send(peer, seq, parcel.frame)

    async def _close_round(self, record: RoundRecord) -> None:
        if self.ledger is not None:
            await self._work(self.ledger.close_round, record.round, self.participant.algorithm)

    async def _save_at_end(self) -> None:
        if not self.participant.session.in_round:
            await self._checkpoint()

    async def _linger(self) -> None:
        deadline = self._now() + self.config.transport.linger_s
        while self._now() < deadline and not self._stop.is_set() and not self._all_settled():
            await self._wait(min(deadline, self._now() + 0.5))
            if self._pending:
                await self._take_frames()
        if self.config.rounds.late == "skip":
            # Messages that came after the last round still carry mass.
            await self._checkpoint()

    def _all_settled(self) -> bool:
        """Whether every neighbour has all our frames for good and every peer's last evaluation has reached us."""
        owed = any(self.out[peer].backlog_bytes for peer in self.receivers if peer not in self._gone)
        return not owed and self._all_have_finished()

    async def _models(self) -> tuple[FloatArray, FloatArray]:
        return self.participant.model(), self.participant.algorithm.x

    async def _wait_for_room(self) -> None:
        """Hold the next round back while a neighbour has too much unacknowledged, or cannot be heard of at all."""
        while not self._stop.is_set() and any(
            self.out[peer].backlog_bytes > _BACKLOG_BYTES_MAX for peer in self.receivers
        ):
            if self._undurable_bytes > _UNDURABLE_BYTES_MAX:
                await self._checkpoint()
            await self._wait(None)

    async def _keep_to_budget(self) -> None:
        """Let the budget choose what the coming round sends, and wait until the links may carry it."""
        budget = self.participant.budget
        if budget is None:
            return
        for peer in self.receivers:
            counters = self.transport.counters(peer)
            budget.measured(peer, counters.packet_bytes_sent or counters.protobuf_bytes_sent)
        now = self._now()
        may_begin_at = self.participant.ready(now)
        decision = budget.take_decision()
        if decision is not None and self._decisions is not None:
            await self._work(self._decisions.append, *decision)
        if may_begin_at > now + _NOTABLE_WAIT_S and budget.is_least and not self._said_that_it_slows_down:
            self._said_that_it_slows_down = True
            log.warning(
                "even the smallest messages exceed compressor.budget_kbytes_per_s = %g: waiting %.1f s before round %d,"
                " and as long as it takes before others",
                self.config.compressor.budget_kbytes_per_s,
                may_begin_at - now,
                self.participant.round,
            )
        while self._now() < may_begin_at and not self._stop.is_set():
            await self._wait(may_begin_at)
            if self._pending:
                # Whoever asks for a repair of the last round is not kept waiting; rounds do not begin here.
                await self._take_frames()

    def _give_up_on_the_lost(self) -> None:
        if not self.participant.session.in_round:
            return
        waiting = self.participant.session.waiting_for
        self._give_up_if_refused(waiting)
        for peer in waiting:
            if self.transport.is_up(peer):
                self._last_seen[peer] = self._now()
            silent = self._now() - self._last_seen.setdefault(peer, self._previous_time_s)
            if silent > self.config.transport.give_up_after_s:
                reason = self.transport.refusals.get(peer) or self.transport.problems.get(peer)
                name = self.config.peers[peer].name
                raise PeerUnreachable(
                    f"{name} has been away for {silent:.0f} s and round {self.participant.round} needs it; "
                    + (reason or "is it running, and is its address right?")
                )

    def _stopping_in_vain(self) -> bool:
        if not self._stop.is_set():
            return False
        waiting = self.participant.session.waiting_for
        # Of one that was never met nothing can be expected in time either.
        away = all(peer in self._gone or peer not in self._met for peer in waiting)
        return away or self._now() > self._stop_at + _STOP_GRACE_S

    # -- checkpoints --------------------------------------------------------------------------------------------------

    async def _checkpoint(self) -> None:
        state, arrays = self.participant.state()
        durable = self._durable_sequence_numbers()
        kept = {}
        for peer, link in self.out.items():
            next_seq, frames = link.next_seq, link.unacknowledged(0)
            kept[str(peer)] = {"next_seq": next_seq, "lengths": [len(frame) for _, frame in frames]}
            arrays[f"out/{peer}"] = np.frombuffer(b"".join(frame for _, frame in frames), dtype=np.uint8)
        state |= self._description()
        state |= {"incoming": {str(peer): seq for peer, seq in durable.items()}, "out": kept}
        # The rounds before a checkpoint are never repeated, so that their rows have to be there.
        self.metrics.flush()
        await self._work(self.folder.checkpoints.save, Checkpoint(self.participant.round, state, arrays))
        for peer, seq in durable.items():
            if seq > self.incoming[peer].durable_seq:
                self.incoming[peer].durable_seq = seq
                self.transport.acknowledge(peer, seq)
        self._undurable_bytes = 0

    def _checkpoint_is_wanted(self) -> bool:
        return self._undurable_bytes > _UNDURABLE_BYTES_MAX

    async def _take_snapshot(self) -> None:
        if self.participant.session.in_round:
            # The next round boundary takes it.
            self._undurable_bytes = _UNDURABLE_BYTES_MAX + 1
        else:
            await self._checkpoint()

    def _durable_sequence_numbers(self) -> dict[int, int]:
        """Return, for each in-neighbour, the last frame whose effect a checkpoint taken now includes."""
        kept = self.participant.session.unconsumed_counts()
        return {peer: self.incoming[peer].last_seq - kept.get(peer, 0) for peer in self.senders}

    def _restore(self) -> None:
        checkpoint = self._load_checkpoint()
        if checkpoint is None:
            return
        state = checkpoint.state
        self.participant.restore(state, checkpoint.arrays)
        for peer in self.neighbors:
            self.incoming[peer].restore({"last_seq": state["incoming"].get(str(peer), 0)})
            kept = state["out"].get(str(peer), {"next_seq": 1, "lengths": []})
            blob, frames, start = checkpoint.arrays[f"out/{peer}"].tobytes(), [], 0
            for length in kept["lengths"]:
                frames.append(blob[start : start + length])
                start += length
            self.out[peer].restore({"next_seq": kept["next_seq"], "frames": frames})

    # -- what the transport calls -------------------------------------------------------------------------------------

    def _frames_to_send(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        self._remote_has[peer] = remote_has
        frames = self.out[peer].unacknowledged(remote_has)
        return frames + [(0, parcel.frame) for parcel in self.participant.requests_to(peer)]

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        """A whole frame came; its credit goes back when it has been looked at."""
        self._last_seen[peer] = self._now()
        self._pending.append((peer, seq, frame))
        self._wake.set()
        return False if seq else None

    def receipt(self, peer: int, upto: int) -> None:
        """A neighbour has our frames up to `upto` for good."""
        self._remote_durable[peer] = max(upto, self._remote_durable.get(peer, 0))
        # After a crash a neighbour can know more of us than we do; those frames are acknowledged as they are repeated.
        self.out[peer].acknowledge(min(upto, self.out[peer].next_seq - 1))
        self._wake.set()

    def last_received(self, peer: int) -> int:
        """Return the last frame of a neighbour that need not be sent again."""
        return self.incoming[peer].last_seq

    def _figures(self) -> dict[str, Any]:
        compressor = self.participant.algorithm.node.compressor
        return {
            "budget_kbytes_per_s": self.config.compressor.budget_kbytes_per_s,
            "fraction": getattr(compressor, "fraction", None),
            "bits": getattr(compressor, "bits", None),
            "push_weight": self.participant.algorithm.u,
            "waiting_for": [self.config.peers[peer].name for peer in self.participant.session.waiting_for],
        }

    def _link_figures(self, peer: int) -> dict[str, Any]:
        deadlines = self.participant.session.deadlines
        return {
            "unacknowledged_bytes": self.out[peer].backlog_bytes,
            "lateness_s": None if deadlines is None else deadlines.lateness_s(peer),
            "late_after_s": None if deadlines is None else deadlines.after_s(peer),
        }
