"""Every rule that refuses or warns, one known-good configuration for each algorithm, and all combinations."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from peer import compress, gossip
from peer.compress.base import Compressor
from peer.compress.payload import Rounding
from peer.errors import ConfigError
from peer.gossip import graphs, validate
from peer.gossip.base import AlgorithmSpec, GraphNeed, Memory
from peer.gossip.options import RobustMixing
from peer.gossip.topology import Schedule, build_schedule
from peer.gossip.validate import Objection, RuleInput, long_run_rate, short_run_rate
from tests.gossip import drive

SPECS = {name: cls.spec for name, cls in gossip.ALGORITHMS.items()}

NONE = compress.build("none")
TOP_2 = compress.build("top_k", fraction=0.02, value_bits=4)
QSGD_8 = compress.build("qsgd", bits=8, unbiased=True)
QSGD_8_SCALED = compress.build("qsgd", bits=8, unbiased=False)
MODULO_8 = compress.build("modulo", bits=8)
GRID = compress.build("grid", step=0.01)
COMPRESSORS = {
    "none": NONE,
    "top_k": TOP_2,
    "top_k exact": compress.build("top_k", fraction=0.1),
    "random_k": compress.build("random_k", fraction=0.1),
    "random_k unbiased": compress.build("random_k", fraction=0.1, unbiased=True),
    "qsgd": QSGD_8,
    "qsgd 1": compress.build("qsgd", bits=1, unbiased=True),
    "qsgd scaled": QSGD_8_SCALED,
    "grid": GRID,
    "grid nearest": compress.build("grid", step=0.01, rounding="nearest"),
    "sign": compress.build("sign"),
    "ternary": compress.build("ternary"),
    "modulo": MODULO_8,
    "modulo 1": compress.build("modulo", bits=1),
}

GOOD = {
    "local": ("ring", NONE, {}),
    "allreduce": ("complete", NONE, {}),
    "low-rank": ("complete", NONE, {}),
    "compressed-allreduce": ("complete", TOP_2, {}),
    "parameter-server": ("star", QSGD_8, {}),
    "d-psgd": ("ring", NONE, {}),
    "sgp": ("directed-ring", NONE, {}),
    "deep-squeeze": ("ring", TOP_2, {"averaging_rate": 0.1}),
    "sparse-push": ("directed-ring", TOP_2, {"averaging_rate": 0.1}),
    "scsp": ("directed-ring", TOP_2, {"averaging_rate": 0.1, "final_rounds": 40}),
    "choco-sgd": ("ring", TOP_2, {"averaging_rate": 0.1}),
    "quant-sgp": ("directed-ring", TOP_2, {"averaging_rate": 0.1}),
    "dcd-psgd": ("ring", QSGD_8, {}),
    "ecd-psgd": ("ring", GRID, {}),
    "moniqua": ("ring", MODULO_8, {}),
    "d2": ("ring", NONE, {"averaging_rate": 0.5}),
    "moniqua-d2": ("ring", MODULO_8, {"averaging_rate": 0.5}),
    "ad-psgd": ("ring", NONE, {}),
    "moniqua-ad-psgd": ("ring", MODULO_8, {}),
}


def graph(kind: str = "ring", num_peers: int = 8, **options) -> Schedule:
    return build_schedule(num_peers, kind, **options)


def check(spec: AlgorithmSpec, schedule: Schedule, compressor: Compressor, **settings: object) -> list[Objection]:
    return validate.check(RuleInput(spec, schedule, compressor, **settings))


def levels(findings: list[Objection], key: str) -> list[str]:
    return [finding.level for finding in findings if finding.key == key]


def found(level: str, key: str, findings: list[Objection]) -> str:
    """Return the sentence of the one finding of this level and key; fail where there is none or another one."""
    assert [(f.level, f.key) for f in findings] == [(level, key)], findings
    return findings[0].sentence


def test_the_table_of_good_configurations_names_every_algorithm():
    # naive-quantized is there to show that it stalls: it always has its warning.
    assert set(GOOD) == set(SPECS) - {"naive-quantized"}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_configuration_has_no_findings(name):
    kind, compressor, settings = GOOD[name]
    assert check(SPECS[name], graph(kind), compressor, momentum="nesterov", **settings) == []


@pytest.mark.parametrize("name", ["d-psgd", "choco-sgd", "deep-squeeze", "moniqua", "d2", "sgp", "quant-sgp"])
@pytest.mark.parametrize("kind", ["ring", "torus", "hypercube", "complete", "random-regular", "erdos-renyi", "star"])
def test_good_configurations_stay_good_on_every_undirected_graph(name, kind):
    _, compressor, settings = GOOD[name]
    settings = {**settings, "rounds": 2000}
    assert check(SPECS[name], graph(kind), compressor, **settings) == []


@pytest.mark.parametrize("name", sorted(SPECS))
def test_no_combination_of_algorithm_graph_and_compressor_breaks_the_validator(name):
    schedules = []
    for kind, weights in itertools.product(sorted(set(graphs.FAMILIES) - {"file"}), ["auto", "uniform"]):
        for num_peers in (1, 2, 4, 9):
            try:
                schedules.append(graph(kind, num_peers, weights=weights, degree=2))
            except ConfigError:
                continue
    schedules.append(Schedule.from_matrices([[[1, 0], [0, 1]]]))
    assert len(schedules) > 60
    modes = itertools.cycle(["verified", "theorem", "constant"])
    for schedule, compressor in itertools.product(schedules, COMPRESSORS.values()):
        settings = {"theta_mode": next(modes), "late": "skip", "local_steps": 2, "rounds": 50}
        findings = check(SPECS[name], schedule, compressor, **settings)
        assert findings == sorted(findings, key=lambda finding: finding.level != "error")
        for finding in findings:
            assert finding.level in {"error", "warning"}
            assert "." in finding.key
            # A sentence says what to do too: that stands after a semicolon.
            assert "; " in finding.sentence
            assert "nan" not in finding.sentence


@pytest.mark.parametrize(
    ("name", "alternative"),
    [
        ("d-psgd", "sgp"),
        ("naive-quantized", "quant-sgp"),
        ("deep-squeeze", "sparse-push"),
        ("choco-sgd", "quant-sgp"),
        ("dcd-psgd", "quant-sgp"),
        ("ecd-psgd", "quant-sgp"),
        ("moniqua", "quant-sgp"),
    ],
)
def test_averaging_without_push_sum_is_refused_where_rows_do_not_sum_to_1(name, alternative):
    compressor = MODULO_8 if SPECS[name].modulo else QSGD_8_SCALED if name in ("deep-squeeze", "choco-sgd") else QSGD_8
    findings = check(SPECS[name], graph("directed-erdos-renyi", seed=1), compressor)
    (sentence,) = [finding.sentence for finding in findings if finding.level == "error"]
    assert "doubly stochastic" in sentence
    assert "undirected graph" in sentence
    assert f"use {alternative}," in sentence


def test_metropolis_weights_are_suggested_where_the_graph_is_undirected():
    sentence = found("error", "algorithm.name", check(SPECS["d-psgd"], graph("star", weights="uniform"), NONE))
    assert 'graph.weights = "metropolis"' in sentence
    assert check(SPECS["d-psgd"], graph("star", weights="metropolis"), NONE) == []


def test_a_doubly_stochastic_directed_graph_suits_d_psgd():
    assert check(SPECS["d-psgd"], graph("directed-ring"), NONE) == []


@pytest.mark.parametrize("name", ["d2", "moniqua-d2", "ad-psgd", "moniqua-ad-psgd"])
def test_symmetry_is_asked_for_where_it_is_needed(name):
    compressor = MODULO_8 if SPECS[name].modulo else NONE
    sentence = found("error", "algorithm.name", check(SPECS[name], graph("directed-ring"), compressor))
    assert "symmetric" in sentence


def test_all_reduce_needs_everybody_and_a_server_needs_its_star():
    assert 'graph.kind = "complete"' in found("error", "graph.kind", check(SPECS["allreduce"], graph("ring"), NONE))
    server = SPECS["parameter-server"]
    assert 'graph.kind = "star"' in found("error", "graph.kind", check(server, graph("ring"), QSGD_8))
    assert "peer 3" in found("error", "graph.kind", check(server, graph("star"), QSGD_8, server=3))
    assert check(server, graph("complete"), QSGD_8, server=3) == []
    assert "from 0 to 7" in found("error", "algorithm.server", check(server, graph("star"), QSGD_8, server=8))


def test_peers_that_never_hear_of_one_another_are_refused():
    apart = Schedule.from_matrices([[[1, 0], [0, 1]]])
    assert "directed path" in found("error", "graph.kind", check(SPECS["sgp"], apart, NONE))
    # One way only: 1 hears 0, 0 never hears 1.
    one_way = Schedule.from_matrices([[[0.5, 0], [0.5, 1]]])
    assert "directed path" in found("error", "graph.kind", check(SPECS["sgp"], one_way, NONE))
    # Over the whole cycle they do.
    in_turn = Schedule.from_matrices([[[0.5, 0], [0.5, 1]], [[1, 0.5], [0, 0.5]]])
    assert not levels(check(SPECS["sgp"], in_turn, NONE), "graph.kind")
    assert check(SPECS["local"], apart, NONE) == []


def test_a_graph_too_slow_for_the_run_is_warned_about():
    slow = graph("directed-ring", 100)
    sentence = found("warning", "graph.kind", check(SPECS["sgp"], slow, NONE, rounds=1000))
    assert "2,027 rounds" in sentence
    assert check(SPECS["sgp"], slow, NONE, rounds=3000) == []
    assert check(SPECS["sgp"], graph("exponential", 100), NONE, rounds=1000) == []


@pytest.mark.parametrize("name", ["dcd-psgd", "ecd-psgd", "moniqua"])
def test_a_changing_graph_is_refused_for_what_needs_a_fixed_one(name):
    spec = replace(SPECS[name], time_varying=False)
    compressor = MODULO_8 if spec.modulo else GRID
    changing = Schedule([graph("ring").matrices[0], graph("complete").matrices[0]])
    sentence = found("error", "graph.kind", check(spec, changing, compressor))
    assert "only on a fixed graph" in sentence


def test_replicas_on_a_changing_graph_are_priced():
    changing = graph("sparse-push-four", 4)
    sentence = found("warning", "algorithm.name", check(SPECS["quant-sgp"], changing, TOP_2, averaging_rate=0.1))
    assert "10 messages per round, not 4" in sentence
    assert check(SPECS["sparse-push"], changing, TOP_2, averaging_rate=0.1) == []


@pytest.mark.parametrize(
    ("kind", "num_peers", "limit"), [("ring", 4, "1"), ("ring", 8, "1"), ("ring", 10, "1"), ("hypercube", 8, "0.889")]
)
def test_d2_is_refused_where_an_eigenvalue_reaches_minus_one_third(kind, num_peers, limit):
    """Even uniform rings have −1/3 exactly, which floating point passes."""
    schedule = graph(kind, num_peers)
    for name, compressor in (("d2", NONE), ("moniqua-d2", MODULO_8)):
        sentence = found("error", "algorithm.averaging_rate", check(SPECS[name], schedule, compressor))
        assert "algorithm.averaging_rate = 0.5" in sentence
        assert f"below {limit} " in sentence
        assert check(SPECS[name], schedule, compressor, averaging_rate=0.5) == []


def test_d2_may_use_the_whole_rate_where_the_spectrum_allows_it():
    assert check(SPECS["d2"], graph("ring", 5), NONE) == []


def test_a_starving_graph_is_refused_or_warned_about():
    # Peer 0 keeps a millionth of itself and hears a millionth of peer 1.
    tiny = 1e-8
    starved = Schedule.from_matrices([[[tiny, tiny], [1 - tiny, 1 - tiny]]])
    sentence = found("error", "graph.weights", check(SPECS["sgp"], starved, NONE))
    assert "guard.min_push_weight" in sentence
    lean = Schedule.from_matrices([[[0.5, 0.1], [0.5, 0.9]]])
    sentence = found("warning", "algorithm.push_weight_guard", check(SPECS["sgp"], lean, NONE))
    # u₀ settles at 2 · 0.1 / 0.6.
    assert "peer 0 settles at 0.33" in sentence
    assert "by 0.67" in sentence
    assert check(SPECS["sgp"], lean, NONE, push_weight_guard=0.3) == []
    assert check(SPECS["sgp"], lean, NONE, push_weight_guard=0.0) == []


def test_a_compressor_that_does_nothing_is_mentioned():
    assert "full precision" in found("warning", "compressor.kind", check(SPECS["sgp"], graph(), TOP_2))


def test_modulo_codes_belong_to_the_modulo_algorithms():
    assert 'kind = "modulo"' in found("error", "compressor.kind", check(SPECS["moniqua"], graph(), TOP_2))
    findings = check(SPECS["choco-sgd"], graph(), MODULO_8)
    assert "cannot decode modulo codes" in found("error", "compressor.kind", findings)


@pytest.mark.parametrize("kind", ["complete", "ring", "exponential", "star"])
def test_no_graph_of_two_is_said_to_mix_slowly(kind):
    """Their spectral gap is 1; only the averaging rate can be too low for a short run."""
    assert graph(kind, 2).spectral_gap == pytest.approx(1.0)
    quant_sgp, sparse = SPECS["quant-sgp"], TOP_2
    for rounds, key in ((1000, None), (10, "algorithm.averaging_rate")):
        findings = check(quant_sgp, graph(kind, 2), sparse, averaging_rate=0.05, rounds=rounds)
        slow = [finding for finding in findings if "factor e" in finding.sentence]
        assert [finding.key for finding in slow] == ([] if key is None else [key])
        assert all(
            "at least 20 rounds" in finding.sentence and "use exponential" not in finding.sentence for finding in slow
        )


def test_a_graph_that_mixes_slowly_for_the_length_of_the_run_is_named():
    findings = check(SPECS["sgp"], graph("directed-ring", 64), NONE, rounds=100)
    assert "use exponential" in found("warning", "graph.kind", findings)
    assert check(SPECS["sgp"], graph("directed-ring", 64), NONE, rounds=10_000) == []


class OneBitStochastic:
    """The code that `compress.build` refuses to make, as a description."""

    kind, unbiased, needs_reference, bits, rounding = "modulo", True, True, 1, Rounding.STOCHASTIC


def test_one_bit_stochastic_modulo_rounding_is_refused():
    """The papers' 1-bit experiments say so, which their own Lemma 2 excludes (δ = ½)."""
    for mode in ("verified", "theorem", "constant"):
        findings = check(SPECS["moniqua"], graph(), OneBitStochastic(), averaging_rate=0.3, theta_mode=mode)
        assert '"dither"' in found("error", "compressor.rounding", findings)


