"""MLflow: a run in an SQLite file of its own."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from peer.trackers.tracker import Run

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

_BATCH = 1000
"""Figures that MLflow takes at once."""
_MOST_PARAMETERS = 100
_PARAMETER_CHARACTERS = 500


def open_tracker(run: Run) -> MlflowTracker:
    """Begin a run in the experiment "sottovoce"."""
    # It tells its makers how it is used, unless it is told not to before it is imported.
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.folder / 'mlflow.db'}")
    known = client.get_experiment_by_name("sottovoce")
    if known is None:
        artifacts = (run.folder / "artifacts").as_uri()
        experiment = client.create_experiment("sottovoce", artifact_location=artifacts)
    else:
        experiment = known.experiment_id
    begun = client.create_run(experiment, run_name=run.name)
    parameters = [Param(key, value[:_PARAMETER_CHARACTERS]) for key, value in run.settings.items()]
    for first in range(0, len(parameters), _MOST_PARAMETERS):
        client.log_batch(begun.info.run_id, params=parameters[first : first + _MOST_PARAMETERS])
    return MlflowTracker(client, begun.info.run_id)


class MlflowTracker:
    """One run."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client, self._run_id = client, run_id
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
