"""Consequences of a configuration before any data is read: algorithm, compressor, rates, graph, findings of the theory.

Here and in `setup` option names become the arguments of the layers below. Neither torch nor data are needed, so
that `sotto lab validate` answers at once.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from peer import compress, gossip
from peer.compress.base import Compressor
from peer.config.options import OWN_LOOP, VOTE, Config, TrainingOptions
from peer.errors import ConfigError, why_not_utf8
from peer.files import instead_of, missing_module
from peer.gossip import topology, validate
from peer.gossip.averaging_rate import default_averaging_rate
from peer.gossip.base import AlgorithmSpec, GraphNeed
from peer.gossip.budget import variants_of
from peer.gossip.drift import default_gain
from peer.gossip.error_feedback import final_rounds_for
from peer.gossip.graphs import GraphFile
from peer.gossip.options import RobustMixing
from peer.gossip.topology import Schedule
from peer.gossip.views import ViewSchedule
from peer.native import bfloat16_is_emulated
from peer.native import missing as kernels_missing
from peer.net.address import dialled_address
from peer.train.listed import TASKS, task_info

LEAST_OF_RATE = 0.2
"""Least averaging rate of the smallest messages of a bandwidth budget, as a fraction of that for full messages: with a
lower one peers would learn less from each other than smaller messages save."""


def algorithm_spec(config: Config) -> AlgorithmSpec:
    """Return the description of the configured algorithm. Raises ConfigError if there is none of that name."""
    name = config.algorithm.name
    if name not in gossip.ALGORITHMS:
        raise ConfigError(
            "unknown algorithm", key="algorithm.name", value=name, valid=", ".join(sorted(gossip.ALGORITHMS))
        )
    return gossip.ALGORITHMS[name].spec


def build_compressor(config: Config) -> Compressor:
    """Return the configured compressor; `none` where the algorithm sends in full precision anyway."""
    options, spec = config.compressor, algorithm_spec(config)
    if not spec.compresses:
        return compress.build("none")
    if options.kind not in compress.COMPRESSORS:
        valid = ", ".join(compress.COMPRESSORS)
        raise ConfigError("unknown compressor", key="compressor.kind", value=options.kind, valid=valid)
    names = compress.options_of(options.kind)
    settings = {name: value for name in names if (value := getattr(options, name)) is not None}
    if "value_bits" in settings:
        del settings["value_type"]  # The number type of values that are sent exactly.
    if "unbiased" in names:
        settings.setdefault("unbiased", spec.needs_unbiased)
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
    if options.period_unit == "epochs" and config.data.partition == "own":
        raise ConfigError(
            'an epoch is a pass over the largest share of the data, which no device knows with data.partition = "own"',
            key="graph.period_unit",
            value="epochs",
            valid="rounds",
        )
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
    """Return a sentence if the members of a run cannot change; None if they can."""
    spec = algorithm_spec(config)
    if not spec.changes_members:
        able = ", ".join(each.name for each in gossip.specs() if each.changes_members)
        return f"with {spec.name} members cannot change during a run; use one of {able}"
    if spec.modulo and config.algorithm.theta == "theorem":
        return 'with algorithm.theta = "theorem" members cannot change (its bound holds for one graph); use "verified"'
    if config.rounds.late != "wait":
        return 'members can change only with rounds.late = "wait"'
    if config.compressor.budget_kbytes_per_s is not None:
        return "with compressor.budget_kbytes_per_s members cannot change; leave that key unset"
    if config.training.momentum == "script":
        return "where scripts average gradients members cannot change: a newcomer would lack the others' optimizer"
    return None


def why_no_rejoin(config: Config) -> str | None:
    """Return a sentence if devices that were declared lost cannot take part again; None if they can."""
    if not config.rounds.rejoin:
        return "rounds.rejoin is false: a device that was declared lost cannot take part again under its name"
    if config.graph.file is not None:
        return "a graph from a file cannot take in a peer that joins"
    return why_no_changes(config)


_LOOSE_THETA = 2.0
"""θ if nothing is known of the distances between models."""
_CLOSE_THETA = 0.01


def first_theta(config: Config) -> float:
    """Return θ of modulo codes in the first round: that of the configuration, or a default.

    Peers begin with the same model, and an adapted θ that is too small costs one repair of a layer. One that is too
    large costs the model itself where codes have few bits: with 2 bits and θ 2, the first message errs by up to 0.7 in
    every parameter.
    """
    if config.algorithm.theta_value is not None:
        return config.algorithm.theta_value
    return _CLOSE_THETA if config.algorithm.theta == "verified" else _LOOSE_THETA


def averaging_rate(config: Config, compressor: Compressor | None = None) -> float:
    """Return the configured η, or the default for algorithm and compressor.

    With a bandwidth budget the default suits the smallest messages that it may choose: both ends of a link have to
    use the same rate, so that it cannot follow the decisions of one of them.
    """
    if config.algorithm.averaging_rate is not None:
        return config.algorithm.averaging_rate
    compressor = compressor or build_compressor(config)
    return default_averaging_rate(algorithm_spec(config), _reachable_variants(config, compressor)[-1])


def corrects_drift(config: Config) -> bool:
    """Return whether peers subtract the drift of their gradients from the mean of all peers'.

    A user's script has a learning rate that the run does not see: nothing is corrected there unless a number asks for
    it. Nor is anything corrected if rounds go on without late neighbours: a peer that hears few has a small push-sum
    weight, and its supposed drift then grows without bound.
    """
    asked = config.algorithm.drift_correction
    is_on = config.training.task != OWN_LOOP if asked == "auto" else asked > 0.0
    return is_on and algorithm_spec(config).corrects_drift and config.rounds.late == "wait"


def drift_gain(config: Config, schedule: Schedule | ViewSchedule, rate: float) -> float:
    """Return β of the drift correction on a graph, for its present members, at an averaging rate η."""
    asked = config.algorithm.drift_correction
    return default_gain(rate, schedule.spectral_gap) if asked == "auto" else asked


def budget_variants(config: Config, schedule: Schedule) -> tuple[Compressor, ...]:
    """Return the compressor and the smaller variants for a bandwidth budget: those to which the rules of algorithm,
    averaging rate and graph have no objection that they do not have to the compressor itself."""
    variants = _reachable_variants(config, build_compressor(config))
    plan = _plan_of(config, schedule, variants[0])
    known = {finding.key for finding in validate.check(plan)}
    for position, variant in enumerate(variants[1:], 1):
        if any(finding.key not in known for finding in validate.check(replace(plan, compressor=variant))):
            return variants[:position]
    return variants


def _reachable_variants(config: Config, compressor: Compressor) -> tuple[Compressor, ...]:
    """Return the variants whose default averaging rate is not too far below that of the compressor."""
    if config.compressor.budget_kbytes_per_s is None:
        return (compressor,)
    spec = algorithm_spec(config)
    least = LEAST_OF_RATE * default_averaging_rate(spec, compressor)
    return tuple(c for c in variants_of(compressor) if default_averaging_rate(spec, c) >= least)


def robust_mixing(config: Config) -> RobustMixing | None:
    """Return the rule by which mixing bounds the effect of a lying member; None if there is none."""
    options = config.algorithm
    if options.mixing == "plain":
        return None
    return RobustMixing(rule=options.mixing, attackers=options.attackers, radius=options.clip_radius)


def why_no_average(config: Config) -> str | None:
    """Return a clause if no average of all models is formed after the last round; None if one is."""
    if not config.run.average:
        return "run.average is false"
    if robust_mixing(config) is not None:
        return "algorithm.mixing bounds what a member that lies can do, and this would undo it"
    return None


def describe_messages(config: Config) -> str:
    """Return a short description of the compression of a run's messages."""
    spec, options = algorithm_spec(config), config.algorithm
    if spec.sends_factors:
        return f"rank {options.rank}, {options.factor_bits} bits"
    return describe_compressor(build_compressor(config)) if spec.compresses else "none (full precision)"


