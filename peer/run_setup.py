"""From a configuration to the objects of a run: graph, compressor, task, partition, participants.

What the daemon, the simulator and the command line share. This is the only module that knows how option names map to
the arguments of the layers below; it knows no network and no clock.
"""

from __future__ import annotations

import contextlib
import enum
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from peer import __version__, compress, gossip
from peer.compress.bound import BoundedCompressor
from peer.compress.layout import Layout
from peer.compress.modulo import Modulo
from peer.config import Config
from peer.errors import ConfigError
from peer.gossip import topology, validate
from peer.gossip.base import Algorithm, AlgorithmSpec, GraphNeed, NodeContext
from peer.gossip.budget import BandwidthBudget, nominal_bits, variants_of
from peer.gossip.error_feedback import final_rounds_for
from peer.gossip.graphs import GraphFile
from peer.gossip.membership import Membership, Newcomer
from peer.gossip.pairwise import PairNode
from peer.gossip.session import LatePolicy
from peer.gossip.theta import largest_stable_rate
from peer.gossip.topology import Schedule
from peer.gossip.views import ViewSchedule, restricted
from peer.node.pair_participant import PairParticipant
from peer.node.participant import LocalSteps, Participant
from peer.random import PhiloxSource
from peer.wire.last_codes import LastCodes

if TYPE_CHECKING:
    # torch is imported by whoever trains; `sotto validate` and `sotto graph` do without.
    from peer.train.local_step import Trainer
    from peer.train.partition import Manifest
    from peer.train.task import Data, Task


LEAST_OF_RATE = 0.2
"""A bandwidth budget may turn messages down as far as the averaging rate that suits them stays above this part of the
one that suits full messages: with a lower one peers would learn less from each other than the larger messages save."""


def algorithm_spec(config: Config) -> AlgorithmSpec:
    """Return the description of the configured algorithm. Raises ConfigError if there is none of that name."""
    name = config.algorithm.name
    if name not in gossip.ALGORITHMS:
        raise ConfigError(
            "is no algorithm", key="algorithm.name", value=name, valid=", ".join(sorted(gossip.ALGORITHMS))
        )
    return gossip.ALGORITHMS[name].spec


def build_compressor(config: Config) -> BoundedCompressor:
    """Return the configured compressor; `none` where the algorithm sends in full precision anyway."""
    options, spec = config.compressor, algorithm_spec(config)
    if not spec.compresses:
        return compress.build("none")
    settings: dict[str, Any] = {}
    if options.kind in ("top_k", "random_k"):
        settings = {"fraction": options.fraction}
        if options.value_bits is not None:
            settings["value_bits"] = options.value_bits
        else:
            settings["value_type"] = options.value_type
    elif options.kind == "none":
        settings = {"value_type": options.value_type}
    elif options.kind in ("qsgd", "modulo"):
        settings = {"bits": options.bits}
    elif options.kind == "grid":
        settings = {"step": options.step}
    if options.kind in ("qsgd", "random_k"):
        unbiased = options.unbiased
        settings["unbiased"] = spec.needs_unbiased if unbiased is None else unbiased
    if options.kind in ("modulo", "grid") and options.rounding is not None:
        settings["rounding"] = options.rounding
    if options.kind == "modulo":
        settings["verified"] = config.algorithm.theta == "verified"
    try:
        return compress.build(options.kind, **settings)
    except ValueError as error:
        raise ConfigError(str(error), key="compressor") from None


def build_schedule(config: Config, base: Path, num_peers: int, *, rounds_per_epoch: int | None = None) -> Schedule:
    """Return the sequence of mixing matrices. `base` is where relative paths start.

    `rounds_per_epoch` turns a period in epochs into rounds; without it (before the data is read) such a period counts
    as rounds. Raises ConfigError if the graph is impossible for that many peers.
    """
    options = config.graph
    kinds = (options.kind,) if isinstance(options.kind, str) else options.kind
    period = options.period
    if options.period_unit == "epochs" and rounds_per_epoch is not None:
        period *= rounds_per_epoch
    return topology.build_schedule(
        num_peers,
        kinds,
        weights=options.weights,
        period_rounds=period,
        degree=options.degree,
        probability=options.probability,
        seed=options.seed,
        file=None if options.file is None else _read_graph(base / options.file),
        doubly=algorithm_spec(config).graph in (GraphNeed.DOUBLY, GraphNeed.SYMMETRIC),
    )


