"""Objections of the papers' theory, and of measurements, to a configuration before its first round.

`check` looks at plain values and returns findings. An error is a configuration that cannot converge, or cannot run at
all; a warning is one that may not, or that costs more than it seems. Each finding names the key to change, the fault
and the remedy. Each rule is one function, in the order of the data: graph, compressor, rates, momentum, rounds; numbers
that are judgements stand as constants with their reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np

from peer.compress.base import Compressor, ErrorBound
from peer.compress.modulo import delta, modulus
from peer.compress.payload import Rounding
from peer.gossip.base import AlgorithmSpec, GraphNeed, Memory
from peer.gossip.drift import default_gain
from peer.gossip.options import RobustMixing
from peer.gossip.spectrum import D2_LEAST_EIGENVALUE
from peer.gossip.theta import (
    d2_constant,
    largest_stable_rate,
    pairwise_mixing_time,
    resting_rate,
    theorem_3,
    theorem_4,
    theorem_5,
)
from peer.gossip.topology import Schedule
from peer.records import ADAPTIVE

DIRECTED_ALTERNATIVES = {
    "d-psgd": "sgp",
    "naive-quantized": "quant-sgp",
    "deep-squeeze": "sparse-push",
    "choco-sgd": "quant-sgp",
    "dcd-psgd": "quant-sgp",
    "ecd-psgd": "quant-sgp",
    "moniqua": "quant-sgp",
    "d2": "sgp",
    "moniqua-d2": "quant-sgp",
    "ad-psgd": "sgp",
    "moniqua-ad-psgd": "quant-sgp",
}
"""The push-sum algorithm for directed graphs that corresponds to each of these for undirected ones."""

LONG_RUN_RATES = ((0.001, 0.001), (0.01, 0.005), (0.1, 0.01), (0.5, 0.08), (1.0, 1.0))
"""(fraction kept, η): the averaging rates of Sparse-Push's table 5, for runs of 200 epochs."""

SHORT_RUN_RATE = (0.02, 0.15, 0.7)
"""(kept₀, η₀, exponent): the highest η to trust in runs of 1,000 rounds is η₀ (kept / kept₀)^exponent. Measured on a
directed ring of 8 with label skew 0.8: top 2 % is robust at 0.1 and top 1 % at 0.05; both collapse at 0.3."""

NOISY_RATE = 3.0
"""η per part kept, for quantizers whose error is noise of the size 1/kept − 1 of the vector sent. Measured with
choco-sgd and qsgd of 1 to 5 bits on a ring of 8: no trouble up to 2.6, the worst peer or all of them gone from 3.3 to
4.3 on."""

DRIFT_FACTOR = 2.5
"""A drift correction this many times above the usual one is warned of. Measured with quant-sgp on a directed ring of 8:
at 3 times, ResNet-20 on CIFAR-10 diverged, and digits was well; at 16 times, digits lost 5 points."""

RATE_FACTOR = 10.0
"""An η this many times above or below that of the long runs is far from those known to converge."""

MODULO_RATES = ((0.9, 0.3), (0.3, 0.5))
"""(δB/θ, η): from this error of a modulo code on, averaging with a higher η does not bring peers together. Measured
with θ following the largest distance, on rings of 8 and 16 and a hypercube of 8: 1 bit (δB = θ) up to 0.3, 2 bits (θ/3)
up to 0.7, 3 bits (θ/7) at any rate."""

BOUND_SLACK = 4.0
"""A variance bound is up to this many times the variance of dense vectors: beyond it a violated condition is
certain."""

MAX_EFFECTIVE_RATE = 5.0
"""γ/(1 − β) above this is far outside the papers' range (1: 0.1 with momentum 0.9)."""

FEW = 0.1
"""A message that carries less of a model than this is small."""

MAX_SKIPPED_ROUNDS = 20
"""After this many rounds without each other, peers wait. Measured with quant-sgp and top 2 %: a cluster divided for ten
times as many rounds, each part without half of the classes, never agreed again (docs/studies/durability.md)."""

MAX_ADAM_RATE = 0.02
"""Adam moves each weight by γ a step, whatever the gradient: its usual rate is 0.001."""

COLLAPSING_QG_RATE = 0.1
"""Quasi-global momentum at this γ or more collapsed together with strong compression (top 1 %, β 0.9)."""

STRONG_COMPRESSION = 0.1
"""Keeping less than this is called strong."""

STARVATION_ROUNDS = 2000
"""Rounds over which the recursion of the push-sum weights is followed to find the smallest one."""


@dataclass(frozen=True)
class Objection:
    """One thing that theory or measurement says against a configuration."""

    level: Literal["error", "warning"]
    key: str
    """The dotted key of the configuration that should change."""
    sentence: str
    """The fault and the remedy."""


