"""What peers of one process share: copies, decoded frames and gradients. None of it changes a bit."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest

from peer.config import options as configuration
from peer.gossip.shared_copies import SharedCopies
from peer.node.frame_account import decode_from
from peer.simulate import rounds as in_rounds
from peer.simulate import run as simulated_run
from peer.simulate import virtual_run
from peer.simulate.network import LinkModel
from peer.simulate.rounds import Simulator
from peer.simulate.run import run
from peer.train import stacked
from tests.gossip.drive import schedule_of
from tests.gossip.scenarios import doubly_stochastic

SMALL = ("training.task=clusters", "training.task_options.hidden=8", "training.task_options.samples=400")


def job(*settings: str, rounds: int = 6) -> configuration.Config:
    fixed = [*SMALL, "training.batch_size=5", "evaluation.every_rounds=0", f"run.rounds={rounds}"]
    return configuration.load(overrides=[*fixed, *settings], environment={})


def simulator(*settings: str, num_peers: int = 8, rounds: int = 6, **more) -> Simulator:
    return Simulator(job(*settings, rounds=rounds), Path(), num_peers=num_peers, **more)


def models(simulation: Simulator) -> list[bytes]:
    assert simulation.run()
    return [participant.model().tobytes() for participant in simulation.participants]


REPLICAS = [
    ("algorithm.name=quant-sgp", "graph.kind=exponential-one-peer"),
    ("algorithm.name=choco-sgd", "graph.kind=ring"),
    ("algorithm.name=dcd-psgd", "graph.kind=ring", "compressor.kind=qsgd", "compressor.bits=8"),
    ("algorithm.name=quant-sgp", "graph.kind=exponential-one-peer", "algorithm.memory=bfloat16"),
    ("algorithm.name=dcd-psgd", "graph.kind=ring", "compressor.kind=qsgd", "algorithm.memory=bfloat16"),
    ("algorithm.name=ecd-psgd", "graph.kind=ring", "compressor.kind=qsgd", "compressor.bits=8"),
]


@pytest.mark.parametrize("settings", REPLICAS, ids="-".join)
def test_shared_copies_are_those_that_each_peer_would_keep(settings, monkeypatch):
    shared = simulator(*settings)
    found = models(shared)
    monkeypatch.setattr(virtual_run, "SharedCopies", lambda: None)
    apart = simulator(*settings)
    assert models(apart) == found
    for one, other in zip(shared.participants, apart.participants, strict=True):
        mine, theirs = one.algorithm.replicas, other.algorithm.replicas
        assert mine.of.keys() == theirs.of.keys()
        assert all(np.array_equal(mine.of[j], theirs.of[j]) for j in mine.of)
        assert mine.own_digests == theirs.own_digests
    copies = [copy for each in apart.participants for copy in each.algorithm.replicas.of.values()]
    assert len({id(copy) for copy in copies}) == len(copies)


def test_all_that_hear_a_peer_hold_one_array():
    simulation = simulator(*REPLICAS[0])
    models(simulation)
    held = [participant.algorithm.replicas.of for participant in simulation.participants]
    for peer in range(8):
        holders = [copies for copies in held if peer in copies]
        assert len(holders) > 2
        assert len({id(copies[peer]) for copies in holders}) == 1
        assert not holders[0][peer].flags.writeable


def test_copies_stay_apart_while_peers_are_in_different_rounds():
    """A slow peer holds older copies for a while, and later ones come late."""
    more = {"links": LinkModel(rate_kbit_s=50.0, latency_s=0.3), "step_s": 1.0, "slow": {3: 4.0}}
    settings = (*REPLICAS[0], "rounds.late=skip", "rounds.late_after_s=2")
    one = models(simulator(*settings, rounds=12, **more))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(virtual_run, "SharedCopies", lambda: None)
        assert models(simulator(*settings, rounds=12, **more)) == one


def test_a_copy_that_is_sent_whole_is_its_holders_own_from_then_on():
    simulation = simulator(*REPLICAS[1], rounds=3)
    models(simulation)
    first, second = (simulation.participants[peer].algorithm.replicas for peer in (0, 1))
    assert first.of[1] is second.own
    before = second.own.copy()
    second.restart_own(np.ones_like(before), 3)
    first.start_copy(second.own_copy(3))
    assert np.array_equal(first.of[1], np.ones_like(before))
    # Who was not told still has the old one, to which nobody writes.
    assert np.array_equal(simulation.participants[2].algorithm.replicas.of[1], before)


def test_copies_are_let_go_when_nobody_holds_them():
    shared = SharedCopies()
    start = shared.start(np.zeros(3, np.float32))
    assert shared.start(np.zeros(3, np.float32)) is start
    assert shared.start(np.ones(3, np.float32)) is not start
    made = []

    def add_one_(copy):
        made.append(copy)
        copy += 1

    first = shared.moved(5, 1, start, add_one_)
    assert shared.moved(5, 1, start, add_one_) is first
    assert len(made) == 1
    made.clear()
    del first
    assert shared.moved(5, 1, start, add_one_).tolist() == [1, 1, 1]
    assert len(made) == 1
    with pytest.raises(ValueError, match="read-only"):
        start += 1


def test_a_frame_is_decoded_once_for_all_its_receivers(monkeypatch):
    decoded = []

    def counting(sender, frame, *more, **named):
        decoded.append((sender, frame))
        return decode_from(sender, frame, *more, **named)

    monkeypatch.setattr(in_rounds, "decode_from", counting)
    simulation = simulator(*REPLICAS[0])
    models(simulation)
    # To the receiver of the round a frame with weight, to the others one without.
    assert len(decoded) == len(set(decoded)) == 2 * 8 * 6
    receivers = simulation.setup.schedule.all_receivers(0)
    assert len(receivers) == 3


def test_codes_told_against_different_messages_are_decoded_apart():
    """Moniqua's codes against those of the round before, with links on which frames overtake those of others."""
    settings = ("algorithm.name=moniqua", "graph.kind=ring", "compressor.kind=modulo", "compressor.against_last=true")
    more = {"links": LinkModel(rate_kbit_s=40.0, latency_s=0.2), "step_s": 0.1, "slow": {2: 7.0}}
    together = models(simulator(*settings, rounds=10, **more))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_rounds, "KEPT", 0)
        assert models(simulator(*settings, rounds=10, **more)) == together