def why_no_changes(config: Config) -> str | None:
    """Return a sentence where the members of a run cannot change; None where they can."""
    spec = algorithm_spec(config)
    if not spec.changes_members:
        able = ", ".join(each.name for each in gossip.specs() if each.changes_members)
        return f"{spec.name} needs the same peers throughout; algorithms with which members may change: {able}"
    if spec.modulo and config.algorithm.theta == "theorem":
        return 'the bound of algorithm.theta = "theorem" is that of one graph: members may change with "verified"'
    if config.rounds.late != "wait":
        return 'members may change with rounds.late = "wait" only'
    if config.compressor.budget_kbytes_per_s is not None:
        return "members cannot change in a run with compressor.budget_kbytes_per_s"
    return None


def default_averaging_rate(spec: AlgorithmSpec, compressor: BoundedCompressor, layout_size: int = 10_000) -> float:
    """Return a rate η that is known to be robust for the pair.

    Exact averaging takes 1, D² ½ (its smallest eigenvalue). With replicas the rate is 2.5 times what the compressor
    keeps. Measured with quant-sgp on an exponential graph of 8, models that nobody trains, 4 bits: at 1, 2 and 10 % of
    the coordinates rates of 0.03, 0.05 and 0.2 bring them together by a factor e in 180, 80 and 10 rounds; with 0.06,
    0.1 and 0.3 they stay apart, and runs end with that distance. With an error memory it is lower (the Sparse-Push
    paper used smaller ones still, for runs of 200 epochs).
    """
    if spec.name in ("d2", "moniqua-d2"):
        return 0.5
    if isinstance(compressor, Modulo) and spec.modulo:
        # Coarse codes need the slack matrix: see `largest_stable_rate`.
        return math.floor(100 * largest_stable_rate(compressor.bits, compressor.rounding)) / 100
    if not spec.compresses or compressor.kind == "none":
        return 1.0
    if not spec.uses_averaging_rate:
        return 1.0
    if compressor.kind == "sign":
        # Its guarantee, 1/n, is that of a vector with one large coordinate; models and gradients are far from that.
        return 0.3
    # An unbiased compressor of variance ω contracts by 1 / (1 + ω) once it is scaled down (as error feedback does).
    bound = compressor.error_bound(layout_size)
    kept = bound.contraction if bound.contraction is not None else 1.0 / (1.0 + (bound.variance or 0.0))
    if "error_memory" in spec.state:
        # It sends what is left of whole models, a replica only differences (digits, skew 0.8, top 2 % at 4 bits: worst
        # sparse-push peer 93 % at 0.02, 70 % at 0.1; MNIST alike).
        return float(f"{min(1.0, max(0.005, 0.02 * (kept / 0.02) ** 0.7)):.1g}")
    return float(f"{min(1.0, max(0.001, 2.5 * kept)):.2g}")


def averaging_rate(config: Config, compressor: BoundedCompressor | None = None) -> float:
    """Return the configured η, or the default for algorithm and compressor.

    With a bandwidth budget the default suits the smallest messages that it may choose: both ends of a link have to
    use the same rate, so that it cannot follow the decisions of one of them.
    """
    if config.algorithm.averaging_rate is not None:
        return config.algorithm.averaging_rate
    compressor = compressor or build_compressor(config)
    return default_averaging_rate(algorithm_spec(config), _reachable_variants(config, compressor)[-1])


