"""The objects of a run: task, partition, graph, and for each peer its trainer and its participant.

Daemon, simulator and export share it. It knows no network and no clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from peer import gossip
from peer.compress.base import Compressor
from peer.compress.layout import Layout
from peer.compress.modulo import Modulo
from peer.compress.payload import FloatArray
from peer.config.options import Config, TrainingOptions
from peer.config.precision_choice import FASTEST, Precision, PrecisionChoice
from peer.errors import ConfigError, LocalProtocolError, TaskError
from peer.gossip import topology
from peer.gossip.base import Algorithm, AlgorithmSpec, MomentumRule, NodeContext, NoMomentum
from peer.gossip.budget import BandwidthBudget, nominal_bits
from peer.gossip.late_neighbors import LatePolicy
from peer.gossip.membership import Membership, Newcomer
from peer.gossip.mixing_matrix import mean_matrix
from peer.gossip.options import FinalRounds, LowRankOptions, ModuloOptions, ServerOptions
from peer.gossip.shared_copies import SharedCopies
from peer.gossip.topology import Schedule
from peer.gossip.views import ViewSchedule
from peer.node.frame_account import Decode, decode_from
from peer.node.local_steps import LocalSteps, RecordedSteps
from peer.node.membership import MembershipRules
from peer.node.pair_participant import PairParticipant
from peer.node.participant import Participant
from peer.node.statements import Statements
from peer.random import PhiloxSource
from peer.records import Criterion, ModelParts
from peer.run.plan import (
    algorithm_spec,
    averaging_rate,
    budget_variants,
    build_compressor,
    build_schedule,
    check_rules,
    corrects_drift,
    drift_gain,
    final_rounds,
    first_theta,
    privacy_findings,
    refuse_errors,
    robust_mixing,
    why_no_changes,
    why_no_rejoin,
)
from peer.run.privacy_budget import Budget, plan_budget
from peer.train import tasks
from peer.train.evaluation import Evaluation
from peer.train.fastest import fastest
from peer.train.label_adjustment import declared_shares
from peer.train.learning_rate import learning_rate, step_size_decay
from peer.train.local_step import Split, Trainer, check_data, make_momentum
from peer.train.metrics import UNDECLARED
from peer.train.momentum import Momentum
from peer.train.own_task import criteria_of
from peer.train.partition import Manifest, own_samples, partition
from peer.train.precision import precision_of
from peer.train.private_step import SECRET_BYTES, GaussianMechanism
from peer.train.task import Data, Task
from peer.train.threads import use_one_thread
from peer.wire.data_meaning import Meaning
from peer.wire.last_codes import LastCodes
from peer.wire.start_model import StartModel


class PeerTrainer(LocalSteps, Protocol):
    """The training side of a peer, as daemon and simulator see it: a `Trainer`, or a loop of the user's own."""

    @property
    def layout(self) -> Layout: ...
    @property
    def repeatable(self) -> bool:
        """Whether a local step that is computed again, or read from the journal, gives the same bits."""
        ...

    @property
    def meanings(self) -> tuple[Meaning, ...]:
        """Meanings of the numbers in this device's data, as far as they are known."""
        ...

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The figures of `evaluate`."""
        ...

    def initial_vector(self) -> npt.NDArray[np.float32]: ...
    def start_model(self) -> StartModel: ...
    def class_counts(self) -> tuple[int, ...]: ...
    def evaluate(self, z: FloatArray, split: Split = "test") -> Evaluation: ...
    def save_model(self, z: FloatArray, path: Path) -> None: ...
    def model_parts(self) -> ModelParts | None:
        """See `train.model_file.model_parts`."""
        ...


log = logging.getLogger("sotto")


@dataclass(frozen=True)
class RunSetup:
    """Everything that the peers of a run share, computed alike on every device; where each device has its own data,
    also this one's."""

    config: Config
    base: Path
    num_peers: int
    """Number of peers that the lists of all devices have in common."""
    _task: Task | None
    manifest: Manifest
    schedule: Schedule
    """Schedule of the members with which the run starts."""
    compressor: Compressor
    averaging_rate: float
    """η, the part of the way that a round moves a model towards those of its neighbours."""
    first_theta: float
    """θ of modulo codes in the first round; of all rounds where it is constant."""
    rounds_per_epoch: int = 1
    shared_copies: SharedCopies | None = None
    """Replicas that all peers of this process keep in common, if they do."""
    precision: Precision = "float32"
    """Precision of models where `training.precision` is "fastest": that of this device's peer. Without a peer, that of
    all models, in which models of peers that chose differently can be compared."""
    criteria_of_loop: tuple[Criterion, ...] = UNDECLARED
    """Where there is no task, the figures that scripts may tell."""

    @classmethod
    def open(
        cls,
        config: Config,
        base: Path,
        num_peers: int | None = None,
        *,
        rates: tuple[float, float] | None = None,
        former_order: bool = False,
    ) -> RunSetup:
        """Read the task and its data, deal it out and build the graph. `rates`: η and the first θ that the run began
        with, where those are known. `former_order` is as for `tasks.configured`."""
        refuse_errors([*privacy_findings(config)])
        count = num_peers or config.num_listed
        try:
            task = tasks.configured(config, base, former_order=former_order)
            data = task.train_data()
        except TaskError as error:
            if config.data.directory is not None and not any((base / config.data.directory).glob("*")):
                error.args = (f"data.directory: there is nothing at {base / config.data.directory}; {error}",)
            raise
        check_data(task, data, "training")
        for sentence in tasks.found_in(task, data):
            log.info("data: %s", sentence)
        manifest = deal(config, data, count)
        rounds_per_epoch = 1
        if manifest.own_labels is None:
            largest = max(len(indices) for indices in manifest.train.values())
            if config.peer.index >= count:
                # A peer that was admitted takes a share of its own, longer list; nobody else's changes.
                manifest = deal(config, data, config.peer.index + 1)
            steps = config.training.batch_size * config.training.local_steps
            rounds_per_epoch = max(1, math.ceil(largest / steps))
        schedule = build_schedule(config, base, config.num_members(count), rounds_per_epoch=rounds_per_epoch)
        compressor = build_compressor(config)
        rate, theta = rates or (averaging_rate(config, compressor), first_theta(config))
        return cls(config, base, count, task, manifest, schedule, compressor, rate, theta, rounds_per_epoch)

    @classmethod
    def of_loop(
        cls,
        config: Config,
        base: Path,
        num_peers: int | None = None,
        *,
        rates: tuple[float, float] | None = None,
        criteria: tuple[Criterion, ...] = UNDECLARED,
    ) -> RunSetup:
        """Return the setup of a run whose local steps are those of the user's scripts, which tell figures by some
        `criteria`: it knows no task and no data."""
        refuse_errors([*privacy_findings(config)])
        count = num_peers or config.num_listed
        nothing = {peer: np.empty(0, np.int64) for peer in range(max(count, config.peer.index + 1))}
        samples = Manifest(0, nothing, nothing, own_labels="")
        schedule = build_schedule(config, base, config.num_members(count))
        compressor = build_compressor(config)
        rate, theta = rates or (averaging_rate(config, compressor), first_theta(config))
        setup = cls(config, base, count, None, samples, schedule, compressor, rate, theta)
        return replace(setup, criteria_of_loop=criteria)

    @property
    def task(self) -> Task:
        """The task that is learned, if there is one."""
        if self._task is None:
            raise LocalProtocolError("a run whose loop is the user's has no task")
        return self._task

    @cached_property
    def spec(self) -> AlgorithmSpec:
        return algorithm_spec(self.config)

    @cached_property
    def criteria(self) -> tuple[Criterion, ...]:
        """The figures of an evaluation, the one that models are compared by first."""
        return self.criteria_of_loop if self._task is None else criteria_of(self._task)

    @property
    def criterion(self) -> Criterion:
        """The figure by which models are compared."""
        return self.criteria[0]

    @property
    def trained_in(self) -> str:
        """The precision in which peers train; float32, which models are kept in, where only a script knows."""
        return "float32" if self._task is None else precision_of(self._task, self.training)

    @cached_property
    def variants(self) -> tuple[Compressor, ...]:
        """The compressor and its smaller variants for the bandwidth budget."""
        return budget_variants(self.config, self.schedule)

    def budget(self, peer: int, layout: Layout) -> BandwidthBudget | None:
        """Return the budget that keeps one peer's links below the configured bandwidth, if there is a limit."""
        limit = self.config.compressor.budget_kbytes_per_s
        if limit is None:
            return None
        whole_below = self.config.algorithm.whole_below
        costs = [nominal_bits(variant, layout, whole_below) for variant in self.variants]
        return BandwidthBudget(1000.0 * limit, self.schedule.all_receivers(peer), costs)

    @cached_property
    def max_lead(self) -> int:
        """Rounds that an in-neighbour can be ahead: it cannot pass our messages, which reach it by a detour."""
        lead = self.schedule.diameter or self.num_peers
        # The graph of single rounds can be sparser than the union over the schedule.
        lead *= max(1, self.schedule.cycle_rounds)
        return lead + (self.config.rounds.max_skipped_rounds + 1) * lead * (self.config.rounds.late == "skip") + 1

    @cached_property
    def late_policy(self) -> LatePolicy | None:
        options = self.config.rounds
        if options.late == "wait":
            return None
        return LatePolicy(
            after_s=options.late_after_s,
            max_skipped=options.max_skipped_rounds,
            adaptive=options.deadlines == "adaptive",
            silent_after_s=options.leave_out_after_s,
        )

    @cached_property
    def first_members(self) -> tuple[int, ...]:
        """Members of round 0; the others may join later."""
        return tuple(range(self.schedule.num_peers))

    @cached_property
    def why_no_changes(self) -> str | None:
        """A sentence if members cannot change during the run; None if they can."""
        return why_no_changes(self.config)

    def views(self, peer: int) -> ViewSchedule:
        """Return a schedule for one peer that follows the members."""
        return ViewSchedule(max(self.num_peers, peer + 1), Membership(self.first_members), self.graph_of)

    def graph_of(self, members: tuple[int, ...]) -> Schedule:
        """Return the schedule over the positions of some members, the same on every device.

        If the configured kind has no graph for that many (a hypercube of 7), a ring takes its place; a graph from a
        file keeps the edges between the peers left, if it is still connected.
        """
        if members is self.first_members or members == self.first_members:
            return self.schedule
        if members not in self._graphs:
            self._graphs[members] = self._graph_without_checks(members)
        return self._graphs[members]

    @cached_property
    def _graphs(self) -> dict[tuple[int, ...], Schedule]:
        return {}

    def _graph_without_checks(self, members: tuple[int, ...]) -> Schedule:
        if len(members) == 1:
            return Schedule.from_matrices([[[1.0]]])
        graph: Schedule | None = None
        if self.config.graph.file is not None:
            if set(members) <= set(self.first_members):
                kept = [matrix.among(members) for matrix in self.schedule.matrices]
                graph = Schedule(kept, self.schedule.period_rounds)
        else:
            with contextlib.suppress(ConfigError):
                per_epoch = self.rounds_per_epoch
                graph = build_schedule(self.config, self.base, len(members), rounds_per_epoch=per_epoch)
        if graph is None or not graph.is_strongly_connected:
            graph = topology.build_schedule(len(members), "ring")
        return graph

    def check_members(self, members: tuple[int, ...]) -> None:
        """Raise ConfigError if the run cannot go on between these members."""
        if self.config.graph.file is not None:
            if not set(members) <= set(self.first_members):
                raise ConfigError("a graph from a file cannot take in a peer that joins", key="graph.file")
            if len(members) > 1 and not mean_matrix(self.schedule.matrices).among(members).is_strongly_connected:
                raise ConfigError(
                    "without that peer the graph is no longer connected; let the run end, or use another graph",
                    key="graph.file",
                )
        if len(members) > 1:
            refuse_errors(check_rules(self.config, self.graph_of(members), self.compressor))

    @cached_property
    def training(self) -> TrainingOptions:
        """The options of the local step.

        If all peers hold one model at every step, or drift is taken out of their gradients, labels are not adjusted:
        the peers together draw the classes in their shares, and classes that one lacks others have. If momentum and
        weight decay act on the average, the local step has none. If each device chooses its precision, it is that of
        this one.
        """
        options, changes = self.config.training, dict[str, object]()
        if options.precision == FASTEST:
            changes["precision"] = self.precision
        drifts = not (self._peers_hold_one_model or corrects_drift(self.config))
        if options.label_adjustment == "auto" and not drifts:
            changes["label_adjustment"] = False
        if self._momentum_of_mean:
            changes |= {"momentum": "none", "weight_decay": 0.0, "clip_norm": None}
        return options.model_copy(update=changes)

    @property
    def _momentum_of_mean(self) -> bool:
        """Whether momentum and weight decay act on the mean of all peers' gradients."""
        training = self.config.training
        return self.spec.acts_on_mean(training.momentum, training.local_steps)

    def _mean_momentum(self, layout: Layout) -> Callable[[], MomentumRule]:
        """Return what makes the momentum of the mean of all peers' gradients or steps."""
        if self._momentum_of_mean:
            return partial(make_momentum, self.config.training, layout)
        beta = self.config.algorithm.outer_momentum
        return partial(Momentum, "nesterov", beta=beta) if beta and self.spec.momentum_of_mean else NoMomentum

    @property
    def _peers_hold_one_model(self) -> bool:
        """Whether all peers take each step from the same model: they average gradients before it, or whole models
        after it."""
        if self.spec.momentum_of_mean or not self.spec.local_steps:
            return True
        if not self.spec.mixes_after_step or self.config.training.local_steps > 1:
            return False
        return all(matrix.is_mean for matrix in self.schedule.matrices)

    @cached_property
    def class_shares(self) -> npt.NDArray[np.float64] | None:
        """The shares of the classes in the data of all peers; None if they can be counted, there are none, or the
        devices are to vote on them."""
        if self.manifest.own_labels is None:
            return None
        return declared_shares(self.task, self.config.data.class_shares)

    @cached_property
    def step_weight(self) -> float:
        """Factor of the length of this peer's steps, by `data.weight_by_samples`."""
        options, num_samples = self.config.data, self.manifest.num_samples
        if self.manifest.own_labels is None or not options.weight_by_samples:
            return 1.0
        if options.total_samples is None or options.total_samples < num_samples:
            raise ConfigError(
                f"this device alone has {num_samples} samples",
                key="data.total_samples",
                value=options.total_samples,
                valid="the samples of all devices together",
            )
        return num_samples * self.num_peers / options.total_samples

    def short_shard(self, peers: Iterable[int]) -> str | None:
        """Return a sentence if a batch is larger than the shard of one of these peers; None if none is."""
        fewest, peer = min((len(self.manifest.train[peer]), peer) for peer in peers)
        size = self.config.training.batch_size
        if size <= fewest:
            return None
        return (
            f"training.batch_size is {size}, but peer {peer} has {fewest} training samples, so each of its batches has"
            " samples more than once; lower it, or use more data or fewer peers"
        )

    def budget_of_privacy(self, peer: int) -> Budget | None:
        """Return the privacy budget of one peer's steps; None if they are not private. Raises ConfigError."""
        if not self.config.privacy.is_on:
            return None
        return plan_budget(self.config, len(self.manifest.train[peer]))

    def _mechanism(self, peer: int, secret: bytes | None) -> GaussianMechanism | None:
        budget = self.budget_of_privacy(peer)
        if budget is None:
            return None
        options = self.config.privacy
        return GaussianMechanism(
            budget.noise_multiplier, options.clip_norm, secret or simulated_secret(options.simulation_seed, peer)
        )

    def trainer(self, peer: int, *, secret: bytes | None = None) -> Trainer:
        """Return the training side of one peer. `secret`: source of the noise and sampling of private steps; without
        it, as in simulations, `simulated_secret`, which protects nothing. Raises ConfigError for a peer whose data only
        its device has."""
        if peer not in self.manifest.train:
            raise ConfigError(f"only the device of peer {peer} has its data", key="data.partition", value="own")
        return Trainer(
            self.task,
            self.training,
            rounds=self.config.run.rounds,
            seed=self.config.run.seed,
            peer=peer,
            train_indices=self.manifest.train[peer],
            holdout_indices=self.manifest.holdout[peer],
            class_shares=self.class_shares,
            step_weight=self.step_weight,
            privacy=self._mechanism(peer, secret),
            alike_in_all_precisions=self.config.training.precision == FASTEST,
            device=self.config.peer.device,
            base=self.base,
        )

    def fastest_precision(self, peer: int) -> PrecisionChoice:
        """Measure training steps of one peer on this machine; return the precision in which they take least time, and
        float32 if they are private. Raises SottoError if the peer cannot train at all."""
        if self.config.privacy.is_on:
            return PrecisionChoice("float32")
        return fastest(lambda precision: replace(self, precision=precision).trainer(peer))

    def node(self, peer: int, layout: Layout) -> NodeContext:
        """Return the constant context of one peer's algorithm."""
        options = self.config.algorithm
        schedule = self.schedule if self.why_no_changes else self.views(peer)
        return NodeContext(
            peer=peer,
            schedule=schedule,
            layout=layout,
            draw_source=PhiloxSource(self.config.run.seed, peer),
            compressor=self.compressor,
            averaging_rate=self.averaging_rate,
            whole_below=options.whole_below,
            packed=self.config.compressor.coding == "packed",
            push_weight_guard=options.push_weight_guard,
            drift_gain=partial(drift_gain, self.config, schedule, self.averaging_rate)
            if corrects_drift(self.config)
            else None,
            rounds=self.config.run.rounds,
            largest_loss=self.config.guard.max_loss,
            seed=self.config.run.seed,
            modulo=ModuloOptions(
                theta=(self.first_theta,),
                theta_mode=options.theta,
                verified=options.theta == "verified",
                step_size_decay=self._step_size_decay if options.theta == "theorem" else (1.0,),
                bits_between=self._bits_between,
            ),
            final=FinalRounds(count=final_rounds(self.config, self.schedule)),
            in_bfloat16=options.memory == "bfloat16",
            outer_rate=options.outer_rate,
            low_rank=LowRankOptions(rank=options.rank, bits=options.factor_bits, exponents=options.factor_exponents),
            robust=robust_mixing(self.config),
            momentum=self._mean_momentum(layout),
            server=ServerOptions(peer=options.server, model_bits=options.model_bits, model_range=options.model_range),
            shared_copies=self.shared_copies,
        )

    @cached_property
    def _step_size_decay(self) -> tuple[float, ...]:
        """C_α of Theorem 2, round by round."""
        rounds = self.config.run.rounds
        return step_size_decay(learning_rate(self.config.training, rounds, t) for t in range(rounds))

    @property
    def _bits_between(self) -> tuple[int, int] | None:
        """The fewest and the most bits that a peer's modulo codes may have."""
        least, most = self.variants[-1], self.variants[0]
        return (least.bits, most.bits) if isinstance(least, Modulo) and isinstance(most, Modulo) else None

    def participant(
        self,
        peer: int,
        local_steps: LocalSteps,
        layout: Layout,
        x0: npt.NDArray[np.float32],
        *,
        check_newcomer: Callable[[int, Newcomer], None] = lambda peer, newcomer: None,
        statements: Statements | None = None,
        name_of: Callable[[int], str] = "peer {}".format,
        word_suffices: Callable[[], bool] = lambda: False,
        observe: Callable[[str, int, int, bytes], None] | None = None,
        decode: Decode = decode_from,
        cpu_clock: Callable[[], float] | None = None,
    ) -> Participant:
        """Return one peer, ready for round 0."""
        node = self.node(peer, layout)
        rule = local_steps.rule_of_mean if isinstance(local_steps, RecordedSteps) else None
        if rule is not None:
            node = replace(node, momentum=lambda: rule)
        algorithm = gossip.build(self.config.algorithm.name, node, x0)
        return Participant(
            peer=peer,
            algorithm=algorithm,
            local_steps=local_steps,
            layout=layout,
            max_lead=self.max_lead,
            late=self.late_policy,
            budget=self.budget(peer, layout),
            variants=self.variants,
            membership_rules=MembershipRules(
                why_no_changes=self.why_no_changes,
                check_members=self.check_members,
                num_listed=self.num_peers,
                check_newcomer=check_newcomer,
                statements=statements,
                by_majority=self.config.rounds.lost_after_s is not None,
                name_of=name_of,
                why_no_rejoin=why_no_rejoin(self.config),
                word_suffices=word_suffices,
            ),
            last_codes=self._last_codes(algorithm),
            observe=observe,
            decode=decode,
            **({} if cpu_clock is None else {"cpu_clock": cpu_clock}),
        )

    def _last_codes(self, algorithm: Algorithm) -> LastCodes | None:
        """Return the last codes, against which modulo codes are coded, if the configuration allows it: hashes have to
        show when the two ends hold different codes."""
        config = self.config
        if not (algorithm.spec.modulo and config.compressor.against_last and config.algorithm.theta == "verified"):
            return None
        # A budget chooses bits by the clock and a GPU rounds as it likes: repeated after a power cut, they give other
        # codes.
        repeatable = config.compressor.budget_kbytes_per_s is None and config.peer.device == "cpu"
        return LastCodes(algorithm.node.layout, algorithm.x.dtype, tells_changes=repeatable)

    def pair_participant(
        self,
        peer: int,
        local_steps: LocalSteps,
        layout: Layout,
        x0: npt.NDArray[np.float32],
    ) -> PairParticipant:
        """Return one peer of an asynchronous run, ready for its first step. Raises ConfigError for a momentum that
        follows rounds."""
        if local_steps.needs_displacement:
            raise ConfigError(
                f"quasi-global momentum needs rounds, but {self.config.algorithm.name} has none",
                key="training.momentum",
                value=self.config.training.momentum,
                valid="none, heavy-ball, nesterov, adam, adamw, muon",
            )
        algorithm = gossip.build_pair_node(self.config.algorithm.name, self.node(peer, layout), x0)
        return PairParticipant(algorithm=algorithm, local_steps=local_steps)


