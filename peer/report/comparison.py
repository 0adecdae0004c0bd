"""Several runs beside each other: runs that differ in their seed alone are one contender, with mean and range.

Curves of a contender are compared by round, by second and by byte. All are of the worst peer, the averaged model, and
the mean training loss of the peers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peer.config.options import OWN_LOOP
from peer.foreign_values import parse_toml
from peer.records import ACCURACY, Criterion
from peer.report.curves import Against, averaged_figure, figure_axis, mean_loss, measures, worst_figure
from peer.report.line_chart import Axis, Line
from peer.report.run_data import RunData, mean

_OWN_KEYS = ("run.name", "run.seed", "evaluation.keep_models")
"""Settings without effect on training, or that differ between seeds."""
_OWN_SECTIONS = ("peers", "peer", "security", "limits")
"""Sections of each device alone."""

Curve = list[tuple[int, float]]
"""(completed rounds, value)."""


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds of a contender."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Return the spread of at least one figure; None where a seed has none."""
        known = [value for value in values if value is not None]
        return cls(mean(known), min(known), max(known)) if known and len(known) == len(values) else None


@dataclass(frozen=True)
class Contender:
    """Runs with one configuration and different seeds."""

    name: str
    runs: tuple[RunData, ...]
    settings: Mapping[str, str]
    """Dotted key → value, as TOML has it."""

    def figure(self, reading: Callable[[RunData], float | None]) -> Spread | None:
        """Return a figure over all seeds."""
        return Spread.of([reading(run) for run in self.runs])


@dataclass(frozen=True)
class Target:
    """A figure that every contender reaches, and its cost to each."""

    criterion: Criterion
    value: float
    """Figure of the worst peer: the best that all contenders have in all their runs."""
    reached: Mapping[str, Mapping[str, Spread | None]]
    """Contender → measure (round, bytes, time) → position at which its worst peer first has it."""


def contenders(runs: Sequence[RunData]) -> list[Contender]:
    """Return the runs, those together that differ in their seed alone, in the order in which they come.

    Scripts with one seed stay apart: they may differ in what no configuration tells.
    """
    found: list[tuple[RunData, Mapping[str, str], list[RunData]]] = []
    for run in runs:
        own = settings(run)
        same = next((others for _, known, others in found if own and own == known), None)
        if same and own.get("training.task") == OWN_LOOP and _seed(run) in map(_seed, same):
            same = None
        if same is None:
            found.append((run, own, [run]))
        else:
            same.append(run)
    names = distinct([_common_name(group) for _, _, group in found])
    return [Contender(name, tuple(group), own) for name, (_, own, group) in zip(names, found, strict=True)]


def _seed(run: RunData) -> int | None:
    return None if run.summary is None else run.summary.seed


def settings(run: RunData) -> dict[str, str]:
    """Return the settings of a run, without those of one device or one seed; empty where they are unknown."""
    try:
        tree = parse_toml(run.config or "")
    except ValueError:
        return {}
    found = {key: value for key, value in _flat(tree) if key not in _OWN_KEYS}
    if found and run.summary is not None:
        found |= {"peers": str(run.summary.num_peers), "simulated": "yes" if run.summary.simulated else "no"}
    return found