def budget_variants(config: Config, schedule: Schedule) -> tuple[BoundedCompressor, ...]:
    """Return the compressor and what a bandwidth budget may turn it down to: as far as the rules of algorithm,
    averaging rate and graph have nothing to say against it that they do not say against the compressor itself."""
    variants = _reachable_variants(config, build_compressor(config))
    known = {finding.key for finding in _check(config, schedule, variants[0])}
    for position, variant in enumerate(variants):
        if any(finding.key not in known for finding in _check(config, schedule, variant)):
            return variants[:position]
    return variants


def _reachable_variants(config: Config, compressor: BoundedCompressor) -> tuple[BoundedCompressor, ...]:
    """Return the variants whose default averaging rate is not too far below that of the compressor."""
    if config.compressor.budget_kbytes_per_s is None:
        return (compressor,)
    spec = algorithm_spec(config)
    least = LEAST_OF_RATE * default_averaging_rate(spec, compressor)
    return tuple(c for c in variants_of(compressor) if default_averaging_rate(spec, c) >= least)


def describe_compressor(compressor: BoundedCompressor) -> str:
    """Return the compressor with its settings in a few words, such as "top_k 2 % 4 bits"."""
    words = [compressor.kind]
    for item in fields(compressor):  # type: ignore[arg-type]  # every compressor is a dataclass of its settings
        value = getattr(compressor, item.name)
        if item.name == "fraction":
            words.append(f"{100 * value:g} %")
        elif item.name in ("bits", "value_bits") and value is not None:
            words.append(f"{value} bits")
        elif isinstance(value, (str, float)) and item.name != "fraction":
            words.append(f"{value:g}" if isinstance(value, float) else value)
        elif isinstance(value, enum.Enum):
            words.append(value.name.lower())
    return " ".join(words)


def validate_config(config: Config, base: Path, num_peers: int | None = None) -> list[validate.Finding]:
    """Return what the theory says against this configuration; raises ConfigError for what is impossible."""
    count = config.num_members(num_peers or config.num_peers)
    if count < 1:
        raise ConfigError("no peers are listed", key="peers", valid="one [[peers]] table for each device")
    schedule = build_schedule(config, base, count)
    findings = list(_later_peers(config))
    findings += _check(config, schedule, build_compressor(config)) + list(_budget_findings(config, schedule))
    if config.guard.action == "rollback" and algorithm_spec(config).modulo and config.algorithm.theta == "verified":
        # Repairs and messages share one sequence of numbers, and may come in another order the second time.
        sentence = (
            "the repairs of verified codes are numbered with the messages, so that peers whose state was put back may"
            ' wait for each other; set guard.action = "stop", or algorithm.theta = "constant"'
        )
        findings.append(validate.Finding("error", "guard.action", sentence))
    # A job that names its peers without any address is for `sotto up` and the simulator.
    if any(peer.advertise is not None for peer in config.peers):
        findings += [validate.Finding("warning", "peers", sentence) for sentence in unreachable_pairs(config, schedule)]
    return findings


def _later_peers(config: Config) -> Iterator[validate.Finding]:
    """Say where peers are listed that could never join."""
    sentence = why_no_changes(config)
    if sentence is not None and any(not peer.is_first for peer in config.peers):
        yield validate.Finding("error", "peers", f"not all begin, and {sentence}")


def unreachable_pairs(config: Config, schedule: Schedule, only: int | None = None) -> list[str]:
    """Return a sentence for each two neighbours of whom neither can be dialled; `only` asks for one peer's own."""
    return [
        f"{config.peers[one].name} and {config.peers[other].name} are neighbours in this graph, and neither has an "
        "advertise address at which the other could dial it; give one of them an address or a relay, or choose a graph "
        "in which they are not neighbours"
        for one, peer in enumerate(config.peers[: schedule.num_peers])
        for other in sorted({*schedule.all_receivers(one), *schedule.all_senders(one)})
        if one < other and only in (None, one, other)
        if not any(each.advertise or each.relay for each in (peer, config.peers[other]))
    ]


