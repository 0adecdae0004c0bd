"""The race in the folder of a study: trains the curves that are missing, and joins them with the cells.

A curve whose file exists is not trained again. Seconds of a contender on a link are its gradient steps to the target
times the seconds of a step in its cell; so curves need no links, and cells no data.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peer.lab.grid import Files, one_by_one
from peer.lab.study import race
from peer.lab.study.race import Curve
from peer.lab.study.row import Cell
from peer.lab.study.study import Contender, Study
from peer.ops.executors import ALL, Shard
from peer.report.numbers import duration, percent


@dataclass(frozen=True, kw_only=True)
class Finish:
    """A contender on one link: the mean of its seeds."""

    contender: str
    skew: float
    profile: str
    seeds: int
    worst: float
    """Accuracy of the worst peer at the end; lowest seed."""
    averaged: float
    step_s: float
    """Seconds from one gradient step to the next."""
    payload_bytes: float | None
    """Compressed numbers that one peer sends for each gradient step."""
    interface_bytes: float
    """Bytes that leave one peer's interface for each gradient step."""
    steps_to: tuple[float | None, ...]
    """Gradient steps to each target of the race; None where a seed does not reach it."""

    @property
    def seconds_to(self) -> tuple[float | None, ...]:
        """Seconds to each target."""
        return tuple(None if steps is None else steps * self.step_s for steps in self.steps_to)

    @property
    def bytes_to(self) -> tuple[float | None, ...]:
        """Bytes that leave one interface, to each target."""
        return tuple(None if steps is None else steps * self.interface_bytes for steps in self.steps_to)

    def as_json(self) -> dict[str, object]:
        """Return one flat table."""
        return asdict(self) | {"seconds_to": self.seconds_to, "bytes_to": self.bytes_to}


class RaceFolder:
    """The curves of a study."""

    def __init__(self, study: Study, folder: Path, data: Path | None = None) -> None:
        """`data`: the folder of the data set, for training alone."""
        self._study, self._folder, self._data = study, folder / "curves", data

    def curves(self, only: Sequence[str] = ()) -> Files[tuple[Contender, float, int], Curve]:
        """Return the curves (contender, skew, seed) in the order of the study, or only those that `only` names."""
        return Files(self._study.curves(only), self._folder, Curve, lambda c: f"{c[0].name}--{c[1]:g}--{c[2]}")

    def trained(self) -> list[Curve]:
        """Return the curves that were trained."""
        return [curve for _, curve in self.curves().rows()]

    def run(self, only: Sequence[str], say: Callable[[str], None], shard: Shard = ALL) -> int:
        """Train the missing curves of a shard and report each to `say`; return how many failed."""
        grid = self.curves(only)
        missing, took = grid.missing(shard), list[float]()

        def begin(position: int, cell: tuple[Contender, float, int]) -> None:
            left = f", {duration(statistics.mean(took) * (len(missing) - position))} left" if took else ""
            say(f"[{position + 1}/{len(missing)}{left}] {cell[0].name} at skew {cell[1]:g}, seed {cell[2]}")

        def tell(_: object, curve: Curve) -> str:
            took.append(curve.seconds)
            return f"worst peer {percent(curve.points[-1].worst)} after {curve.points[-1].steps} steps"

        outcomes = one_by_one(missing, begin, lambda cell: race.train(self._study, *cell, self._data))
        return grid.run(outcomes, tell, lambda _, text: say(f"    {text}"))

    def finishes(self, cells: Sequence[Cell]) -> list[Finish]:
        """Return the finishes from curves and cells, by skew and profile, the fastest to the last target first."""
        if self._study.race is None:
            return []
        measured = {(cell.contender, cell.profile): cell for cell in cells}
        groups: dict[tuple[float, str], list[Curve]] = defaultdict(list)
        for curve in self.trained():
            groups[curve.skew, curve.contender].append(curve)
        contenders = {each.name: each for each in self._study.contenders}
        found = []
        for skew in self._study.race.skews:
            for profile in self._study.profiles:
                here = []
                for name, contender in contenders.items():
                    curves, cell = groups.get((skew, name)), measured.get((contender.timed_as or name, profile))
                    if curves and cell is not None:
                        here.append(self._finish(contender, curves, cell))
                found += sorted(here, key=_order)
        return found

    def _finish(self, contender: Contender, curves: Sequence[Curve], cell: Cell) -> Finish:
        assert self._study.race is not None
        period, ends = self._study.steps_per_round(contender), [curve.points[-1] for curve in curves]
        payloads = [curve.payload_bytes for curve in curves if curve.payload_bytes is not None]
        return Finish(
            contender=contender.name,
            skew=curves[0].skew,
            profile=cell.profile,
            seeds=len(curves),
            worst=min(end.worst for end in ends),
            averaged=statistics.mean(end.averaged for end in ends),
            step_s=cell.result.round_s / period,
            payload_bytes=statistics.mean(payloads) if payloads else None,
            interface_bytes=cell.result.interface_bytes / period,
            steps_to=tuple(_mean_steps(curves, target) for target in self._study.race.targets),
        )


def _mean_steps(curves: Sequence[Curve], target: float) -> float | None:
    steps = [curve.steps_to(target) for curve in curves]
    known = [each for each in steps if each is not None]
    return statistics.mean(known) if len(known) == len(steps) else None


def _order(finish: Finish) -> tuple[tuple[bool, float], ...]:
    """Return the order of finish: by the last target, then by those before it; those that reach none come last."""
    return tuple((seconds is None, seconds or 0.0) for seconds in reversed(finish.seconds_to))