def test_one_bit_rounded_to_nearest_is_warned_about():
    moniqua, key = SPECS["moniqua"], "compressor.rounding"
    nearest, dither, two_bits = (
        compress.build("modulo", bits=bits, rounding=rounding)
        for bits, rounding in ((1, Rounding.NEAREST), (1, Rounding.DITHER), (2, Rounding.NEAREST))
    )
    assert "dither" in found("warning", key, check(moniqua, graph(), nearest, averaging_rate=0.05))
    for sound in (dither, two_bits):
        assert not any(finding.key == key for finding in check(moniqua, graph(), sound, averaging_rate=0.05))


@pytest.mark.parametrize(("bits", "rests", "highest"), [(1, 0.1, 0.2), (2, 0.31, 0.62), (3, 1.0, 1.0), (4, 1.0, 1.0)])
def test_coarse_modulo_codes_need_a_slack_matrix(bits, rests, highest):
    code = compress.build("modulo", bits=bits, rounding=Rounding.DITHER)
    assert check(SPECS["moniqua"], graph(), code, averaging_rate=rests) == []
    if highest < 1:
        findings = check(SPECS["moniqua"], graph(), code, averaging_rate=highest)
        assert f"to {rests:g} or less" in found("warning", "algorithm.averaging_rate", findings)
        findings = check(SPECS["moniqua"], graph(), code, averaging_rate=1.0)
        assert f"to {highest:g} or less" in found("error", "compressor.bits", findings)