def _budget_findings(config: Config, schedule: Schedule) -> Iterator[validate.Finding]:
    """Say what a bandwidth budget costs, and where it can do little or nothing."""
    if config.compressor.budget_kbytes_per_s is None:
        return
    key, spec = "compressor.budget_kbytes_per_s", algorithm_spec(config)
    if spec.asynchronous:
        sentence = f"{spec.name} has no rounds that a budget could be shared out to; leave this key unset"
        yield validate.Finding("error", key, sentence)
        return
    sentence = "a budget follows the clock: two runs of this configuration no longer end in the same bits"
    yield validate.Finding("warning", key, sentence)
    compressor = build_compressor(config)
    if len(variants_of(compressor)) == 1:
        kind = compressor.kind if spec.compresses else f"{spec.name}, which sends in full precision,"
        sentence = (
            f"{kind} has nothing to turn down, so that peers can only slow down to keep to the budget; use top_k,"
            " random_k, qsgd or modulo for messages that become smaller"
        )
        yield validate.Finding("warning", key, sentence)
    elif len(budget_variants(config, schedule)) == 1:
        sentence = (
            "this algorithm, averaging rate and graph leave no room for smaller messages, so that peers can only slow"
            " down to keep to the budget; leave algorithm.averaging_rate unset, or lower it"
        )
        yield validate.Finding("warning", key, sentence)


def _check(config: Config, schedule: Schedule, compressor: BoundedCompressor) -> list[validate.Finding]:
    return validate.check(
        algorithm_spec(config),
        schedule,
        compressor,
        averaging_rate=averaging_rate(config),
        learning_rate=config.training.learning_rate,
        momentum=config.training.momentum,
        beta=config.training.beta,
        local_steps=config.training.local_steps,
        late=config.rounds.late,
        max_skipped_rounds=config.rounds.max_skipped_rounds,
        rounds=config.run.rounds,
        final_rounds=final_rounds(config, schedule),
        theta_mode=config.algorithm.theta,
        theta=config.algorithm.theta_value,
        server=config.algorithm.server,
        push_weight_guard=config.algorithm.push_weight_guard,
        min_push_weight=config.guard.min_push_weight,
    )


def refuse_errors(findings: Sequence[validate.Finding]) -> list[validate.Finding]:
    """Raise ConfigError for the first error among the findings; return the warnings."""
    for finding in findings:
        if finding.level == "error":
            raise ConfigError(finding.sentence, key=finding.key)
    return [finding for finding in findings if finding.level == "warning"]


def machine_facts() -> dict[str, str]:
    """Return what bit identity depends on: processor, Python, numpy and torch version."""
    import torch

    return {
        "processor": _processor_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "sottovoce": __version__,
    }