def describe_compressor(compressor: Compressor) -> str:
    """Return the compressor with its settings in a few words, such as "top_k 2 % 4 bits"."""
    words = [compressor.kind]
    for name in compress.settings_of(compressor.kind):
        value = getattr(compressor, name)
        if name == "fraction":
            words.append(f"{100 * value:g} %")
        elif name in ("bits", "value_bits") and value is not None:
            words.append(f"{value} bits")
        elif isinstance(value, (str, float)):
            words.append(f"{value:g}" if isinstance(value, float) else value)
        elif isinstance(value, enum.Enum):
            words.append(value.name.lower())
    return " ".join(words)


def validate_config(config: Config, base: Path, num_peers: int | None = None) -> list[validate.Objection]:
    """Return the theory's findings against this configuration; raises ConfigError for an impossible one."""
    count = config.num_members(num_peers or config.num_peers)
    if count < 1:
        raise ConfigError("no peers are listed", key="peers", valid="one [[peers]] table for each device")
    schedule = build_schedule(config, base, count)
    findings = [*_later_peers(config), *_precision_findings(config), *_data_findings(config), *_loop_findings(config)]
    findings += [
        *privacy_findings(config),
        *_kernel_findings(),
        *check_rules(config, schedule, build_compressor(config)),
    ]
    findings += [*_budget_findings(config, schedule), *_limit_findings(config)]
    if config.guard.action == "rollback" and algorithm_spec(config).modulo and config.algorithm.theta == "verified":
        # Repairs and messages share one sequence of numbers, and may come in another order the second time.
        sentence = (
            "repairs of verified codes share the numbering of messages, so peers whose state was rolled back may wait"
            ' for each other; set guard.action = "stop", or algorithm.theta = "constant"'
        )
        findings.append(validate.Objection("error", "guard.action", sentence))
    if config.training.momentum == "script" and config.training.task != OWN_LOOP:
        sentence = "only a training script that averages gradients sets it; leave it out"
        findings.append(validate.Objection("error", "training.momentum", sentence))
    spec, training = algorithm_spec(config), config.training
    no_sum, of_mean = not spec.momentum_of_mean, spec.acts_on_mean(training.momentum, training.local_steps)
    for key, is_idle in (("outer_rate", no_sum), ("outer_momentum", no_sum or of_mean)):
        if is_idle and getattr(config.algorithm, key) != type(config.algorithm).model_fields[key].default:
            sentence = f"has no effect with {spec.name}, only with compressed-allreduce and low-rank"
            if not no_sum:
                sentence = (
                    "has no effect but on several local steps of adamw or muon: training.momentum acts on the mean"
                )
            findings.append(validate.Objection("warning", f"algorithm.{key}", sentence))
    # A job whose peers have names but no addresses is for `sotto up` and the simulator.
    if any(peer.advertise is not None for peer in config.peers):
        findings += [
            validate.Objection("warning", "peers", sentence) for sentence in unreachable_pairs(config, schedule)
        ]
    return [*findings, *_address_findings(config)]