def test_pairs_and_d2_need_three_bits_for_an_adapted_theta():
    two, three = (compress.build("modulo", bits=bits, rounding=Rounding.DITHER) for bits in (2, 3))
    for name, rate in (("moniqua-d2", 0.5), ("moniqua-ad-psgd", 1.0)):
        findings = check(SPECS[name], graph(), two, averaging_rate=rate)
        assert "3 or more" in found("error", "compressor.bits", findings)
        assert not [f for f in check(SPECS[name], graph(), three, averaging_rate=rate) if f.level == "error"]


def test_the_theorems_theta_is_warned_about_where_it_says_nothing_of_the_weights():
    """Ring of 8: 50 γG∞; slack 0.005: 10⁴ γG∞."""
    moniqua = SPECS["moniqua"]
    settings = {"theta_mode": "theorem", "learning_rate": 0.1}
    sentence = found(
        "warning", "algorithm.theta", check(moniqua, graph(), compress.build("modulo", bits=4), **settings)
    )
    assert "the theorem's θ of 4.97" in sentence
    assert check(moniqua, graph(), MODULO_8, **settings) == []
    slack = check(moniqua, graph(), MODULO_8, averaging_rate=0.005, rounds=10_000, **settings)
    assert "θ of 994" in found("warning", "algorithm.theta", slack)
    momentum = check(moniqua, graph(), MODULO_8, momentum="nesterov", beta=0.9, **settings)
    assert "θ of 49.7" in found("warning", "algorithm.theta", momentum)
    for name, rate in (("moniqua-d2", 0.5), ("moniqua-ad-psgd", 1.0)):
        findings = check(SPECS[name], graph(), MODULO_8, averaging_rate=rate, **settings)
        assert "the theorem's θ" in found("warning", "algorithm.theta", findings)


