"""The standing of a peer that does not answer: it may have finished, left the run, be lost, or not have joined yet.

There are two sources: its state on disk, where its folder lies here, and the peers that do answer. A folder may be a
copy, so only a final state in it is believed: a peer that has finished or left stays so.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from peer.config.options import Config
from peer.errors import StateError
from peer.gossip.incarnations import Numbering
from peer.gossip.membership import ChangeKind
from peer.records import Criterion
from peer.state.checkpoints import find_checkpoints, read_description
from peer.state.disk import Disk
from peer.state.kept_file import AVERAGE_FILE, SCRIPT_SAYS
from peer.state.metrics import MetricsStore

OWN_FOLDER = "its state folder"

FINAL = ("lost", "left", "finished")
"""States that a peer keeps."""

_BY_WEIGHT = (*FINAL, "joining", "not joined", "connected")
"""Order of precedence where peers disagree about another one: some have not heard the latest yet."""


@dataclass(frozen=True)
class Standing:
    """The known state of a peer that does not answer."""

    state: Literal["finished", "left", "lost", "joining", "not joined", "connected"]
    told_by: str
    """The name of a peer, or the source on disk."""
    round: int | None = None
    """Rounds that it completed; None where that is not known."""

    @property
    def sentence(self) -> str:
        """Return it as a sentence without its subject."""
        after = "" if self.round is None else f" after {self.round} rounds"
        what = {
            "finished": f"has finished{after}",
            "left": f"has left the run{after}",
            "lost": "was excluded from the run as lost",
            "joining": "is about to join",
            "not joined": "has not joined yet",
            "connected": "is connected",
        }
        return f"{what[self.state]}, says {self.told_by}"


def with_length(config: Config, base: Path) -> Config:
    """Return the configuration of a peer with the rounds of its run, where a training script has decided on them."""
    said = SCRIPT_SAYS.read(Disk(base / config.state.directory))
    if said is None:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"rounds": said.rounds})})


def script_criteria(config: Config, base: Path) -> tuple[Criterion, ...] | None:
    """Return the figures that the training script of a peer may tell, by its state folder; None where that does not say
    so. Raises StateError."""
    said = SCRIPT_SAYS.read(Disk(base / config.state.directory))
    return None if said is None else said.criteria


def from_folder(config: Config, base: Path) -> Standing | None:
    """Return the standing in a peer's state folder, if it is final; None if it is not, or there is none."""
    folder = base / config.state.directory
    try:
        config = with_length(config, base)
        checkpoints = find_checkpoints(folder)
        done, state = read_description(checkpoints[-1]) if checkpoints else (0, {})
    except StateError:
        done, state = 0, {}
    index, rounds = config.peer.index, config.run.rounds
    if has_left(state, config, index, done):
        return Standing("left", OWN_FOLDER, done)
    if done >= rounds or recorded(folder / "metrics.sqlite", index) >= rounds:
        return Standing("finished", OWN_FOLDER, rounds)
    return None


def from_average(config: Config, base: Path, index: int) -> Standing | None:
    """Return that another peer than that of a state folder has finished, if the folder holds the average that all
    members of the last round form, and it was not gone by then."""
    folder = base / config.state.directory
    # First the cheap question: each folder is asked about each silent peer.
    if not (folder / AVERAGE_FILE).exists():
        return None
    own = from_folder(config, base)
    if own is None or own.state != "finished":
        return None
    try:
        _, state = read_description(find_checkpoints(folder)[-1])
    except (IndexError, StateError):
        return None
    device = Numbering(config.num_listed).device
    gone = {device(subject) for kind, subject, *_ in state.get("members", ()) if kind != ChangeKind.JOIN}
    return None if index in gone else replace(own, told_by=f"the folder of {config.own.name}")


def last_figures(config: Config, base: Path, index: int | None = None) -> dict[str, Any]:
    """Return the last figures of a peer by its state folder, as its own answer would have them; none where that holds
    no metrics. `index`: of another peer, which told some of them."""
    file = base / config.state.directory / "metrics.sqlite"
    with (
        contextlib.suppress(sqlite3.Error, StateError),
        contextlib.closing(MetricsStore(file, read_only=True)) as store,
    ):
        rounds, criteria = with_length(config, base).run.rounds, script_criteria(config, base)
        return {"rounds": rounds, **store.last_figures(config.peer.index if index is None else index, criteria)}
    return {}


def from_metrics(file: Path, config: Config, index: int) -> Standing | None:
    """Return that a peer has finished, if its collected metrics hold its last round."""
    if recorded(file, index) >= config.run.rounds:
        return Standing("finished", "its metrics", config.run.rounds)
    return None


def from_answers(name: str, answers: Iterable[Mapping[str, Any]]) -> Standing | None:
    """Return another peer's standing by the peers that answered; None if they take it for a member that trains, and
    none of them is connected to it."""
    said = [
        Standing(each["peers"][name]["state"], str(each["name"]))
        for each in answers
        if name in each.get("peers", {}) and each["peers"][name].get("state") in _BY_WEIGHT
    ]
    # Nobody can dial one that has no address, or not from here; its neighbours hear it all the same.
    said += [
        Standing("connected", str(each["name"])) for each in answers if each.get("links", {}).get(name, {}).get("up")
    ]
    return min(said, key=lambda standing: _BY_WEIGHT.index(standing.state), default=None)


def has_left(state: Mapping[str, Any], config: Config, index: int, done: int) -> bool:
    """Return whether a checkpoint after `done` rounds is that of a peer that had left by then, under whichever of its
    numbers."""
    changes, numbering = state.get("members", ()), Numbering(config.num_listed)
    return any(
        kind == ChangeKind.LEAVE and numbering.device(subject) == index and effective <= done
        for kind, subject, _, effective, *_ in changes
    )


def recorded(file: Path, index: int) -> int:
    """Return the rounds that a metrics file has of a peer."""
    if not file.exists():
        return 0
    try:
        with contextlib.closing(MetricsStore(file, read_only=True)) as store:
            return store.last_round(index) + 1
    except sqlite3.Error:
        return 0
