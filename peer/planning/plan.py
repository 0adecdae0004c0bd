"""The plan: every option with its cost and its evidence, and which of them to take.

Options are compared by the time for as much progress as one round of all-reduce makes: seconds a round times the rounds
that the option needs for each round that all-reduce needs, until the worst peer is within some points of what
all-reduce ends with. An option without evidence, or whose evidence does not reach that far, is shown and not
recommended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peer.config.options import Config
from peer.errors import ConfigError
from peer.gossip.base import Memory
from peer.gossip.topology import Schedule
from peer.lab.study import predict
from peer.links.profiles import Profile
from peer.planning import messages, rivals
from peer.planning.evidence import Evidence, Option, Setting
from peer.planning.layers import Layers
from peer.run import plan as run_plan

DAY_S = 86400.0

WITHIN_POINTS = 6.0
"""Default margin of the worst peer below all-reduce's last accuracy, in points. Measured differences below 2 points
mean nothing, and with 5 some options would be left out by less."""

UNKNOWN_SKEW = 0.8
"""Skew assumed if none is given: real data on devices is rarely dealt at random."""

SLOWER_MIXING = 2.0
"""Evidence counts as long as the spectral gap is not smaller by more than this than with the peers of the evidence."""

_NEEDS_SHAPES = "its messages depend on the shapes of layers; give --model, --task or --config"

RATES_KBIT = (100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)
"""Link rates for which the choice is shown beside that for the given link."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The situation that a plan is made for."""

    layers: Layers
    num_peers: int
    link: Profile
    step_s: float
    skew: float
    steps: int | None = None
    """Steps of all-reduce or one process, to compute totals for."""
    within_points: float = WITHIN_POINTS
    processor: float = 1.0
    """Duration of the slowest device's computation, relative to this one's. The duration of a step is not
    multiplied."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One option on the given link."""

    option: Option
    frame_bytes: float | None = None
    """One message to one neighbour, of our options."""
    round_s: float | None = None
    """Duration of one step of each peer, work included."""
    work_s: float | None = None
    """Processor time in `round_s` beside the step: algorithm, compression, coding, sockets."""
    up_bytes: float | None = None
    """A peer's upload in one round, headers included; the download is the same in all these graphs."""
    memory_bytes: float | None = None
    """Memory beside the model: gradient, momentum, the algorithm's state, messages in flight."""
    rounds_factor: float | None = None
    """Rounds for each round of all-reduce, until the worst peer is close enough to it."""
    worst_accuracy: float | None = None
    """Accuracy at the end of the measured runs, in percent."""
    gap_points: float | None = None
    """All-reduce's lead there."""
    reason: str | None = None
    """Why it is not recommended, if it cannot be."""
    warnings: tuple[str, ...] = ()

    @property
    def progress_s(self) -> float | None:
        """Seconds for the progress of one round of all-reduce."""
        if self.round_s is None or self.rounds_factor is None or self.reason is not None:
            return None
        return self.round_s * self.rounds_factor

    @property
    def up_bytes_per_day(self) -> float | None:
        return None if self.up_bytes is None or self.round_s is None else self.up_bytes * DAY_S / self.round_s

    def total(self, steps: int | None) -> tuple[float, float] | None:
        """Return seconds and bytes (up) until it is where all-reduce is after `steps` rounds."""
        if steps is None or self.rounds_factor is None or self.round_s is None or self.up_bytes is None:
            return None
        rounds = steps * self.rounds_factor
        return rounds * self.round_s, rounds * self.up_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `sotto lab plan`."""

    situation: Situation
    evidence: Setting
    estimates: tuple[Estimate, ...]
    """Best first; those without a rating last."""
    by_rate: tuple[tuple[int, str | None], ...]
    """(rate in kbit/s in both directions, name of the best option); the latency stays."""

    @property
    def average_bytes(self) -> int:
        """What each device receives for the average after the last round (`run.average`): the model of each other,
        where these differ."""
        return 4 * self.situation.layers.parameters * (self.situation.num_peers - 1)

    @property
    def average_s(self) -> float:
        """How long that takes at least, where devices pass on as much as they receive."""
        rates = [rate for rate in (self.situation.link.up_kbit, self.situation.link.down_kbit) if rate]
        return 8e-3 * self.average_bytes / min(rates) if rates else 0.0

    @property
    def best(self) -> Estimate | None:
        return next((each for each in self.estimates if each.progress_s is not None), None)

    @property
    def best_own(self) -> Estimate | None:
        """The best configuration of ours; without evidence that one gets there, the one that came closest."""
        own = [e for e in self.estimates if e.option.rival is None and e.round_s is not None]
        rated = [each for each in own if each.progress_s is not None]
        close = [each for each in own if each.gap_points is not None]
        return next(iter(rated or sorted(close, key=lambda each: each.gap_points or 0.0)), None)


def make_plan(
    situation: Situation,
    evidence: Evidence,
    setting: Setting,
    configured: Callable[[Sequence[str]], Config],
    base: Path,
) -> Plan:
    """Return the plan. `configured(settings)` is the configuration with an option's settings. Raises SottoError."""
    if situation.num_peers < 2:
        raise ConfigError(
            "there is nothing to plan for one peer", key="--peers", value=situation.num_peers, valid="2 or more"
        )
    weighed = [Weighed.weigh(option, situation, setting, configured, base) for option in evidence.options]
    estimates = [each.estimate(situation, setting) for each in weighed]
    return Plan(
        situation=situation,
        evidence=setting,
        estimates=tuple(sorted(estimates, key=_rank)),
        by_rate=tuple((rate, _best_at(rate, weighed, situation, setting)) for rate in RATES_KBIT),
    )


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """Figures of an option that do not depend on the link."""

    option: Option
    frame_bytes: float = 0.0
    schedule: Schedule | None = None
    to_all: bool = False
    exchanges: int = 1
    averages: rivals.Averages | None = None
    work_s: float = 0.0
    models_kept: float = 0.0
    reason: str | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def weigh(
        cls,
        option: Option,
        situation: Situation,
        setting: Setting,
        configured: Callable[[Sequence[str]], Config],
        base: Path,
    ) -> Weighed:
        layers, count = situation.layers, situation.num_peers
        if option.rival is not None:
            averages = rivals.averages(option, layers.sizes, layers.shapes)
            if averages is None:
                return cls(option=option, reason=_NEEDS_SHAPES)
            return cls(option=option, averages=averages, models_kept=averages.models_kept)
        config = configured(option.settings)
        try:
            findings = run_plan.validate_config(config, base, count)
            schedule = run_plan.build_schedule(config, base, count)
        except ConfigError as error:
            return cls(option=option, reason=str(error))
        errors = [finding.sentence for finding in findings if finding.level == "error"]
        if sentences := errors or [finding.sentence for finding in findings if finding.key == "peers"]:
            return cls(option=option, reason=sentences[0])
        spec, reason = run_plan.algorithm_spec(config), None
        if spec.sends_factors and layers.shapes is None:
            return cls(option=option, reason=_NEEDS_SHAPES)
        usual = run_plan.build_schedule(config, base, setting.peers).spectral_gap
        if schedule.spectral_gap * SLOWER_MIXING < usual:
            reason = (
                f"with {count} peers its graph mixes {usual / max(schedule.spectral_gap, 1e-9):.0f} times more slowly"
                f" than with the {setting.peers} of the measurements, so they say nothing about it"
            )
        weight = (
            messages.weigh_parts(option.settings, layers.shapes, count)
            if spec.sends_factors and layers.shapes is not None
            else messages.weigh(option.settings, layers.sizes)
        )
        return cls(
            option=option,
            frame_bytes=weight.frame_bytes,
            work_s=weight.gossip_s,
            schedule=schedule,
            to_all=spec.memory is Memory.REPLICAS,
            exchanges=spec.exchanges,
            models_kept=messages.state_models(option.settings, count)
            + _MOMENTUM_MODELS.get(config.training.momentum, 1.0),
            reason=reason,
            warnings=tuple(f"{each.key}: {each.sentence}" for each in findings if each.level == "warning"),
        )

    def estimate(self, situation: Situation, setting: Setting) -> Estimate:
        """Return the option on the link of a situation."""
        links, model_bytes = predict.link_model(situation.link), 4 * situation.layers.parameters
        known = Estimate(option=self.option, reason=self.reason, warnings=self.warnings)
        if self.averages is not None:
            count = situation.num_peers
            work_s = situation.processor * (
                self.averages.work_s / self.averages.every + self.averages.transport_s(count)
            )
            known = replace(
                known,
                round_s=self.averages.round_s(count, links, situation.step_s) + work_s,
                work_s=work_s,
                up_bytes=self.averages.wire_bytes(count, links),
                # Gradient and momentum, which every system has.
                memory_bytes=(2.0 + self.models_kept) * model_bytes,
            )
        elif self.schedule is not None:
            sends = self.exchanges * self._sends(self.schedule)
            rounds, every = max(4, self.schedule.cycle_rounds + 1), self.option.every
            work_s = situation.processor * (self.work_s + messages.transport_s(sends, self.frame_bytes))
            round_s = predict.round_seconds(
                self.schedule,
                links,
                every * situation.step_s + work_s,
                self.frame_bytes,
                to_all=self.to_all,
                exchanges=self.exchanges,
                rounds=rounds,
            )
            known = replace(
                known,
                frame_bytes=self.frame_bytes,
                round_s=round_s / every,
                work_s=work_s / every,
                up_bytes=sends * links.wire_bytes(round(self.frame_bytes)) / every,
                # The gradient; and each frame is kept until its receiver has it, and so are those that arrive.
                memory_bytes=(1.0 + self.models_kept) * model_bytes + 2 * sends * self.frame_bytes,
            )
        return _with_evidence(known, situation, setting)

    def _sends(self, schedule: Schedule) -> float:
        """Return how many messages the peer with most of them sends in an exchange."""
        peers = range(schedule.num_peers)
        if self.to_all:
            return float(max(len(schedule.all_receivers(peer)) for peer in peers))
        cycle = range(schedule.cycle_rounds)
        return max(sum(len(schedule.receivers(t, peer)) for t in cycle) / len(cycle) for peer in peers)