@dataclass(frozen=True)
class RuleInput:
    """Input of the rules, under the names of the configuration."""

    spec: AlgorithmSpec
    schedule: Schedule
    compressor: Compressor
    _: KW_ONLY
    averaging_rate: float = 1.0
    learning_rate: float = 0.1
    momentum: str = "none"
    beta: float = 0.9
    local_steps: int = 1
    late: str = "wait"
    max_skipped_rounds: int = 20
    rounds: int = 1000
    final_rounds: int = 0
    theta_mode: str = "verified"
    theta: float = 2.0
    server: int = 0
    push_weight_guard: float = 0.5
    min_push_weight: float = 1e-6
    layer_size: int = 10_000
    """Size of the largest layer."""
    gradient_bound: float = 1.0
    """G∞, the largest coordinate of a gradient."""
    typical_weight: float = 0.05
    """The root mean square of the model's weights."""
    robust: RobustMixing | None = None
    drift_correction: float | Literal["auto"] = 0.0
    in_bfloat16: bool = False

    @property
    def num_peers(self) -> int:
        return self.schedule.num_peers

    @property
    def averages(self) -> bool:
        """Whether models are mixed by W (not the baselines)."""
        return self.spec.graph in (GraphNeed.COLUMN, GraphNeed.DOUBLY, GraphNeed.SYMMETRIC)

    @property
    def feeds_errors_back(self) -> bool:
        """Whether the compressor's error is kept and sent later (error memory or replicas of CHOCO's kind)."""
        return self.spec.compresses and not self.spec.needs_unbiased and not self.spec.modulo

    @property
    def bound(self) -> ErrorBound:
        """Error bound of the compressor for the largest layer."""
        error_bound = getattr(self.compressor, "error_bound", None)
        if error_bound is None:
            return ErrorBound()
        bound: ErrorBound = error_bound(self.layer_size)
        return bound

    @property
    def kept(self) -> float | None:
        """Least part of a vector's energy that one message carries, None if that is unknown.

        For sparse compressors it is the fraction of the coordinates, as in Sparse-Push's table.
        """
        fraction = getattr(self.compressor, "fraction", None)
        if fraction is not None:
            return float(fraction)
        if self.compressor.kind == "sign":
            # Its worst case, 1/d, is a vector of one coordinate; for Gaussian ones it is 2/π.
            return 2.0 / math.pi
        return self.bound.contraction


def check(plan: RuleInput) -> list[Objection]:
    """Return everything found against the plan, errors first; none for a sound one."""
    findings = [finding for rule in RULES for finding in rule(plan)]
    return sorted(findings, key=lambda finding: finding.level != "error")


def _graph_connects(plan: RuleInput) -> Iterator[Objection]:
    """Convergence needs the union over the cycle to be strongly connected."""
    if plan.averages and not plan.schedule.is_strongly_connected:
        yield _error(
            "graph.kind",
            "information from some peers never reaches some others, so they cannot agree on one model; add edges until"
            " there is a directed path from every peer to every other",
        )


def _graph_mixes_in_time(plan: RuleInput) -> Iterator[Objection]:
    """Disagreement falls by a factor e every 1 / (η (1 − ρ)) rounds."""
    if not plan.averages or plan.num_peers == 1 or not plan.schedule.is_strongly_connected:
        return
    gap = plan.schedule.spectral_gap * plan.averaging_rate
    if 0.0 < plan.averaging_rate < 1.0 / plan.rounds:
        # Not even a complete graph, whose spectral gap is 1, would do.
        yield _warning(
            "algorithm.averaging_rate",
            f"at averaging rate {plan.averaging_rate:g} peers need at least {1.0 / plan.averaging_rate:,.0f} rounds to"
            f" come closer by a factor e, whatever the graph, and the run has {plan.rounds}; use more rounds, or a"
            " compressor that keeps more of a message, which allows a higher averaging rate",
        )
    elif gap * plan.rounds < 1.0:
        needed = f"about {1.0 / gap:,.0f} rounds" if gap > 1e-12 else "unlimited time"
        yield _warning(
            "graph.kind",
            f"this graph mixes so slowly (spectral gap {plan.schedule.spectral_gap:.2g} at averaging rate"
            f" {plan.averaging_rate:g}) that peers need {needed} to reduce their distance by a factor e, but the run"
            f" has {plan.rounds} rounds; use exponential or random-regular, a higher averaging rate or more rounds",
        )


def _graph_suits_algorithm(plan: RuleInput) -> Iterator[Objection]:
    """Averaging without a push-sum weight needs rows that sum to 1: else the average drifts to a weighted one."""
    spec, schedule = plan.spec, plan.schedule
    alternative = DIRECTED_ALTERNATIVES.get(spec.name, "sgp")
    if spec.graph is GraphNeed.DOUBLY and not schedule.is_doubly_stochastic:
        worst = max(float(np.abs(matrix.row_sums() - 1.0).max()) for matrix in schedule.matrices)
        repair = 'set graph.weights = "metropolis"' if _is_undirected(schedule) else "use an undirected graph"
        yield _error(
            "algorithm.name",
            f"{spec.name} needs a doubly stochastic graph, but here a row sum differs from 1 by {worst:.2g}, so peers"
            f" would at best agree on a weighted average; {repair}, or use {alternative}, which works on such graphs",
        )
    if spec.graph is GraphNeed.SYMMETRIC and not (schedule.is_symmetric and schedule.is_doubly_stochastic):
        yield _error(
            "algorithm.name",
            f"{spec.name} needs a symmetric graph, where each edge has the same weight in both directions; use an"
            f' undirected graph with graph.weights = "metropolis", or {alternative}, which works on directed graphs',
        )
    if spec.graph is GraphNeed.COMPLETE and not schedule.is_complete:
        yield _error(
            "graph.kind",
            f'in {spec.name} every peer sends to every other; set graph.kind = "complete"',
        )


