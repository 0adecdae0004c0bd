"""One simulated run from its configuration to its files: metrics, averaged model and summary."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from peer.compress.payload import FloatArray
from peer.config.options import Config
from peer.config.precision_choice import ALL_PEERS
from peer.config.writer import write_resolved
from peer.errors import ConfigError, DivergenceError, SottoError
from peer.records import ONE_PROCESS, Progress
from peer.run.plan import algorithm_spec, why_no_average
from peer.run.setup import settle_precision
from peer.run.summary import compare_with_single_process, describe_run, finish_summary, note_precisions
from peer.simulate.network import LinkModel
from peer.simulate.pairs import AsynchronousSimulator
from peer.simulate.parallel import ParallelSimulator
from peer.simulate.rounds import Simulator
from peer.simulate.virtual_run import MODELS_EVALUATED_MAX, RunOptions
from peer.state.disk import writing
from peer.state.kept_file import AVERAGE_FILE
from peer.state.metrics import MetricsStore, Summary
from peer.state.shares import places, write_average
from peer.train.local_step import Trainer

log = logging.getLogger("sotto")


@dataclass(frozen=True)
class Simulation:
    """Results of a simulation."""

    summary: Summary
    models: list[FloatArray]
    """z of every peer, float32[n]."""
    averaged: FloatArray
    """Σ x_i / Σ u_i, float32[n]."""
    trainer: Trainer
    """Trainer of peer 0: to evaluate or save any of the models."""


def run(
    config: Config,
    base: Path,
    *,
    num_peers: int,
    directory: Path | None = None,
    links: LinkModel | None = None,
    step_s: float = 0.0,
    slow: Mapping[int, float] | None = None,
    stacked: bool = False,
    workers: int = 1,
    baseline: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    command: str = "",
) -> Simulation:
    """Simulate a run and leave metrics, averaged model and summary in `directory`, if given: it exists and is empty.

    `workers`: number of processes that compute; no bit depends on it. `baseline`: also train one process on all data,
    for comparison. `command`: the line that started it. If the precision is "fastest", it is measured once for all
    peers, and `directory` gets a configuration with the chosen one. Raises DivergenceError (with the summary so far
    already written) and the errors of the configuration.
    """
    started = time.monotonic()
    config, chosen = settle_precision(config, base, num_peers)
    if chosen is not None:
        log.info("all peers train in %s", chosen.sentence)
        if directory is not None:
            # Before the first round: a run that breaks off can be repeated as well.
            write_resolved(config, directory / "config.toml", base)
    with closing(MetricsStore(None if directory is None else directory / "metrics.sqlite")) as metrics:
        simulator = _simulator(
            config, base, workers,
            num_peers=num_peers, metrics=metrics, links=links, step_s=step_s, slow=slow, stacked=stacked,
        )  # fmt: skip
        trainer = simulator.trainer
        assert isinstance(trainer, Trainer)
        summary = describe_run(config, simulator.setup, trainer.layout.size, command=command)
        summary.simulated = True
        if chosen is not None:
            note_precisions(summary, {ALL_PEERS: chosen})
        run_to_the_end(
            simulator,
            summary,
            lambda: simulator.run(stop=stop, on_progress=on_progress),
            directory=directory,
            metrics=metrics,
            started=started,
        )
        averaged = simulator.averaged_model()
        if directory is not None:
            with writing("model.safetensors"):
                trainer.save_model(averaged, directory / "model.safetensors", averaged=True)
            parts = trainer.model_parts()
            if summary.ended == "completed" and parts is not None and why_no_average(config) is None:
                write_average(
                    directory / AVERAGE_FILE,
                    places(parts[0]),
                    lambda begin, end: [averaged[begin:end].astype("<f4").tobytes()],
                    rounds=config.run.rounds,
                    members=range(num_peers),
                )
            write_resolved(config, directory / "config.toml", base)
        progress = replace(simulator.progress(0.0), phase=ONE_PROCESS)

        def show() -> None:
            if on_progress is not None:
                on_progress(replace(progress, elapsed_s=time.monotonic() - started))

        if baseline and summary.ended == "completed":
            compare_with_single_process(summary, simulator.setup, directory, show, stop)
        models = [participant.model().copy() for participant in simulator.participants]
        return Simulation(summary, models, averaged, trainer)


def run_to_the_end(
    simulator: Simulator | AsynchronousSimulator,
    summary: Summary,
    run: Callable[[], bool],
    *,
    directory: Path | None,
    metrics: MetricsStore,
    started: float,
) -> None:
    """Let `run` run the simulator; it returns whether the last round was reached. Fill in the summary in any case, and
    leave it in `directory`, if given. `started`: when the command did, by the monotonic clock. Raises what `run`
    raises."""
    ended = "completed"
    try:
        if not run():
            ended = "stopped"
    except DivergenceError as error:
        ended = f"diverged: {error}"
        raise
    except SottoError as error:
        ended = f"failed: {error}"
        raise
    finally:
        summary.ended = ended
        summary.seconds = time.monotonic() - started
        simulator.put_links()
        finish_summary(summary, [metrics], simulator.setup)
        summary.is_sample = simulator.num_peers > MODELS_EVALUATED_MAX
        if directory is not None:
            summary.save(directory / "summary.json")


def _simulator(
    config: Config, base: Path, workers: int, **options: Unpack[RunOptions]
) -> Simulator | AsynchronousSimulator:
    """Return the run that suits the algorithm and the number of processes."""
    if algorithm_spec(config).asynchronous:
        if workers > 1:
            raise ConfigError(f"{config.algorithm.name} has no rounds, which worker processes need", key="--workers")
        return AsynchronousSimulator(config, base, **options)
    if workers > 1:
        return ParallelSimulator(config, base, workers=workers, **options)
    return Simulator(config, base, **options)