def test_a_constant_theta_is_warned_about_in_the_same_way():
    settings = {"theta_mode": "constant", "theta": 2.0, "averaging_rate": 0.3}
    assert check(SPECS["moniqua"], graph(), MODULO_8, **settings) == []
    two_bits = compress.build("modulo", bits=2)
    assert "up to 0.67" in found(
        "warning", "algorithm.theta_value", check(SPECS["moniqua"], graph(), two_bits, **settings)
    )


@pytest.mark.parametrize("name", ["dcd-psgd", "ecd-psgd", "parameter-server"])
@pytest.mark.parametrize("kind", ["top_k", "sign", "random_k", "qsgd scaled", "grid nearest"])
def test_a_biased_compressor_without_error_feedback_is_refused(name, kind):
    schedule = graph("star" if name == "parameter-server" else "ring")
    sentence = found("error", "compressor.kind", check(SPECS[name], schedule, COMPRESSORS[kind]))
    assert "error feedback" in sentence


def test_float16_on_the_wire_is_no_biased_compressor():
    half = compress.build("none", value_type="float16")
    assert check(SPECS["dcd-psgd"], graph(), half) == []


@pytest.mark.parametrize("name", ["deep-squeeze", "sparse-push", "scsp", "choco-sgd", "quant-sgp"])
def test_errors_fed_back_through_an_expanding_compressor_are_refused(name):
    settings = {"averaging_rate": 0.1, "final_rounds": 40}
    for kind, key in (
        ("qsgd 1", "compressor.unbiased"),
        ("random_k unbiased", "compressor.unbiased"),
        ("ternary", "compressor.kind"),
    ):
        findings = check(SPECS[name], graph(), COMPRESSORS[kind], **settings)
        assert "grows from round to round" in found("error", key, findings)
    # 8 bits: s = 255, so ω = d/s² reaches 1 at layers of 65,025 numbers.
    assert check(SPECS[name], graph(), QSGD_8, **settings) == []
    findings = check(SPECS[name], graph(), QSGD_8, layer_size=200_000, **settings)
    assert "200,000" in found("warning", "compressor.unbiased", findings)
    assert check(SPECS[name], graph(), QSGD_8_SCALED, layer_size=200_000, **settings) == []


