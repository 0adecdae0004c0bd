"""The search for η and γ: on landscapes that are known exactly, and on a small job."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peer.config import options as configuration
from peer.config.options import Config
from peer.config.precision_choice import PrecisionChoice
from peer.errors import ConfigError, DivergenceError
from peer.ops.executors import Computing
from peer.ops.tune import MOST_SEEDS, Run, Search, Trial, Tuning, gain_of, tune, with_rates, write
from peer.records import Better, Criterion
from peer.run import setup as run_setup


def search(run: Run, **limits: Any) -> Tuning:
    return Search(run, **limits).find()


def landscape(
    *, best: tuple[float, float] = (0.2, 0.2), cliff_at: float = 0.5, diverges_at: float = math.inf
) -> tuple[Run, list[Trial]]:
    """Return a run whose accuracy rises toward `best`, falls to chance from η = `cliff_at` on, and diverges from
    γ = `diverges_at` on; and the list of its trials."""
    trials: list[Trial] = []

    def run(eta: float, gamma: float, rounds: int, repeat: int = 0) -> Trial:
        far = abs(math.log10(eta / best[0])) + abs(math.log10(gamma / best[1]))
        accuracy = 0.1 if eta >= cliff_at else max(0.1, 0.95 - 0.2 * far) * (1 - 5 / rounds)
        trial = Trial(
            averaging_rate=eta,
            learning_rate=gamma,
            rounds=rounds,
            repeat=repeat,
            verdict="held",
            worst_accuracy=accuracy,
            averaged_accuracy=accuracy,
            consensus_distance=eta,
            seconds=rounds / 100,
        )
        if gamma >= diverges_at:
            trial = replace(trial, verdict="diverged", reason="loss too high", worst_accuracy=None)
        trials.append(trial)
        return trial

    return run, trials


def test_the_best_rates_are_found_from_far_away() -> None:
    run, _ = landscape(best=(0.1, 0.02), cliff_at=1.1)
    found = search(run, averaging_rate=0.5, learning_rate=0.2, rounds=800, trials=60)
    assert (found.best.averaging_rate, found.best.learning_rate) == (0.1, 0.02)
    assert found.safe
    assert found.best.rounds == 800


def test_the_chosen_point_is_one_step_away_from_the_cliff() -> None:
    """The best point, η = 0.2, stands at the edge: the next η collapses. What is chosen is one η lower."""
    run, _ = landscape(best=(0.2, 0.2), cliff_at=0.5)
    found = search(run, averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=60)
    assert found.best.averaging_rate == 0.1
    assert found.safe
    edge = next(t for t in found.trials if (t.averaging_rate, t.learning_rate, t.rounds) == (0.5, 0.2, 800))
    assert found.over_the_cliff(edge)


def test_a_point_over_the_cliff_is_not_chosen_where_trials_do_not_last_to_a_safe_one() -> None:
    """Once the best point is known to be beside the cliff, the next best may be the one over it."""
    run, _ = landscape(best=(0.2, 0.2), cliff_at=0.5)
    for trials in range(10, 40):
        found = search(run, averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=trials)
        assert not found.over_the_cliff(found.best), trials


def test_a_point_beside_divergence_is_not_chosen() -> None:
    run, _ = landscape(best=(0.1, 0.2), cliff_at=1.1, diverges_at=0.5)
    found = search(run, averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=60)
    assert found.best.learning_rate == 0.1
    assert found.safe
    assert any(trial.verdict == "diverged" for trial in found.trials)


def test_low_rates_are_slow_and_not_over_the_cliff() -> None:
    run, _ = landscape(best=(0.2, 0.2), cliff_at=1.1)
    found = search(run, averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=60)
    slow = min((t for t in found.trials if t.rounds == 100), key=lambda trial: trial.score)
    assert slow.learning_rate < 0.1
    assert not found.over_the_cliff(slow)


def test_equal_accuracy_is_decided_by_consensus() -> None:
    def run(eta: float, gamma: float, rounds: int, repeat: int = 0) -> Trial:
        return Trial(
            averaging_rate=eta,
            learning_rate=gamma,
            rounds=rounds,
            repeat=repeat,
            verdict="held",
            worst_accuracy=0.9 + gamma * 1e-5,
            consensus_distance=abs(math.log10(gamma / 0.05)),
        )

    found = search(run, averaging_rate=None, learning_rate=0.1, rounds=400, trials=40)
    assert found.best.learning_rate == 0.05


def test_an_algorithm_without_averaging_rate_varies_only_the_learning_rate() -> None:
    run, trials = landscape(best=(1.0, 0.02), cliff_at=1.1)
    found = search(run, averaging_rate=None, learning_rate=0.1, rounds=800, trials=30)
    assert {trial.averaging_rate for trial in trials} == {1.0}
    assert found.best.learning_rate == 0.02
    assert not found.averages


def test_every_rate_is_tried_once_at_each_length_with_each_seed() -> None:
    run, trials = landscape()
    found = search(run, averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=60)
    keys = [(t.averaging_rate, t.learning_rate, t.rounds, t.repeat) for t in trials]
    assert len(set(keys)) == len(keys) == len(found.trials)
    assert all(0 < t.averaging_rate <= 1 for t in trials)


@pytest.mark.parametrize("trials", [3, 5, 10, 20])
def test_no_more_trials_than_allowed(trials: int) -> None:
    run, done = landscape()
    found = search(run, averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=trials)
    assert len(done) <= trials
    if found.ended == "trials used up":
        assert len(done) == trials


def test_too_few_trials_are_refused() -> None:
    run, _ = landscape()
    with pytest.raises(ConfigError, match="3 or more"):
        search(run, averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=2)


class Clock:
    """Time that passes only while a trial runs."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def timed(self, run: Run) -> Run:
        def timed(eta: float, gamma: float, rounds: int, repeat: int) -> Trial:
            trial = run(eta, gamma, rounds, repeat)
            self.now += trial.seconds
            return trial

        return timed


