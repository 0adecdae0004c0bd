"""The process of one peer, whatever its loop: state folder, run setup, transport, evaluation, operator, signals.

The loops are `peer.daemon.rounds` (rounds) and `peer.daemon.pairs` (pairs of peers, no rounds). The event loop of
asyncio belongs to the sockets; whatever takes long runs in worker threads, so that heartbeats and credits are answered
during a step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from peer import __version__, wire
from peer.compress.payload import FloatArray
from peer.config import SHARED_SECTIONS, Config
from peer.daemon.exporter import Exporter
from peer.daemon.frozen_roster import keep, refuse_other_changes, settle
from peer.daemon.roster import Roster
from peer.daemon.service_manager import notify
from peer.daemon.traffic import Traffic
from peer.errors import ConfigError, DivergenceError, HandshakeRefused, SottoError
from peer.gossip.effects import OutgoingFrame
from peer.gossip.membership import ChangeKind
from peer.net.hello import HelloInfo, quote
from peer.net.neighbor import Neighbor
from peer.net.security.credentials import load_credentials
from peer.net.transport import Transport
from peer.node.divergence_guard import reason_to_stop
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair
from peer.node.evaluation_cadence import is_evaluated, is_shared
from peer.node.pair_participant import PairParticipant
from peer.node.participant import Participant
from peer.round_record import RoundRecord
from peer.run_plan import unreachable_pairs, why_no_changes
from peer.run_setup import RunSetup
from peer.run_summary import evaluation_record, machine_facts
from peer.state.checkpoints import StateFolder
from peer.state.metrics import EvaluationRecord, LinkRecord, MetricsStore

log = logging.getLogger("sotto")

T = TypeVar("T")

_SYNC_EVERY_S = 1.0
"""How often what was journaled is synced."""
_REFUSED_S = 15.0
"""Give up after this long when all that the round waits for refuse a peer that they never let in."""


class Daemon(ABC):
    """One peer: owns the participant, the transport and the state folder."""

    participant: Participant | PairParticipant
    durable: DurablePeer | DurablePair

    def __init__(self, config: Config, base: Path, reread: Callable[[], Config] | None = None) -> None:
        """Read data and checkpoint. Raises SottoError."""
        self._file, self._reread = config, reread
        settled = settle(config, base)
        self.config, self.base = settled.config, base
        config = settled.config
        self._taken_out = settled.taken_out
        """Peers that are in the list of the run and not in the file any more."""
        self.me = config.peer.index
        self.name = config.peers[self.me].name
        self.access = load_credentials(config.security, base, self.name)
        self.roster = Roster(config, self.access)
        # Before the costly part, so that a second daemon on the folder fails at once.
        self.folder = StateFolder(
            base / config.state.directory,
            keep=config.state.keep_checkpoints,
            regular=config.state.checkpoint_every_rounds,
        )
        if not config.peers[self.me].is_first and (why := why_no_changes(config)) is not None:
            raise ConfigError(f"{self.name} cannot join: {why}", key="peers")
        self.setup = RunSetup.open(config, base)
        self.trainer = self.setup.trainer(self.me)
        schedule, begins = self.setup.schedule, self.me in self.setup.first_members
        # Of a run that begins without this peer it learns its neighbours when it joins.
        self.receivers = schedule.all_receivers(self.me) if begins else ()
        self.senders = schedule.all_senders(self.me) if begins else ()
        self.neighbors = tuple(sorted({*self.receivers, *self.senders}))
        self.metrics = MetricsStore(self.folder.directory / "metrics.sqlite")
        self.evaluations: dict[tuple[int, str], EvaluationRecord] = {}
        """Newest known evaluation of every peer, by (peer, split): spread by gossip."""
        self.ended = "running"
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._syncer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sync")
        self._snapshot_wanted = False
        self._to_replay_s = 0.0
        """About how long it would take to repeat what is in the journal."""
        others = [peer for peer in range(self.setup.num_peers) if peer != self.me]
        self.traffic = Traffic(self.me, others, self.metrics.links())
        self._machine = machine_facts()
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_reason: str | None = None
        self._reload_asked = asyncio.Event()
        self._diverged: tuple[int, str] | None = None
        self._gone: dict[int, str] = {}
        self._last_seen: dict[int, float] = {}
        self._met: set[int] = set()
        """Neighbours to which there was a link since this process began."""
        self._refused_since: float | None = None
        self._protobuf_before = 0
        self._last_put: RoundRecord | None = None
        self._last_loss: float | None = None
        self._previous_time_s = 0.0
        self._started = time.monotonic()
        self._flushed = 0.0
        self._exporter: Exporter | None = None
        self._list_is_kept = False
        self.transport: Transport

    def close(self) -> None:
        """Release files and threads."""
        self._syncer.shutdown(wait=True, cancel_futures=True)
        self._worker.shutdown(wait=False, cancel_futures=True)
        self.durable.close()
        self.metrics.close()
        self.folder.close()

    # -- what the loops differ in --------------------------------------------------------------------------------------

    @abstractmethod
    async def _rounds(self) -> None:
        """Train until the last round, a stop, or a divergence."""

    @abstractmethod
    async def _linger(self) -> None:
        """Stay, after the last round, until the others have all they need of us; leave a checkpoint of the end."""

    @abstractmethod
    async def _save_at_end(self) -> None:
        """Save what a stop or the last round leaves, if it can be saved."""

    @abstractmethod
    async def _checkpoint(self) -> None:
        """Save the state."""

    @abstractmethod
    async def _close_round(self, record: RoundRecord) -> None:
        """Write the audit trail of a round, if there is one."""

    @abstractmethod
    async def _models(self) -> tuple[FloatArray, FloatArray]:
        """Return (z, x), good until the next round."""

    @abstractmethod
    async def _take_snapshot(self) -> None:
        """Save the state for the operator, now or as soon as it can be saved."""

    @abstractmethod
    def _frames_to_send(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """Return what a neighbour that is back needs, in order."""

    @abstractmethod
    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        """A whole frame came; False keeps its credit back until `Transport.taken`."""

    @abstractmethod
    def receipt(self, peer: int, upto: int) -> None:
        """A neighbour has our frames up to `upto` for good."""

    @abstractmethod
    def last_received(self, peer: int) -> int:
        """Return the last frame of a neighbour that need not be sent again."""

    @abstractmethod
    def _figures(self) -> dict[str, Any]:
        """Return what `sotto status` shows of this kind of loop alone."""

    def _link_figures(self, peer: int) -> dict[str, Any]:
        """Return the same for the link to one neighbour."""
        return {}

    def _give_up_on_the_lost(self) -> None:  # noqa: B027 (a loop that waits for nobody has nothing to do)
        """Raise PeerUnreachable if a neighbour that is waited for has been away for too long."""

    def _helpers(self) -> list[Coroutine[Any, Any, None]]:
        """Return what runs beside the loop until it ends."""
        return [
            self._watch_parent(),
            self._reload_when_asked(),
            self._sync_now_and_then(),
            self.transport.wait_closed(),
        ]

    # -- what is on disk -----------------------------------------------------------------------------------------------

    def _durability(self) -> dict[str, Any]:
        """Return how a participant is to be kept, as arguments of `DurablePeer` and of `DurablePair`."""
        options = self.config.state
        return {
            "identity": self._belongs_to(),
            "durability": options.durability,
            "keep_checkpoints": options.keep_checkpoints,
            "regular": options.checkpoint_every_rounds,
            # Nothing but the CPU is promised to be repeatable to the bit.
            "repeatable": self.trainer.device.type == "cpu",
        }

    def _checkpoint_is_wanted(self) -> bool:
        """Whether a checkpoint should be taken before its time."""
        options = self.config.state
        return (
            self._snapshot_wanted
            or self.durable.disk_state.journal_bytes > options.journal_mbytes << 20
            or self._to_replay_s > options.recover_within_s
        )

    async def _sync_now_and_then(self) -> None:
        """Bound what a power cut costs, and let neighbours forget what is safe here."""
        while True:
            await asyncio.sleep(_SYNC_EVERY_S)
            await self._sync()

    async def _sync(self) -> None:
        """Make what was journaled survive a power cut."""
        await asyncio.get_running_loop().run_in_executor(self._syncer, self.durable.sync)

    # -- from the first round to the last ------------------------------------------------------------------------------

    async def main(self) -> int:
        """Run to the end; return the exit code."""
        self._install_signals()
        self.transport = self._make_transport()
        self._open_exporter()
        await self.transport.start()
        log.info(
            "%s listens on port %s, others dial %s, %d neighbours, round %d of %d",
            self.name,
            self.transport.port if self.config.peer.listen else "none (dials out)",
            self.roster[self.me].advertise or "nothing",
            len(self.neighbors),
            self.participant.round,
            self.config.run.rounds,
        )
        notify("READY=1")
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(helper) for helper in self._helpers()]
                await self._rounds()
                await self._finish()
                for helper in helpers:
                    helper.cancel()
        except BaseExceptionGroup as group:
            # One error is enough to end with, and says more than a group of one.
            error = group.exceptions[0]
            self._stop_reason = f"it ends with an error: {error}"
            raise error from None
        finally:
            notify("STOPPING=1")
            if self._exporter is not None:
                await asyncio.to_thread(self._exporter.close)
            await self.transport.close(self._stop_reason or self.ended)
            self._record_links()
        if self._diverged is not None:
            raise DivergenceError(self._diverged[1])
        return 0

    async def _after_round(self, record: RoundRecord) -> None:
        done = self.participant.round
        if not self._list_is_kept:
            # Only now: until a round was completed, a list that nobody agrees with can be mended in the file.
            await self._keep_list()
        now = self._now()
        self._last_loss = record.loss if record.loss is not None else self._last_loss
        self._put_round(record)
        if self._exporter is not None:
            self._exporter.observe(record)
        await self._close_round(record)
        reason = reason_to_stop(self.config.guard, record, self.participant.algorithm.x)
        if reason is not None:
            await self._diverge(f"{self.name}: {reason}")
            return
        if self._is_evaluated(done):
            await self._evaluate(done)
        every = self.config.state.checkpoint_every_rounds
        if done == self.config.run.rounds or (every and done % every == 0) or self._checkpoint_is_wanted():
            await self._checkpoint()
        if now - self._flushed > 0.5:
            self._flushed = now
            self._record_links()

    def _put_round(self, record: RoundRecord, link_round: int | None = None) -> None:
        """Write the row of a round, with what went over the sockets since the last one, and the rows of its links
        (under another number where the round has such rows already)."""
        counters = {peer: self.transport.counters(peer) for peer in self.neighbors}
        protobuf = sum(each.protobuf_bytes_sent for each in counters.values())
        since = max(0, protobuf - self._protobuf_before)
        self._last_put = replace(record, protobuf_bytes=record.protobuf_bytes + since)
        self.metrics.put(
            self._last_put, *self.traffic.close_round(record.round if link_round is None else link_round, counters)
        )
        self._protobuf_before = protobuf

    async def _finish(self) -> None:
        """Stay until the neighbours have all they need of us, then write the model."""
        completed = self.participant.round >= self.config.run.rounds or self._has_left
        if self._diverged is not None:
            self.ended = f"diverged: {self._diverged[1]}"
            if self.config.guard.action == "rollback":
                round_ = self.durable.go_back(self._diverged[0])
                self.metrics.drop_after(round_ - 1)
                self._diverged = (round_, f"{self._diverged[1]}; the state was put back to round {round_}")
                log.error("state put back to round %d", round_)
            self.metrics.flush()
            return
        await self._save_at_end()
        self.ended = "left" if self._has_left else "completed" if completed else "stopped"
        self.metrics.flush()
        if not completed:
            return
        await self._linger()
        path = self.folder.directory / "model.safetensors"
        z, _ = await self._models()
        await self._work(self.trainer.save_model, z, path)
        self.metrics.put(*self.evaluations.values())
        self.metrics.flush()

    def _all_have_finished(self) -> bool:
        """Whether every peer's last evaluation has reached us, or all neighbours have left."""
        final = self.config.run.rounds
        known = {
            peer for (peer, split), record in self.evaluations.items() if split == "test" and record.round == final
        }
        return known >= set(self._members_at_end()) or self._gone.keys() >= set(self.neighbors)

    @property
    def _has_left(self) -> bool:
        """Whether this peer is done before the run is, because it left it."""
        return False

    def _members_at_end(self) -> Sequence[int]:
        """Return whose last evaluation is waited for."""
        return range(self.setup.num_peers)

    # -- pieces of the loops -------------------------------------------------------------------------------------------

    async def _work(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    def _pace(self, started: float) -> None:
        """Sleep, in the worker, for what a local step that began at `started` (perf_counter) is to take longer."""
        options = self.config.peer
        took = time.perf_counter() - started
        wanted = max(took, options.min_step_s) * (1.0 + options.slow_down)
        if wanted > took:
            time.sleep(wanted - took)

    async def _wait(self, until: float | None) -> None:
        """Sleep until something happens or `until`."""
        self._give_up_on_the_lost()
        timeout = 1.0 if until is None else min(1.0, max(0.0, until - self._now()))
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

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

    async def _evaluate(self, done: int) -> None:
        z, x = await self._models()
        records = await self._work(self._judge, done, z, x)
        self.metrics.put(*records)
        if self._is_shared(done):
            for record in records:
                self._learn(record)

    def _judge(self, done: int, z: FloatArray, x: FloatArray) -> list[EvaluationRecord]:
        """Return the accuracy of the model z on each split, and leave x where `sotto up` looks for it."""
        splits: list[Literal["test", "holdout"]] = ["test"]
        if len(self.setup.manifest.holdout[self.me]):
            splits.append("holdout")
        records = [evaluation_record(self.me, done, split, self.trainer.evaluate(z, split)) for split in splits]
        if self.config.evaluation.keep_models:
            self._keep_model(done, x)
        return records

    def _is_evaluated(self, done: int) -> bool:
        return is_evaluated(self.config.evaluation, done, self.config.run.rounds)

    def _is_shared(self, done: int) -> bool:
        return is_shared(self.config.evaluation, done, self.config.run.rounds)

    def _keep_model(self, done: int, x: FloatArray) -> None:
        """Leave (x, u) for `sotto up`, which measures the consensus distance from all peers' files."""
        folder = self.folder.directory / "models"
        folder.mkdir(exist_ok=True)
        beside = folder / f".{done}.npy"
        with open(beside, "wb") as file:
            np.save(file, np.append(x.astype(np.float64), self.participant.algorithm.u))
        beside.rename(folder / f"{done}.npy")

    def _learn(self, record: EvaluationRecord, source: int | None = None) -> None:
        """Take note of a peer's accuracy and tell the neighbours, if it is news."""
        known = self.evaluations.get((record.peer, record.split))
        if known is not None and known.round >= record.round:
            return
        self.evaluations[record.peer, record.split] = record
        note = evaluation_note(record).encode()
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

    def _description(self) -> dict[str, Any]:
        """Return what every checkpoint says of where it belongs."""
        return {
            **self._belongs_to(),
            "job": self.config.run_digest(),
            "version": __version__,
            "machine": self._machine,
            "seconds": self._now(),
        }

    def _belongs_to(self) -> dict[str, str]:
        """Return what a checkpoint has to agree with; rates, say, may change while a run is stopped everywhere."""
        return {
            "run": self.config.run.name,
            "peer": self.name,
            "model": self.trainer.layout.digest,
            "graph": self.setup.schedule.digest,
            "algorithm": self.config.algorithm.name,
            "momentum": self.config.training.momentum,
        }

    # -- what the transport calls -------------------------------------------------------------------------------------

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """A neighbour is connected and has our frames up to `remote_has`; return what to send (again)."""
        self._gone.pop(peer, None)
        self._met.add(peer)
        self._last_seen[peer] = self._now()
        frames = self._frames_to_send(peer, remote_has)
        for record in self.evaluations.values():
            self.transport.bulletin(peer, "evaluation", evaluation_note(record).encode())
        self._wake.set()
        return frames

    def link_down(self, peer: int, reason: str) -> None:
        """A link ended; the transport dials again by itself."""
        log.info("lost %s: %s", self.roster.name(peer), reason)
        self._wake.set()

    def bulletin_received(self, peer: int, topic: str, data: bytes) -> None:
        """A note that is passed on from peer to peer."""
        try:
            if topic == "evaluation":
                self._learn(parse_evaluation(data, self.roster), source=peer)
            elif topic == "diverged" and self._diverged is None:
                round_, reason = json.loads(data)
                self._diverged = (int(round_), str(reason)[:500])
                for other in self.neighbors:
                    if other != peer and self.transport.is_up(other):
                        self.transport.bulletin(other, "diverged", data)
                self._request_stop(self._diverged[1])
        except (ValueError, TypeError) as error:
            log.error("dropped a note of %s about %s: %s", self.roster.name(peer), topic, error)

    def goodbye(self, peer: int, reason: str) -> None:
        """A neighbour leaves on purpose."""
        log.info("%s says goodbye: %s", self.roster.name(peer), reason)
        self._gone[peer] = reason
        self._wake.set()

    async def control(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer the operator."""
        if verb == "status":
            return self.status()
        if verb == "stop":
            self._request_stop("stopped by the operator")
            return {"stopping": True, "round": self.participant.round, "newcomers": self._newcomers()}
        if verb == "snapshot":
            await self._take_snapshot()
            return {"round": self.participant.round}
        if verb == "reload":
            return await self._reload()
        if verb == "leave":
            return await self._announce(ChangeKind.LEAVE, self.me)
        if verb == "remove":
            lost = self.roster.index_of(str(arguments.get("name")))
            if lost is None:
                raise SottoError(f"there is no peer {str(arguments.get('name'))[:80]!r} in this run")
            if lost == self.me:
                raise SottoError(f"{self.name} lives and can leave by itself: sotto leave")
            return await self._announce(ChangeKind.LOST, lost)
        raise SottoError(f"there is no control call {verb!r}; valid: status, stop, snapshot, reload, leave, remove")

    async def _announce(self, kind: ChangeKind, subject: int) -> dict[str, Any]:
        """Announce a change of the members; return from when it counts. Raises SottoError, with what is against it."""
        raise SottoError(self.setup.why_no_changes or "the members of this run cannot change")

    # -- a file that changed ------------------------------------------------------------------------------------------

    async def _keep_list(self) -> None:
        self._list_is_kept = True
        await self._work(keep, self.folder.disk, self.config.peers)

    async def _reload_when_asked(self) -> None:
        """Read the file again after a SIGHUP."""
        while True:
            await self._reload_asked.wait()
            self._reload_asked.clear()
            try:
                await self._reload()
            except SottoError as error:
                log.error("the file is not taken over, and all goes on as before: %s", error)

    async def _reload(self) -> dict[str, Any]:
        """Take over who is in the list of peers now; return what came of it. Raises ConfigError for anything else that
        changed in the file."""
        if self._reread is None:
            raise SottoError("this peer was not started from a file")
        new = self._reread()
        refuse_other_changes(self._file, new)
        before, now = ({peer.name for peer in each.peers} for each in (self._file, new))
        added = [peer for peer in new.peers if peer.name not in before]
        taken_out = [peer.name for peer in self._file.peers if peer.name not in now]
        if (added or taken_out) and self.setup.why_no_changes is not None:
            raise ConfigError(self.setup.why_no_changes, key="peers")
        await self._keep_list()
        self._file = new
        for entry in added:
            self.roster.expect(entry)
        answer = await self._follow_list(taken_out)
        log.info("the list of peers was read again: %s", json.dumps(answer))
        return {"added": [entry.name for entry in added], **answer}

    async def _follow_list(self, taken_out: Sequence[str]) -> dict[str, Any]:
        """Link to whom the list names now, and go on without whom it does not; return what came of that."""
        return {}

    def status(self) -> dict[str, Any]:
        """Return what `sotto status` shows, as JSON values."""
        links = self._link_totals()
        sockets = [link.socket_bytes for link in links.values()]
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
            "worst": None if worst is None else {"peer": self.roster.name(worst.peer), "accuracy": worst.accuracy},
            "neighbors": len(links),
            "neighbors_up": sum(link.up for link in links.values()),
            "payload_bytes": self.traffic.payload_bytes,
            "frame_bytes": sum(link.frame_bytes for link in links.values()),
            "protobuf_bytes": sum(link.protobuf_bytes for link in links.values()),
            "socket_bytes": None if None in sockets else sum(size or 0 for size in sockets),
            "links": {self.roster.name(peer): self._link_status(peer, link) for peer, link in links.items()},
            "newcomers": self._newcomers(),
            "relayed": {f"{one} > {two}": size for (one, two), size in self.transport.relay.carried.items()},
            "seconds": self._now(),
            **self._figures(),
        }

    def _newcomers(self) -> list[dict[str, Any]]:
        """Return whom this peer knows beyond everybody's list, as JSON values."""
        return [
            {"index": peer, "name": entry.name, "advertise": entry.advertise, "relay": entry.relay}
            for peer, entry in self.roster.newcomers.items()
        ]

    def _link_status(self, peer: int, link: LinkRecord) -> dict[str, Any]:
        """Return what `sotto status --json` says of the link to one neighbour; bytes are what was sent over it."""
        return {
            "up": link.up,
            "problem": self.transport.refusals.get(peer) or self.transport.problems.get(peer),
            "sends": peer in self.senders,
            "receives": peer in self.receivers,
            **self.traffic.described(peer),
            "frames": link.frames,
            "payload_bytes": link.payload_bytes,
            "frame_bytes": link.frame_bytes,
            "protobuf_bytes": link.protobuf_bytes,
            "socket_bytes": link.socket_bytes,
            "packet_bytes": link.packet_bytes,
            "reconnects": link.reconnects,
            "resent_frames": link.resent_frames,
            "relayed_bytes": self.transport.relayed(peer),
            **self._link_figures(peer),
        }

    # -- small things -------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Seconds since the run began on this device, the time before a restart included."""
        return self._previous_time_s + time.monotonic() - self._started

    def _make_transport(self) -> Transport:
        config = self.config
        if self.me in self.setup.first_members:
            for sentence in unreachable_pairs(config, self.setup.schedule, only=self.me):
                raise ConfigError(sentence, key="peers")
        neighbors = [self.roster.neighbor(peer) for peer in self._linked()]
        hello = HelloInfo(
            run=config.run.name,
            algorithm=config.algorithm.name,
            run_digest=config.run_digest(),
            shared_sections=SHARED_SECTIONS,
            model_digest=self.trainer.start_digest(),
            graph_digest=self.setup.schedule.digest,
            num_peers=self.setup.num_peers,
            name=self.name,
            software=f"sottovoce {__version__}",
            max_frame_bytes=wire.max_frame_bytes(self.trainer.layout),
        )
        if self.access is None:
            log.warning("security.mode is insecure: no encryption, and anybody may claim to be any peer")
        return Transport(
            me=self.me,
            listen=config.peer.listen or None,
            neighbors=neighbors,
            hello=hello,
            security=self.access,
            options=config.transport,
            handler=self,
            members=self.roster.names,
            own_relay=self.roster.relay_of(self.me),
            hear=self._hear,
        )

    def _hear(self, peer: int, name: str) -> Neighbor | None:
        """Return how a caller is seen that not everybody lists; None for any other. Raises HandshakeRefused."""
        if peer >= self.setup.num_peers and self.setup.why_no_changes is not None:
            raise HandshakeRefused(f"{quote(name)} is not in everybody's list, and {self.setup.why_no_changes}")
        return self.roster.hear(peer, name)

    def _linked(self) -> Sequence[int]:
        """Return to whom there should be a link."""
        return self.neighbors

    def _open_exporter(self) -> None:
        """Serve metrics, if the configuration says so."""
        if not self.config.peer.metrics_listen:
            return
        labels = {"algorithm": self.config.algorithm.name, "version": __version__}
        self._exporter = Exporter(self.config.peer.metrics_listen, self.status, labels)
        log.info("metrics at port %d", self._exporter.port)

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload_asked.set)

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

    def _count(self, outgoing: OutgoingFrame) -> None:
        """Take note of a frame for a neighbour."""
        self.traffic.handed_over(
            outgoing.receiver,
            frame_bytes=len(outgoing.frame),
            payload_bytes=outgoing.payload_bytes,
            values=outgoing.values,
            entropy_bits=outgoing.entropy_bits,
        )

    def _link_totals(self) -> dict[int, LinkRecord]:
        """Return what went over the link to each neighbour since the run began."""
        transport = self.transport
        return {
            peer: self.traffic.total(peer, transport.counters(peer), up=transport.is_up(peer))
            for peer in self.neighbors
        }

    def _record_links(self) -> None:
        """Write the totals of the links, and make everything written visible to readers."""
        self.metrics.put(*self._link_totals().values())
        self.metrics.flush()


def evaluation_note(record: EvaluationRecord) -> str:
    """Return an evaluation as peers tell it to each other."""
    return json.dumps([record.peer, record.round, record.split, record.correct, record.total], separators=(",", ":"))


def parse_evaluation(data: bytes, peers: Container[int]) -> EvaluationRecord:
    """Return what `evaluation_note` made for one of these peers. Raises ValueError or TypeError for anything else."""
    peer, round_, split, correct, total = json.loads(data)
    counts = (*correct, *total)
    if not (isinstance(peer, int) and peer in peers and isinstance(round_, int) and split in ("test", "holdout")):
        raise ValueError("names no split")
    if len(correct) != len(total) or len(counts) > 2000 or not all(isinstance(n, int) and n >= 0 for n in counts):
        raise ValueError("its counts are not counts")
    return EvaluationRecord(peer=peer, round=round_, split=split, correct=tuple(correct), total=tuple(total))