def _server_reaches_all(plan: RuleInput) -> Iterator[Objection]:
    """A parameter server exchanges with every worker in every round."""
    if plan.spec.graph is not GraphNeed.SERVER:
        return
    n, server = plan.num_peers, plan.server
    if not 0 <= server < n:
        yield _error(
            "algorithm.server", f"peer {server} cannot be the server: the {n} peers are numbered from 0 to {n - 1}"
        )
    elif any(len(m.senders(server)) < n - 1 or len(m.receivers(server)) < n - 1 for m in plan.schedule.matrices):
        repair = 'set graph.kind = "star"' if server == 0 else 'set graph.kind = "complete" or algorithm.server = 0'
        yield _error(
            "graph.kind",
            f"the server, peer {server}, does not exchange with every other peer in every round; {repair}",
        )


def _schedule_may_change(plan: RuleInput) -> Iterator[Objection]:
    """An algorithm that keeps state about a neighbour, or remembers its own last mixing, needs one graph."""
    spec, schedule = plan.spec, plan.schedule
    if not schedule.is_time_varying:
        return
    if not spec.time_varying and spec.graph is not GraphNeed.NONE:
        yield _error(
            "graph.kind",
            f"{spec.name} works only on a fixed graph; choose a single graph that does not change, or use"
            f" {'sparse-push' if spec.compresses else 'sgp'}, which works on graphs that change",
        )
    elif spec.memory is Memory.REPLICAS:
        needed, sent = schedule.messages_per_round, schedule.replica_messages_per_round
        if sent > needed:
            yield _warning(
                "algorithm.name",
                f"{spec.name} keeps replicas, so each message must also reach peers that are neighbours in other"
                f" rounds: {sent:g} messages per round, not {needed:g}; sparse-push keeps none and sends {needed:g}",
            )


def _slack_eigenvalue_of_d2(plan: RuleInput) -> Iterator[Objection]:
    """D² needs λ_min(W̄) > −1/3 (Tang et al. 2018b, assumption 1)."""
    spec, schedule = plan.spec, plan.schedule
    if spec.graph is not GraphNeed.SYMMETRIC or spec.asynchronous or not schedule.is_symmetric:
        return
    if schedule.smallest_slack_eigenvalue(plan.averaging_rate) > D2_LEAST_EIGENVALUE:
        return
    smallest = schedule.smallest_slack_eigenvalue()
    # η λ + 1 − η > −1/3 for every η below (4/3) / (1 − λ), which is at least 2/3.
    limit = (4.0 / 3.0) / (1.0 - smallest)
    yield _error(
        "algorithm.averaging_rate",
        f"{spec.name} diverges unless every eigenvalue of ηW + (1 − η)I is above −1/3, but here the smallest is"
        f" {schedule.smallest_slack_eigenvalue(plan.averaging_rate):.4g}; set algorithm.averaging_rate = 0.5"
        f" (any value below {limit:.3g} works)",
    )


def _push_weights_stay_up(plan: RuleInput) -> Iterator[Objection]:
    """A peer's step in z is γ/u: where the graph starves a peer, u falls and the step explodes or is scaled down."""
    if not plan.spec.push_sum or not plan.schedule.is_strongly_connected:
        return
    lowest, settled, peer = _push_weights(plan)
    if lowest <= plan.min_push_weight:
        yield _error(
            "graph.weights",
            f"the push-sum weight of a peer falls to {lowest:.2g} on this graph, below guard.min_push_weight ="
            f' {plan.min_push_weight:g}; give that peer more incoming weight, or set graph.weights = "metropolis"'
            " on an undirected graph",
        )
    elif settled < plan.push_weight_guard * (1.0 - 1e-6):
        yield _warning(
            "algorithm.push_weight_guard",
            f"the push-sum weight of peer {peer} settles at {settled:.2g} on this graph, so its local steps are scaled"
            f" by {settled / plan.push_weight_guard:.2g} throughout; lower algorithm.push_weight_guard to"
            f" {0.9 * settled:.1g}, or give that peer more incoming weight",
        )


def _push_weights(plan: RuleInput) -> tuple[float, float, int]:
    """Return the smallest u of any round, the smallest in the last cycle, and the peer that has it."""
    u = np.ones(plan.num_peers)
    lowest, settled, peer = 1.0, 1.0, 0
    rounds = min(plan.rounds, STARVATION_ROUNDS)
    last_cycle = rounds - min(rounds, plan.schedule.cycle_rounds)
    if all(matrix.is_doubly_stochastic for matrix in plan.schedule.matrices):
        return lowest, settled, peer
    for t in range(rounds):
        u = u + plan.averaging_rate * (plan.schedule.at(t).apply(u) - u)
        smallest = int(np.argmin(u))
        lowest = min(lowest, float(u[smallest]))
        if t >= last_cycle and u[smallest] < settled:
            settled, peer = float(u[smallest]), smallest
    return lowest, settled, peer