def test_runs_become_shorter_where_the_budget_is_small() -> None:
    clock = Clock()
    run, _ = landscape()
    found = search(
        clock.timed(run), averaging_rate=0.1, learning_rate=0.1, rounds=8000, trials=40, budget_s=100, clock=clock
    )
    assert found.shortened
    assert max(trial.rounds for trial in found.trials) < 8000
    # One screening run of the original length was needed to know; nothing starts after the budget.
    assert clock.now < 100 + 8000 / 8 / 100


@pytest.mark.parametrize("budget_s", [0.01, 1000.0])
def test_no_trial_is_longer_than_the_run(budget_s: float) -> None:
    clock = Clock()
    run, _ = landscape()
    found = search(
        clock.timed(run), averaging_rate=0.1, learning_rate=0.1, rounds=8, trials=20, budget_s=budget_s, clock=clock
    )
    assert max(trial.rounds for trial in found.trials) <= 8


def test_a_large_budget_changes_nothing() -> None:
    clock = Clock()
    run, _ = landscape()
    with_budget = search(
        clock.timed(run), averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=40, budget_s=1000, clock=clock
    )
    without = search(run, averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=40)
    assert with_budget.trials == without.trials
    assert with_budget.best == without.best


def test_the_budget_is_nearly_used_and_repetitions_take_the_rest() -> None:
    clock = Clock()
    run, _ = landscape()
    found = search(
        clock.timed(run), averaging_rate=0.1, learning_rate=0.1, rounds=8000, trials=1000, budget_s=1000, clock=clock
    )
    # A run that began in time may end late here; the simulator would stop it.
    assert 850 < clock.now < 1000 + found.best.seconds
    assert found.safe
    assert len(found.repeats) > 2
    assert {t.rounds for t in found.trials if t.repeat} == {found.best.rounds}


def test_runs_that_were_shortened_too_much_are_repeated_in_greater_length() -> None:
    """The first run of a process takes far longer than those that follow: it loads data and libraries."""
    clock = Clock()
    run, trials = landscape()

    def slow_at_first(eta: float, gamma: float, rounds: int, repeat: int) -> Trial:
        trial = run(eta, gamma, rounds, repeat)
        return trial if len(trials) > 1 else replace(trial, seconds=trial.seconds + 10)

    found = search(
        clock.timed(slow_at_first), averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=500, budget_s=100,
        clock=clock,
    )  # fmt: skip
    assert found.best.rounds == 800
    assert not found.shortened
    assert len(found.repeats) == MOST_SEEDS or clock.now > 85
    assert clock.now <= 100


