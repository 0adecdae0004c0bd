"""The loop of one peer: three inputs (a local step done, a message, a timer), one ordered way to perform outcomes.

The event loop belongs to the sockets; training, compression and decoding run in one worker thread, so that heartbeats
and credits are answered during a step. What a neighbour may forget is decided by checkpoints: a frame counts as
received for good only once a checkpoint that includes its effect is on disk, and until then its sender keeps it. A
peer that was killed starts again from its checkpoint, asks for the frames after it, and repeats the rounds since; with
`late = "wait"` it computes the very same bits, so that nobody can tell.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from peer import __version__, wire
from peer.config import Config
from peer.errors import (
    DivergenceError,
    HandshakeRefused,
    PeerUnreachable,
    RemoteProtocolError,
    SottoError,
    StateError,
)
from peer.guard import reason_to_stop
from peer.job import Job, machine_facts, refuse_errors, validate_config
from peer.ledger import Ledger
from peer.link import InLink, OutLink
from peer.metrics import EvaluationRecord, LinkRecord, MetricsStore, RoundRecord
from peer.participant import Parcel, Participant, Turn
from peer.security import load_credentials
from peer.service_manager import notify
from peer.store import Checkpoint, StateFolder
from peer.summary import evaluation_record
from peer.train.threads import use_one_thread
from peer.transport import HelloInfo, Neighbor, Transport

log = logging.getLogger("sotto")

T = TypeVar("T")

_UNDURABLE_BYTES_MAX = 64 << 20
"""Take a checkpoint early when neighbours have to keep more than this for us."""
_BACKLOG_BYTES_MAX = 256 << 20
"""Start no further round while a neighbour has this much unacknowledged from us."""
_REFUSED_S = 15.0
"""Give up after this long when all that the round waits for refuse a peer that they never let in."""
_STOP_GRACE_S = 5.0
"""After SIGTERM: how long to wait for the neighbours of the round under way."""


def run(config: Config, base: Path) -> int:
    """Run one peer in the foreground until its last round or a signal; return the exit code.

    `base` is the folder that relative paths of the configuration start from. Raises SottoError.
    """
    use_one_thread()
    for finding in refuse_errors(validate_config(config, base)):
        log.warning("%s: %s", finding.key, finding.sentence)
    daemon = Daemon(config, base)
    try:
        return asyncio.run(daemon.main())
    finally:
        daemon.close()


class Daemon:
    """One peer: owns the participant, the links, the transport and the state folder."""

    def __init__(self, config: Config, base: Path) -> None:
        """Read data and checkpoint. Raises SottoError."""
        self.config, self.base = config, base
        self.me = config.peer.index
        self.name = config.peers[self.me].name
        # Before the costly part, so that a second daemon on the folder fails at once.
        self.folder = StateFolder(base / config.state.directory, keep=config.state.keep_checkpoints)
        self.job = Job.open(config, base)
        self.trainer = self.job.trainer(self.me)
        self.ledger = Ledger(self.folder.directory / "ledger") if config.state.ledger else None
        self.participant: Participant = self.job.participant(
            self.me,
            self.trainer,
            self.trainer.layout,
            self.trainer.initial_vector(),
            observe=None if self.ledger is None else self.ledger.observe,
        )
        schedule = self.job.schedule
        self.receivers = schedule.all_receivers(self.me)
        self.senders = schedule.all_senders(self.me)
        self.neighbors = tuple(sorted({*self.receivers, *self.senders}))
        self.out = {peer: OutLink() for peer in self.neighbors}
        self.incoming = {peer: InLink() for peer in self.neighbors}
        self.metrics = MetricsStore(self.folder.directory / "metrics.sqlite")
        self.evaluations: dict[tuple[int, str], EvaluationRecord] = {}
        """Newest known evaluation of every peer, by (peer, split): spread by gossip."""
        self.ended = "running"
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._pending: deque[tuple[int, int, bytes]] = deque()
        self._consumed: dict[int, dict[tuple[int, int], int]] = {peer: {} for peer in self.neighbors}
        self._payload_bytes = dict.fromkeys(self.neighbors, 0)
        self._undurable_bytes = 0
        self._remote_durable: dict[int, int] = {}
        self._remote_has: dict[int, int] = {}
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_reason: str | None = None
        self._diverged: tuple[int, str] | None = None
        self._gone: dict[int, str] = {}
        self._last_seen: dict[int, float] = {}
        self._met: set[int] = set()
        """Neighbours to which there was a link since this process began."""
        self._refused_since: float | None = None
        self._protobuf_before = 0
        self._last_loss: float | None = None
        self._previous_time_s = 0.0
        self._started = time.monotonic()
        self._flushed = 0.0
        self.transport: Transport
        self._restore()

    def close(self) -> None:
        """Release files and threads."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self.metrics.close()
        self.folder.close()

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def main(self) -> int:
        """Run to the end; return the exit code."""
        self._install_signals()
        self.transport = self._make_transport()
        await self.transport.start()
        log.info(
            "%s listens on port %s, %d neighbours, round %d of %d",
            self.name,
            self.transport.port if self.config.peer.listen else "none (dials out)",
            len(self.neighbors),
            self.participant.round,
            self.config.run.rounds,
        )
        notify("READY=1")
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._watch_parent()), tasks.create_task(self.transport.wait_closed())]
                await self._rounds()
                await self._finish()
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as group:
            # One error is enough to end with, and says more than a group of one.
            raise group.exceptions[0] from None
        finally:
            notify("STOPPING=1")
            await self.transport.close(self._stop_reason or self.ended)
            self._record_links()
        if self._diverged is not None:
            raise DivergenceError(self._diverged[1])
        return 0

    async def _rounds(self) -> None:
        while self.participant.round < self.config.run.rounds and not self._stop.is_set():
            await self._wait_for_room()
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
        if self.config.peer.slow_down:
            time.sleep(self.config.peer.slow_down * (time.perf_counter() - started))
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
        self._payload_bytes[peer] += parcel.payload_bytes
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

    async def _after_round(self, record: RoundRecord) -> None:
        done = self.participant.round
        now = self._now()
        protobuf = sum(self.transport.counters(peer).protobuf_bytes_sent for peer in self.neighbors)
        self._last_loss = record.loss if record.loss is not None else self._last_loss
        self.metrics.put(replace(record, protobuf_bytes=max(0, protobuf - self._protobuf_before)))
        self._protobuf_before = protobuf
        if self.ledger is not None:
            await self._work(self.ledger.close_round, record.round, self.participant.algorithm)
        reason = reason_to_stop(self.config.guard, record, self.participant.algorithm.x)
        if reason is not None:
            await self._diverge(f"peer {self.name}: {reason}")
            return
        every = self.config.evaluation.every_rounds
        if done == self.config.run.rounds or (every and done % every == 0):
            await self._evaluate(done)
        every = self.config.state.checkpoint_every_rounds
        if (
            done == self.config.run.rounds
            or (every and done % every == 0)
            or self._undurable_bytes > _UNDURABLE_BYTES_MAX
        ):
            await self._checkpoint()
        if now - self._flushed > 0.5:
            self._flushed = now
            self.metrics.flush()

    async def _finish(self) -> None:
        """Stay until the neighbours have all they need of us, then write the model."""
        completed = self.participant.round >= self.config.run.rounds
        if self._diverged is not None:
            self.ended = f"diverged: {self._diverged[1]}"
            if self.config.guard.action == "rollback":
                round_ = self.folder.go_back(self._diverged[0])
                self.metrics.drop_after(round_ - 1)
                log.error("state put back to round %d", round_)
            self.metrics.flush()
            return
        if not self.participant.session.in_round:
            await self._checkpoint()
        self.ended = "completed" if completed else "stopped"
        self.metrics.flush()
        if not completed:
            return
        deadline = self._now() + self.config.transport.linger_s
        while self._now() < deadline and not self._stop.is_set() and not self._all_settled():
            await self._wait(min(deadline, self._now() + 0.5))
            if self._pending:
                await self._take_frames()
        if self.config.rounds.late == "skip":
            # Messages that came after the last round still carry mass.
            await self._checkpoint()
        path = self.folder.directory / "model.safetensors"
        z = self.participant.model()
        await self._work(self.trainer.save_model, z, path)
        self.metrics.put(*self.evaluations.values())
        self.metrics.flush()

    def _all_settled(self) -> bool:
        """Whether every neighbour has all our frames for good and every peer's last evaluation has reached us."""
        if any(self.out[peer].backlog_bytes for peer in self.receivers if peer not in self._gone):
            return False
        final = self.config.run.rounds
        known = {
            peer for (peer, split), record in self.evaluations.items() if split == "test" and record.round == final
        }
        return len(known) == self.job.num_peers or len(self._gone) == len(self.neighbors)

    # -- pieces of the loop -------------------------------------------------------------------------------------------

    async def _work(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def _wait(self, until: float | None) -> None:
        """Sleep until something happens or `until`."""
        self._give_up_on_the_lost()
        timeout = 1.0 if until is None else min(1.0, max(0.0, until - self._now()))
        try:
            await asyncio.wait_for(self._wake.wait(), timeout)
        except TimeoutError:
            return
        self._wake.clear()

    async def _wait_for_room(self) -> None:
        """Hold the next round back while a neighbour has too much unacknowledged, or cannot be heard of at all."""
        while not self._stop.is_set() and any(
            self.out[peer].backlog_bytes > _BACKLOG_BYTES_MAX for peer in self.receivers
        ):
            if self._undurable_bytes > _UNDURABLE_BYTES_MAX:
                await self._checkpoint()
            await self._wait(None)

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

    def _give_up_if_refused(self, waiting: Sequence[int]) -> None:
        """End a peer that was started with the wrong configuration, rather than let it wait.

        One that was let in before stays: then the neighbour is the one that changed, and it can be put right.
        """
        refusals = [self.transport.refusals.get(peer) for peer in waiting if peer not in self._met]
        if not waiting or len(refusals) < len(waiting) or None in refusals:
            self._refused_since = None
            return
        if self._refused_since is None:
            self._refused_since = self._now()
        if self._now() - self._refused_since > _REFUSED_S:
            raise HandshakeRefused(f"none of the neighbours that it waits for lets it in: {refusals[0]}")

    def _stopping_in_vain(self) -> bool:
        if not self._stop.is_set():
            return False
        waiting = self.participant.session.waiting_for
        return self._now() > self._stop_at + _STOP_GRACE_S or all(peer in self._gone for peer in waiting)

    async def _evaluate(self, done: int) -> None:
        records = []
        z = self.participant.model()
        splits = ["test"] + (["holdout"] if len(self.job.manifest.holdout[self.me]) else [])
        for split in splits:
            found = await self._work(self.trainer.evaluate, z, split)
            records.append(evaluation_record(self.me, done, split, found))
        self.metrics.put(*records)
        if self.config.evaluation.keep_models:
            await self._work(self._keep_model, done)
        every = self.config.evaluation.every_rounds * self.config.evaluation.share_every
        if done == self.config.run.rounds or (every and done % every == 0):
            for record in records:
                self._learn(record)

    def _keep_model(self, done: int) -> None:
        """Leave (x, u) for `sotto up`, which measures the consensus distance from all peers' files."""
        folder = self.folder.directory / "models"
        folder.mkdir(exist_ok=True)
        beside = folder / f".{done}.npy"
        with open(beside, "wb") as file:
            np.save(file, np.append(self.participant.algorithm.x.astype(np.float64), self.participant.algorithm.u))
        beside.rename(folder / f"{done}.npy")

    def _learn(self, record: EvaluationRecord, source: int | None = None) -> None:
        """Take note of a peer's accuracy and tell the neighbours, if it is news."""
        known = self.evaluations.get((record.peer, record.split))
        if known is not None and known.round >= record.round:
            return
        self.evaluations[record.peer, record.split] = record
        note = json.dumps(
            [record.peer, record.round, record.split, record.correct, record.total], separators=(",", ":")
        ).encode()
        for peer in self.neighbors:
            if peer != source and self.transport.is_up(peer):
                self.transport.bulletin(peer, "evaluation", note)
        self._wake.set()

    async def _diverge(self, reason: str) -> None:
        if self._diverged is None:
            log.error("%s", reason)
            self._diverged = (self.participant.round - self.participant.round % self._checkpoint_every(), reason)
            note = json.dumps([self._diverged[0], reason]).encode()
            for peer in self.neighbors:
                if self.transport.is_up(peer):
                    self.transport.bulletin(peer, "diverged", note)
        self._request_stop(reason)

    def _checkpoint_every(self) -> int:
        return self.config.state.checkpoint_every_rounds or self.config.run.rounds

    async def _checkpoint(self) -> None:
        state, arrays = self.participant.state()
        durable = self._durable_sequence_numbers()
        state |= {
            "run": self.config.run.name,
            "peer": self.name,
            "job": self.config.job_digest(),
            "graph": self.job.schedule.digest,
            "version": __version__,
            "machine": machine_facts(),
            "seconds": self._now(),
            "incoming": {str(peer): seq for peer, seq in durable.items()},
            "out": {},
        }
        for peer, link in self.out.items():
            next_seq, frames = link.next_seq, link.unacknowledged(0)
            state["out"][str(peer)] = {"next_seq": next_seq, "lengths": [len(frame) for _, frame in frames]}
            arrays[f"out/{peer}"] = np.frombuffer(b"".join(frame for _, frame in frames), dtype=np.uint8)
        # The rounds before a checkpoint are never repeated, so that their rows have to be there.
        self.metrics.flush()
        await self._work(self.folder.save, Checkpoint(self.participant.round, state, arrays))
        for peer, seq in durable.items():
            if seq > self.incoming[peer].durable_seq:
                self.incoming[peer].durable_seq = seq
                self.transport.acknowledge(peer, seq)
        self._undurable_bytes = 0

    def _durable_sequence_numbers(self) -> dict[int, int]:
        """Return, for each in-neighbour, the last frame whose effect a checkpoint taken now includes."""
        kept = self.participant.session.unconsumed_counts()
        return {peer: self.incoming[peer].last_seq - kept.get(peer, 0) for peer in self.senders}

    def _restore(self) -> None:
        checkpoint = self.folder.newest()
        if checkpoint is None:
            return
        state = checkpoint.state
        ours = {"run": self.config.run.name, "peer": self.name, "graph": self.job.schedule.digest}
        for key, value in ours.items():
            if state.get(key) != value:
                raise StateError(
                    f"{self.folder.directory}: the checkpoint belongs to {key} {state.get(key)!r}, this is {value!r}; "
                    "use another state.directory or delete the old one"
                )
        self.participant.restore(state, checkpoint.arrays)
        for peer in self.neighbors:
            self.incoming[peer].restore({"last_seq": state["incoming"].get(str(peer), 0)})
            kept = state["out"].get(str(peer), {"next_seq": 1, "lengths": []})
            blob, frames, start = checkpoint.arrays[f"out/{peer}"].tobytes(), [], 0
            for length in kept["lengths"]:
                frames.append(blob[start : start + length])
                start += length
            self.out[peer].restore({"next_seq": kept["next_seq"], "frames": frames})
        self._previous_time_s = float(state.get("seconds", 0.0))
        self.metrics.drop_after(checkpoint.round - 1)
        log.info("%s goes on from round %d", self.name, checkpoint.round)

    # -- what the transport calls -------------------------------------------------------------------------------------

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """A neighbour is connected and has our frames up to `remote_has`; return what to send (again)."""
        self._gone.pop(peer, None)
        self._met.add(peer)
        self._last_seen[peer] = self._now()
        self._remote_has[peer] = remote_has
        frames = self.out[peer].unacknowledged(remote_has)
        frames += [(0, parcel.frame) for parcel in self.participant.requests_to(peer)]
        for record in self.evaluations.values():
            note = json.dumps([record.peer, record.round, record.split, record.correct, record.total])
            self.transport.bulletin(peer, "evaluation", note.encode())
        self._wake.set()
        return frames

    def link_down(self, peer: int, reason: str) -> None:
        """A link ended; the transport dials again by itself."""
        log.info("lost %s: %s", self.config.peers[peer].name, reason)
        self._wake.set()

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

    def bulletin_received(self, peer: int, topic: str, data: bytes) -> None:
        """A note that is passed on from peer to peer."""
        try:
            if topic == "evaluation":
                self._learn(_parse_evaluation(data, self.job.num_peers), source=peer)
            elif topic == "diverged" and self._diverged is None:
                round_, reason = json.loads(data)
                self._diverged = (int(round_), str(reason)[:500])
                for other in self.neighbors:
                    if other != peer and self.transport.is_up(other):
                        self.transport.bulletin(other, "diverged", data)
                self._request_stop(self._diverged[1])
        except (ValueError, TypeError) as error:
            log.error("dropped a note of %s about %s: %s", self.config.peers[peer].name, topic, error)

    def goodbye(self, peer: int, reason: str) -> None:
        """A neighbour leaves on purpose."""
        log.info("%s says goodbye: %s", self.config.peers[peer].name, reason)
        self._gone[peer] = reason
        self._wake.set()

    async def control(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer the operator: status, stop, snapshot."""
        if verb == "status":
            return self.status()
        if verb == "stop":
            self._request_stop("stopped by the operator")
            return {"stopping": True, "round": self.participant.round}
        if verb == "snapshot":
            if self.participant.session.in_round:
                # The next round boundary takes it.
                self._undurable_bytes = _UNDURABLE_BYTES_MAX + 1
            else:
                await self._checkpoint()
            return {"round": self.participant.round}
        raise SottoError(f"there is no control call {verb!r}; valid: status, stop, snapshot")

    def status(self) -> dict[str, Any]:
        """Return what `sotto status` shows, as JSON values."""
        totals = [self.transport.counters(peer) for peer in self.neighbors]
        own = self.evaluations.get((self.me, "test"))
        worst = min(
            (r for (_, split), r in self.evaluations.items() if split == "test"), key=lambda r: r.accuracy, default=None
        )
        return {
            "name": self.name,
            "run": self.config.run.name,
            "version": __version__,
            "state": "stopping" if self._stop.is_set() else self.ended,
            "round": self.participant.round,
            "rounds": self.config.run.rounds,
            "loss": self._last_loss,
            "accuracy": None if own is None else own.accuracy,
            "worst": None
            if worst is None
            else {"peer": self.config.peers[worst.peer].name, "accuracy": worst.accuracy},
            "push_weight": self.participant.algorithm.u,
            "waiting_for": [self.config.peers[peer].name for peer in self.participant.session.waiting_for],
            "neighbors": {
                self.config.peers[peer].name: {
                    "up": self.transport.is_up(peer),
                    "refusal": self.transport.refusals.get(peer),
                    "sends": peer in self.senders,
                    "receives": peer in self.receivers,
                    "unacknowledged_bytes": self.out[peer].backlog_bytes,
                }
                for peer in self.neighbors
            },
            "frame_bytes": sum(c.frame_bytes_sent for c in totals),
            "protobuf_bytes": sum(c.protobuf_bytes_sent for c in totals),
            "socket_bytes": sum(c.socket_bytes_sent or 0 for c in totals),
            "seconds": self._now(),
        }

    # -- small things -------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Seconds since the run began on this device, the time before a restart included."""
        return self._previous_time_s + time.monotonic() - self._started

    def _make_transport(self) -> Transport:
        config = self.config
        neighbors = []
        for peer in self.neighbors:
            address = config.peers[peer].advertise
            # One connection serves a pair: the lower index dials, unless only one of the two can be dialled.
            can_be_dialled = config.peer.listen is not None and config.peers[self.me].advertise is not None
            dial = address is not None and (self.me < peer or not can_be_dialled)
            neighbors.append(Neighbor(index=peer, name=config.peers[peer].name, address=address, dial=dial))
        hello = HelloInfo(
            run=config.run.name,
            algorithm=config.algorithm.name,
            job_digest=config.job_digest(),
            model_digest=self.trainer.start_digest(),
            graph_digest=self.job.schedule.digest,
            num_peers=self.job.num_peers,
            name=self.name,
            software=f"sottovoce {__version__}",
            max_frame_bytes=wire.max_frame_bytes(self.trainer.layout),
        )
        security = None
        if config.security.mode == "mtls":
            security = load_credentials(config.security, self.base, self.name)
        else:
            log.warning("security.mode is insecure: no encryption, and anybody may claim to be any peer")
        return Transport(
            me=self.me,
            listen=config.peer.listen or None,
            neighbors=neighbors,
            hello=hello,
            security=security,
            options=config.transport,
            handler=self,
        )

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            log.warning("second signal: stopping at once")
            os._exit(128 + number)
        self._request_stop(f"stopped by {signal.Signals(number).name}")

    def _request_stop(self, reason: str) -> None:
        if not self._stop.is_set():
            self._stop_reason, self._stop_at = reason, self._now()
            log.info("%s: finishing the round", reason)
            self._stop.set()
        self._wake.set()

    async def _watch_parent(self) -> None:
        """Stop when the `sotto up` that started this process is gone: nothing may be left running."""
        parent = os.environ.get("SOTTO_PARENT")
        while parent is not None:
            await asyncio.sleep(1.0)
            if os.getppid() != int(parent):
                self._request_stop("the process that started this peer is gone")
                return

    def _record_links(self) -> None:
        for peer in self.neighbors:
            counters = self.transport.counters(peer)
            self.metrics.put(
                LinkRecord(
                    peer=self.me,
                    neighbor=peer,
                    frames=counters.frames_sent,
                    payload_bytes=self._payload_bytes[peer],
                    frame_bytes=counters.frame_bytes_sent,
                    protobuf_bytes=counters.protobuf_bytes_sent,
                    socket_bytes=counters.socket_bytes_sent,
                    packet_bytes=counters.packet_bytes_sent,
                    reconnects=counters.reconnects,
                    resent_frames=counters.frames_resent,
                    up=self.transport.is_up(peer),
                )
            )
        self.metrics.flush()


def _parse_evaluation(data: bytes, num_peers: int) -> EvaluationRecord:
    peer, round_, split, correct, total = json.loads(data)
    counts = (*correct, *total)
    if not (
        isinstance(peer, int) and 0 <= peer < num_peers and isinstance(round_, int) and split in ("test", "holdout")
    ):
        raise ValueError("names no split")
    if len(correct) != len(total) or len(counts) > 2000 or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise ValueError("its counts are not counts")
    return EvaluationRecord(peer=peer, round=round_, split=split, correct=tuple(correct), total=tuple(total))