def _compressor_is_used(plan: RuleInput) -> Iterator[Objection]:
    if not plan.spec.compresses and not plan.spec.modulo and plan.compressor.kind != "none":
        yield _warning(
            "compressor.kind",
            f"{plan.spec.name} sends in full precision, so the compressor {plan.compressor.kind} has no effect; set"
            ' compressor.kind = "none", or choose an algorithm that compresses, such as sparse-push or quant-sgp',
        )


def _modulo_with_modulo_only(plan: RuleInput) -> Iterator[Objection]:
    """A modulo code decodes only against a vector near the sender's, which only the modulo algorithms hold."""
    spec, compressor = plan.spec, plan.compressor
    if spec.modulo and not compressor.needs_reference:
        yield _error(
            "compressor.kind",
            f'{spec.name} sends modulo codes; set compressor.kind = "modulo" instead of {compressor.kind}',
        )
    if compressor.needs_reference and not spec.modulo:
        yield _error(
            "compressor.kind",
            f"{spec.name} cannot decode modulo codes, which need a receiver whose model is close to the sender's;"
            " choose another compressor, or the algorithm moniqua",
        )


def _modulo_rounding(plan: RuleInput) -> Iterator[Objection]:
    """Lemma 2 of Moniqua asks for δ < ½, and 1-bit stochastic rounding has δ = ½."""
    code = _modulo_code(plan.compressor)
    if code is not None and delta(*code) >= 0.5:
        yield _error(
            "compressor.rounding",
            "a modulo code with stochastic rounding needs at least 2 bits: with 1 bit its error is as large as its"
            ' range; set compressor.rounding = "dither" (as tight as nearest, and unbiased) or compressor.bits = 2',
        )


def _modulo_noise(plan: RuleInput) -> Iterator[Objection]:
    """With few bits the error of the code, δB, is near θ itself, and only a small η averages it out (Theorem 3)."""
    spec, code = plan.spec, _modulo_code(plan.compressor)
    if not spec.modulo or code is None or delta(*code) >= 0.5 or plan.theta_mode == "constant":
        return
    if plan.theta_mode == "verified":
        halfway = spec.asynchronous or spec.graph is GraphNeed.SYMMETRIC
        limit = math.floor(100 * largest_stable_rate(*code, halfway=halfway)) / 100
        if plan.averaging_rate > limit:
            change = "set compressor.bits to 3 or more"
            if not halfway:
                change += f", or algorithm.averaging_rate to {limit:g} or less"
            yield _error(
                "compressor.bits",
                f"with {code[0]}-bit {code[1].name.lower()} codes, the error of the code makes an adaptive θ grow"
                f" without bound at averaging rate {plan.averaging_rate:g}; {change}",
            )
        elif not halfway and plan.averaging_rate > (rest := math.floor(100 * resting_rate(*code)) / 100):
            yield _warning(
                "algorithm.averaging_rate",
                f"with {code[0]}-bit {code[1].name.lower()} codes, the error of the code can make an adaptive θ grow"
                f" without bound in layers of many thousand parameters at averaging rate {plan.averaging_rate:g};"
                f" set it to {rest:g} or less",
            )
        return
    if spec.asynchronous:
        return
    error = delta(*code) * modulus(1.0, *code)
    limit = next((rate for least, rate in MODULO_RATES if error >= least), 1.0)
    if plan.averaging_rate > limit:
        yield _warning(
            "algorithm.averaging_rate",
            f"{code[0]}-bit modulo codes are so coarse that, at averaging rate {plan.averaging_rate:g}, rounding drives"
            f" the models apart as fast as averaging brings them together; set algorithm.averaging_rate to {limit:g} or"
            " less (Moniqua's slack matrix; its paper uses 0.005), or use more bits",
        )


def _one_bit_is_unbiased(plan: RuleInput) -> Iterator[Objection]:
    """Rounded to the nearest of two levels, a number errs the same way each round, and averaging removes none of it.

    Measured on digits (ring of 8, skew 0.8, 500 rounds, η 0.05, verified θ): worst peer 70.8 %, with dither 93.9 %.
    """
    code = _modulo_code(plan.compressor)
    if plan.spec.modulo and code == (1, Rounding.NEAREST):
        yield _warning(
            "compressor.rounding",
            "1-bit codes rounded to the nearest level are biased, so the models stay far apart and some peers end"
            ' without a useful one; set compressor.rounding = "dither", which is unbiased, or use more bits',
        )