def test_time_is_left_for_what_is_reserved() -> None:
    clock = Clock()
    run, _ = landscape()
    found = search(
        clock.timed(run), averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=500, budget_s=200,
        reserved_runs=1.0, clock=clock,
    )  # fmt: skip
    assert 150 < clock.now <= 200 - found.best.seconds


def noisy(change: Callable[[Trial], Trial]) -> Run:
    """Return a flat landscape with another outcome of repetitions."""
    run, _ = landscape(best=(0.2, 0.2), cliff_at=1.1)

    def repeated(eta: float, gamma: float, rounds: int, repeat: int) -> Trial:
        trial = run(eta, gamma, rounds, repeat)
        trial = replace(trial, worst_accuracy=0.7 + 0.2 * (trial.worst_accuracy or 0))
        return change(trial) if repeat else trial

    return repeated


def test_a_point_that_was_lucky_with_one_seed_is_not_chosen() -> None:
    def unlucky(trial: Trial) -> Trial:
        is_best = (trial.averaging_rate, trial.learning_rate) == (0.2, 0.2)
        return replace(trial, worst_accuracy=(trial.worst_accuracy or 0) - 0.3 * is_best)

    found = search(noisy(unlucky), averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=80)
    assert (found.best.averaging_rate, found.best.learning_rate) != (0.2, 0.2)
    assert found.safe
    assert found.next_best is not None
    assert (found.next_best.averaging_rate, found.next_best.learning_rate) != (0.2, 0.2)


def test_a_point_that_diverges_with_another_seed_is_not_chosen() -> None:
    def diverges(trial: Trial) -> Trial:
        is_best = (trial.averaging_rate, trial.learning_rate) == (0.2, 0.2)
        return replace(trial, verdict="diverged", reason="loss too high", worst_accuracy=None) if is_best else trial

    found = search(noisy(diverges), averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=80)
    assert (found.best.averaging_rate, found.best.learning_rate) != (0.2, 0.2)
    assert found.safe


def test_the_worst_peer_decides_and_not_the_average() -> None:
    run, _ = landscape(best=(0.04, 0.1), cliff_at=1.1)

    def averaged_high(eta: float, gamma: float, rounds: int, repeat: int) -> Trial:
        return replace(run(eta, gamma, rounds, repeat), averaged_accuracy=0.5 + eta / 2)

    found = search(averaged_high, averaging_rate=0.2, learning_rate=0.1, rounds=800, trials=60)
    assert (found.best.averaging_rate, found.best.learning_rate) == (0.04, 0.1)


def test_equal_outcomes_and_durations_lead_to_the_same_search() -> None:
    def once() -> Tuning:
        clock = Clock()
        run, _ = landscape()
        return search(
            clock.timed(run), averaging_rate=0.1, learning_rate=0.1, rounds=8000, trials=100, budget_s=300, clock=clock
        )

    assert once() == once()


def test_a_search_that_is_stopped_returns_what_it_has() -> None:
    stop = threading.Event()
    run, done = landscape()

    def stopping(eta: float, gamma: float, rounds: int, repeat: int) -> Trial:
        if len(done) == 5:
            stop.set()
        return run(eta, gamma, rounds, repeat)

    found = search(stopping, averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=40, stop=stop)
    assert found.ended == "stopped"
    assert not found.safe
    assert len(found.trials) == 5


def test_rates_that_all_diverge_are_an_error_with_the_reason() -> None:
    run, _ = landscape(diverges_at=0.0)
    with pytest.raises(DivergenceError, match="loss too high"):
        search(run, averaging_rate=0.1, learning_rate=0.1, rounds=800, trials=20)


def small_job(**overrides: object) -> Config:
    settings = {
        "run.rounds": 60,
        "training.task_options": "{hidden = 16}",
        "training.warmup_rounds": 10,
        "compressor.fraction": 0.1,
        "data.skew": 0.5,
    } | overrides
    return configuration.load(overrides=[f"{key}={value}" for key, value in settings.items()], environment={})