def test_dcd_and_ecd_refuse_coarse_compressors():
    def of_noise(findings: list[Objection]) -> list[Objection]:
        return [finding for finding in findings if finding.key == "compressor.bits"]

    for name in ("dcd-psgd", "ecd-psgd"):
        for bits in (1, 2, 4):
            findings = of_noise(check(SPECS[name], graph(), compress.build("qsgd", bits=bits, unbiased=True)))
            assert f"{bits}-bit qsgd" in found("error", "compressor.bits", findings)
        # A slower graph bears less noise.
        findings = of_noise(check(SPECS[name], graph("ring", 16), QSGD_8))
        assert "this graph tolerates 0.056" in found("warning", "compressor.bits", findings)
        # Small layers bear more.
        four_bits = compress.build("qsgd", bits=4, unbiased=True)
        assert of_noise(check(SPECS[name], graph(), four_bits, layer_size=40)) == []


def test_ecd_is_warned_of_an_error_that_grows_with_what_it_extrapolates():
    sentence = found("warning", "compressor.kind", check(SPECS["ecd-psgd"], graph(), QSGD_8))
    assert "8-bit qsgd" in sentence
    assert 'compressor.kind = "grid"' in sentence
    for compressor in (GRID, NONE):
        assert check(SPECS["ecd-psgd"], graph(), compressor) == []


def test_naive_quantization_is_told_its_floor():
    """Theorem 1: φ²Δ²/(8(1 + φ²)), φ = 1/5 on a torus, Δ = 0.01."""
    findings = check(SPECS["naive-quantized"], graph("torus", 16), COMPRESSORS["grid"])
    assert "below 4.8e-07" in found("warning", "algorithm.name", findings)
    assert "stalls" in found("warning", "algorithm.name", check(SPECS["naive-quantized"], graph(), QSGD_8))
    assert check(SPECS["naive-quantized"], graph(), NONE) == []