def _with_evidence(known: Estimate, situation: Situation, setting: Setting) -> Estimate:
    """Return the estimate with the measurements of the option."""
    skew, name = situation.skew, known.option.name
    reference, curve = setting.curve(setting.reference, skew), setting.curve(name, skew)
    if reference is None or curve is None:
        return replace(known, reason=known.reason or f"not measured at a skew of {skew:g} or more")
    target = reference[-1][1] - situation.within_points
    usual, needed = setting.rounds_to(setting.reference, skew, target), setting.rounds_to(name, skew, target)
    end = curve[-1][1]
    reason = known.reason
    if needed is None and reason is None:
        reason = (
            f"its worst peer reached {end:.1f} % in {curve[-1][0]} rounds, {reference[-1][1] - end:.1f} points below"
            " all-reduce"
        )
    return replace(
        known,
        worst_accuracy=end,
        gap_points=reference[-1][1] - end,
        rounds_factor=None if needed is None or usual is None else needed / usual,
        reason=reason,
    )


def _best_at(rate_kbit: int, weighed: Sequence[Weighed], situation: Situation, setting: Setting) -> str | None:
    link = replace(situation.link, up_kbit=rate_kbit, down_kbit=rate_kbit)
    estimates = [each.estimate(replace(situation, link=link), setting) for each in weighed]
    rated = [each for each in sorted(estimates, key=_rank) if each.progress_s is not None]
    return rated[0].option.name if rated else None


def _rank(estimate: Estimate) -> tuple[bool, float]:
    """Return the order of options: rated ones by time, then the others by their gap."""
    progress = estimate.progress_s
    if progress is not None:
        return False, progress
    return True, float("inf") if estimate.gap_points is None else estimate.gap_points


_MOMENTUM_MODELS = {"none": 0.0, "adam": 2.0, "adamw": 2.0, "muon": 2.0}
"""Models of float32 that a rule of momentum keeps; all others one."""