@dataclass(frozen=True)
class RunSetup:
    """Everything that the peers of a run share, computed alike on every device."""

    config: Config
    base: Path
    num_peers: int
    """How many the lists of all devices have in common."""
    task: Task
    manifest: Manifest
    schedule: Schedule
    """Of the members that the run starts with."""
    compressor: BoundedCompressor
    rounds_per_epoch: int = 1

    @classmethod
    def open(cls, config: Config, base: Path, num_peers: int | None = None) -> RunSetup:
        """Read the task and its data, deal it out and build the graph. Imports torch."""
        from peer.train import tasks

        count = num_peers or config.num_listed
        task = tasks.resolve_task(
            config.training.task,
            dict(config.training.task_options),
            directory=None if config.data.directory is None else base / config.data.directory,
        )
        manifest = deal(config, task.train_data(), count)
        largest = max(len(indices) for indices in manifest.train)
        if config.peer.index >= count:
            # A peer that was admitted takes a share of its own, longer list; nobody else's changes.
            manifest = deal(config, task.train_data(), config.peer.index + 1)
        steps = config.training.batch_size * config.training.local_steps
        rounds_per_epoch = max(1, math.ceil(largest / steps))
        schedule = build_schedule(config, base, config.num_members(count), rounds_per_epoch=rounds_per_epoch)
        return cls(config, base, count, task, manifest, schedule, build_compressor(config), rounds_per_epoch)

    @cached_property
    def spec(self) -> AlgorithmSpec:
        return algorithm_spec(self.config)

    @cached_property
    def variants(self) -> tuple[BoundedCompressor, ...]:
        """The compressor and what the bandwidth budget may turn it down to."""
        return budget_variants(self.config, self.schedule)

    def budget(self, peer: int, layout: Layout) -> BandwidthBudget | None:
        """Return what keeps one peer's links below the configured bandwidth, if there is a limit."""
        limit = self.config.compressor.budget_kbytes_per_s
        if limit is None:
            return None
        whole_below = self.config.algorithm.whole_below
        costs = [nominal_bits(variant, layout, whole_below) for variant in self.variants]
        return BandwidthBudget(1000.0 * limit, self.schedule.all_receivers(peer), costs)

    @cached_property
    def max_lead(self) -> int:
        """How many rounds an in-neighbour can be ahead: it cannot pass what it hears of us by a detour."""
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
        """Who takes part in round 0; the others may join later."""
        return tuple(range(self.schedule.num_peers))

    @cached_property
    def why_no_changes(self) -> str | None:
        """A sentence where members cannot change during the run; None where they can."""
        return why_no_changes(self.config)

    def views(self, peer: int) -> ViewSchedule:
        """Return a schedule for one peer that follows the members."""
        return ViewSchedule(max(self.num_peers, peer + 1), Membership(self.first_members), self.graph_of)

    def graph_of(self, members: tuple[int, ...]) -> Schedule:
        """Return the schedule over the positions of some members, the same on every device.

        Where the configured kind has no graph for that many (a hypercube of 7), a ring takes its place; a graph from a
        file keeps the edges between those that are left, if they still hold together.
        """
        if members == self.first_members:
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
                kept = [restricted(matrix.dense(), members) for matrix in self.schedule.matrices]
                graph = Schedule.from_matrices(kept, self.schedule.period_rounds)
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
                raise ConfigError("a graph from a file has no place for a peer that joins", key="graph.file")
            union = restricted(np.sum([matrix.dense() for matrix in self.schedule.matrices], axis=0), members)
            kept = Schedule.from_matrices([union / union.sum(axis=0)])
            if len(members) > 1 and not kept.is_strongly_connected:
                raise ConfigError(
                    "without that peer not every peer hears of every other; let the run end, or give it another graph",
                    key="graph.file",
                )
        if len(members) > 1:
            refuse_errors(_check(self.config, self.graph_of(members), self.compressor))

    def trainer(self, peer: int) -> Trainer:
        """Return the training side of one peer."""
        from peer.train.local_step import Trainer

        return Trainer(
            self.task,
            self.config.training,
            rounds=self.config.run.rounds,
            seed=self.config.run.seed,
            peer=peer,
            train_indices=self.manifest.train[peer],
            holdout_indices=self.manifest.holdout[peer],
            device=self.config.peer.device,
            base=self.base,
        )

    def node(self, peer: int, layout: Layout) -> NodeContext:
        """Return what stays the same for one peer's algorithm."""
        options = self.config.algorithm
        return NodeContext(
            peer=peer,
            schedule=self.schedule if self.why_no_changes else self.views(peer),
            layout=layout,
            draw_source=PhiloxSource(self.config.run.seed, peer),
            compressor=self.compressor,
            averaging_rate=averaging_rate(self.config, self.compressor),
            whole_below=options.whole_below,
            push_weight_guard=options.push_weight_guard,
            rounds=self.config.run.rounds,
            final_rounds=final_rounds(self.config, self.schedule),
            theta=(options.theta_value,),
            verified=options.theta == "verified",
            settings={
                "seed": self.config.run.seed,
                "server": options.server,
                "model_bits": options.model_bits,
                "model_range": options.model_range,
                "theta_mode": options.theta,
                "bits_between": self._bits_between,
            },
        )

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
        observe: Callable[[str, int, int, bytes], None] | None = None,
        cpu_clock: Callable[[], float] | None = None,
    ) -> Participant:
        """Return one peer, ready for round 0."""
        algorithm = gossip.build(self.config.algorithm.name, self.node(peer, layout), x0)
        return Participant(
            peer=peer,
            algorithm=algorithm,
            local_steps=local_steps,
            layout=layout,
            max_lead=self.max_lead,
            late=self.late_policy,
            budget=self.budget(peer, layout),
            variants=self.variants,
            why_no_changes=self.why_no_changes,
            check_members=self.check_members,
            num_listed=self.num_peers,
            check_newcomer=check_newcomer,
            last_codes=self._last_codes(algorithm),
            observe=observe,
            **({} if cpu_clock is None else {"cpu_clock": cpu_clock}),
        )

    def _last_codes(self, algorithm: Algorithm) -> LastCodes | None:
        """Return what modulo codes are told against, where the configuration lets them be: hashes have to tell when the
        two ends hold different codes."""
        config = self.config
        if not (algorithm.spec.modulo and config.compressor.against_last and config.algorithm.theta == "verified"):
            return None
        # A budget chooses bits by the clock and a GPU rounds as it likes: repeated after a power cut, they give others.
        repeatable = config.compressor.budget_kbytes_per_s is None and config.peer.device == "cpu"
        return LastCodes(algorithm.node.layout, algorithm.x.dtype, tells_changes=repeatable)

    def pair_node(self, peer: int, layout: Layout, x0: npt.NDArray[np.float32]) -> PairNode:
        """Return one peer's side of the configured asynchronous algorithm."""
        return gossip.build_pair_node(self.config.algorithm.name, self.node(peer, layout), x0)

    def pair_participant(
        self,
        peer: int,
        local_steps: LocalSteps,
        layout: Layout,
        x0: npt.NDArray[np.float32],
        *,
        cpu_clock: Callable[[], float] | None = None,
    ) -> PairParticipant:
        """Return one peer of an asynchronous run, ready for its first step. Raises ConfigError for a momentum that
        follows rounds."""
        if local_steps.needs_displacement:
            raise ConfigError(
                f"follows the rounds of all peers, and {self.config.algorithm.name} has none",
                key="training.momentum",
                value=self.config.training.momentum,
                valid="none, heavy-ball, nesterov, adam",
            )
        return PairParticipant(
            algorithm=self.pair_node(peer, layout, x0),
            local_steps=local_steps,
            **({} if cpu_clock is None else {"cpu_clock": cpu_clock}),
        )


