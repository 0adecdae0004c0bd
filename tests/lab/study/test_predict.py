"""What the simulator says of a cell."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from peer.lab.study import predict
from peer.lab.study.study import Contender, Study
from peer.links.profiles import Profile, find
from peer.simulate import run as simulator
from peer.state.metrics import MetricsStore
from tests.lab.study.small_study import read


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return read(tmp_path)


def test_the_simulator_says_how_long_a_round_takes(study: Study) -> None:
    config = study.config(study.contenders[0], 0, 4)
    thin = predict.predict(config, 4, find("moniqua-1mbit-1ms"), 0.5, predict.weigh(config, 4).frame_bytes)
    # Two models of 80 kB, which entropy coding makes a little smaller, over an upload of 1 Mbit/s.
    assert 0.5 + 2 * 60_000 * 8 / 1e6 < thin < 0.5 + 2 * 80_000 * 8 * 1.046 / 1e6


@pytest.mark.parametrize("options", [(), ("algorithm.name=allreduce", "graph.kind=complete", "graph.weights=uniform")])
def test_what_the_simulator_says_of_a_round_needs_no_training(
    study: Study, tmp_path: Path, options: tuple[str, ...]
) -> None:
    contender = Contender(name="one", options=(*study.contenders[0].options, *options))
    config, profile = study.config(contender, 0, 4), find("moniqua-1mbit-1ms")
    link_bytes = predict.weigh(config, 4).frame_bytes
    assert 60_000 < link_bytes < 80_000
    directory = tmp_path / "simulated"
    directory.mkdir()
    simulator.run(
        config, Path(), num_peers=5, directory=directory, step_s=0.5, links=predict.link_model(profile), baseline=False
    )
    with contextlib.closing(MetricsStore(directory / "metrics.sqlite", read_only=True)) as store:
        ends = [record.time_s for record in store.rounds() if record.peer == 0]
    predicted = predict.predict(config, 5, profile, 0.5, link_bytes)
    assert predicted == pytest.approx((ends[-1] - ends[0]) / 3, rel=0.01)


def test_messages_are_weighed_once_they_are_like_all_that_follow(study: Study) -> None:
    modulo = ("algorithm.name=moniqua", "compressor.kind=modulo", "compressor.bits=8", "algorithm.theta_value=0.05")
    config = study.config(Contender(name="modulo", options=modulo), 0, 4)
    # The first message has no reference codes of the round before.
    assert predict.weigh(config, 4).frame_bytes < 0.9 * predict.weigh(config, 4, rounds=1).frame_bytes


def test_virtual_links_have_the_figures_of_their_profile() -> None:
    model = predict.link_model(Profile(up_kbit=768, down_kbit=1600, latency_ms=75))
    assert (model.up_kbit_s, model.down_kbit_s, model.latency_s) == (768, 1600, 0.075)
    assert predict.link_model(find("unshaped")).up_kbit_s is None


def test_on_a_graph_that_changes_each_copy_of_a_model_gets_every_difference(study: Study) -> None:
    """One neighbour a round in turn, of three: models go to the one whose turn it is, differences to all three."""
    one_peer = ("graph.kind=exponential-one-peer", "graph.weights=auto")
    whole = Contender(name="sgp", options=(*one_peer, "algorithm.name=sgp"))
    replicas = Contender(name="quant-sgp", options=(*one_peer, "algorithm.name=quant-sgp", "compressor.kind=top_k"))
    link = find("moniqua-1mbit-1ms")
    of_models = predict.predict(study.config(whole, 0, 4), 8, link, 0.5, 100_000) - 0.5
    of_differences = predict.predict(study.config(replicas, 0, 4), 8, link, 0.5, 100_000) - 0.5
    assert of_differences == pytest.approx(3 * of_models, rel=0.02)