def test_tuning_a_job_is_deterministic_and_improves_on_bad_rates(tmp_path: Path) -> None:
    """From a γ a hundred times too small the search comes to rates at which three peers learn digits."""
    job = small_job(**{"training.learning_rate": 0.005, "algorithm.averaging_rate": 0.5})
    first, second = (tune(job, tmp_path, num_peers=3, trials=12) for _ in range(2))
    timeless: Callable[[Trial], Trial] = lambda trial: replace(trial, seconds=0.0)  # noqa: E731
    assert [timeless(t) for t in first.trials] == [timeless(t) for t in second.trials]
    assert timeless(first.best) == timeless(second.best)
    before = next(t for t in first.trials if (t.averaging_rate, t.learning_rate) == (0.5, 0.005))
    assert first.best.learning_rate > 0.005
    assert first.best.worst_accuracy is not None
    assert before.worst_accuracy is not None
    assert first.best.worst_accuracy > before.worst_accuracy + 0.2


def test_the_precision_is_measured_once_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[PrecisionChoice] = []

    def fastest(open_trainer: object) -> PrecisionChoice:
        # Another one each time: runs that measured for themselves would not agree.
        measured.append(PrecisionChoice("float32" if not measured else "int8"))
        return measured[-1]

    monkeypatch.setattr(run_setup, "fastest", fastest)
    found = tune(small_job(**{"training.precision": "fastest"}), tmp_path, num_peers=3, trials=3)
    assert measured == [PrecisionChoice("float32")]
    fixed = tune(small_job(**{"training.precision": "float32"}), tmp_path, num_peers=3, trials=3)
    timeless: Callable[[Trial], Trial] = lambda trial: replace(trial, seconds=0.0)  # noqa: E731
    assert [timeless(t) for t in found.trials] == [timeless(t) for t in fixed.trials]


def test_runs_that_are_computed_side_by_side_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    job = small_job(**{"run.rounds": 60})
    alone = tune(job, tmp_path, num_peers=3, trials=9)
    with ThreadPoolExecutor(1) as executor:
        together = tune(job, tmp_path, num_peers=3, trials=9, computing=Computing(executor, 3))
    timeless: Callable[[Trial], Trial] = lambda trial: replace(trial, seconds=0.0)  # noqa: E731
    assert [timeless(t) for t in together.trials] == [timeless(t) for t in alone.trials]
    assert timeless(together.best) == timeless(alone.best)


def test_the_worst_peer_is_compared_with_one_process_that_has_all_data(tmp_path: Path) -> None:
    hopeless = small_job(**{"algorithm.name": "local", "data.skew": 1.0, "run.rounds": 240})
    found = tune(hopeless, tmp_path, num_peers=4, trials=3)
    assert found.guessing == 0.1
    assert found.single_process_accuracy is not None
    assert found.best.worst_accuracy is not None
    assert found.best.worst_accuracy < 0.6 < found.single_process_accuracy
    assert found.is_useful is False
    alike = replace(found, best=replace(found.best, worst_accuracy=found.single_process_accuracy))
    assert alike.is_useful
    assert replace(found, single_process_accuracy=None).is_useful is None


def test_divergence_of_a_real_run_is_shown_as_such(tmp_path: Path) -> None:
    job = small_job(**{"training.learning_rate": 10.0, "run.rounds": 40})
    found = tune(job, tmp_path, num_peers=3, trials=14)
    diverged = [trial for trial in found.trials if trial.verdict == "diverged"]
    assert diverged
    assert all("guard.max_loss" in str(trial.reason) for trial in diverged)
    assert all(found.over_the_cliff(trial) for trial in diverged)
    assert found.best.learning_rate < min(trial.learning_rate for trial in diverged)


def test_points_that_the_validator_refuses_are_not_run(tmp_path: Path) -> None:
    """D² on a hypercube needs an η below 2/3: at 1 the smallest eigenvalue is −0.5."""
    job = small_job(
        **{
            "algorithm.name": "d2",
            "algorithm.averaging_rate": 0.5,
            "graph.kind": "hypercube",
            "run.rounds": 20,
            "training.momentum": "none",
        }
    )
    found = tune(job, tmp_path, num_peers=8, trials=12)
    refused = [trial for trial in found.trials if trial.verdict == "refused"]
    assert {trial.averaging_rate for trial in refused} == {1.0}
    assert found.best.averaging_rate < 1.0


