"""The trackers that there are.

Each writes into a folder of the run and asks nobody for anything. Its package is in the extra "trackers", and is
imported only when that tracker is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec

from peer.errors import ConfigError
from peer.trackers import mlflow_store, tensorboard_events, trackio_store, wandb_offline
from peer.trackers.tracker import Run, Tracker


@dataclass(frozen=True)
class Kind:
    """A tracker that there is."""

    title: str
    packages: tuple[str, ...]
    """Modules that have to be installed."""
    open: Callable[[Run], Tracker]
    how_to_look: str
    """The command that shows the written figures; {folder} stands for the folder."""


KINDS: Mapping[str, Kind] = {
    "tensorboard": Kind(
        "TensorBoard", ("tensorboard",), tensorboard_events.open_tracker, "tensorboard --logdir {folder}"
    ),
    "wandb": Kind(
        "Weights & Biases", ("wandb",), wandb_offline.open_tracker, "wandb sync {folder}/wandb/offline-run-*"
    ),
    "mlflow": Kind(
        "MLflow",
        ("mlflow", "sqlalchemy", "alembic"),
        mlflow_store.open_tracker,
        "mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db",
    ),
    "trackio": Kind("trackio", ("trackio",), trackio_store.open_tracker, "TRACKIO_DIR={folder} trackio show"),
}


def require(kind: str) -> None:
    """Raise ConfigError unless the packages of a tracker are installed."""
    lacking = [package for package in KINDS[kind].packages if find_spec(package) is None]
    if lacking:
        problem = f"needs {' and '.join(lacking)}: pip install {' '.join(lacking)}, or 'sottovoce[trackers]'"
        raise ConfigError(problem, key=kind)


def open_tracker(kind: str, run: Run) -> Tracker:
    """Begin a run in a tracker. Raises ConfigError if its package is missing."""
    require(kind)
    run.folder.mkdir(parents=True, exist_ok=True)
    # Trackers start processes and databases, which may look at the folder from elsewhere.
    return KINDS[kind].open(replace(run, folder=run.folder.resolve()))