def test_the_papers_averaging_rates_are_interpolated():
    for kept, rate in ((1.0, 1.0), (0.5, 0.08), (0.1, 0.01), (0.01, 0.005), (0.001, 0.001)):
        assert long_run_rate(kept) == pytest.approx(rate)
        assert short_run_rate(kept) >= rate
    assert 0.005 < long_run_rate(0.02) < 0.01


@pytest.mark.parametrize("name", ["quant-sgp", "sparse-push", "choco-sgd", "deep-squeeze"])
@pytest.mark.parametrize(
    ("fraction", "good", "bad"),
    [
        (0.5, [0.08, 0.8], []),
        (0.1, [0.01, 0.3], [0.7]),
        (0.02, [0.1], [0.3, 1.0]),
        (0.01, [0.005, 0.05], [0.3, 0.0004]),
        (0.001, [0.001], [0.1]),
    ],
)
def test_averaging_rates_far_from_those_known_to_converge_are_warned_about(name, fraction, good, bad):
    compressor = compress.build("top_k", fraction=fraction)
    for rate in good:
        assert check(SPECS[name], graph(), compressor, averaging_rate=rate, rounds=100_000) == []
    for rate in bad:
        findings = check(SPECS[name], graph(), compressor, averaging_rate=rate, rounds=100_000)
        assert "averaging rate" in found("warning", "algorithm.averaging_rate", findings)


@pytest.mark.parametrize(
    ("bits", "good", "bad"), [(1, 0.02, 0.05), (2, 0.05, 0.1), (3, 0.1, 0.2), (4, 0.2, 0.35), (5, 0.4, 1.0)]
)
def test_the_noise_of_few_bits_bears_only_a_low_averaging_rate(bits, good, bad):
    """`good` trained every peer of a ring of 8 on digits, whose largest layer this is; `bad` lost the worst or all."""
    compressor = compress.build("qsgd", bits=bits, unbiased=False)
    for rate, expected in ((good, []), (bad, ["warning"])):
        findings = check(SPECS["choco-sgd"], graph(), compressor, averaging_rate=rate, layer_size=16_384)
        assert levels(findings, "algorithm.averaging_rate") == expected


def test_an_averaging_rate_outside_of_its_range_or_without_a_use_is_found():
    for rate in (0.0, -0.1, 1.5, float("nan")):
        assert "error" in levels(check(SPECS["sgp"], graph(), NONE, averaging_rate=rate), "algorithm.averaging_rate")
    findings = check(SPECS["dcd-psgd"], graph(), QSGD_8, averaging_rate=0.5)
    assert "has no averaging rate" in found("warning", "algorithm.averaging_rate", findings)
    # 0.01 is far from the 1 of full precision.
    findings = check(SPECS["sgp"], graph(), NONE, averaging_rate=0.01, rounds=10_000)
    assert "learn little" in found("warning", "algorithm.averaging_rate", findings)


def test_learning_rates_far_outside_of_the_papers_are_warned_about():
    sgp = SPECS["sgp"]
    assert check(sgp, graph(), NONE, learning_rate=0.1, momentum="nesterov", beta=0.9) == []
    findings = check(sgp, graph(), NONE, learning_rate=0.1, momentum="heavy-ball", beta=0.99)
    assert "acts like 10 " in found("warning", "training.learning_rate", findings)
    assert check(sgp, graph(), NONE, learning_rate=0.001, momentum="adam") == []
    findings = check(sgp, graph(), NONE, learning_rate=0.1, momentum="adam")
    assert "usual 0.001" in found("warning", "training.learning_rate", findings)


def test_quasi_global_momentum_with_strong_compression_is_warned_about():
    settings = {"averaging_rate": 0.05, "momentum": "qg", "beta": 0.9}
    quant_sgp = SPECS["quant-sgp"]
    findings = check(quant_sgp, graph(), TOP_2, learning_rate=0.1, **settings)
    assert "collapsed" in found("warning", "training.momentum", findings)
    assert check(quant_sgp, graph(), TOP_2, learning_rate=0.01, **settings) == []
    assert (
        check(quant_sgp, graph(), COMPRESSORS["sign"], learning_rate=0.1, **{**settings, "averaging_rate": 0.3}) == []
    )
    assert check(SPECS["sgp"], graph(), NONE, learning_rate=0.1, **{**settings, "averaging_rate": 1.0}) == []