def differences(found: Sequence[Contender]) -> list[tuple[str, list[str]]]:
    """Return (key, its value for each contender) of every setting that not all have alike."""
    keys = sorted({key for each in found for key in each.settings})
    rows = [(key, [each.settings.get(key, "") for each in found]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def criterion_of(found: Sequence[Contender]) -> Criterion:
    """Return the figure that compares all contenders: accuracy, unless their tasks have another in common."""
    own = {run.summary.criterion for each in found for run in each.runs if run.summary is not None}
    return own.pop() if len(own) == 1 else ACCURACY


def target(found: Sequence[Contender]) -> Target | None:
    """Return the figure that all contenders reach; None where one was not evaluated."""
    criterion = criterion_of(found)
    reached = [[value for _, value in worst_figure(run, criterion)] for each in found for run in each.runs]
    if not all(reached):
        return None
    wanted = criterion.worst(max(values, key=criterion.rank) for values in reached)
    return Target(
        criterion,
        wanted,
        {
            each.name: {
                measure: Spread.of([_first_at(run, criterion, wanted, measure) for run in each.runs])
                for measure in MEASURES
            }
            for each in found
        },
    )


def curves(found: Sequence[Contender]) -> list[tuple[str, Callable[[RunData], Curve], Axis]]:
    """Return (name, curve, vertical axis) of each chart: worst peer, averaged model, and loss."""
    criterion = criterion_of(found)
    name, axis = criterion.name[:1].upper() + criterion.name[1:], figure_axis(criterion)
    return [
        (f"{name} of the worst peer", lambda run: worst_figure(run, criterion), axis),
        (f"{name} of the averaged model", lambda run: averaged_figure(run, criterion), axis),
        ("Training loss, mean of all peers", mean_loss, Axis(label="loss", log=True)),
    ]


def comparison_lines(
    found: Sequence[Contender], curve: Callable[[RunData], Curve], measure: str
) -> tuple[Axis | None, list[Line]]:
    """Return one curve for each contender against a measure, with the range of its seeds around it, and the axis; None
    where no run has that measure."""
    axis, lines = None, []
    for number, each in enumerate(found):
        against = [_measure(run, measure) for run in each.runs]
        present = [one for one in against if one is not None]
        if len(present) < len(against):
            continue
        axis = axis or present[0].axis
        curves = [dict(curve(run)) for run in each.runs]
        common = sorted(set.intersection(*(set(one) for one in curves)))
        points, band = [], []
        for done in common:
            # Seeds are compared round by round; the position of a round on the axis is the mean of theirs.
            x, values = mean([one.of_all(done) for one in present]), [one[done] for one in curves]
            points.append((x, mean(values)))
            band.append((x, min(values), max(values)))
        lines.append(Line(label=each.name, points=points, style=style(number), band=band if len(each.runs) > 1 else ()))
    ends = [line.points[-1][0] for line in lines if line.points and line.points[-1][0] > 0]
    if axis is not None and ends and max(ends) > _LOG_FROM * min(ends):
        # The shorter curve would be a line at the edge.
        axis = replace(axis, log=True, low=None)
    return axis, lines


def style(number: int) -> str:
    """Return the class of the style sheet for a contender; after eight, colours come again with dashes."""
    return f"{'dashed ' if number >= _COLOURS else ''}run-{number % _COLOURS}"


MEASURES = ("round", "bytes", "time")
_COLOURS = 8
_LOG_FROM = 15.0
"""Ratio of the longest curve to the shortest from which on the axis is logarithmic."""


def _common_name(runs: Sequence[RunData]) -> str:
    """Return the common beginning of the names of some folders; the first name if there is none."""
    names = [run.directory.resolve().name for run in runs]
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in alike).rstrip("-_. ") or names[0]


def _measure(run: RunData, name: str) -> Against | None:
    return next((each for each in measures(run) if each.name == name), None)


def _first_at(run: RunData, criterion: Criterion, wanted: float, measure: str) -> float | None:
    """Return the position at which a run's worst peer first is as good as wanted."""
    against = _measure(run, measure)
    good = criterion.rank(wanted)
    done = next((done for done, value in worst_figure(run, criterion) if criterion.rank(value) >= good), None)
    return None if against is None or done is None else against.of_all(done)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in tree.items():
        if not prefix and key in _OWN_SECTIONS:
            continue
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.") or [(f"{prefix}{key}", "{}")]
        else:
            found.append((f"{prefix}{key}", str(value).lower() if isinstance(value, bool) else str(value)))
    return found


def distinct(names: Sequence[str]) -> list[str]:
    """Return names of which no two are alike: folders of different parents may have one name."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: n + 1].count(name)})" for n, name in enumerate(names)
    ]
