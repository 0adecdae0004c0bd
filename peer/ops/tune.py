"""Finds the averaging rate η and the learning rate γ of a job by simulated trials, and stays a step from the cliff.

With strong compression accuracy rises with η and γ up to an edge beyond which models collapse or diverge (the cliff),
and where that edge lies depends on data, skew and length of the run. The search is a successive halving on a
logarithmic grid, followed by a climb at full length:

1. every point of a grid around the configured rates, in runs of an eighth of the rounds; the grid grows by a line
   where the best point lies on its rim;
2. the best quarter of them again, in runs of a third;
3. the two best in full, and from the better one on: each point that is one step of η or of γ closer to the cliff. A
   point is *safe* when both of these hold;
4. with the rest of the budget: longer runs of the best where all runs had to be shortened, and then up to three safe
   points again with other seeds. The result is the safe point with the best mean over the same seeds.

Points are compared by their worst peer: by its accuracy, or by the first metric of an own task (`gain_of`). Short runs
have the whole schedule of γ, warm-up included, in proportion. The same figures and durations of runs always lead to
the same result.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import tomlkit
from tomlkit.exceptions import TOMLKitError

from peer.config.options import Config
from peer.config.writer import write_bytes
from peer.errors import ConfigError, DataError, DivergenceError, SottoError
from peer.ops.executors import Computing
from peer.records import ACCURACY, Criterion
from peer.run import plan as run_plan
from peer.run.setup import RunSetup, settle_precision
from peer.run.summary import train_single_process
from peer.simulate import run as simulator
from peer.state.metrics import Summary

STEP = 10 ** (1 / 3)
"""Ratio of neighbouring rates on the grid: three a decade."""

SCREENING, SHORTLIST = 1 / 8, 1 / 3
"""Length of the runs of the first two stages, as a part of the whole run."""

SHORTEST = 20
"""Rounds; shorter runs tell nothing."""

_HALVING = 0.1
"""Gain for halving a metric of which lower values are better, on the scale of accuracies: an error that doubles is a
collapse of ten points."""

_WORST_GAIN = -0.99
"""Gain of a figure that is no number; trials that did not hold are below it."""

CLIFF_DROP = 0.1
"""A point with a larger η or γ than the best point of the same length collapsed if its worst peer is this far below, as
a fraction of all samples. (One with smaller rates is only slow.)"""

RESOLUTION = 0.001
"""Accuracies that round to the same multiple of this are equal; then the smaller consensus distance wins."""

FINALISTS = 3
"""Most safe points that are run again with other seeds."""

MOST_SEEDS = 10
"""Most seeds: further ones would say little more."""

CLOSE = 0.1
"""A safe point whose worst peer is further below the best one, as a fraction of all samples, is not run again."""

LONGER = 1.5
"""Runs that were shortened are repeated in greater length if they can grow by this factor."""

USEFUL = 0.8
"""A useful model gains at least this part of the gain of one process with all data over guessing."""

SCREENED, LISTED = 0.4, 0.6
"""Parts of the budget after which no run of the first and of the second stage is started."""

_RUNS_OF_A_CLIMB = 8
"""Runs in full that a climb from known points takes: two points and the neighbours of a few."""

_MARGIN = 1.15
"""A run is started if this many times its expected duration is left."""

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
    repeat: int = 0
    """0: with the configured seed; k: with that seed plus k."""
    verdict: Verdict
    """held: it came to its end. diverged: a guard stopped it. refused: the validator did, before the first round. cut
    off: the time was up."""
    reason: str | None = None
    """Why a run did not come to its end."""
    worst_accuracy: float | None = None
    """Fraction of the test samples that the worst peer's model gets right."""
    averaged_accuracy: float | None = None
    worst_figure: float | None = None
    """The worst peer's figure by the first metric of an own task; None where there is none."""
    averaged_figure: float | None = None
    worst_gain: float | None = None
    """Gain of `worst_figure`: see `gain_of`."""
    consensus_distance: float | None = None
    payload_bytes: int = 0
    """Sum over all peers."""
    seconds: float = 0.0

    @property
    def gain(self) -> float | None:
        """The worst peer's gain; its accuracy where the task has no metrics."""
        return self.worst_accuracy if self.worst_figure is None else self.worst_gain

    @property
    def worst(self) -> float | None:
        """The worst peer's figure as it is shown."""
        return self.worst_accuracy if self.worst_figure is None else self.worst_figure

    @property
    def score(self) -> tuple[float, float]:
        """Sort key of trials of equal length: worst peer first, then consensus."""
        if self.verdict != "held" or self.gain is None:
            return -1.0, -math.inf
        distance = self.consensus_distance
        return round(self.gain / RESOLUTION) * RESOLUTION, -math.inf if distance is None else -distance


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The result of a search."""

    best: Trial
    safe: bool
    """Whether the points one step closer to the cliff were run in full, and held."""
    averages: bool
    """Whether the algorithm has an η at all."""
    rounds: int
    """Rounds of the longest runs."""
    shortened: bool
    """Whether these are shorter than the job, for want of time."""
    ended: Literal["done", "trials used up", "time used up", "stopped"]
    """The end of the search for a safe point; repetitions after it do not count."""
    criterion: Criterion = ACCURACY
    """The criterion that trials are compared by."""
    repeats: tuple[float, ...] = ()
    """Figures of the worst peer of the best point, one for each seed, in its longest runs."""
    next_best: Trial | None = None
    """The best of the other safe points, if one was run with the same seeds."""
    next_best_repeats: tuple[float, ...] = ()
    guessing: float | None = None
    """Accuracy of a model that gives every class equally often; None where a task has no classes. Where an own task has
    metrics, the figure of the untrained model."""
    single_process_accuracy: float | None = None
    """Accuracy of one process with all data and the best γ that sees as many samples; None if there was no time for
    it."""
    single_process_figure: float | None = None
    """The same by the first metric of an own task."""
    trials: tuple[Trial, ...]
    """All trials, in the order in which they ran."""
    seconds: float

    @property
    def is_useful(self) -> bool | None:
        """Whether the worst peer learned at least `USEFUL` of what one process learns; None where that is not known."""
        if self.criterion == ACCURACY:
            worst, alone, guessing = self.best.worst_accuracy, self.single_process_accuracy, self.guessing or 0.0
        elif self.guessing is None or self.single_process_figure is None:
            return None
        else:
            worst, alone = self.best.gain, gain_of(self.criterion, self.single_process_figure, self.guessing)
            guessing = gain_of(self.criterion, self.guessing, self.guessing)
        if worst is None or alone is None:
            return None
        return worst - guessing >= USEFUL * (alone - guessing)

    def newest(self) -> dict[tuple[float, float], Trial]:
        """Return the longest trial of every point (η, γ) that was tried."""
        found: dict[tuple[float, float], Trial] = {}
        for trial in self.trials:
            point = trial.averaging_rate, trial.learning_rate
            if trial.verdict == "cut off" or trial.repeat > 0:
                continue
            if point not in found or found[point].rounds <= trial.rounds:
                found[point] = trial
        return found

    def over_the_cliff(self, trial: Trial) -> bool:
        """Return whether a trial diverged, was refused, or collapsed."""
        same = [t for t in self.trials if (t.rounds, t.repeat) == (trial.rounds, trial.repeat)]
        return _is_over(trial, same)


def gain_of(criterion: Criterion, figure: float, start: float) -> float:
    """Return the gain of a figure, on the scale of accuracies. Figures of which higher values are better count as they
    are; of others, each halving of `start`, that of the untrained model, counts for ten points."""
    if not math.isfinite(figure):
        return _WORST_GAIN
    if criterion.better == "higher":
        return max(_WORST_GAIN, figure)
    if not math.isfinite(start):
        start = 1.0
    # Logarithms need an error; a figure that may be below 0, such as a log-likelihood, has no halves.
    gain = math.log2(start / figure) if min(start, figure) > 0 else (start - figure) / max(1.0, abs(start))
    return max(_WORST_GAIN, _HALVING * gain)


Run: TypeAlias = Callable[[float, float, int, int], Trial]
"""(η, γ, rounds, repeat) → the trial."""

Prepare: TypeAlias = Callable[[Sequence[tuple[float, float, int, int]]], None]
"""Told of runs that will be asked for next, and do not depend on each other."""


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
    computing: Computing | None = None,
) -> Tuning:
    """Return the rates that do best in the simulator.

    `trials` and `budget_s` bound the search; `on_trial(trial, number)` is told of each run. `computing`: where runs
    that do not depend on each other are computed at once; by default runs go one after the other, here. Raises
    ConfigError for a job that cannot run at all, DivergenceError where every point diverged.
    """
    run_plan.refuse_own_data(config)
    run_plan.refuse_errors(run_plan.validate_config(config, base, num_peers))
    started = clock()
    # Once, so that all runs are compared in the same precision.
    config, _ = settle_precision(config, base, num_peers)
    deadline = math.inf if budget_s is None else started + budget_s
    simulated = _Simulated(config, base, num_peers, deadline=deadline, stop=stop or threading.Event(), clock=clock)
    found = Search(
        simulated,
        averaging_rate=(
            run_plan.averaging_rate(config) if run_plan.algorithm_spec(config).uses_averaging_rate else None
        ),
        learning_rate=config.training.learning_rate,
        rounds=config.run.rounds,
        trials=trials,
        budget_s=budget_s,
        reserved_runs=1.0,
        on_trial=on_trial,
        stop=stop,
        clock=clock,
        prepare=None if computing is None else partial(simulated.prepare, computing),
        at_once=1 if computing is None else computing.at_once,
    ).find()
    found = replace(found, criterion=simulated.criterion)
    # One process that sees as many samples as all peers takes no longer than they do together.
    fits = clock() + found.best.seconds <= deadline
    return simulated.compared(found) if fits and found.ended != "stopped" else found


def write(path: Path, tuning: Tuning) -> None:
    """Put η and γ into a configuration file; comments and everything else stay as they are. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
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
    # Where the file is a link, it is the one that its owner meant.
    write_bytes(path.resolve(), tomlkit.dumps(document).encode())


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