def test_local_steps_are_refused_where_every_gradient_travels():
    for name, kind, compressor in (("allreduce", "complete", NONE), ("parameter-server", "star", QSGD_8)):
        findings = check(SPECS[name], graph(kind), compressor, local_steps=4)
        assert "local_steps = 1" in found("error", "training.local_steps", findings)
    assert check(SPECS["sgp"], graph(), NONE, local_steps=4) == []
    for name in ("low-rank", "compressed-allreduce"):
        assert check(SPECS[name], graph("complete"), NONE, local_steps=4) == []


MIXING = [name for name in SPECS if SPECS[name].graph in (GraphNeed.COLUMN, GraphNeed.DOUBLY)]


@pytest.mark.parametrize("name", [name for name in MIXING if not SPECS[name].asynchronous])
def test_several_steps_are_warned_of_where_they_part_the_peers(name):
    """Peers that begin alike, take other steps and hear all others hold one model after the round, or are parted."""
    if SPECS[name].needs_unbiased:
        compressor = "grid", {"step": 1e-4}
    else:
        compressor = ("modulo", {"bits": 16}) if SPECS[name].modulo else "none"
    among_all = drive.schedule_of(np.full((4, 4), 0.25))
    algorithms = drive.peers(name, among_all, np.zeros(3), compressor=compressor, theta=(1.0,))
    drive.gossip(algorithms, 0, list(np.arange(12.0).reshape(4, 3)), 0.1)
    are_parted = float(np.ptp([a.x / a.u for a in algorithms], axis=0).max()) > 0.5
    _, compressor, settings = GOOD.get(name, ("ring", NONE, {}))
    findings = check(SPECS[name], graph("complete"), compressor, local_steps=4, **settings)
    assert any(each.key == "training.local_steps" for each in findings) == are_parted


@pytest.mark.parametrize("name", sorted(SPECS))
def test_going_on_without_a_neighbour_is_for_those_that_can(name):
    """sgp, sparse-push, scsp, quant-sgp; d-psgd, deep-squeeze and choco-sgd with the difference form; no others."""
    if name == "naive-quantized":
        kind, compressor, settings = "ring", NONE, {}
    else:
        kind, compressor, settings = GOOD[name]
    findings = check(SPECS[name], graph(kind), compressor, late="skip", **settings)
    able = {"sgp", "sparse-push", "scsp", "quant-sgp", "d-psgd", "deep-squeeze", "choco-sgd", "local"}
    if name in able:
        assert findings == []
    elif SPECS[name].asynchronous:
        assert "no rounds to wait for" in found("warning", "rounds.late", findings)
    else:
        assert "cannot continue without a neighbour" in found("error", "rounds.late", findings)


def test_going_on_alone_for_long_is_for_those_that_find_together_again():
    def long(name: str, kind: str, compressor) -> list:
        return check(SPECS[name], graph(kind), compressor, late="skip", max_skipped_rounds=200, averaging_rate=0.1)

    assert long("sgp", "directed-ring", NONE) == []
    assert "drift further apart" in found(
        "warning", "rounds.max_skipped_rounds", long("quant-sgp", "directed-ring", TOP_2)
    )
    assert "move a model too far" in found("warning", "rounds.max_skipped_rounds", long("d-psgd", "ring", NONE))


def test_skipping_neighbours_without_the_guard_is_warned_about():
    findings = check(SPECS["sgp"], graph("directed-ring"), NONE, late="skip", push_weight_guard=0.0)
    assert "NaN" in found("warning", "algorithm.push_weight_guard", findings)


def test_scsp_must_train_before_its_final_rounds():
    settings = {"averaging_rate": 0.1, "rounds": 200}
    scsp, ring = SPECS["scsp"], graph()
    assert check(scsp, ring, TOP_2, final_rounds=40, **settings) == []
    findings = check(scsp, ring, TOP_2, final_rounds=200, **settings)
    assert "do not train" in found("error", "algorithm.final_rounds", findings)
    findings = check(scsp, ring, TOP_2, final_rounds=0, **settings)
    assert "same as sparse-push" in found("warning", "algorithm.final_rounds", findings)


ROBUST = [RobustMixing(rule="clipped"), RobustMixing(rule="trimmed-mean")]