def _theta_is_useful(plan: RuleInput) -> Iterator[Objection]:
    """θ by the theorems is loose: an error δB above the size of the weights is no information about them."""
    code = _modulo_code(plan.compressor)
    if not plan.spec.modulo or code is None or delta(*code) >= 0.5 or plan.theta_mode == "verified":
        return
    theta = plan.theta if plan.theta_mode == "constant" else _theorem_theta(plan)
    if theta is None:
        return
    worst = delta(*code) * modulus(theta, *code)
    if worst > plan.typical_weight:
        source = "this θ" if plan.theta_mode == "constant" else f"the theorem's θ of {theta:.3g}"
        key = "algorithm.theta_value" if plan.theta_mode == "constant" else "algorithm.theta"
        yield _warning(
            key,
            f"{source} allows an error of up to {worst:.2g} in {code[0]}-bit codes, more than the weights themselves"
            f' (about {plan.typical_weight:g}); set algorithm.theta = "verified", which finds the smallest θ, or use'
            " more bits",
        )


def _theorem_theta(plan: RuleInput) -> float | None:
    """Return the a-priori θ of the theorem for this algorithm, None if there is none.

    Momentum makes of G∞ up to G∞/(1 − β).
    """
    schedule, rate = plan.schedule, plan.averaging_rate
    if not schedule.is_strongly_connected or not rate > 0:
        return None
    bound = plan.gradient_bound
    if plan.momentum not in ("none", *ADAPTIVE):
        bound /= 1.0 - plan.beta
    if plan.spec.asynchronous:
        return theorem_5(plan.learning_rate, bound, pairwise_mixing_time(schedule.at(0)))
    if plan.spec.graph is not GraphNeed.SYMMETRIC:
        return theorem_3(plan.learning_rate, bound, plan.num_peers, schedule.second_eigenvalue, rate)
    if not schedule.is_symmetric or schedule.smallest_slack_eigenvalue(rate) <= D2_LEAST_EIGENVALUE:
        return None
    return theorem_4(plan.learning_rate, bound, plan.num_peers, d2_constant(schedule.at(0), rate))


def _bias_needs_feedback(plan: RuleInput) -> Iterator[Objection]:
    """Without error feedback a bias adds up round after round."""
    spec, compressor = plan.spec, plan.compressor
    if spec.needs_unbiased and not compressor.unbiased and compressor.kind != "none" and not compressor.needs_reference:
        alternative = "choco-sgd or quant-sgp" if plan.averages else "deep-squeeze or quant-sgp"
        yield _error(
            "compressor.kind",
            f"{spec.name} has no error feedback, so the bias of {compressor.kind} adds up in every round; use an"
            f" unbiased compressor (qsgd with compressor.unbiased = true), or {alternative}, which have error feedback",
        )


def _feedback_needs_contraction(plan: RuleInput) -> Iterator[Objection]:
    """An error memory with E‖C(v) − v‖² ≥ ‖v‖² grows for ever, whatever η is; scaled down, the same C contracts."""
    variance = plan.bound.variance
    if not plan.feeds_errors_back or plan.bound.contraction is not None or variance is None:
        return
    scalable = plan.compressor.kind in ("qsgd", "random_k")
    key, repair = (
        ("compressor.unbiased", "set compressor.unbiased = false, or use more bits or top_k")
        if scalable
        else ("compressor.kind", "use top_k, sign, or qsgd with compressor.unbiased = false")
    )
    sentence = (
        f"{plan.spec.name} accumulates what {plan.compressor.kind} leaves out. In layers of {plan.layer_size:,} numbers"
        f" that error can be {variance:.2g} times what is sent, so it grows from round to round; {repair}"
    )
    yield _error(key, sentence) if variance >= BOUND_SLACK else _warning(key, sentence)


def _replica_noise_of_dcd(plan: RuleInput) -> Iterator[Objection]:
    """DCD and ECD inject the compressor's noise into the models: E‖x − x̄‖² gets the factor ρ² + ω μ² in each round.

    μ = max |1 − λ_i| (Tang et al. 2018a, who ask for even less noise). Below 1 disagreement shrinks; their papers and
    Moniqua's table 6 see it grow at 1 and 2 bits.
    """
    spec, schedule, variance = plan.spec, plan.schedule, plan.bound.variance
    if not (spec.needs_unbiased and spec.memory is Memory.REPLICAS) or variance is None or plan.num_peers == 1:
        return
    if not schedule.is_strongly_connected:
        return
    spread = 1.0 - schedule.smallest_slack_eigenvalue() if schedule.is_symmetric else 2.0
    limit = (1.0 - schedule.second_eigenvalue**2) / spread**2
    if variance <= limit:
        return
    sentence = (
        f"{spec.name} diverges when its compressor is too coarse: in layers of {plan.layer_size:,} numbers the noise of"
        f" {_describe(plan.compressor)} is up to {variance:.2g} times what is sent, and this graph tolerates"
        f" {limit:.2g}; use more bits, a graph that mixes faster, or choco-sgd"
    )
    yield (
        _error("compressor.bits", sentence) if variance > BOUND_SLACK * limit else _warning("compressor.bits", sentence)
    )