def missing_here(config: Config, base: Path) -> Iterator[validate.Objection]:
    """Yield findings on the code of the task and the folder of its data where they are not on this device. Neither is
    read. Raises ConfigError for a task that does not exist."""
    name, directory = config.training.task, config.data.directory
    module, _, function = name.partition(":")
    if function and (remedy := missing_module(module)) is not None:
        yield validate.Objection("error", "training.task", f"there is no module {module} here{remedy}")
    if directory is not None and not (base / directory).exists():
        makes = "; make that folder, where the task fills it by itself" if function else ""
        sentence = f"there is no {(base / directory).resolve()} on this device{instead_of(base / directory)}{makes}"
        yield validate.Objection("error", "data.directory", sentence)
    elif function or name == OWN_LOOP or not task_info(name).reads_files:
        return
    elif directory is not None and (base / directory).is_dir() and not any((base / directory).iterdir()):
        yield validate.Objection("error", "data.directory", f"there is nothing in {base / directory}")
    elif directory is None:
        sentence = f"is missing; name the folder with the data of task {name}: --set data.directory=FOLDER"
        yield validate.Objection("error", "data.directory", sentence)


def _address_findings(config: Config) -> Iterator[validate.Objection]:
    """Yield findings on peers that nobody can dial: a run that began so may go on, since either end of a link can
    dial."""
    for index, peer in enumerate(config.peers):
        if peer.advertise is not None:
            try:
                dialled_address(peer.advertise, key=f"peers.{index}.advertise")
            except ConfigError as error:
                yield validate.Objection("warning", f"peers.{index}.advertise", f"{peer.advertise} {error.problem}")