def settle_precision(config: Config, base: Path, num_peers: int) -> tuple[Config, PrecisionChoice | None]:
    """Return a configuration with the precision in which all peers of this process train: if it is "fastest", the one
    measured with steps of peer 0, and their times. Raises SottoError."""
    if config.training.precision != FASTEST:
        return config, None
    # Steps are measured with as many threads as they will have.
    use_one_thread()
    choice = RunSetup.open(config, base, num_peers).fastest_precision(0)
    training = config.training.model_copy(update={"precision": choice.precision})
    return config.model_copy(update={"training": training}), choice


def simulated_secret(seed: int, peer: int) -> bytes:
    """Return the stand-in for the secret of a simulated peer: everybody can compute it."""
    return hashlib.blake2b(f"{seed} {peer}".encode(), digest_size=SECRET_BYTES, person=b"sotto simulated").digest()


def deal(config: Config, data: Data, num_peers: int) -> Manifest:
    """Return the samples on which each peer trains and those that it holds out; if each device has its own data, this
    peer's."""
    options = config.data
    if options.partition == "own":
        fraction = options.holdout_fraction
        return own_samples(data.labels.numpy(), config.peer.index, seed=config.run.seed, holdout_fraction=fraction)
    return partition(
        data.labels.numpy(),
        num_peers,
        options.partition,
        seed=config.run.seed,
        skew=options.skew,
        alpha=options.alpha,
        labels_per_peer=options.labels_per_peer,
        holdout_fraction=options.holdout_fraction,
    )
