"""Every algorithm, through encoded bytes, against a dense-matrix reference on random graphs, sizes and numbers."""

from __future__ import annotations

import numpy as np
import pytest

from peer.gossip import ALGORITHMS
from peer.simulate.replay import largest_difference, parse_scenario, replay
from tests.gossip.reference import reference_trajectory
from tests.gossip.scenarios import column_stochastic, events, scenario

TOP_K = {"kind": "top_k", "fraction": 0.3}


def _uniforms(seed, rounds, *shape):
    return np.random.default_rng(seed + 1000).random((rounds, *shape)).tolist()


def _cases():
    yield "local", {}
    yield "local", {"momentum": {"kind": "heavy-ball", "beta": 0.7, "weight_decay": 0.02}}
    yield "allreduce", {"momentum": {"kind": "nesterov"}}
    low_rank = {"layers": [[9, 8], 5, [3, 2]], "rank": 2, "factor_bits": 8, "draws": "shared"}
    yield "low-rank", low_rank
    yield (
        "low-rank",
        {**low_rank, "layers": [[6, 2, 5], [12, 7]], "momentum": {"kind": "nesterov", "weight_decay": 0.02}},
    )
    yield "low-rank", {**low_rank, "factor_bits": 3, "nodes": 7, "momentum": {"kind": "qg", "beta": 0.8}, "lr": 0.01}
    yield "low-rank", {"rank": 1, "factor_bits": 16}
    yield "low-rank", {**low_rank, "factor_bits": 5, "factor_exponents": "layer"}
    yield "low-rank", {**low_rank, "factor_exponents": "layer", "nodes": 7, "layers": [[6, 2, 5], [12, 7]]}
    yield "compressed-allreduce", {"compressor": TOP_K, "momentum": {"kind": "nesterov", "weight_decay": 0.02}}
    yield "compressed-allreduce", {"compressor": {"kind": "sign"}, "nodes": 7, "lr": 0.02}
    yield "compressed-allreduce", {"compressor": TOP_K, "whole_below": 5, "momentum": {"kind": "qg", "beta": 0.8}}
    yield "compressed-allreduce", {}
    yield "parameter-server", {"compressor": {"kind": "grid", "step": 0.07}, "draws": "node"}
    yield "parameter-server", {"compressor": {"kind": "sign"}, "momentum": {"kind": "heavy-ball"}, "lr": 0.01}
    yield "d-psgd", {"averaging_rate": 0.7}
    yield "d-psgd", {"matrices": 3, "mixing_period": 2, "momentum": {"kind": "qg", "beta": 0.8, "mu": 0.6}}
    yield "naive-quantized", {"compressor": {"kind": "grid", "step": 0.1}, "draws": "node"}
    yield "naive-quantized", {"compressor": {"kind": "grid", "step": 0.1}}
    yield "sgp", {"matrices": 4, "mixing_period": 3, "lr": np.linspace(0.1, 0.01, 25).tolist()}
    yield "sgp", {"averaging_rate": 0.4, "momentum": {"kind": "qg-nesterov", "beta": 0.8, "weight_decay": 0.01}}
    yield "deep-squeeze", {"compressor": TOP_K, "averaging_rate": 0.3}
    yield "deep-squeeze", {"compressor": {"kind": "qsgd", "bits": 3}, "averaging_rate": 0.2, "draws": "node"}
    yield "sparse-push", {"compressor": TOP_K, "averaging_rate": 0.2, "matrices": 3}
    yield "sparse-push", {"compressor": TOP_K, "averaging_rate": 0.2, "whole_below": 5}
    yield "scsp", {"compressor": TOP_K, "averaging_rate": 0.2, "final_rounds": 7, "matrices": 2}
    yield (
        "scsp",
        {"compressor": TOP_K, "averaging_rate": 0.2, "final_rounds": 5, "momentum": {"kind": "qg"}, "lr": 0.02},
    )
    yield "scsp", {"compressor": TOP_K, "averaging_rate": 0.2, "final_rounds": 25}
    yield "choco-sgd", {"compressor": {"kind": "sign"}, "averaging_rate": 0.3}
    yield "choco-sgd", {"compressor": TOP_K, "averaging_rate": 0.3, "graph": column_stochastic}
    yield "quant-sgp", {"compressor": TOP_K, "averaging_rate": 0.2, "matrices": 3, "mixing_period": 2}
    yield (
        "quant-sgp",
        {"compressor": {"kind": "qsgd", "bits": 4, "biased": True}, "averaging_rate": 0.2, "draws": "node"},
    )
    yield "dcd-psgd", {"compressor": {"kind": "qsgd", "bits": 8}, "draws": "node"}
    yield "ecd-psgd", {"compressor": {"kind": "qsgd", "bits": 8}, "draws": "node", "rounds": 10}
    for rounding, bits in (("nearest", 1), ("dither", 1), ("stochastic", 2), ("stochastic", 8), ("dither", 12)):
        code = {"kind": "modulo", "bits": bits, "rounding": rounding, "theta": 4.0}
        yield "moniqua", {"compressor": code, "averaging_rate": 0.3, "draws": "shared"}
    code = {"kind": "modulo", "bits": 6, "rounding": "dither", "theta": np.linspace(5.0, 3.0, 25).tolist()}
    yield "moniqua", {"compressor": code, "draws": "shared", "whole_below": 4}
    yield "d2", {"averaging_rate": 0.5}
    yield "d2", {"averaging_rate": 0.5, "momentum": {"kind": "nesterov", "beta": 0.5}, "lr": 0.02}
    yield "moniqua-d2", {"compressor": {**code, "theta": 6.0}, "averaging_rate": 0.5, "draws": "shared"}
    yield "moniqua-d2", {"compressor": {**code, "theta": 6.0, "rounding": "nearest"}, "averaging_rate": 0.5}
    yield "ad-psgd", {"events": 60}
    yield "moniqua-ad-psgd", {"events": 60, "compressor": {**code, "theta": 6.0}, "draws": "shared"}


CASES = list(_cases())


def _build(name, settings, seed):
    settings = dict(settings)
    draws, count = settings.pop("draws", None), settings.pop("events", None)
    s = scenario(name, seed, **settings)
    if count:
        s["events"] = events(np.random.default_rng(seed), s["nodes"], count)
    length = count or s["rounds"]
    if draws:
        s["uniforms"] = _uniforms(seed, length, *((s["nodes"], s["dim"]) if draws == "node" else (s["dim"],)))
    return s


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "settings"), CASES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CASES)])
def test_replay_follows_the_equations(name, settings, seed):
    s = _build(name, settings, 17 * seed + len(name))
    assert largest_difference(replay(parse_scenario(s)), reference_trajectory(s)) < 1e-9


def test_every_algorithm_has_a_case():
    assert {name for name, _ in CASES} == set(ALGORITHMS)
