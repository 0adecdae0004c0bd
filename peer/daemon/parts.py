"""The parts of one peer that any way to train needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from peer import __version__
from peer.config.options import VOTE
from peer.daemon.checkpoint_cadence import CheckpointCadence, patience_s
from peer.daemon.device.limits import Limits
from peer.daemon.local_peer import LocalPeer
from peer.daemon.members.admissions import Admissions
from peer.daemon.metrics_writer import MetricsWriter
from peer.daemon.neighbors import Neighbors
from peer.daemon.notes import notes
from peer.daemon.notes.class_votes import ClassVotes
from peer.daemon.notes.divergence import Divergence, advice
from peer.daemon.notes.evaluations import Evaluations, OwnEvaluation, SampleCounts
from peer.daemon.notes.releases import Releases
from peer.daemon.runtime import Runtime
from peer.daemon.traffic import Traffic
from peer.daemon.watcher import Watcher
from peer.net.security.credentials import Credentials
from peer.node.local_steps import RecordedSteps
from peer.protocol import EQUALITY
from peer.state.admission_log import AdmissionLog
from peer.state.metrics import EvaluationRecord
from peer.train.local_step import Split, Trainer

SOFTWARE = f"sottovoce {__version__}"

Judge = Callable[[int, bytes], None]
"""Takes a note: (neighbour, bytes). Raises RemoteProtocolError."""
Greeting = Callable[[int], Iterable[bytes]]
"""Returns the notes that a neighbour should hear that is connected."""


class CommonParts:
    """The parts that do not depend on how a peer trains."""

    def __init__(self, local: LocalPeer, watcher: Watcher, wall_clock: Callable[[], float]) -> None:
        """`wall_clock` returns the seconds since 1970. Raises ConfigError and StateError."""
        self.local, self.watcher = local, watcher
        self.runtime = runtime = Runtime()
        self.neighbors = neighbors = Neighbors(Traffic(local.number, local.metrics.links()))
        config, setup, name = local.config, local.setup, local.roster.name

        def evaluated(record: EvaluationRecord) -> None:
            if record.peer != local.number:
                watcher.evaluated(record, name(record.peer))
            runtime.wake()

        if local.begins:
            # A peer learns its neighbours when it joins a run that began without it.
            schedule = setup.schedule
            neighbors.set_partners(schedule.all_senders(local.index), schedule.all_receivers(local.index))
        splits: list[Split] = ["test"]
        if len(setup.manifest.holdout[local.index]):
            splits.append("holdout")
        keep_in = local.folder.directory / "models" if config.evaluation.keep_models else None
        self.own = OwnEvaluation(local.number, local.trainer, splits, keep_in)
        self.hearsay = notes.Hearsay(local.number, local.roster, local.statements, neighbors.is_up, runtime.now)
        self.releases = Releases(self.hearsay, SOFTWARE, neighbors)
        if isinstance(local.trainer, RecordedSteps):
            local.trainer.all_speak = self.releases.have_spoken
        self.evaluations = Evaluations(
            self.hearsay,
            config.evaluation,
            config.run.rounds,
            is_former=local.roster.is_former,
            samples=SampleCounts(
                local.trainer.class_counts(),
                setup.manifest.num_samples if setup.manifest.own_labels is None else None,
            ),
            broadcast=neighbors.broadcast,
            on_news=evaluated,
            criteria=setup.criteria,
        )
        self.divergence = Divergence(
            self.hearsay,
            config.run.rounds,
            name=name,
            advice=advice(config, asynchronous=setup.spec.asynchronous, members_change=setup.why_no_changes is None),
            broadcast=neighbors.broadcast,
            stop=lambda reason: runtime.request_stop(reason, at_once=True),
        )
        self.cadence = CheckpointCadence(
            config.state,
            config.run.rounds,
            local.regular,
            recover_within_s=patience_s(config) if local.steps_are_recorded else None,
        )
        self.metrics = MetricsWriter(local.metrics, neighbors, local.roster.numbering)
        self.admissions = Admissions(
            AdmissionLog(local.folder.disk, wall_clock),
            local.roster,
            neighbors,
            local.access.revoked if isinstance(local.access, Credentials) else None,
        )
        self.class_votes = self._class_votes()
        self.limits: Limits | None = None
        """None where no limit of this device can be reached."""
        if config.limits.can_be_reached:
            disk, counters = local.folder.disk, neighbors.counters
            self.limits = Limits(config.limits, disk, counters, sync=runtime.sync, wall_clock=wall_clock)

    def _class_votes(self) -> ClassVotes | None:
        """Return the vote on the shares of the classes; None where they are known, or nothing is adjusted by them."""
        local, releases = self.local, self.releases
        data, trainer = local.config.data, local.trainer
        votes = data.partition == "own" and data.class_shares == VOTE and local.setup.training.label_adjustment
        if not votes or not isinstance(trainer, Trainer):
            return None
        return ClassVotes(
            self.hearsay,
            trainer.train_class_counts(),
            voters=frozenset(local.setup.first_members),
            total_samples=data.total_samples if data.weight_by_samples else None,
            disk=local.folder.disk,
            neighbors=self.neighbors,
            runtime=self.runtime,
            name=local.roster.name,
            all_speak=lambda: releases.all_speak(EQUALITY),
            use=trainer.know_class_shares,
        )
