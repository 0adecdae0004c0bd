"""A run in several processes is the run in one, to the last bit, whatever their number."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from peer.compress.norms import not_finite
from peer.config import options as configuration
from peer.errors import ConfigError, DivergenceError, LocalProtocolError
from peer.gossip.effects import Effects
from peer.simulate.network import Agenda, LinkModel
from peer.simulate.parallel import ParallelSimulator, outcomes_of
from peer.simulate.rounds import Simulator
from peer.simulate.run import run
from peer.state.metrics import MetricsStore
from peer.train import stacked as stacked_module

SMALL = (
    "training.task=clusters",
    "training.task_options.hidden=8",
    "training.task_options.samples=400",
    "training.batch_size=5",
    "data.holdout_fraction=0.2",
    "evaluation.every_rounds=2",
    "run.rounds=6",
)
LINKS = LinkModel(rate_kbit_s=200.0, latency_s=0.03, up_kbit_s=900.0)


def job(*settings: str) -> configuration.Config:
    return configuration.load(overrides=[*SMALL, *settings], environment={})


def everything(folder: Path, *settings: str, **options):
    """Return all that a run leaves behind, measured times left out."""
    folder.mkdir()
    found = run(job(*settings), Path(), num_peers=7, directory=folder, baseline=False, **options)
    store = MetricsStore(folder / "metrics.sqlite")
    try:
        rounds = [replace(record, train_s=0.0, gossip_s=0.0, cpu_s=0.0) for record in store.rounds()]
        rest = store.evaluations(), store.consensus(), store.links()
    finally:
        store.close()
    return [model.tobytes() for model in found.models], found.averaged.tobytes(), rounds, *rest


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (("algorithm.name=quant-sgp", "graph.kind=exponential-one-peer"), {}),
        (("algorithm.name=quant-sgp",), {"links": LINKS, "step_s": 0.02, "slow": {2: 3.0}}),
        (("algorithm.name=sgp", "training.momentum=qg"), {"stacked": True, "step_s": 0.02, "slow": {5: 2.5}}),
        (
            ("algorithm.name=moniqua", "graph.kind=ring", "compressor.kind=modulo", "algorithm.theta_value=0.0001"),
            {"links": LINKS},
        ),
        (("algorithm.name=allreduce", "graph.kind=complete"), {"links": LinkModel(latency_s=0.5), "step_s": 0.1}),
    ],
    ids=["replicas", "links", "stacked", "repairs", "phases"],
)
def test_bits_figures_and_times_are_those_of_one_process(settings, options, tmp_path, monkeypatch):
    monkeypatch.setattr(stacked_module, "_NUMBERS_AT_ONCE", 600)  # Two peers a group.
    alone = everything(tmp_path / "1", *settings, **options)
    for workers in (2, 3, 20):
        assert everything(tmp_path / str(workers), *settings, workers=workers, **options) == alone


def test_repairs_do_happen_in_that_test(tmp_path):
    settings = ("algorithm.name=moniqua", "graph.kind=ring", "compressor.kind=modulo", "algorithm.theta_value=0.0001")
    rounds = everything(tmp_path / "run", *settings, workers=2)[2]
    assert sum(record.repairs for record in rounds) > 0


def test_workers_share_the_peers_by_whole_groups(monkeypatch):
    monkeypatch.setattr(stacked_module, "_NUMBERS_AT_ONCE", 1200)
    simulator = ParallelSimulator(job("algorithm.name=sgp"), Path(), num_peers=10, workers=2, stacked=True)
    assert [len(group) for group in simulator._rows.trainer.groups] == [4, 4, 2]
    assert simulator._parts == [range(4), range(4, 10)]
    one_by_one = ParallelSimulator(job("algorithm.name=sgp"), Path(), num_peers=10, workers=3)
    assert one_by_one._parts == [range(3), range(3, 6), range(6, 10)]


def test_a_divergence_in_a_worker_names_its_peer(tmp_path):
    settings = ("algorithm.name=sgp", "guard.max_loss=0.01")
    with pytest.raises(DivergenceError) as alone:
        run(job(*settings), Path(), num_peers=5, baseline=False)
    with pytest.raises(DivergenceError) as together:
        run(job(*settings), Path(), num_peers=5, baseline=False, workers=2)
    assert str(alone.value) == str(together.value)
    assert str(alone.value).startswith("peer 1: the training loss")
    # One that is raised within a call, before there is a record.
    with pytest.raises(DivergenceError, match=r"^peer \d: "):
        run(job("algorithm.name=sgp", "training.learning_rate=1e30"), Path(), num_peers=5, baseline=False, workers=2)


def test_an_error_of_a_room_comes_as_what_it_is_derived_from():
    def outcomes() -> Iterator[tuple[Effects, None]]:
        yield Effects(), None
        raise not_finite(3)

    first, error = outcomes_of(outcomes())
    assert first == (Effects(), None)
    assert type(error) is DivergenceError
    assert "layer 3 holds values that are not finite" in str(error)


def test_a_run_that_is_stopped_leaves_the_models_of_its_workers():
    stop = threading.Event()

    def after_some(progress):
        if min(peer.round for peer in progress.peers) >= 2:
            stop.set()

    simulator = ParallelSimulator(job("algorithm.name=sgp"), Path(), num_peers=64, workers=2, step_s=1.0)
    start = simulator._x0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peer.simulate.virtual_run.PROGRESS_EVERY_S", 0.0)
        assert not simulator.run(stop=stop, on_progress=after_some)
    assert not any(np.array_equal(participant.model(), start) for participant in simulator.participants)


def test_a_run_of_few_long_rounds_tells_of_each(monkeypatch):
    monkeypatch.setattr("peer.simulate.virtual_run.PROGRESS_EVERY_S", -1.0)
    seen = set()
    simulator = Simulator(job("algorithm.name=sgp"), Path(), num_peers=2, step_s=1.0)
    assert simulator.run(on_progress=lambda progress: seen.add(progress.round))
    assert seen == set(range(simulator.config.run.rounds + 1))


def test_a_worker_that_ends_is_a_bug_and_no_hang(monkeypatch):
    simulator = ParallelSimulator(job("algorithm.name=sgp"), Path(), num_peers=4, workers=2)

    def broken(request, content):
        raise SystemExit(3)

    monkeypatch.setattr(simulator, "_answer", broken)
    with pytest.raises(LocalProtocolError, match="worker process"):
        simulator.run()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("algorithm.name=sgp", "rounds.late=skip"), "rounds.late"),
        (("algorithm.name=quant-sgp", "compressor.budget_kbytes_per_s=5"), "compressor.budget_kbytes_per_s"),
        (("algorithm.name=ad-psgd", "graph.kind=ring"), "--workers"),
        (("algorithm.name=sgp", "peer.device=cuda"), "peer.device"),
    ],
)
def test_what_depends_on_more_than_the_peer_is_refused(settings, key):
    with pytest.raises(ConfigError) as caught:
        run(job(*settings), Path(), num_peers=4, baseline=False, workers=2)
    assert caught.value.key == key


def test_systems_that_cannot_fork_are_told_so(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ConfigError, match="fork") as caught:
        run(job("algorithm.name=sgp"), Path(), num_peers=4, baseline=False, workers=2)
    assert caught.value.key == "--workers"


def test_a_stretch_of_the_agenda_ends_before_anything_can_follow_from_it():
    agenda: Agenda[str] = Agenda()
    for time_s, event in [(1.0, "a"), (1.0, "b"), (1.25, "c"), (1.5, "d")]:
        agenda.add(time_s, event)
    assert agenda.pop_stretch(0.5) == [(1.0, "a"), (1.0, "b"), (1.25, "c")]
    agenda.add(1.5, "e")
    assert agenda.pop_stretch(0.0) == [(1.5, "d"), (1.5, "e")]
    assert not agenda


def when_answers_come(monkeypatch: pytest.MonkeyPatch, number: int, then: Callable[[], None]) -> None:
    """Do something in the first process before it reads so many answers of its workers."""
    receive, first, answers = Connection.recv, os.getpid(), 0

    def watched(connection: Connection) -> object:
        nonlocal answers
        if os.getpid() == first:
            answers += 1
            if answers == number:
                then()
        return receive(connection)

    monkeypatch.setattr(Connection, "recv", watched)


def test_an_interrupt_amid_answers_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers that nobody has read are not taken for others."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    when_answers_come(monkeypatch, 4, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(job("algorithm.name=sgp"), Path(), num_peers=7, baseline=False, workers=3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_is_for_the_first_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    expected = everything(tmp_path / "undisturbed", "algorithm.name=sgp")

    def send() -> None:
        children = multiprocessing.active_children()
        assert len(children) == 3
        for child in children:
            assert child.pid is not None
            os.kill(child.pid, number)

    when_answers_come(monkeypatch, 4, send)
    assert everything(tmp_path / "with signals", "algorithm.name=sgp", workers=3) == expected