def test_a_job_that_cannot_run_is_refused_at_once(tmp_path: Path) -> None:
    job = small_job(**{"algorithm.name": "d-psgd", "graph.kind": "star", "graph.weights": "uniform"})
    with pytest.raises(ConfigError, match="doubly stochastic"):
        tune(job, tmp_path, num_peers=4)


def test_short_runs_have_the_whole_schedule_in_proportion() -> None:
    job = small_job(**{"algorithm.name": "scsp", "run.rounds": 400, "training.warmup_rounds": 40})
    short = with_rates(job, 0.3, 0.02, 100)
    assert (short.run.rounds, short.training.warmup_rounds, short.algorithm.final_rounds) == (100, 10, 10)
    assert (short.algorithm.averaging_rate, short.training.learning_rate) == (0.3, 0.02)
    assert short.compressor == job.compressor


def tuned(averages: bool = True) -> Tuning:
    run, _ = landscape(best=(0.1, 0.02), cliff_at=1.1)
    return search(run, averaging_rate=0.5 if averages else None, learning_rate=0.2, rounds=800, trials=60)


def test_writing_keeps_comments_and_everything_else(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        "# Our job.\n[run]\nrounds = 10 # few\n\n[training]\n# γ\nlearning_rate = 0.5 # much\n\n[data]\nskew = 0.1\n"
    )
    write(path, tuned())
    assert path.read_text() == (
        "# Our job.\n[run]\nrounds = 10 # few\n\n[training]\n# γ\nlearning_rate = 0.02 # much\n\n[data]\nskew = 0.1\n"
        "\n[algorithm]\naveraging_rate = 0.1\n"
    )
    assert configuration.load(path, environment={}).algorithm.averaging_rate == 0.1


def test_an_unset_key_of_a_generated_file_is_filled_in_where_it_stands(tmp_path: Path) -> None:
    from peer.config.writer import write_peer_file

    path = tmp_path / "peer.toml"
    write_peer_file(path, all_keys=True)
    before = path.read_text().splitlines()
    write(path, tuned())
    after = path.read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [
        ("# averaging_rate =", "averaging_rate = 0.1"),
        ("learning_rate = 0.1", "learning_rate = 0.02"),
    ]


def test_no_averaging_rate_is_written_for_an_algorithm_without_one(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[training]\nlearning_rate = 0.5\n")
    write(path, tuned(averages=False))
    assert path.read_text() == "[training]\nlearning_rate = 0.02\n"


@pytest.mark.parametrize(("text", "problem"), [("[training", "cannot be read"), (None, "no such file")])
def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "job.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        write(path, tuned())
    assert not path.exists() or path.read_text() == text


@pytest.mark.parametrize(("better", "figures"), [("lower", (0.5, 0.25, 2.0)), ("higher", (0.5, 0.6, 0.4))])
def test_a_metric_counts_like_accuracy(better: Better, figures: tuple[float, float, float]) -> None:
    start, good, bad = (gain_of(Criterion("own", better), figure, figures[0]) for figure in figures)
    assert good - start == pytest.approx(0.1), "half the error counts for ten points"
    assert bad < start
    for nothing in (math.nan, math.inf):
        assert -1.0 < gain_of(Criterion("own", better), nothing, 0.5) < bad
    assert math.isfinite(gain_of(Criterion("log-likelihood", "lower"), -3.0, 2.0))


@pytest.mark.slow
def test_an_own_task_is_tuned_by_its_first_metric() -> None:
    found = tune(
        configuration.load(
            overrides=(
                "training.task=tests.train.measured_tasks:regression", "training.momentum=none", "run.rounds=60",
                "training.warmup_rounds=0", "training.learning_rate=0.02", "compressor.fraction=1",
            )
        ),
        Path(),
        num_peers=3,
        trials=12,
    )  # fmt: skip
    assert found.criterion == Criterion("RMSE", "lower")
    assert found.best.worst_figure is not None
    assert found.best.worst_accuracy is None
    held = [trial for trial in found.trials if trial.rounds == found.best.rounds and trial.worst_figure is not None]
    assert found.best.worst_figure < max(trial.worst_figure or 0.0 for trial in held)
    assert found.best.learning_rate > 0.02, "a larger rate learns this line better"
    assert found.guessing is not None
    assert found.single_process_figure is not None
    assert found.guessing > found.single_process_figure
