"""Weights & Biases, offline: nothing is sent until somebody calls `wandb sync`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from peer.trackers.tracker import Run

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run as WandbRun


def open_tracker(run: Run) -> WandbTracker:
    """Begin a run in offline mode, whatever the environment says of the mode."""
    # Without this it would report its own errors to its makers.
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True, save_code=False)
    opened = wandb.init(
        project="sottovoce",
        name=run.name,
        dir=str(run.folder),
        mode="offline",
        config=dict(run.settings),
        settings=quiet,
    )
    return WandbTracker(opened)


class WandbTracker:
    """One offline run. Peers are in different rounds, so that the round is a figure, and the axis of the others."""

    def __init__(self, run: WandbRun) -> None:
        self._run = run
        run.define_metric("round")
        run.define_metric("*", step_metric="round")

    def log(self, whose: str, done: int, at: float, figures: Mapping[str, float]) -> None:
        """Log figures as NAME/PEER."""
        own = {f"{name}/{whose}": value for name, value in figures.items()}
        self._run.log({"round": done, "seconds": at, **own})

    def flush(self) -> None:
        """Do nothing: it writes by itself."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()