def _limit_findings(config: Config) -> Iterator[validate.Objection]:
    """Yield findings on device limits that cannot be kept, or only at the cost of all other peers."""
    limits = config.limits
    if not limits.can_be_reached:
        return
    fixed = why_no_changes(config)
    if limits.then == "leave" and fixed is not None:
        sentence = f'this device could not leave the run: {fixed}; or set limits.then = "slow"'
        yield validate.Objection("error", "limits.then", sentence)
    elif limits.then == "pause" and config.rounds.late == "wait" and not algorithm_spec(config).asynchronous:
        sentence = (
            'rounds.late is "wait", so the whole run would pause with this peer; set limits.then = "slow", or'
            ' rounds.late = "skip" on every device'
        )
        yield validate.Objection("error", "limits.then", sentence)


def _later_peers(config: Config) -> Iterator[validate.Objection]:
    """Yield findings on listed peers that could never join."""
    sentence = why_no_changes(config)
    if sentence is not None and any(not peer.is_first for peer in config.peers):
        yield validate.Objection("error", "peers", f"some peers are listed to join later, but {sentence}")
    if config.rounds.lost_after_s is not None:
        yield from _loss_findings(config, sentence)


def _loss_findings(config: Config, why_not: str | None) -> Iterator[validate.Objection]:
    """Yield findings on members that cannot declare losses, or whose identity is not proven."""
    key = "rounds.lost_after_s"
    if why_not is not None:
        yield validate.Objection("error", key, f"nobody can be declared lost: {why_not}")
    elif 0 < config.num_members(config.num_peers) < 3:
        sentence = "of two peers neither is a majority: an operator has to declare a loss (sotto remove)"
        yield validate.Objection("warning", key, sentence)
    if config.transport.give_up_after_s <= (config.rounds.lost_after_s or 0.0):
        sentence = "must be longer than rounds.lost_after_s: a peer that ends before that declares nobody lost"
        yield validate.Objection("error", "transport.give_up_after_s", sentence)
    if config.security.mode != "mtls":
        sentence = (
            f'security.mode is "{config.security.mode}", so nobody signs: a member can vote in the name of others'
        )
        yield validate.Objection("warning", key, sentence)


def _precision_findings(config: Config) -> Iterator[validate.Objection]:
    """Yield a finding if bfloat16 would take longer than float32."""
    if config.training.precision == "bfloat16" and config.peer.device == "cpu" and bfloat16_is_emulated():
        sentence = (
            "this processor has no instructions for bfloat16, so a step takes two to seven times as long as in float32;"
            " use float32 unless another processor trains"
        )
        yield validate.Objection("warning", "training.precision", sentence)


def privacy_findings(config: Config) -> Iterator[validate.Objection]:
    """Yield an error for each option with which a private peer would tell more about its samples than is accounted for.
    The precision of an own task, and the number of samples, are known only once those are read."""
    if not config.privacy.is_on:
        return
    training, untold = config.training, "which [privacy] does not account for"
    precision = training.precision
    if precision == "auto" and training.task in TASKS:
        precision = TASKS[training.task].precision
    refused = {
        "training.task": (training.task == OWN_LOOP, "[privacy] cannot make the steps of a script private; use a task"),
        "training.precision": (
            precision in ("bfloat16", "int8"),
            f'is {precision}: the ranges of its numbers follow the samples without noise, {untold}; set "float32"',
        ),
        "training.class_balance": (
            training.class_balance > 0,
            f"draws by how many samples of each class there are, {untold}; set 0",
        ),
        "training.label_adjustment": (
            training.label_adjustment is True,
            f'uses how many samples of each class there are, {untold}; set "auto", which leaves it out',
        ),
        "data.holdout_fraction": (
            config.data.holdout_fraction > 0,
            f"lets others see how accurate models are on samples of this device, {untold}; set 0",
        ),
        "guard.action": (
            config.guard.action == "rollback",
            'lets rounds be done again, which [privacy] would not count; set "stop"',
        ),
        "algorithm.name": (
            algorithm_spec(config).asynchronous,
            f"{config.algorithm.name} has no rounds, by which [privacy] counts steps; use an algorithm with rounds",
        ),
    }
    yield from (validate.Objection("error", key, sentence) for key, (is_so, sentence) in refused.items() if is_so)


