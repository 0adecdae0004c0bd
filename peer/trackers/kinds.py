"""The trackers that there are.

Each writes into a folder of the run and asks nobody for anything. Its package is in the extra "trackers", and is
imported only when that tracker is wanted.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from peer.errors import ConfigError

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


@dataclass(frozen=True)
class Run:
    """A run's description for a tracker, given before the first figure."""

    name: str
    settings: Mapping[str, str]
    """Dotted key → value."""
    folder: Path
    """An existing folder for its files."""


class Tracker(Protocol):
    """One run in a tracker."""

    def log(self, whose: str, done: int, at: float, figures: Mapping[str, float]) -> None:
        """Take figures of a peer, or of the "average" or of "all" models, after `done` rounds; `at` in Unix seconds."""
        ...

    def flush(self) -> None:
        """Make logged figures visible now."""
        ...

    def close(self) -> None:
        """End the run."""
        ...


@dataclass(frozen=True)
class Kind:
    """A tracker that there is."""

    title: str
    packages: tuple[str, ...]
    """Modules that have to be installed."""
    open: Callable[[Run], Tracker]
    how_to_look: str
    """The command that shows the written figures; {folder} stands for the folder."""


def require(kind: str) -> None:
    """Raise ConfigError unless the packages of a tracker are installed."""
    lacking = [package for package in KINDS[kind].packages if find_spec(package) is None]
    if lacking:
        problem = f"needs {' and '.join(lacking)}: pip install {' '.join(lacking)}, or 'sottovoce[trackers]'"
        raise ConfigError(problem, key=kind)


def open_tracker(kind: str, run: Run) -> Tracker:
    """Begin a run in a tracker, whose packages `require` found."""
    run.folder.mkdir(parents=True, exist_ok=True)
    # Trackers start processes and databases, which may look at the folder from elsewhere.
    return KINDS[kind].open(replace(run, folder=run.folder.resolve()))


class TensorBoardTracker:
    """TensorBoard: event files of one run, a folder for each peer, so that their curves lie over each other in one
    chart."""

    def __init__(self, run: Run) -> None:
        """Begin anew: event files of an earlier call would show every curve twice."""
        shutil.rmtree(run.folder)
        run.folder.mkdir()
        self._folder = run.folder
        self._writers: dict[str, EventFileWriter] = {}

    def log(self, whose: str, done: int, at: float, figures: Mapping[str, float]) -> None:
        """Write one event with all figures."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer(whose).add_event(Event(wall_time=at, step=done, summary=Summary(value=values)))

    def flush(self) -> None:
        """Write buffered events."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, whose: str) -> EventFileWriter:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if whose not in self._writers:
            self._writers[whose] = EventFileWriter(str(self._folder / whose.replace("/", "_")))
        return self._writers[whose]


class WandbTracker:
    """Weights & Biases, offline: nothing is sent until somebody calls `wandb sync`. Peers are in different rounds, so
    that the round is a figure, and the axis of the others."""

    def __init__(self, run: Run) -> None:
        """Begin a run in offline mode, whatever the environment says of the mode."""
        # Without this it would report its own errors to its makers.
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True, save_code=False)
        self._run = wandb.init(
            project="sottovoce",
            name=run.name,
            dir=str(run.folder),
            mode="offline",
            config=dict(run.settings),
            settings=quiet,
        )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def log(self, whose: str, done: int, at: float, figures: Mapping[str, float]) -> None:
        """Log figures as NAME/PEER."""
        own = {f"{name}/{whose}": value for name, value in figures.items()}
        self._run.log({"round": done, "seconds": at, **own})

    def flush(self) -> None:
        """Do nothing: it writes by itself."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()


_BATCH = 1000
"""Figures that MLflow takes at once."""
_MOST_PARAMETERS = 100
_PARAMETER_CHARACTERS = 500


class MlflowTracker:
    """MLflow: a run in an SQLite file of its own."""

    def __init__(self, run: Run) -> None:
        """Begin a run in the experiment "sottovoce"."""
        # It tells its makers how it is used, unless it is told not to before it is imported.
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=f"sqlite:///{run.folder / 'mlflow.db'}")
        known = self._client.get_experiment_by_name("sottovoce")
        if known is None:
            artifacts = (run.folder / "artifacts").as_uri()
            experiment = self._client.create_experiment("sottovoce", artifact_location=artifacts)
        else:
            experiment = known.experiment_id
        self._run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [Param(key, value[:_PARAMETER_CHARACTERS]) for key, value in run.settings.items()]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[first : first + _MOST_PARAMETERS])
        self._waiting: list[Metric] = []

    def log(self, whose: str, done: int, at: float, figures: Mapping[str, float]) -> None:
        """Keep figures as NAME/PEER until there are enough for a batch."""
        from mlflow.entities import Metric

        moment = math.floor(1000 * at)
        self._waiting += [Metric(f"{name}/{whose}", value, moment, done) for name, value in figures.items()]
        while len(self._waiting) >= _BATCH:
            self._send(_BATCH)

    def flush(self) -> None:
        """Write waiting figures."""
        while self._waiting:
            self._send(_BATCH)

    def close(self) -> None:
        """End the run."""
        self.flush()
        self._client.set_terminated(self._run_id)

    def _send(self, count: int) -> None:
        self._client.log_batch(self._run_id, metrics=self._waiting[:count])
        del self._waiting[:count]


class TrackioTracker:
    """trackio: a run in an SQLite file of its own. Peers are in different rounds, and it takes the steps of a run in
    any order."""

    def __init__(self, run: Run) -> None:
        """Begin a run of the project "sottovoce"."""
        # It looks at its environment when it is imported, and so do the packages that it takes along.
        os.environ |= {
            "TRACKIO_DIR": str(run.folder),
            "GRADIO_ANALYTICS_ENABLED": "False",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "1",
        }
        import trackio

        trackio.init(
            project="sottovoce",
            name=run.name,
            config=dict(run.settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, whose: str, done: int, at: float, figures: Mapping[str, float]) -> None:
        """Log figures as NAME/PEER."""
        import trackio

        own = {f"{name}/{whose}": value for name, value in figures.items()}
        trackio.log({**own, "seconds": at}, step=done)

    def flush(self) -> None:
        """Do nothing: it writes by itself."""

    def close(self) -> None:
        """End the run."""
        import trackio

        trackio.finish()


KINDS: Mapping[str, Kind] = {
    "tensorboard": Kind("TensorBoard", ("tensorboard",), TensorBoardTracker, "tensorboard --logdir {folder}"),
    "wandb": Kind("Weights & Biases", ("wandb",), WandbTracker, "wandb sync {folder}/wandb/offline-run-*"),
    "mlflow": Kind(
        "MLflow",
        ("mlflow", "sqlalchemy", "alembic"),
        MlflowTracker,
        "mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db",
    ),
    "trackio": Kind("trackio", ("trackio",), TrackioTracker, "TRACKIO_DIR={folder} trackio show"),
}