@pytest.mark.parametrize("momentum", ["none", "nesterov", "qg", "adam"])
def test_groups_of_stacked_peers_train_as_one_batch_does(momentum, monkeypatch):
    settings = ("algorithm.name=sgp", "graph.kind=exponential-one-peer", f"training.momentum={momentum}")
    slow = {"step_s": 1.0, "slow": {1: 3.0, 6: 5.0}}
    whole = simulator(*settings, stacked=True, **slow)
    size = whole.trainer.layout.size
    assert len(whole._rows.trainer.groups) == 1
    assert whole.run()
    monkeypatch.setattr(stacked, "_NUMBERS_AT_ONCE", 3 * size)
    groups = simulator(*settings, stacked=True, **slow)
    assert [len(group) for group in groups._rows.trainer.groups] == [3, 3, 2]
    assert groups.run()
    for one, other in zip(whole.participants, groups.participants, strict=True):
        assert np.allclose(one.model(), other.model(), rtol=1e-4, atol=1e-6)
    assert not groups._rows._steps


@pytest.mark.parametrize("stacks", [False, True])
def test_an_evaluation_takes_no_copy_of_every_model_and_keeps_its_figures(stacks, monkeypatch):
    copies, most, model_of = [], 0, virtual_run.model_of

    def counted(state):
        nonlocal most
        copies.append(weakref.ref(z := model_of(state)))
        most = max(most, sum(copy() is not None for copy in copies))
        return z

    monkeypatch.setattr(virtual_run, "model_of", counted)
    settings = job("algorithm.name=sgp", "evaluation.every_rounds=2")
    simulation = run(settings, Path(), num_peers=6, stacked=stacks, baseline=False)
    found = simulation.models
    mean = np.mean([model.astype(np.float64) for model in found], axis=0)
    distance = np.mean([np.linalg.norm(model - mean) for model in found])
    assert simulation.summary.consensus_distance == pytest.approx(distance, rel=1e-5)
    assert len(simulation.summary.peer_accuracy) == 6
    assert simulation.summary.document()["margins"] == {"accuracy": None}
    assert 0 < most <= 2 < len(copies)


def test_where_all_hold_one_model_it_is_evaluated_once(monkeypatch):
    asked = []

    def evaluate(self, wanted, states):
        asked.extend(wanted)
        return [self._evaluate_peer(peer, virtual_run.model_of(states[peer]), split) for peer, split in wanted]

    monkeypatch.setattr(Simulator, "_evaluate_peers", evaluate)
    everybody = ("graph.kind=complete", "graph.weights=uniform", "compressor.kind=none")
    together = run(job("algorithm.name=allreduce", *everybody), Path(), num_peers=4, baseline=False)
    assert asked == []
    own = together.trainer.evaluate(together.models[3]).accuracy
    assert together.summary.peer_accuracy == [own] * 4
    assert together.summary.averaged_accuracy == own
    apart = run(job("algorithm.name=local", *everybody), Path(), num_peers=4, baseline=False)
    assert asked == [(peer, "test") for peer in range(4)]
    assert len(set(apart.summary.peer_accuracy)) > 1


def test_a_sample_of_many_peers_says_how_close_its_mean_is(monkeypatch):
    for module in (virtual_run, simulated_run):
        monkeypatch.setattr(module, "MODELS_EVALUATED_MAX", 4)
    summary = run(job("algorithm.name=sgp"), Path(), num_peers=8, stacked=True, baseline=False).summary
    assert len(summary.peer_accuracy) == 4
    expected = 2 * np.std(summary.peer_accuracy, ddof=1) * np.sqrt(0.5 / 4)
    assert summary.document()["margins"] == {"accuracy": pytest.approx(expected)}


def test_a_doubly_stochastic_schedule_of_a_scenario_has_sparse_rows():
    w = doubly_stochastic(np.random.default_rng(1), 6)
    schedule = schedule_of(w, np.eye(6), period=2)
    assert np.array_equal(schedule.at(1).dense(), w)
    assert schedule.senders(2, 0) == ()
    assert schedule.all_senders(0) == tuple(np.flatnonzero(w[0] * (1 - np.eye(6)[0])))
    assert schedule.all_receivers(3) == tuple(np.flatnonzero(w[:, 3] * (1 - np.eye(6)[3])))
