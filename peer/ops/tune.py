"""Finds the averaging rate η and the learning rate γ of a job by simulated trials, and stays a step from the cliff.

With strong compression accuracy rises with η and γ up to an edge beyond which models collapse or diverge (the cliff),
and where that edge lies depends on data, skew and length of the run. The search is a successive halving on a
logarithmic grid, followed by a climb at full length:

1. every point of a grid around the configured rates, in runs of an eighth of the rounds; the grid grows by a line
   where the best point lies on its rim;
2. the best quarter of them again, in runs of a third;
3. the two best in full, and from the better one on: each point that is one step of η or of γ closer to the cliff. A
   point is *safe* when both of these hold; the result is the best safe one.

Short runs have the whole schedule of γ, warm-up included, in proportion. Everything is deterministic for a
configuration and a number of trials, as long as the time suffices; where it does not, all runs become shorter, and the
result says so.
"""

from __future__ import annotations

import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import tomlkit
from tomlkit.exceptions import TOMLKitError

from peer import run_plan
from peer.config import Config
from peer.config_writer import write_bytes
from peer.errors import ConfigError, DataError, DivergenceError, SottoError
from peer.simulate import run as simulator
from peer.state.metrics import Summary

STEP = 10 ** (1 / 3)
"""Ratio of neighbouring rates on the grid: three a decade."""

SCREENING, SHORTLIST = 1 / 8, 1 / 3
"""Length of the runs of the first two stages, as a part of the whole run."""

SHORTEST = 20
"""Rounds; shorter runs tell nothing."""

CLIFF_DROP = 0.1
"""A point with a larger η or γ than the best point of the same length collapsed if its worst peer is this far below, as
a fraction of all samples. (One with smaller rates is only slow.)"""

RESOLUTION = 0.001
"""Accuracies that round to the same multiple of this are equal; then the smaller consensus distance wins."""

_GROW_AT_MOST = 3
"""Lines by which the grid may grow on each side."""

_LEAST_AVERAGING_RATE = 1e-4

Verdict: TypeAlias = Literal["held", "diverged", "refused", "cut off"]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One simulated run."""

    averaging_rate: float
    learning_rate: float
    rounds: int
    verdict: Verdict
    """held: it came to its end. diverged: a guard stopped it. refused: the validator did, before the first round. cut
    off: the time was up."""
    reason: str | None = None
    """Of a run that did not come to its end."""
    worst_accuracy: float | None = None
    """Fraction of the test samples that the worst peer's model gets right."""
    averaged_accuracy: float | None = None
    consensus_distance: float | None = None
    payload_bytes: int = 0
    """Of all peers."""
    seconds: float = 0.0

    @property
    def score(self) -> tuple[float, float]:
        """What trials of equal length are compared by: worst peer first, then consensus."""
        if self.verdict != "held" or self.worst_accuracy is None:
            return -1.0, -math.inf
        distance = self.consensus_distance
        return round(self.worst_accuracy / RESOLUTION) * RESOLUTION, -math.inf if distance is None else -distance


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What a search found."""

    best: Trial
    safe: bool
    """Whether the points one step closer to the cliff were run in full, and held."""
    averages: bool
    """Whether the algorithm has an η at all."""
    rounds: int
    """Of the longest runs."""
    shortened: bool
    """Whether these are shorter than the job, for want of time."""
    ended: Literal["done", "trials used up", "time used up", "stopped"]
    trials: tuple[Trial, ...]
    """In the order in which they ran."""
    seconds: float

    def newest(self) -> dict[tuple[float, float], Trial]:
        """Return the longest trial of every point (η, γ) that was tried."""
        found: dict[tuple[float, float], Trial] = {}
        for trial in self.trials:
            point = trial.averaging_rate, trial.learning_rate
            if trial.verdict != "cut off" and (point not in found or found[point].rounds <= trial.rounds):
                found[point] = trial
        return found

    def over_the_cliff(self, trial: Trial) -> bool:
        """Return whether a trial diverged, was refused, or collapsed."""
        return _is_over(trial, [other for other in self.trials if other.rounds == trial.rounds])


Run: TypeAlias = Callable[[float, float, int], Trial]
"""(η, γ, rounds) → what came of it."""


def tune(
    config: Config,
    base: Path,
    *,
    num_peers: int,
    trials: int = 40,
    budget_s: float | None = None,
    on_trial: Callable[[Trial, int], None] | None = None,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Return the rates that do best in the simulator.

    `trials` and `budget_s` bound the search; `on_trial(trial, number)` is told of each run. Raises ConfigError for a
    job that cannot run at all, DivergenceError where every point diverged.
    """
    run_plan.refuse_errors(run_plan.validate_config(config, base, num_peers))
    started = clock()
    deadline = math.inf if budget_s is None else started + budget_s
    simulated = _Simulated(config, base, num_peers, deadline=deadline, stop=stop or threading.Event(), clock=clock)
    return search(
        simulated,
        averaging_rate=(
            run_plan.averaging_rate(config) if run_plan.algorithm_spec(config).uses_averaging_rate else None
        ),
        learning_rate=config.training.learning_rate,
        rounds=config.run.rounds,
        trials=trials,
        budget_s=budget_s,
        on_trial=on_trial,
        stop=stop,
        clock=clock,
    )


