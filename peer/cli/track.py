"""`sotto lab track`: hand the figures of a run to experiment trackers, during the run or after it."""

from __future__ import annotations

import os
import sys
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

from peer.cli.app import SottoCommand, StopOnSignal, tell
from peer.cli.options import json_option
from peer.errors import StateError
from peer.files import instead_of

if TYPE_CHECKING:
    from peer.trackers.follow import Follower
    from peer.trackers.kinds import Tracker

_POLL_S = 1.0


@click.command(cls=SottoCommand)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "-t",
    "--to",
    "kinds",
    multiple=True,
    required=True,
    type=click.Choice(["tensorboard", "wandb", "mlflow", "trackio"]),
    help="Tracker; may be repeated.",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Of the rounds, hand over every N-th; evaluations are handed over in any case.",
)
@click.option("--follow", is_flag=True, help="Go on with what comes, until Ctrl-C or SIGTERM.")
@json_option
def track(directory: Path, kinds: tuple[str, ...], every: int, follow: bool, as_json: bool) -> None:
    """Hand the figures of a run to TensorBoard, Weights & Biases, MLflow or trackio.

    DIR is a run folder, or a cluster folder after `sotto report`. Trackers write into DIR/trackers and send nothing
    anywhere: Weights & Biases is in its offline mode, MLflow and trackio use files of their own. Accuracies on
    hold-outs are not handed over.

    `sotto up --track KIND` and `sotto simulate --track KIND` do this while the run goes on. Of more than 32 peers, the
    first 32 are handed over.

    \b
    Examples:
      sotto lab track runs/digits --to tensorboard
      sotto lab track runs/digits --to wandb --to mlflow --every 10
      sotto lab track runs/digits --to trackio --follow
    """
    from peer.trackers.follow import Follower
    from peer.trackers.kinds import KINDS, Run, open_tracker, require

    for kind in kinds:
        require(kind)
    if not directory.is_dir():
        raise StateError(f"{directory}: no such folder; `sotto up` and `simulate` make them{instead_of(directory)}")
    follower = Follower(directory, every=every)
    # Some trackers greet on stdout, where results go.
    with redirect_stdout(sys.stderr), closing(follower), StopOnSignal() as stop:
        while follow and not follower.has_begun and not _ends(stop):
            pass
        name, settings = follower.describe()
        trackers = [open_tracker(kind, Run(name, settings, directory / "trackers" / kind)) for kind in kinds]
        try:
            points = _hand_over(follower, trackers)
            while follow and not _ends(stop):
                points += _hand_over(follower, trackers)
            # Figures from between the last look and the request to stop.
            points += _hand_over(follower, trackers)
        finally:
            for tracker in trackers:
                tracker.close()
    if not points:
        raise StateError(f"{directory}: there are no figures to hand over")
    looks = {kind: KINDS[kind].how_to_look.format(folder=directory / "trackers" / kind) for kind in kinds}
    lines = (f"{KINDS[kind].title}: {command}" for kind, command in looks.items())
    tell(as_json, {"points": points, "trackers": looks}, lines)


def _hand_over(follower: Follower, trackers: list[Tracker]) -> int:
    """Hand over new figures; return the number of points."""
    points = 0
    for point in follower.new():
        points += 1
        for tracker in trackers:
            tracker.log(point.whose, point.done, point.at, point.figures)
    for tracker in trackers if points else ():
        tracker.flush()
    return points


def _ends(stop: StopOnSignal) -> bool:
    """Wait a moment; return whether it is time to end: at a signal, or when the run that started this is gone."""
    parent = os.environ.get("SOTTO_PARENT")
    return stop.wait(_POLL_S) or (parent is not None and os.getppid() != int(parent))