def _extrapolation_of_ecd(plan: RuleInput) -> Iterator[Objection]:
    """ECD sends (1 − s/2) x + (s/2) x' in round s, which grows with s; its theory (Tang et al. 2018a) bounds the
    compressor's error itself, not its ratio to the vector sent."""
    compressor = plan.compressor
    grows = compressor.unbiased and compressor.kind != "none" and plan.bound.absolute is None
    if not (plan.spec.grows_what_it_sends and grows):
        return
    yield _warning(
        "compressor.kind",
        f"ecd-psgd sends a vector that grows with the number of rounds, and the error of {_describe(compressor)} grows"
        ' with it until training diverges; set compressor.kind = "grid", whose error does not grow, or use dcd-psgd or'
        " choco-sgd",
    )


def _naive_floor(plan: RuleInput) -> Iterator[Objection]:
    """Moniqua's Theorem 1: E‖∇f‖² ≥ φ²Δ²/(8 (1 + φ²)) for ever, φ the smallest weight, Δ the distance of two levels."""
    if not plan.spec.forgets_errors or plan.compressor.kind == "none":
        return
    floor = ""
    spacing = plan.bound.absolute
    if spacing is not None:
        weights = (float(matrix.column_weights[matrix.column_weights > 0].min()) for matrix in plan.schedule.matrices)
        phi = min(weights)
        floor = f" (the squared gradient never falls below {phi**2 * spacing**2 / (8 * (1 + phi**2)):.2g})"
    yield _warning(
        "algorithm.name",
        f"naive-quantized stalls at a floor that no learning rate removes{floor}; it is provided for comparison, so use"
        " moniqua or choco-sgd to train",
    )


def _averaging_rate_known(plan: RuleInput) -> Iterator[Objection]:
    """η falls with the part that the compressor keeps; far from the known rates the models collapse, or never meet."""
    spec, rate = plan.spec, plan.averaging_rate
    if not 0 < rate <= 1:
        yield _error("algorithm.averaging_rate", f"the averaging rate must be above 0 and at most 1, not {rate:g}")
        return
    if not spec.uses_averaging_rate:
        if rate != 1.0:
            yield _warning(
                "algorithm.averaging_rate",
                f"{spec.name} has no averaging rate, so {rate:g} has no effect; leave algorithm.averaging_rate unset",
            )
        return
    kept = plan.kept if plan.feeds_errors_back else 1.0
    if kept is None or not plan.averages or spec.modulo or spec.asynchronous:
        return
    known = long_run_rate(kept)
    highest = max(RATE_FACTOR * known, short_run_rate(kept))
    if plan.compressor.kind == "qsgd" and rate > NOISY_RATE * kept:
        yield _warning(
            "algorithm.averaging_rate",
            f"an averaging rate of {rate:g} lets the noise of {_describe(plan.compressor)} grow from round to round in"
            f" layers of {plan.layer_size:,} numbers, and models drift apart or overflow; set algorithm.averaging_rate"
            f" to {NOISY_RATE * kept:.1g} or less, or use more bits",
        )
    elif rate > highest:
        yield _warning(
            "algorithm.averaging_rate",
            f"an averaging rate of {rate:g} is far above the rates known to converge when {kept:.2g} of each model is"
            f" sent (short runs: up to {short_run_rate(kept):.2g}, long runs: {known:.2g}), and models may collapse;"
            " lower algorithm.averaging_rate or send more",
        )
    elif rate < known / RATE_FACTOR:
        yield _warning(
            "algorithm.averaging_rate",
            f"an averaging rate of {rate:g} is far below the rate known to work when {kept:.2g} of each model is sent"
            f" ({known:.2g}), so peers learn little from each other; raise algorithm.averaging_rate",
        )


def long_run_rate(kept: float) -> float:
    """Return the η that Sparse-Push's table 5 gives for this fraction kept, interpolated in logarithms."""
    fractions, rates = zip(*LONG_RUN_RATES, strict=True)
    logarithm = np.interp(math.log(max(kept, 1e-12)), np.log(fractions), np.log(rates))
    return math.exp(float(logarithm))


def short_run_rate(kept: float) -> float:
    """Return the highest η to trust in short runs at this fraction kept, at most 1."""
    kept0, rate0, exponent = SHORT_RUN_RATE
    return min(1.0, rate0 * math.pow(kept / kept0, exponent))


def _drift_correction_is_stable(plan: RuleInput) -> Iterator[Objection]:
    """β has to stay below the pull of the graph in a round, or models swing ever further."""
    key, gain = "algorithm.drift_correction", plan.drift_correction
    if gain == "auto" or gain == 0.0:
        return
    if not plan.spec.corrects_drift:
        yield _warning(key, f"{plan.spec.name} corrects no drift, so {gain:g} has no effect; leave this key unset")
        return
    if plan.late != "wait":
        sentence = f'with rounds.late = "{plan.late}" nothing is corrected; use "wait", or leave this key unset'
        yield _warning(key, sentence)
        return
    usual = default_gain(plan.averaging_rate, plan.schedule.spectral_gap)
    if gain > DRIFT_FACTOR * usual and plan.num_peers > 1:
        yield _warning(
            key,
            f"a correction of {gain:g} is far above {usual:g}, a sixth of the averaging rate times the spectral gap of"
            ' this graph, and models may swing ever further; use "auto" or a smaller number',
        )