def _kernel_findings() -> Iterator[validate.Objection]:
    """Yield a finding if the installation lacks its native kernels."""
    if kernels_missing():
        sentence = (
            "the native kernels are not installed, so numpy does their work in more processor time; install a wheel"
            " that has them, or a C compiler (gcc) before you install from source"
        )
        yield validate.Objection("warning", "kernels", sentence)


def _data_findings(config: Config) -> Iterator[validate.Objection]:
    """Yield findings on options for each device's own data that lack something, or do nothing."""
    options = config.data
    if options.partition != "own":
        for key in ("weight_by_samples", "total_samples", "class_shares"):
            if getattr(options, key):
                yield validate.Objection("warning", f"data.{key}", 'has no effect without data.partition = "own"')
        return
    name = config.training.task
    is_built_in = ":" not in name and name != OWN_LOOP
    if config.data.directory is None and is_built_in and not task_info(name).reads_files:
        sentence = (
            f"task {name} has the same samples on every device, so every peer trains on all of them;"
            " use a task that reads the device's own"
        )
        yield validate.Objection("warning", "data.partition", sentence)
    if options.weight_by_samples and options.total_samples is None:
        sentence = (
            "is missing, which data.weight_by_samples needs: set it to the number of samples that all devices have"
            " together, the same on every device"
        )
        yield validate.Objection("error", "data.total_samples", sentence)
    elif options.total_samples is not None and not options.weight_by_samples:
        yield validate.Objection("warning", "data.total_samples", "has no effect without data.weight_by_samples = true")
    if options.class_shares == VOTE:
        yield from _vote_findings(config)


def _vote_findings(config: Config) -> Iterator[validate.Objection]:
    """Yield findings on a vote on the shares of the classes that reveals too much, or has no use."""
    if config.privacy.is_on:
        sentence = (
            "tells the other devices how frequent the classes are on each, without the noise of [privacy]; declare the"
            " shares, or leave them unset"
        )
        yield validate.Objection("error", "data.class_shares", sentence)
    elif config.training.task == OWN_LOOP:
        yield validate.Objection(
            "warning", "data.class_shares", "has no effect with your own loop, which adjusts nothing"
        )
    elif config.training.label_adjustment is False:
        yield validate.Objection("warning", "data.class_shares", "has no effect with training.label_adjustment = false")


def _loop_findings(config: Config) -> Iterator[validate.Objection]:
    """Yield findings on options that a user's own loop excludes: they depend on gradients or samples, which the run
    does not see."""
    if config.training.task != OWN_LOOP:
        return
    if algorithm_spec(config).modulo and config.algorithm.theta == "theorem":
        sentence = (
            "the bound of the theorem needs gradients and learning rates, which your own loop keeps to itself; set"
            ' algorithm.theta = "verified"'
        )
        yield validate.Objection("error", "algorithm.theta", sentence)
    if config.graph.period_unit == "epochs":
        sentence = 'with your own loop the length of an epoch is not known; set graph.period_unit = "rounds"'
        yield validate.Objection("error", "graph.period_unit", sentence)
    if config.data.weight_by_samples:
        sentence = "has no effect with your own loop, which decides how long its steps are"
        yield validate.Objection("warning", "data.weight_by_samples", sentence)


def refuse_own_data(config: Config) -> None:
    """Raise ConfigError for each device's own data, since all peers of a command read the same."""
    if config.data.partition == "own":
        raise ConfigError(
            "all peers of this command read the same data, so none has its own; deal that data out for a trial"
            " (--set data.partition=skew), and start peers with data of their own with `sotto run`",
            key="data.partition",
            value="own",
            valid="skew, dirichlet, shards, by-label, iid",
        )


def unreachable_pairs(config: Config, schedule: Schedule, only: int | None = None) -> list[str]:
    """Return a sentence for each pair of neighbours neither of which can be dialled; `only`: only pairs with that
    peer."""
    return [
        f"{config.peers[one].name} and {config.peers[other].name} are neighbours in this graph, but neither has an "
        "advertise address that the other could dial; a seat gets one from `sotto invite`, otherwise give one of them "
        "an address or a relay (`sotto init cluster --relay K`), or choose a graph such as star in which they are not "
        "neighbours"
        for one, peer in enumerate(config.peers[: schedule.num_peers])
        for other in sorted({*schedule.all_receivers(one), *schedule.all_senders(one)})
        if one < other and only in (None, one, other)
        if not any(each.advertise or each.relay for each in (peer, config.peers[other]))
    ]