def deal(config: Config, data: Data, num_peers: int) -> Manifest:
    """Return which samples each peer trains on and keeps as hold-out."""
    from peer.train import partition

    options = config.data
    return partition.partition(
        data.labels.numpy(),
        num_peers,
        options.partition,
        seed=config.run.seed,
        skew=options.skew,
        alpha=options.alpha,
        labels_per_peer=options.labels_per_peer,
        holdout_fraction=options.holdout_fraction,
    )


def _read_graph(path: Path) -> GraphFile:
    try:
        return GraphFile(str(path), path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text", key="graph.file", value=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", key="graph.file", value=str(path)) from None


def final_rounds(config: Config, schedule: Schedule) -> int:
    """Return how many of the last rounds are full-precision gossip (scsp).

    "auto": as many as shrink the consensus distance a thousandfold on this graph, at most half of the run.
    """
    if config.algorithm.name != "scsp":
        return 0
    wanted = config.algorithm.final_rounds
    if wanted != "auto":
        return wanted
    contraction = min(1.0 - schedule.spectral_gap, 1.0 - 1e-9)
    return min(final_rounds_for(1.0, max(0.0, contraction), 1e-3), config.run.rounds // 2)


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # Not Linux: the platform module knows a shorter name.
    return platform.processor() or platform.machine()