def _learning_rate_with_momentum(plan: RuleInput) -> Iterator[Objection]:
    rate, beta = plan.learning_rate, plan.beta
    if plan.momentum in ADAPTIVE:
        if rate > MAX_ADAM_RATE:
            yield _warning(
                "training.learning_rate",
                f"{plan.momentum} moves each weight by about the learning rate in each step, and {rate:g} is far above"
                f" the usual 0.001; set training.learning_rate below {MAX_ADAM_RATE:g}",
            )
        return
    effective = rate if plan.momentum == "none" else rate / (1.0 - beta)
    if effective > MAX_EFFECTIVE_RATE:
        yield _warning(
            "training.learning_rate",
            f"a learning rate of {rate:g} with momentum {beta if plan.momentum != 'none' else 0:g} acts like"
            f" {effective:.3g} (the papers use 1), which diverges on most tasks; lower training.learning_rate",
        )
    kept = plan.kept
    if (
        plan.momentum.startswith("qg")
        and plan.feeds_errors_back
        and rate >= COLLAPSING_QG_RATE
        and kept is not None
        and kept < STRONG_COMPRESSION
    ):
        yield _warning(
            "training.momentum",
            f"quasi-global momentum collapsed in tests at learning rates of {COLLAPSING_QG_RATE:g} and above when as"
            f" little of each model ({kept:.2g}) was sent; lower training.learning_rate, send more, or set"
            ' training.momentum = "nesterov"',
        )


def _local_steps_allowed(plan: RuleInput) -> Iterator[Objection]:
    if plan.local_steps > 1 and not plan.spec.local_steps:
        yield _error(
            "training.local_steps",
            f"{plan.spec.name} exchanges after every gradient step; set training.local_steps = 1, or use sgp, which"
            " allows more",
        )
    elif plan.local_steps > 1 and plan.spec.mixes_before_step and plan.num_peers > 1:
        yield _warning(
            "training.local_steps",
            f"{plan.spec.name} averages the models as they were before the round's {plan.local_steps} steps, so that"
            f" all of these part the peers; use {DIRECTED_ALTERNATIVES[plan.spec.name]}, which averages after them, or"
            " one step a round",
        )


def _late_neighbours(plan: RuleInput) -> Iterator[Objection]:
    spec = plan.spec
    if plan.late != "skip" or spec.graph is GraphNeed.NONE:
        return
    if spec.asynchronous:
        yield _warning(
            "rounds.late", f'{spec.name} has no rounds to wait for, so "skip" has no effect; set rounds.late = "wait"'
        )
    elif not spec.tolerates_late:
        yield _error(
            "rounds.late",
            f'{spec.name} cannot continue without a neighbour; set rounds.late = "wait", or use an algorithm of the'
            " push-sum family (sgp, sparse-push, scsp, quant-sgp)",
        )
    elif spec.push_sum and plan.push_weight_guard == 0.0:
        yield _warning(
            "algorithm.push_weight_guard",
            "a peer that continues without its neighbours gives away its push-sum weight u while its step grows like"
            " 1/u (in a test, 20 such rounds ended in NaN); set algorithm.push_weight_guard = 0.5",
        )


def _going_on_alone(plan: RuleInput) -> Iterator[Objection]:
    if plan.late != "skip" or not plan.spec.tolerates_late or plan.max_skipped_rounds <= MAX_SKIPPED_ROUNDS:
        return
    if not plan.spec.push_sum:
        yield _warning(
            "rounds.max_skipped_rounds",
            f"{plan.spec.name} adds the differences of all missed rounds when they arrive, and those of more than"
            f" {MAX_SKIPPED_ROUNDS} rounds move a model too far; set rounds.max_skipped_rounds ="
            f" {MAX_SKIPPED_ROUNDS}, or use sgp",
        )
    elif plan.feeds_errors_back and (plan.kept or 1.0) < FEW:
        yield _warning(
            "rounds.max_skipped_rounds",
            f"peers that continue without each other for more than {MAX_SKIPPED_ROUNDS} rounds drift further apart than"
            " small messages can bring them together; set rounds.max_skipped_rounds ="
            f" {MAX_SKIPPED_ROUNDS}, or use sgp",
        )


def _final_rounds_fit(plan: RuleInput) -> Iterator[Objection]:
    if not plan.spec.final_rounds:
        return
    if plan.final_rounds >= plan.rounds:
        yield _error(
            "algorithm.final_rounds",
            f"all {plan.rounds} rounds of the run would be final rounds, which do not train; set algorithm.final_rounds"
            " well below run.rounds (the paper uses 40 of about 78,000)",
        )
    elif plan.final_rounds < 1:
        yield _warning(
            "algorithm.final_rounds",
            "without final rounds, scsp is the same as sparse-push; set algorithm.final_rounds = 40, as in the paper",
        )