@pytest.mark.parametrize("robust", ROBUST, ids=lambda robust: robust.rule)
@pytest.mark.parametrize("name", sorted(GOOD))
def test_robust_mixing_is_for_those_that_mix_whole_models_and_keep_no_sum(name, robust):
    kind, compressor, settings = GOOD[name]
    kind = "complete" if kind in ("ring", "directed-ring") else kind
    findings = check(SPECS[name], graph(kind), compressor, robust=robust, **settings)
    if name in ("d-psgd", "choco-sgd", "dcd-psgd"):
        assert findings == []
    else:
        assert f'{name} cannot mix by "{robust.rule}"' in found("error", "algorithm.mixing", findings)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_bfloat16_is_for_copies_and_memories_that_make_up_for_its_rounding(name):
    kind, compressor, settings = GOOD[name]
    findings = check(SPECS[name], graph(kind), compressor, in_bfloat16=True, **settings)
    if name == "ecd-psgd" or SPECS[name].memory not in (Memory.REPLICAS, Memory.ERRORS):
        sentence = found("error", "algorithm.memory", findings)
        assert ("never makes up for" if name == "ecd-psgd" else "keeps neither copies") in sentence
    else:
        assert findings == []


@pytest.mark.parametrize("robust", ROBUST, ids=lambda robust: robust.rule)
def test_robust_mixing_needs_edges_of_two_directions_and_rounds_that_wait(robust):
    findings = check(SPECS["d-psgd"], graph("exponential", 16), NONE, robust=robust)
    assert "needs an undirected graph" in found("error", "graph.kind", findings)
    findings = check(SPECS["choco-sgd"], graph("complete"), TOP_2, averaging_rate=0.1, late="skip", robust=robust)
    assert 'set rounds.late = "wait"' in found("error", "rounds.late", findings)


@pytest.mark.parametrize(
    ("rule", "attackers", "enough"), [("clipped", 2, 3), ("trimmed-mean", 1, 3), ("trimmed-mean", 2, 5)]
)
def test_more_neighbours_are_needed_than_lie(rule, attackers, enough):
    robust = RobustMixing(rule=rule, attackers=attackers)
    assert check(SPECS["d-psgd"], graph("random-regular", degree=enough), NONE, robust=robust) == []
    findings = check(SPECS["d-psgd"], graph("random-regular", degree=enough - 1), NONE, robust=robust)
    sentence = found("error", "algorithm.attackers", findings)
    assert f"needs at least {enough} neighbours" in sentence
    assert f"graph.degree = {enough})" in sentence
    # A fixed radius holds whoever lies.
    fixed = RobustMixing(rule="clipped", attackers=7, radius=1.0)
    assert check(SPECS["d-psgd"], graph("ring"), NONE, robust=fixed) == []


def test_errors_come_before_warnings():
    findings = check(SPECS["sgp"], graph("directed-ring", 100), TOP_2, averaging_rate=2.0, rounds=10)
    assert [finding.level for finding in findings] == ["error", "warning", "warning"]


def test_an_algorithm_that_is_not_in_the_table_is_checked_by_what_it_says_of_itself():
    spec = AlgorithmSpec(name="own", summary="An own one.", source="none", graph=GraphNeed.DOUBLY)
    sentence = found("error", "algorithm.name", check(spec, graph("four-node-a", 4), NONE))
    assert "own needs a doubly stochastic graph" in sentence


def test_a_correction_of_drift_that_would_swing_or_do_nothing_is_warned_about():
    ring, compressor = graph("directed-ring"), compress.build("top_k", fraction=0.1, value_bits=4)
    settings = {"averaging_rate": 0.24, "rounds": 2000}
    for gain in ("auto", 0.0, 0.007):
        assert check(SPECS["quant-sgp"], ring, compressor, drift_correction=gain, **settings) == []
    findings = check(SPECS["quant-sgp"], ring, compressor, drift_correction=0.05, **settings)
    skipping = check(SPECS["quant-sgp"], ring, compressor, drift_correction=0.01, late="skip", **settings)
    assert any("nothing is corrected" in finding.sentence for finding in skipping)
    assert "far above 0.003" in found("warning", "algorithm.drift_correction", findings)
    findings = check(SPECS["sgp"], ring, COMPRESSORS["none"], drift_correction=0.01, rounds=2000)
    assert "sgp corrects no drift" in found("warning", "algorithm.drift_correction", findings)
    assert check(SPECS["sgp"], ring, COMPRESSORS["none"], drift_correction="auto", rounds=2000) == []