@dataclass
class Search:
    """The search for the best safe point around the given rates: its limits, and the findings of its stages."""

    run: Run
    """Tries one point."""
    _: KW_ONLY
    averaging_rate: float | None
    """None: only γ varies."""
    learning_rate: float
    rounds: int
    trials: InitVar[int]
    budget_s: float | None = None
    reserved_runs: float = 0.0
    """Repetitions leave as much of the budget unused as so many of the longest runs take."""
    on_trial: Callable[[Trial, int], None] | None = None
    stop: threading.Event | None = None
    clock: Callable[[], float] = time.monotonic
    prepare: Prepare | None = None
    """Told of up to `at_once` runs before `run` is called for each of them."""
    at_once: int = 1
    ended: Literal["done", "trials used up", "time used up", "stopped"] = "done"
    found: dict[tuple[Point, int], Trial] = field(default_factory=dict)
    """(point, rounds) → trial with the configured seed."""
    finalists: list[Point] = field(default_factory=list)
    """Safe points that are run again, in full."""
    again: dict[Point, list[Trial]] = field(default_factory=dict)
    """Their trials with other seeds, in the order of the seeds."""
    lengths: list[int] = field(default_factory=list)
    """Lengths of the runs of each stage, in the order of the stages."""
    unsafe: set[Point] = field(default_factory=set)
    safe: set[Point] = field(default_factory=set)
    lost: set[Point] = field(default_factory=set)
    """Points that diverged with another seed."""
    tried: list[Trial] = field(default_factory=list)
    """All trials, in the order in which they ran."""
    reserved_s: float = 0.0
    """Part of the budget for work after the search."""

    def __post_init__(self, trials: int) -> None:
        """Raise ConfigError for too few `trials`."""
        if trials < 3:
            raise ConfigError("is too small", key="--trials", value=trials, valid="3 or more")
        self.num_trials, self.started, self.full = trials, self.clock(), self.rounds
        self.grid = _Grid(self.averaging_rate, self.learning_rate)

    def find(self) -> Tuning:
        """Return the best safe point."""
        try:
            self.screen()
            self.shorten_list()
            self.fit_climb()
            self.climb()
            self.use_the_rest()
        except _OutOfBudget as reason:
            self.ended = reason.ended
        return self.result()

    def length(self, part: float) -> int:
        """Return so much of the longest runs, in rounds."""
        return min(self.full, max(SHORTEST, math.ceil(part * self.full)))

    def try_(self, point: Point, rounds: int) -> Trial:
        """Return the trial of a point, run now unless it has been. Raises _OutOfBudget."""
        if (point, rounds) not in self.found:
            self.found[point, rounds] = self._run(point, rounds, 0)
        return self.found[point, rounds]

    def _run(self, point: Point, rounds: int, repeat: int) -> Trial:
        if len(self.tried) >= self.num_trials:
            raise _OutOfBudget("trials used up")
        if self._left_s() <= self.reserved_s:
            raise _OutOfBudget("time used up")
        trial = self.run(*self.grid.rates(point), rounds, repeat)
        if self.stop is not None and self.stop.is_set():
            raise _OutOfBudget("stopped")
        if trial.verdict == "cut off":
            raise _OutOfBudget("time used up")
        self.tried.append(trial)
        if self.on_trial is not None:
            self.on_trial(trial, len(self.tried))
        return trial

    def _spent(self) -> float:
        """Return the part of the budget that is used up."""
        return 0.0 if self.budget_s is None else 1.0 - self._left_s() / self.budget_s

    def _left_s(self) -> float:
        return math.inf if self.budget_s is None else self.budget_s - (self.clock() - self.started)

    def _in_parts(self, points: Sequence[Point]) -> Iterator[Sequence[Point]]:
        """Yield the points, as many together as are computed at once."""
        for start in range(0, len(points), self.at_once):
            yield points[start : start + self.at_once]

    def _try_all(self, points: Sequence[Point], rounds: int) -> None:
        """Try some points. Raises _OutOfBudget."""
        self._prepare(points, rounds)
        for point in points:
            self.try_(point, rounds)

    def _prepare(self, points: Sequence[Point], rounds: int) -> None:
        """Let those of some points that have to be run be computed at once."""
        new = [point for point in points if (point, rounds) not in self.found][: self.num_trials - len(self.tried)]
        if self.prepare is not None and len(new) > 1:
            self.prepare([(*self.grid.rates(point), rounds, 0) for point in new])

    def screen(self) -> None:
        """Try a grid in short runs; let it grow where the best point lies on its rim."""
        rows, columns = self._shape()
        top = min(self.grid.top, rows // 2)
        left = -((columns - 1) // 2)
        etas, gammas = range(top - rows + 1, top + 1), range(left, left + columns)
        self._fit_budget(rows * columns)
        rounds = self.length(SCREENING)
        self.lengths.append(rounds)
        points = [(i, j) for i in etas for j in gammas if self.grid.contains((i, j))]
        # From the middle outward: whatever cuts the search short, the configured rates and those near them are known.
        for some in self._in_parts(sorted(points, key=lambda p: (abs(p[0]) + abs(p[1]), p))):
            if self._spent() > SCREENED:
                return
            self._try_all(some, rounds)
        for _ in range(2 * _GROW_AT_MOST):
            best = self._best(rounds)
            if len(self.tried) >= self.num_trials * 3 // 4 or self._spent() > SCREENED:
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
            for some in self._in_parts(more):
                self._try_all(some, rounds)
            points += more

    def shorten_list(self) -> None:
        """Try the best quarter of the screening again, longer."""
        ranking, rounds = self._ranking(self.lengths[-1]), self.length(SHORTLIST)
        self.lengths.append(rounds)
        done = 0
        for some in self._in_parts(ranking[: max(2, len(ranking) // 4)]):
            if done >= 2 and self._spent() > LISTED:
                return
            self._try_all(some, rounds)
            done += len(some)

    def fit_climb(self) -> None:
        """Choose the length of the longest runs anew, now that it is known how long runs take."""
        if self.budget_s is not None:
            self._climb_with(min(self.rounds, max(SHORTEST, self.lengths[-1], self._affordable_rounds())))

    def _climb_with(self, rounds: int) -> None:
        """Make runs in full so long from now on."""
        self.full = rounds
        start_s, round_s = self._costs()
        # Most of the budget is for the search itself, whatever is to follow.
        self.reserved_s = min(_MARGIN * self.reserved_runs * (start_s + rounds * round_s), 0.2 * self._left_s())

    def climb(self) -> None:
        """Run the best in full, then the points between the best and the cliff, until the best is safe."""
        full = self.length(1.0)
        ranking = [point for length in reversed(self.lengths) for point in self._ranking(length)]
        self.lengths.append(full)
        self._prepare(list(dict.fromkeys(ranking))[:2], full)
        for rank, point in enumerate(dict.fromkeys(ranking)):
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

    def use_the_rest(self) -> None:
        """Repeat the best in greater length and with other seeds, as far as trials and time last."""
        while self.full < self.rounds and (longer := self._affordable_rounds()) >= min(LONGER * self.full, self.rounds):
            self._climb_with(longer)
            # Points that held in shorter runs have to hold in these.
            self.safe.clear()
            self.unsafe.clear()
            self.climb()
        try:
            self._choose_finalists()
            self._repeat()
        except _OutOfBudget as reason:
            if reason.ended == "stopped":
                raise

    def _affordable_rounds(self) -> int:
        """Return how long the runs of one more climb can be."""
        runs = _RUNS_OF_A_CLIMB + self.reserved_runs
        start_s, round_s = self._costs()
        return int(min(self.rounds, max(0.0, self._left_s() / (_MARGIN * runs) - start_s) / round_s))

    def _affords(self, runs: float) -> bool:
        """Return whether there is time for so many runs in full."""
        start_s, round_s = self._costs()
        return self._left_s() - self.reserved_s >= runs * _MARGIN * (start_s + self.full * round_s)

    def _costs(self) -> tuple[float, float]:
        """Return about how many seconds a run takes beside its rounds, and for each round."""
        medians = {}
        # The first run also loads data and libraries.
        trials = self.tried[1:] or self.tried
        for length in {trial.rounds for trial in trials}:
            seconds = sorted(t.seconds for t in trials if t.rounds == length and t.verdict == "held")
            if seconds:
                medians[length] = seconds[len(seconds) // 2]
        if not medians:
            return 0.0, math.inf
        short, long = min(medians), max(medians)
        mean = max(1e-9, medians[long] / long)
        slope = (medians[long] - medians[short]) / (long - short) if short < long else mean
        # Runs of nearly the same length say little about a round, and other work on the machine may mislead.
        round_s = min(mean, max(slope, mean / 2))
        return (mean - round_s) * long, round_s

    def _choose_finalists(self) -> None:
        """Find the best safe points that are close to each other. Raises _OutOfBudget."""
        for length in self.lengths[:-1][::-1]:
            for point in self._ranking(length)[:FINALISTS]:
                if self._affords(2 + FINALISTS):
                    self.try_(point, self.full)
        for point in self._ranking(self.full):
            gain = self.found[point, self.full].gain or 0.0
            if self.finalists and gain < (self.found[self.finalists[0], self.full].gain or 0.0) - CLOSE:
                return
            if point not in self.unsafe and not self._is_over(point) and self._is_safe(point):
                self.finalists.append(point)
            if len(self.finalists) == FINALISTS:
                return

    def _is_safe(self, point: Point) -> bool:
        """Return whether the points one step closer to the cliff hold, running them where there is time for it."""
        if point not in self.safe and self._affords(2 + FINALISTS):
            (self.safe if self._cliff_above(point) is None else self.unsafe).add(point)
        return point in self.safe

    def _repeat(self) -> None:
        """Run the finalists again with one other seed after the other. Raises _OutOfBudget."""
        while self.finalists and self._affords(1):
            point = min(self.finalists, key=lambda finalist: len(self.again.get(finalist, ())))
            repeat = len(self.again.get(point, ())) + 1
            if repeat == MOST_SEEDS:
                return
            trial = self._run(point, self.full, repeat)
            if trial.verdict == "held":
                self.again.setdefault(point, []).append(trial)
            else:
                # A cliff that one seed did not show; points beside it are no longer safe.
                self.lost.add(point)
                self.safe.clear()
                self.finalists.clear()
                self.climb()
                self._choose_finalists()

    def _cliff_above(self, point: Point) -> Point | None:
        """Return the neighbour of a point that is over the cliff, running those in full that have not diverged yet."""
        closer = ((point[0] + 1, point[1]), (point[0], point[1] + 1))
        for neighbor in filter(self.grid.contains, closer):
            if not self._diverged(neighbor):
                self.try_(neighbor, self.length(1.0))
            if self._is_over(neighbor):
                return neighbor
        return None

    def result(self) -> Tuning:
        """Return the best point of the longest runs there are, a safe one if there is one."""
        ranking = sorted(self.finalists, key=self._over_seeds, reverse=True)
        for rounds in dict.fromkeys(reversed(self.lengths)):
            best = next(iter(ranking), None) or self._best(rounds) or self._best(rounds, but_safe=False)
            if best is not None:
                second = ranking[1] if len(ranking) > 1 else None
                return Tuning(
                    best=self.found[best, rounds],
                    safe=best in self.safe,
                    averages=self.grid.averaging_rate is not None,
                    rounds=self.full,
                    shortened=self.full < self.rounds,
                    ended=self.ended,
                    repeats=self._worst(best, rounds),
                    next_best=None if second is None else self.found[second, rounds],
                    next_best_repeats=() if second is None else self._worst(second, rounds),
                    trials=tuple(self.tried),
                    seconds=self.clock() - self.started,
                )
        if not self.found:
            raise SottoError(f"no trial was completed: {self.ended}")
        reasons = [trial.reason for trial in self.found.values() if trial.reason]
        raise DivergenceError(
            f"all {len(self.found)} trials diverged, down to a learning rate of "
            f"{min(trial.learning_rate for trial in self.found.values()):g}; the last one: {reasons[-1]}"
        )

    def _worst(self, point: Point, rounds: int) -> tuple[float, ...]:
        """Return the worst peer's figure in each run of that length, the configured seed first."""
        return tuple(trial.worst for trial in self._of_all_seeds(point, rounds) if trial.worst is not None)

    def _of_all_seeds(self, point: Point, rounds: int) -> list[Trial]:
        return [self.found[point, rounds], *(self.again.get(point, []) if rounds == self.full else [])]

    def _over_seeds(self, point: Point) -> tuple[float, float, int, int]:
        """Return the mean by which finalists are compared: over the seeds that all of them ran with."""
        common = 1 + min(len(self.again.get(other, ())) for other in self.finalists)
        known = [t.gain for t in self._of_all_seeds(point, self.full) if t.gain is not None][:common]
        mean = sum(known) / len(known) if known else -1.0
        # Among equals the smaller distance, then the smaller rates, as for single runs.
        return round(mean / RESOLUTION) * RESOLUTION, self.found[point, self.full].score[1], -point[1], -point[0]

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
            self.full = min(self.rounds, max(SHORTEST, int(self.rounds * self.budget_s / needed)))

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
        ended = ("diverged", "refused")
        return point in self.lost or any(p == point and t.verdict in ended for (p, _), t in self.found.items())

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
    prepared: dict[tuple[float, float, int, int], Trial] = field(default_factory=dict)
    """Trials that were computed elsewhere and not asked for yet."""

    @cached_property
    def _untrained(self) -> tuple[Criterion, float | None]:
        """The criterion of trials, and where it is a metric, the figure of the untrained model."""
        setup = RunSetup.open(self.config, self.base, self.num_peers)
        if setup.criterion == ACCURACY:
            return ACCURACY, None
        trainer = setup.trainer(0)
        return setup.criterion, trainer.evaluate(trainer.initial_vector()).metrics[setup.criterion.name]

    @property
    def criterion(self) -> Criterion:
        return self._untrained[0]

    def __call__(self, averaging_rate: float, learning_rate: float, rounds: int, repeat: int) -> Trial:
        """Return the result of a run with these rates, that many rounds and the seed of that repetition."""
        if (averaging_rate, learning_rate, rounds, repeat) in self.prepared:
            return self.prepared.pop((averaging_rate, learning_rate, rounds, repeat))
        config = with_rates(self.config, averaging_rate, learning_rate, rounds, repeat)
        given: dict[str, Any] = {"averaging_rate": averaging_rate, "learning_rate": learning_rate, "rounds": rounds}
        given["repeat"] = repeat
        for finding in run_plan.validate_config(config, self.base, self.num_peers):
            if finding.level == "error":
                return Trial(**given, verdict="refused", reason=finding.sentence)
        started = self.clock()
        try:
            summary = self._simulate(config)
        except DivergenceError as error:
            return Trial(**given, verdict="diverged", reason=str(error), seconds=self.clock() - started)
        criterion, start = self._untrained
        worst = None if start is None else summary.worst(criterion)
        return Trial(
            **given,
            verdict="held" if summary.ended == "completed" else "cut off",
            worst_accuracy=summary.worst_accuracy,
            averaged_accuracy=summary.averaged_accuracy,
            worst_figure=worst,
            averaged_figure=None if start is None else summary.averaged(criterion),
            worst_gain=None if start is None or worst is None else gain_of(criterion, worst, start),
            consensus_distance=summary.consensus_distance,
            payload_bytes=summary.payload_bytes,
            seconds=self.clock() - started,
        )

    def prepare(self, computing: Computing, runs: Sequence[tuple[float, float, int, int]]) -> None:
        """Compute several runs at once, to be asked for afterwards."""
        job = self.config.model_dump_json(), str(self.base), self.num_peers
        left_s = self.deadline - self.clock()
        calls = [(run, (*job, *run, left_s)) for run in runs]
        for run, answer in computing.results(try_rates, calls, self.stop.is_set):
            self.prepared[run] = Trial(**json.loads(answer))

    def compared(self, found: Tuning) -> Tuning:
        """Return the result, beside those of one process with all data and of guessing."""
        best = found.best
        config = with_rates(self.config, best.averaging_rate, best.learning_rate, best.rounds)
        setup = RunSetup.open(config, self.base, self.num_peers)
        alone = train_single_process(setup)
        criterion, start = self._untrained
        if criterion != ACCURACY:
            return replace(found, guessing=start, single_process_figure=alone.metrics[criterion.name])
        classes = setup.task.num_classes
        return replace(found, guessing=1 / classes if classes else None, single_process_accuracy=alone.accuracy)

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


def try_rates(
    config: str,
    base: str,
    num_peers: int,
    averaging_rate: float,
    learning_rate: float,
    rounds: int,
    repeat: int,
    left_s: float,
) -> str:
    """Return a trial as JSON: the work of `_Simulated`, as a function that other processes can call. `config`: JSON."""
    simulated = _simulated(config, base, num_peers)
    simulated.deadline = simulated.clock() + left_s
    return json.dumps(asdict(simulated(averaging_rate, learning_rate, rounds, repeat)))


@lru_cache(maxsize=1)
def _simulated(config: str, base: str, num_peers: int) -> _Simulated:
    return _Simulated(
        Config.model_validate_json(config), Path(base), num_peers, math.inf, threading.Event(), time.monotonic
    )


def with_rates(config: Config, averaging_rate: float, learning_rate: float, rounds: int, repeat: int = 0) -> Config:
    """Return the job with other rates and length, and with the seed of a repetition; warm-up and SCSP's final rounds
    shrink in proportion."""
    part = rounds / config.run.rounds
    algorithm: dict[str, Any] = {}
    if run_plan.algorithm_spec(config).uses_averaging_rate:
        algorithm["averaging_rate"] = averaging_rate
    if isinstance(config.algorithm.final_rounds, int):
        algorithm["final_rounds"] = round(config.algorithm.final_rounds * part)
    training = {"learning_rate": learning_rate, "warmup_rounds": round(config.training.warmup_rounds * part)}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"rounds": rounds, "seed": config.run.seed + repeat}),
            "algorithm": config.algorithm.model_copy(update=algorithm),
            "training": config.training.model_copy(update=training),
            "evaluation": config.evaluation.model_copy(update={"every_rounds": 0}),
        }
    )


def _is_over(trial: Trial, same_length: list[Trial]) -> bool:
    if trial.verdict != "held" or trial.gain is None:
        return trial.verdict in ("diverged", "refused")
    best = max(same_length, key=lambda other: other.score)
    larger = trial.averaging_rate > best.averaging_rate or trial.learning_rate > best.learning_rate
    return larger and trial.gain < (best.gain or 0.0) - CLIFF_DROP


def _step(rate: float, steps: int) -> float:
    """Return a rate so many steps from the configured one, rounded to one digit that people would have chosen."""
    return rate if steps == 0 else float(f"{rate * STEP**steps:.0e}")