def _robust_mixing_allowed(plan: RuleInput) -> Iterator[Objection]:
    """Clipping and trimming need whole models of neighbours, edges of two directions, and more honest neighbours than
    liars."""
    spec, robust = plan.spec, plan.robust
    if robust is None:
        return
    reason = _why_not_robust(spec)
    if reason is not None:
        yield _error(
            "algorithm.mixing",
            f'{spec.name} cannot mix by "{robust.rule}": {reason}; use d-psgd, choco-sgd or dcd-psgd, or set'
            ' algorithm.mixing = "plain"',
        )
        return
    if not plan.schedule.is_symmetric:
        yield _error(
            "graph.kind",
            f'"{robust.rule}" mixing needs an undirected graph: along an edge of one direction nothing balances'
            " what is cut off, and the average of all models drifts; use complete, random-regular, torus or ring",
        )
    if plan.late == "skip":
        yield _error(
            "rounds.late",
            f'"{robust.rule}" mixing judges the models of one round by each other, so a late one cannot be added'
            ' afterwards; set rounds.late = "wait"',
        )
    if (robust.rule == "clipped" and robust.radius is not None) or plan.num_peers == 1:
        return
    needed = robust.attackers + 1 if robust.rule == "clipped" else 2 * robust.attackers + 1
    fewest = min(len(matrix.senders(peer)) for matrix in plan.schedule.matrices for peer in range(plan.num_peers))
    if fewest < needed:
        yield _error(
            "algorithm.attackers",
            f'"{robust.rule}" mixing with {robust.attackers} attackers needs at least {needed} neighbours of every'
            f" peer in every round, and on this graph a peer has {fewest}; use a graph with more edges"
            f' (graph.kind = "complete", or random-regular with graph.degree = {needed}) or a lower number',
        )


def _why_not_robust(spec: AlgorithmSpec) -> str | None:
    """Return why an algorithm can neither clip nor trim; None if it can."""
    if spec.robust_mixing:
        return None
    if spec.asynchronous:
        return "it averages in pairs, so that a peer has one neighbour's model at a time and nothing to compare it with"
    if spec.push_sum:
        return "what is cut from a model would still count in its push-sum weight, so the average would drift"
    if spec.modulo:
        return "a modulo code is read as the number nearest to the receiver's, so distances to liars look small"
    if spec.memory is Memory.ERRORS:
        return "its messages are parts of models, and what was left out is made up for only if all of them are added"
    if spec.memory is Memory.LAST_STEP:
        return "what it remembers of the last step cancels the difference of the data only under linear mixing"
    if spec.grows_what_it_sends:
        return "it rebuilds models from extrapolations, whose noise would count as distance"
    if spec.forgets_errors:
        return "the noise of what it sends would count as distance"
    return "it does not average models of neighbours"


def _memory_bears_rounding(plan: RuleInput) -> Iterator[Objection]:
    """What is rounded has to be made up for: copies by the next difference, an error memory by what it brings."""
    spec = plan.spec
    if not plan.in_bfloat16:
        return
    if spec.memory not in (Memory.REPLICAS, Memory.ERRORS):
        reason = "keeps neither copies of models nor an error memory"
    elif spec.grows_what_it_sends:
        reason = "never makes up for what rounding adds to its estimates"
    else:
        return
    yield _error("algorithm.memory", f'{spec.name} {reason}; set algorithm.memory = "float32"')


RULES = (
    _graph_connects,
    _graph_mixes_in_time,
    _graph_suits_algorithm,
    _server_reaches_all,
    _schedule_may_change,
    _slack_eigenvalue_of_d2,
    _push_weights_stay_up,
    _compressor_is_used,
    _modulo_with_modulo_only,
    _modulo_rounding,
    _modulo_noise,
    _one_bit_is_unbiased,
    _theta_is_useful,
    _bias_needs_feedback,
    _feedback_needs_contraction,
    _replica_noise_of_dcd,
    _extrapolation_of_ecd,
    _naive_floor,
    _averaging_rate_known,
    _drift_correction_is_stable,
    _learning_rate_with_momentum,
    _local_steps_allowed,
    _late_neighbours,
    _going_on_alone,
    _final_rounds_fit,
    _robust_mixing_allowed,
    _memory_bears_rounding,
)


def _error(key: str, sentence: str) -> Objection:
    return Objection("error", key, sentence)


def _warning(key: str, sentence: str) -> Objection:
    return Objection("warning", key, sentence)


def _modulo_code(compressor: Compressor) -> tuple[int, Rounding] | None:
    """Return bits and rounding of a modulo code, None for another compressor."""
    if not compressor.needs_reference:
        return None
    settings: Any = compressor
    return int(settings.bits), Rounding(settings.rounding)


def _describe(compressor: Compressor) -> str:
    bits = getattr(compressor, "bits", None)
    return compressor.kind if bits is None else f"{bits}-bit {compressor.kind}"


def _is_undirected(schedule: Schedule) -> bool:
    """Whether every edge has its reverse, with whatever weight."""
    return all(m.senders(peer) == m.receivers(peer) for m in schedule.matrices for peer in range(schedule.num_peers))
