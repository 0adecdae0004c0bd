"""`sotto lab replay`: scenario files in, trajectories out; every mistake in a file gets one sentence."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from peer import wire
from peer.errors import ConfigError
from peer.gossip import ALGORITHMS
from peer.simulate.replay import largest_difference, parse_scenario, read_scenario, replay
from tests.gossip.reference import reference_trajectory
from tests.gossip.scenarios import scenario


def _vector_files() -> list[Path]:
    """Return external scenario files: of the folder SOTTO_VECTORS, else of ../shared/vectors beside the checkout."""
    named = os.environ.get("SOTTO_VECTORS")
    folder = Path(named) if named else Path(__file__).parents[3] / "shared" / "vectors"
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def _parameters() -> list[object]:
    files = _vector_files()
    if not files:
        reason = "no scenario files: set SOTTO_VECTORS to a folder of them"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")]
    return [pytest.param(file, id=file.stem) for file in files]


@pytest.mark.parametrize("file", _parameters())
def test_external_scenarios_are_reproduced(file):
    expect = json.loads(file.read_text()).get("expect")
    result = replay(read_scenario(file))
    assert expect is None or largest_difference(result, expect) < 1e-9


def test_a_file_gives_x_z_and_u_of_every_round(tmp_path):
    s = scenario("sgp", 1, rounds=4)
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(s))
    result = replay(read_scenario(path))
    n, d = s["nodes"], s["dim"]
    assert np.shape(result["x"]) == np.shape(result["z"]) == (5, n, d)
    assert np.shape(result["u"]) == (5, n)
    assert result["x"][0] == [s["x0"]] * n
    json.dumps(result)


def test_every_message_goes_over_the_wire(monkeypatch):
    """Bytes are made and read for each message, and nothing but what was decoded is used."""
    frames = []

    def encode(message, layout):
        frames.append(original(message, layout))
        return frames[-1]

    original = wire.encode
    monkeypatch.setattr("peer.simulate.replay.wire.encode", encode)
    s = scenario("sparse-push", 2, rounds=6, compressor={"kind": "top_k", "fraction": 0.5}, averaging_rate=0.3)
    replay(parse_scenario(s))
    w = np.array(s["mixing"][0])
    edges = int((w != 0).sum() - (np.diag(w) != 0).sum())
    assert len(frames) == 6 * edges


def test_verified_codes_repair_a_theta_that_is_too_small():
    """The file asks for hashes: with θ far too small the result is that of exact codes within δB."""
    code = {"kind": "modulo", "bits": 8, "rounding": "nearest", "theta": 1e-3}
    small = scenario("moniqua", 3, compressor={**code, "verified": True})
    large = scenario("moniqua", 3, compressor={**code, "theta": 10.0})
    wrong = scenario("moniqua", 3, compressor=code)
    exact = reference_trajectory({**large, "algorithm": "d-psgd", "compressor": {"kind": "none"}})
    assert largest_difference(replay(parse_scenario(small)), exact) < 1e-4
    assert largest_difference(replay(parse_scenario(large)), reference_trajectory(large)) < 1e-9
    assert largest_difference(replay(parse_scenario(wrong)), exact) > 0.1


def test_replay_gives_the_same_bits_twice():
    s = scenario("quant-sgp", 4, compressor={"kind": "qsgd", "bits": 4}, averaging_rate=0.2)
    first, second = replay(parse_scenario(s)), replay(parse_scenario(s))
    assert first == second
    other = replay(parse_scenario({**s, "seed": 1}))
    assert other != first


@pytest.mark.parametrize("kind", ["random_k", "ternary"])
def test_compressors_without_a_reference_run_too(kind):
    settings = {"fraction": 0.4} if kind == "random_k" else {}
    s = scenario("choco-sgd", 5, compressor={"kind": kind, **settings}, averaging_rate=0.2)
    s["uniforms"] = np.random.default_rng(0).random((s["rounds"], s["nodes"], s["dim"])).tolist()
    assert np.isfinite(replay(parse_scenario(s))["x"]).all()


def test_a_quantized_model_server_in_a_scenario():
    s = scenario("parameter-server", 6, nodes=3, model_bits=5, model_range=4.0, server=1)
    x = np.array(replay(parse_scenario(s))["x"])
    assert np.array_equal(x[1:] * 4, np.round(x[1:] * 4))


def test_differences_that_cannot_be_compared_are_infinite():
    assert largest_difference({"x": [[1.0]]}, {"x": [[1.5]]}) == 0.5
    assert largest_difference({"x": [[1.0]]}, {"x": [[1.0, 2.0]]}) == np.inf
    assert largest_difference({"x": [[1.0]]}, {"z": [[1.0]]}) == np.inf
    assert largest_difference({"x": [[float("nan")]]}, {"x": [[1.0]]}) == np.inf


MODULO = {"kind": "modulo", "bits": 4, "rounding": "dither", "theta": 2.0}

BAD = {
    "algorithm missing": (lambda s: s.pop("algorithm"), "algorithm: is missing"),
    "algorithm unknown": (lambda s: s.update(algorithm="fedavg"), "algorithm: is not one of the choices.*sgp"),
    "nodes zero": (lambda s: s.update(nodes=0), "nodes: is out of range"),
    "nodes text": (lambda s: s.update(nodes="four"), "nodes: .*four"),
    "dim and layers": (lambda s: s.update(layers=[1, 1]), "layers: does not add up"),
    "layer of nothing": (lambda s: s.update(layers=[0, s["dim"]]), "layers: has to be a list"),
    "rounds negative": (lambda s: s.update(rounds=-1), "rounds: is out of range"),
    "rounds too many": (lambda s: s.update(rounds=10**9), "rounds: makes a trajectory too long"),
    "x0 too short": (lambda s: s.update(x0=[1.0]), "x0: has the shape"),
    "x0 not finite": (lambda s: s.update(x0=[float("nan")] * s["dim"]), "x0: .*not finite"),
    "x0 text": (lambda s: s.update(x0=["a"] * s["dim"]), "x0: has to be an array of numbers"),
    "objective missing": (lambda s: s.pop("objective"), "objective: is missing"),
    "curvature missing": (lambda s: s["objective"].pop("curvature"), r"objective\.curvature: is missing"),
    "target ragged": (lambda s: s["objective"].update(target=[[1.0], [1.0, 2.0]]), r"objective\.target: has to be"),
    "mixing missing": (lambda s: s.pop("mixing"), "mixing: is missing"),
    "mixing empty": (lambda s: s.update(mixing=[]), "mixing: "),
    "mixing of other size": (lambda s: s.update(mixing=[[[1.0]]]), "mixing: has the shape"),
    "columns": (lambda s: s["mixing"][0][0].__setitem__(0, 9.0), "mixing: is not column stochastic"),
    "period zero": (lambda s: s.update(mixing_period=0), "mixing_period: is out of range"),
    "lr missing": (lambda s: s.pop("lr"), "lr: is missing"),
    "lr too few": (lambda s: s.update(lr=[0.1]), "lr: .*one for each round"),
    "rate text": (lambda s: s.update(averaging_rate="fast"), "averaging_rate: has to be a number"),
    "compressor unknown": (lambda s: s.update(compressor={"kind": "zip"}), r"compressor\.kind: is not one of"),
    "compressor setting": (lambda s: s.update(compressor={"kind": "top_k", "k": 3}), "compressor: .*k.*fraction"),
    "fraction": (lambda s: s.update(compressor={"kind": "top_k", "fraction": 2}), "compressor: .*fraction"),
    "modulo without": (lambda s: s.update(compressor=MODULO), r"compressor\.kind: does not go with sgp"),
    "uniforms too few": (lambda s: s.update(uniforms=[[0.5] * s["dim"]]), "uniforms: are too few"),
    "uniforms of one": (lambda s: s.update(uniforms=[[1.0] * s["dim"]] * 25), "uniforms: .*out of range"),
    "uniforms shape": (lambda s: s.update(uniforms=[0.5] * 25), "uniforms: has the shape"),
    "momentum kind": (lambda s: s.update(momentum={"kind": "fast"}), r"momentum\.kind: .*qg"),
    "momentum key": (lambda s: s.update(momentum={"kind": "qg", "gamma": 1}), r"momentum\.gamma: is no setting"),
    "momentum beta": (lambda s: s.update(momentum={"kind": "qg", "beta": 2}), r"momentum\.beta: "),
    "momentum text": (lambda s: s.update(momentum="qg"), "momentum: should be an object"),
    "exponents": (lambda s: s.update(factor_exponents="row"), "factor_exponents: is not one of the choices.*vector"),
    "final rounds": (lambda s: s.update(final_rounds=99), "final_rounds: is out of range.*0 to 25"),
    "expect text": (lambda s: s.update(expect=1), "expect: should be an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_in_a_file_are_named(case):
    spoil, words = BAD[case]
    s = scenario("sgp", 7, rounds=25)
    spoil(s)
    with pytest.raises(ConfigError, match=r"some\.json: (.*)" + words):
        parse_scenario(s, "some.json")


BAD_EVENTS = {
    "missing": (None, "is missing"),
    "no list": ({}, "has to be a list"),
    "unknown": ([["sleep", 0]], "event 0.*is none"),
    "short": ([["mix", 0]], "event 0.*is none"),
    "number": ([3], "event 0.*is none"),
    "self": ([["mix", 1, 1]], "different nodes"),
    "far": ([["read", 0], ["read", 9]], "event 1.*nodes from 0 to 2"),
    "unread": ([["step", 0]], "steps before it read"),
}


@pytest.mark.parametrize("case", BAD_EVENTS)
def test_mistakes_in_events_are_named(case):
    events, words = BAD_EVENTS[case]
    s = scenario("ad-psgd", 8, nodes=3)
    if events is not None:
        s["events"] = events
    with pytest.raises(ConfigError, match="events: .*" + words):
        parse_scenario(s)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ({**MODULO, "theta": 0.0}, r"compressor\.theta"),
        ({**MODULO, "theta": [1.0]}, r"compressor\.theta"),
        ({k: v for k, v in MODULO.items() if k != "theta"}, r"compressor\.theta: is missing"),
        ({**MODULO, "bits": 1, "rounding": "stochastic"}, "nearest"),
        ({**MODULO, "verified": 1}, r"compressor\.verified"),
        ({"kind": "top_k", "fraction": 0.5}, "does not go with moniqua"),
    ],
)
def test_mistakes_in_modulo_codes_are_named(code, words):
    with pytest.raises(ConfigError, match=words):
        parse_scenario(scenario("moniqua", 9, compressor=code))


def test_matrices_take_the_steps_of_muon():
    s = scenario("allreduce", 10, dim=12, layers=[[3, 4]], momentum={"kind": "muon"})
    x = np.array(replay(parse_scenario(s))["x"])
    step = (x[0] - x[1])[0].reshape(3, 4) / s["lr"]
    sizes = np.linalg.svd(step, compute_uv=False) / (0.2 * math.sqrt(4))
    assert np.all((sizes > 0.5) & (sizes < 1.5))


def test_quasi_global_momentum_needs_rounds():
    s = scenario("ad-psgd", 10, events=[["read", 0]], momentum={"kind": "qg"})
    with pytest.raises(ConfigError, match="follows rounds"):
        parse_scenario(s)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "not valid JSON"), (b"[1]", "one JSON object"), (b"\xff\xfe", "not valid JSON"), (None, "no such file")],
)
def test_files_that_are_none(tmp_path, content, words):
    path = tmp_path / "scenario.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_scenario(path)
    assert caught.value.file == str(path)
    with pytest.raises(ConfigError):
        read_scenario(tmp_path)


def test_algorithms_that_mix_nothing_need_no_matrices():
    for name in ("local", "allreduce", "parameter-server"):
        s = scenario(name, 11)
        del s["mixing"]
        replay(parse_scenario(s))


def test_all_algorithms_can_be_replayed():
    assert len(ALGORITHMS) == 20