def _budget_findings(config: Config, schedule: Schedule) -> Iterator[validate.Objection]:
    """Yield findings on the cost of a bandwidth budget, and on its limits."""
    if config.compressor.budget_kbytes_per_s is None:
        return
    key, spec = "compressor.budget_kbytes_per_s", algorithm_spec(config)
    if spec.asynchronous:
        sentence = f"{spec.name} has no rounds, so a budget per round cannot be computed; leave this key unset"
        yield validate.Objection("error", key, sentence)
        return
    sentence = "a budget depends on the clock, so two runs of this configuration do not end with identical models"
    yield validate.Objection("warning", key, sentence)
    compressor = build_compressor(config)
    if len(variants_of(compressor)) == 1:
        kind = compressor.kind if spec.compresses else f"{spec.name}, which sends in full precision,"
        sentence = (
            f"{kind} cannot reduce its messages, so peers can only slow down to stay within the budget; use top_k,"
            " random_k, qsgd or modulo to get smaller messages instead"
        )
        yield validate.Objection("warning", key, sentence)
    elif len(budget_variants(config, schedule)) == 1:
        sentence = (
            "with this algorithm, averaging rate and graph, messages cannot become smaller, so peers can only slow down"
            " to stay within the budget; leave algorithm.averaging_rate unset, or lower it"
        )
        yield validate.Objection("warning", key, sentence)


def check_rules(config: Config, schedule: Schedule, compressor: Compressor) -> list[validate.Objection]:
    """Return the theory's findings against this graph and compressor."""
    return validate.check(_plan_of(config, schedule, compressor))


def _plan_of(config: Config, schedule: Schedule, compressor: Compressor) -> validate.RuleInput:
    """Return the input of the rules. The displacement of a user's own loop stands for one step of rate 1, however it
    came about."""
    training = config.training
    if training.task == OWN_LOOP:
        # Baselines average displacements, to which any number of steps is one.
        steps = training.local_steps if algorithm_spec(config).local_steps else 1
        training = TrainingOptions(task=OWN_LOOP, learning_rate=1.0, momentum="none", local_steps=steps)
    return validate.RuleInput(
        algorithm_spec(config),
        schedule,
        compressor,
        averaging_rate=averaging_rate(config),
        learning_rate=training.learning_rate,
        momentum=training.momentum,
        beta=training.beta,
        local_steps=training.local_steps,
        late=config.rounds.late,
        max_skipped_rounds=config.rounds.max_skipped_rounds,
        rounds=config.run.rounds,
        final_rounds=final_rounds(config, schedule),
        theta_mode=config.algorithm.theta,
        theta=first_theta(config),
        server=config.algorithm.server,
        push_weight_guard=config.algorithm.push_weight_guard,
        min_push_weight=config.guard.min_push_weight,
        robust=robust_mixing(config),
        drift_correction=config.algorithm.drift_correction,
        in_bfloat16=config.algorithm.memory == "bfloat16",
    )


def refuse_errors(findings: Sequence[validate.Objection]) -> list[validate.Objection]:
    """Raise ConfigError for the first error among the findings; return the warnings."""
    for finding in findings:
        if finding.level == "error":
            raise ConfigError(finding.sentence, key=finding.key)
    return [finding for finding in findings if finding.level == "warning"]


def _read_graph(path: Path) -> GraphFile:
    try:
        return GraphFile(str(path), path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(why_not_utf8(error), key="graph.file", value=str(path)) from None
    except OSError as error:
        problem = f"cannot be read: {error.strerror}{instead_of(path)}"
        raise ConfigError(problem, key="graph.file", value=str(path)) from None


def final_rounds(config: Config, schedule: Schedule) -> int:
    """Return the number of last rounds that are full-precision gossip (scsp).

    "auto": enough to shrink the consensus distance a thousandfold on this graph, at most half of the run.
    """
    if not algorithm_spec(config).final_rounds:
        return 0
    wanted = config.algorithm.final_rounds
    if wanted != "auto":
        return wanted
    contraction = min(1.0 - schedule.spectral_gap, 1.0 - 1e-9)
    return min(final_rounds_for(1.0, max(0.0, contraction), 1e-3), config.run.rounds // 2)