def search(
    run: Run,
    *,
    averaging_rate: float | None,
    learning_rate: float,
    rounds: int,
    trials: int,
    budget_s: float | None = None,
    on_trial: Callable[[Trial, int], None] | None = None,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Return the best safe point around the given rates; `run` tries one. Without `averaging_rate` only γ varies."""
    if trials < 3:
        raise ConfigError("is too small", key="--trials", value=trials, valid="3 or more")
    state = _Search(run, _Grid(averaging_rate, learning_rate), rounds, trials, budget_s, on_trial, stop, clock)
    try:
        state.screen()
        state.shorten_list()
        state.climb()
    except _OutOfBudget as reason:
        state.ended = reason.ended
    return state.result()


def write(path: Path, tuning: Tuning) -> None:
    """Put η and γ into a configuration file; comments and everything else stay as they are. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        document = tomlkit.parse(text)
    except FileNotFoundError:
        raise ConfigError("no such file; `sotto init` writes one", file=str(path)) from None
    except (OSError, UnicodeDecodeError, TOMLKitError) as error:
        raise ConfigError(f"cannot be read: {error}", file=str(path)) from None
    values = {("training", "learning_rate"): tuning.best.learning_rate}
    if tuning.averages:
        values["algorithm", "averaging_rate"] = tuning.best.averaging_rate
    for section, key in values:
        if key not in document.get(section, {}):
            document = tomlkit.parse(text := _uncomment(text, section, key))
    for (section, key), value in values.items():
        if section not in document:
            document.add(section, tomlkit.table())
        table: Any = document[section]
        table[key] = value
    # Beside it first: a configuration that was cut off half-way would be worse than an old one.
    path = path.resolve()
    beside = path.with_name(f".{path.name}.new")
    write_bytes(beside, tomlkit.dumps(document).encode())
    shutil.copymode(path, beside)
    beside.replace(path)


def _uncomment(text: str, section: str, key: str) -> str:
    """Return the file with the first line "# key =" of a section, as `sotto init` leaves unset keys, turned into a
    key."""
    line = re.compile(rf"(^\[{section}\][^\n]*$(?:\n(?!\[)[^\n]*)*?\n)# ?{key} ?=[^\n]*$", re.MULTILINE)
    return line.sub(rf"\g<1>{key} = 0.0", text, count=1)


Point: TypeAlias = tuple[int, int]
"""Steps of η and of γ from the configured rates."""


@dataclass(frozen=True)
class _Grid:
    """From whole steps to rates; both rates at (0, 0) are the configured ones."""

    averaging_rate: float | None
    learning_rate: float

    def rates(self, point: Point) -> tuple[float, float]:
        """Return (η, γ); η is at most 1."""
        eta = 1.0 if self.averaging_rate is None else _step(self.averaging_rate, point[0])
        return min(1.0, eta), _step(self.learning_rate, point[1])

    @property
    def top(self) -> int:
        """The step at which η reaches 1."""
        steps = 0
        while self.averaging_rate is not None and _step(self.averaging_rate, steps) < 1.0:
            steps += 1
        return steps

    def contains(self, point: Point) -> bool:
        """Return whether a point has rates of its own."""
        if self.averaging_rate is None:
            return point[0] == 0
        return point[0] <= self.top and (point[0] == 0 or _step(self.averaging_rate, point[0]) >= _LEAST_AVERAGING_RATE)

    def closer_to_the_cliff(self, point: Point) -> Iterator[Point]:
        """Return the neighbours with a larger η and with a larger γ, as far as there are any."""
        for neighbor in ((point[0] + 1, point[1]), (point[0], point[1] + 1)):
            if self.contains(neighbor):
                yield neighbor


@dataclass
class _Search:
    """The three stages and what they have found so far."""

    run: Run
    grid: _Grid
    rounds: int
    num_trials: int
    budget_s: float | None
    on_trial: Callable[[Trial, int], None] | None
    stop: threading.Event | None
    clock: Callable[[], float]
    ended: Literal["done", "trials used up", "time used up", "stopped"] = "done"
    found: dict[tuple[Point, int], Trial] = field(default_factory=dict)
    """(point, rounds) → trial."""
    unsafe: set[Point] = field(default_factory=set)
    safe: set[Point] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.full = self.rounds

    def length(self, part: float) -> int:
        """Return so much of the longest runs, in rounds."""
        return min(self.full, max(SHORTEST, math.ceil(part * self.full)))

    def try_(self, point: Point, rounds: int) -> Trial:
        """Return the trial of a point, run now unless it has been. Raises _OutOfBudget."""
        if (point, rounds) not in self.found:
            if len(self.found) >= self.num_trials:
                raise _OutOfBudget("trials used up")
            if self.budget_s is not None and self.clock() - self.started >= self.budget_s:
                raise _OutOfBudget("time used up")
            trial = self.run(*self.grid.rates(point), rounds)
            if self.stop is not None and self.stop.is_set():
                raise _OutOfBudget("stopped")
            if trial.verdict == "cut off":
                raise _OutOfBudget("time used up")
            self.found[point, rounds] = trial
            if self.on_trial is not None:
                self.on_trial(trial, len(self.found))
        return self.found[point, rounds]

    def screen(self) -> None:
        """Try a grid in short runs; let it grow where the best point lies on its rim."""
        rows, columns = self._shape()
        top = min(self.grid.top, rows // 2)
        left = -((columns - 1) // 2)
        etas, gammas = range(top - rows + 1, top + 1), range(left, left + columns)
        self._fit_budget(rows * columns)
        rounds = self.length(SCREENING)
        points = [(i, j) for i in etas for j in gammas if self.grid.contains((i, j))]
        # From the middle outward: whatever cuts the search short, the configured rates and those near them are known.
        for point in sorted(points, key=lambda p: (abs(p[0]) + abs(p[1]), p)):
            self.try_(point, rounds)
        for _ in range(2 * _GROW_AT_MOST):
            best = self._best(rounds)
            if len(self.found) >= self.num_trials * 3 // 4:
                return
            if best is None:
                # All of them diverged: only a smaller γ can help.
                left = min(j for _, j in points) - 1
                more = [(i, left) for i in etas if self.grid.contains((i, left))]
            else:
                more = self._beyond_the_rim(best, points, etas, gammas)
            more = [point for point in more if (point, rounds) not in self.found]
            if not more:
                return
            for point in more:
                self.try_(point, rounds)
            points += more

    def shorten_list(self) -> None:
        """Try the best quarter of the screening again, longer."""
        ranking = self._ranking(self.length(SCREENING))
        for point in ranking[: max(2, len(ranking) // 4)]:
            self.try_(point, self.length(SHORTLIST))

    def climb(self) -> None:
        """Run the best in full, then whatever lies between the best and the cliff, until the best is safe."""
        full = self.length(1.0)
        for rank, point in enumerate(self._ranking(self.length(SHORTLIST)) + self._ranking(self.length(SCREENING))):
            if rank < 2 or self._best(full) is None:
                self.try_(point, full)
        while (best := self._best(full)) is not None:
            over = self._cliff_above(best)
            if over is None:
                if self._best(full) == best:
                    self.safe.add(best)
                    return
                continue
            self.unsafe.add(best)
            back = best[0] - (over[0] - best[0]), best[1] - (over[1] - best[1])
            if self.grid.contains(back):
                self.try_(back, full)

    def _cliff_above(self, point: Point) -> Point | None:
        """Return the neighbour of a point that is over the cliff, running those in full that have not diverged yet."""
        for neighbor in self.grid.closer_to_the_cliff(point):
            if not self._diverged(neighbor):
                self.try_(neighbor, self.length(1.0))
            if self._is_over(neighbor):
                return neighbor
        return None

    def result(self) -> Tuning:
        """Return the best point of the longest runs there are, a safe one if there is one."""
        for part in (1.0, SHORTLIST, SCREENING):
            rounds = self.length(part)
            best = self._best(rounds) or self._best(rounds, but_safe=False)
            if best is not None:
                return Tuning(
                    best=self.found[best, rounds],
                    safe=best in self.safe,
                    averages=self.grid.averaging_rate is not None,
                    rounds=self.full,
                    shortened=self.full < self.rounds,
                    ended=self.ended,
                    trials=tuple(self.found.values()),
                    seconds=self.clock() - self.started,
                )
        if not self.found:
            raise SottoError(f"no trial was completed: {self.ended}")
        reasons = [trial.reason for trial in self.found.values() if trial.reason]
        raise DivergenceError(
            f"all {len(self.found)} trials diverged, down to a learning rate of "
            f"{min(trial.learning_rate for trial in self.found.values()):g}; the last one: {reasons[-1]}"
        )

    def _shape(self) -> tuple[int, int]:
        """Return how many values of η and γ the first grid has: together half of the trials."""
        share = max(3, self.num_trials // 2)
        if self.grid.averaging_rate is None:
            return 1, min(9, share)
        rows = max(1, min(5, math.isqrt(share)))
        return rows, min(9, share // rows)

    def _fit_budget(self, points: int) -> None:
        """Shorten all runs if the whole plan would take longer than the budget, judging by one screening run."""
        if self.budget_s is None:
            return
        trial = self.try_((0, 0), self.length(SCREENING))
        # Screening, the best quarter, and about six runs in full.
        plan = points * SCREENING + points / 4 * SHORTLIST + 6
        needed = trial.seconds / trial.rounds * plan * self.rounds if trial.verdict == "held" else 0.0
        if needed > self.budget_s:
            self.full = max(SHORTEST, int(self.rounds * self.budget_s / needed))

    def _beyond_the_rim(self, best: Point, points: list[Point], etas: range, gammas: range) -> list[Point]:
        """Return the next line of points on the side where `best` lies on the rim; none where it does not."""
        rows, columns = sorted({i for i, _ in points}), sorted({j for _, j in points})
        lines = (
            (best[1] == columns[-1] < gammas[-1] + _GROW_AT_MOST, [(i, columns[-1] + 1) for i in rows]),
            (best[0] == rows[-1] < etas[-1] + _GROW_AT_MOST, [(rows[-1] + 1, j) for j in columns]),
            (best[1] == columns[0] > gammas[0] - _GROW_AT_MOST, [(i, columns[0] - 1) for i in rows]),
            (best[0] == rows[0] > etas[0] - _GROW_AT_MOST, [(rows[0] - 1, j) for j in columns]),
        )
        near = {best[0] - 1, best[0], best[0] + 1}, {best[1] - 1, best[1], best[1] + 1}
        for wanted, line in lines:
            # Only what touches the best point: the far ends of the line would tell nothing.
            line = [p for p in line if self.grid.contains(p) and p[0] in near[0] and p[1] in near[1]]
            if wanted and line:
                return line
        return []

    def _best(self, rounds: int, *, but_safe: bool = True) -> Point | None:
        """Return the best point among the trials of that length; with `but_safe`, none that is known to be unsafe or
        over the cliff."""
        for point in self._ranking(rounds):
            if not but_safe or not (point in self.unsafe or self._is_over(point)):
                return point
        return None

    def _ranking(self, rounds: int) -> list[Point]:
        """Return the points whose trials of that length held, best first; none that diverged in longer ones."""
        held = [p for (p, length), t in self.found.items() if length == rounds and t.verdict == "held"]
        held = [p for p in held if not self._diverged(p)]
        return sorted(held, key=lambda p: (self.found[p, rounds].score, -p[1], -p[0]), reverse=True)

    def _diverged(self, point: Point) -> bool:
        """Return whether any trial of a point diverged or was refused: one that does so in a short run needs no long
        one."""
        return any(p == point and t.verdict in ("diverged", "refused") for (p, _), t in self.found.items())

    def _is_over(self, point: Point) -> bool:
        """Return whether a point diverged in any trial, or collapsed in full length."""
        full = self.length(1.0)
        if self._diverged(point) or (point, full) not in self.found:
            return self._diverged(point)
        return _is_over(self.found[point, full], [t for (_, length), t in self.found.items() if length == full])


class _OutOfBudget(Exception):
    """Ends the search where it stands."""

    def __init__(self, ended: Literal["trials used up", "time used up", "stopped"]) -> None:
        self.ended = ended
        super().__init__(ended)


@dataclass
class _Simulated:
    """Tries rates in the simulator."""

    config: Config
    base: Path
    num_peers: int
    deadline: float
    stop: threading.Event
    clock: Callable[[], float]
    stacked: bool = True

    def __call__(self, averaging_rate: float, learning_rate: float, rounds: int) -> Trial:
        """Return what came of a run with these rates and that many rounds."""
        config = with_rates(self.config, averaging_rate, learning_rate, rounds)
        given: dict[str, Any] = {"averaging_rate": averaging_rate, "learning_rate": learning_rate, "rounds": rounds}
        for finding in run_plan.validate_config(config, self.base, self.num_peers):
            if finding.level == "error":
                return Trial(**given, verdict="refused", reason=finding.sentence)
        started = self.clock()
        try:
            summary = self._simulate(config)
        except DivergenceError as error:
            return Trial(**given, verdict="diverged", reason=str(error), seconds=self.clock() - started)
        return Trial(
            **given,
            verdict="held" if summary.ended == "completed" else "cut off",
            worst_accuracy=summary.worst_accuracy,
            averaged_accuracy=summary.averaged_accuracy,
            consensus_distance=summary.consensus_distance,
            payload_bytes=summary.payload_bytes,
            seconds=self.clock() - started,
        )

    def _simulate(self, config: Config) -> Summary:
        cut = threading.Event()

        def watch(_: object) -> None:
            if self.stop.is_set() or self.clock() > self.deadline:
                cut.set()

        while True:
            try:
                return simulator.run(
                    config,
                    self.base,
                    num_peers=self.num_peers,
                    stacked=self.stacked,
                    baseline=False,
                    on_progress=watch,
                    stop=cut,
                ).summary
            except (ConfigError, DataError):
                # Some jobs cannot be stacked (dropout, late = "skip"); if that was not the reason, it comes again.
                if not self.stacked:
                    raise
                self.stacked = False


def with_rates(config: Config, averaging_rate: float, learning_rate: float, rounds: int) -> Config:
    """Return the job with other rates and length; warm-up and SCSP's final rounds shrink in proportion."""
    part = rounds / config.run.rounds
    algorithm: dict[str, Any] = {}
    if run_plan.algorithm_spec(config).uses_averaging_rate:
        algorithm["averaging_rate"] = averaging_rate
    if isinstance(config.algorithm.final_rounds, int):
        algorithm["final_rounds"] = round(config.algorithm.final_rounds * part)
    training = {"learning_rate": learning_rate, "warmup_rounds": round(config.training.warmup_rounds * part)}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"rounds": rounds}),
            "algorithm": config.algorithm.model_copy(update=algorithm),
            "training": config.training.model_copy(update=training),
            "evaluation": config.evaluation.model_copy(update={"every_rounds": 0}),
        }
    )


def _is_over(trial: Trial, same_length: list[Trial]) -> bool:
    if trial.verdict != "held" or trial.worst_accuracy is None:
        return trial.verdict in ("diverged", "refused")
    best = max(same_length, key=lambda other: other.score)
    larger = trial.averaging_rate > best.averaging_rate or trial.learning_rate > best.learning_rate
    return larger and trial.worst_accuracy < (best.worst_accuracy or 0.0) - CLIFF_DROP


def _step(rate: float, steps: int) -> float:
    """Return a rate so many steps from the configured one, rounded to one digit that people would have chosen."""
    return rate if steps == 0 else float(f"{rate * STEP**steps:.0e}")
