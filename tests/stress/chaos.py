"""Runs the fault simulator over many seeds, and shows what is needed to look into one that fails.

    python -m tests.stress.chaos [--seeds 0-999] [--rounds 100] [--workers 2] [--json FILE]
    python -m tests.stress.chaos --seeds 19     # one failure again, with the last that happened before it
    python -m tests.stress.chaos --divided      # clusters that fall apart, and declare losses themselves

A seed stands for an algorithm, a graph, a compressor, who joins, leaves and is lost, and everything that goes wrong
(`tests/stress/faults`); after every round of it the invariants are checked: mass, agreement of replicas, every message
once, the bits of the undisturbed run where the clock has no say and nobody was lost, and that rounds go on once all is
well. In half of the seeds one member lies (`tests/stress/faults/liar.py`), and all of that must hold all the same.
Where the others wait for messages that they refuse, they have to go on once an operator removes their sender. With
`--divided`, no two parts of a cluster may go on as the whole (`tests/stress/faults/divided.py`). Ends with 1 if a seed
failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tests.stress.faults import Outcome, SimulationFailed, simulate
from tests.stress.faults.divided import simulate_divided
from tests.stress.faults.scenario import BY_NAME, CASES

_PROGRESS_S = 10.0
DIVIDED = "divided"


@dataclass
class Result:
    """What one seed came to, with what it cost."""

    seed: int
    cpu_s: float
    outcome: Outcome | None
    failure: str | None = None


@dataclass
class Totals:
    """Figures over all seeds so far."""

    seeds: int = 0
    rounds: int = 0
    cpu_s: float = 0.0
    virtual_s: float = 0.0
    duplicates: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    rounds_by_algorithm: Counter[str] = field(default_factory=Counter)
    liars: int = 0
    """Seeds in which a member lies."""
    lies: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        """Count one seed."""
        self.seeds += 1
        self.cpu_s += result.cpu_s
        if result.outcome is None:
            self.failures[result.seed] = result.failure or ""
            return
        outcome = result.outcome
        self.rounds += outcome.rounds
        self.virtual_s += outcome.virtual_s
        self.duplicates += outcome.duplicates
        self.faults += outcome.faults
        self.changes += outcome.changes
        self.liars += bool(outcome.lies)
        self.lies += outcome.lies
        self.refusals += outcome.refusals
        self.rounds_by_algorithm[outcome.algorithm + (", late = skip" if outcome.late else "")] += outcome.rounds

    def line(self) -> str:
        """Return how far it has come."""
        return (
            f"{self.seeds} seeds, {self.rounds} rounds, {sum(self.faults.values())} faults, "
            f"{len(self.failures)} failures, {self.cpu_s:.0f} s of CPU"
        )

    def table(self) -> str:
        """Return what was run and what went wrong in it."""
        lines = [f"{rounds:>9} rounds of {name}" for name, rounds in sorted(self.rounds_by_algorithm.items())]
        lines += [f"{count:>9} × {name}" for name, count in sorted(self.faults.items())]
        lines += [f"{count:>9} × a peer {name}" for name, count in sorted(self.changes.items())]
        lines += [f"{count:>9} × a liar said: {name}" for name, count in sorted(self.lies.items())]
        lines += [f"{count:>9} × refused: {words}" for words, count in self.refusals.most_common()]
        lines.append(f"{self.duplicates:>9} frames came again and were dropped")
        return "\n".join(lines)


def has_liar(seed: int) -> bool:
    """Whether one member lies: in half of the seeds, as often with each algorithm."""
    return seed // len(CASES) % 2 == 1


def run_seed(seed: int, rounds: int, name: str | None) -> Result:
    """Run one seed, of the case of that name if there is one; DIVIDED stands for clusters that fall apart."""
    started = time.process_time()
    try:
        if name == DIVIDED:
            outcome, failure = simulate_divided(seed, rounds, lies=has_liar(seed)), None
        else:
            outcome, failure = simulate(seed, rounds, lies=has_liar(seed), name=name), None
    except SimulationFailed as error:
        outcome, failure = None, str(error)
    return Result(seed, time.process_time() - started, outcome, failure)


def run_all(seeds: range, rounds: int, workers: int, name: str | None) -> Iterator[Result]:
    """Run every seed, in any order."""
    if workers == 1:
        for seed in seeds:
            yield run_seed(seed, rounds, name)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        left = iter(seeds)
        waiting = {pool.submit(run_seed, seed, rounds, name) for seed in islice(left, 4 * workers)}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            waiting |= {pool.submit(run_seed, seed, rounds, name) for seed in islice(left, len(done))}
            for future in done:
                yield future.result()


def parse_seeds(text: str) -> range:
    """Return the seeds of "19" or "0-999"."""
    first, _, last = text.partition("-")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed and no range of seeds, such as 0-999") from None


def main() -> None:
    """Run the seeds and print what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=parse_seeds, default=range(1000), metavar="A-B")
    parser.add_argument("--rounds", type=int, default=100, help="of each seed")
    parser.add_argument("--algorithm", choices=BY_NAME, help="with which seeds are run that otherwise stand for others")
    parser.add_argument(
        "--divided",
        action="store_const",
        const=DIVIDED,
        dest="algorithm",
        help="clusters that fall apart, and whose members declare losses themselves",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    totals, started = Totals(), time.monotonic()
    shown = started
    chosen = f" --algorithm {arguments.algorithm}" if arguments.algorithm else ""
    if arguments.algorithm == DIVIDED:
        chosen = " --divided"
    for result in run_all(arguments.seeds, arguments.rounds, arguments.workers, arguments.algorithm):
        totals.add(result)
        if result.failure is not None:
            print(f"{result.failure}\n  again: python -m tests.stress.chaos{chosen} --seeds {result.seed}", flush=True)
        if time.monotonic() - shown > _PROGRESS_S:
            shown = time.monotonic()
            print(totals.line(), flush=True)
    print(f"{totals.table()}\n{totals.line()} in {time.monotonic() - started:.0f} s")
    if arguments.json is not None:
        figures = {
            "seeds": [arguments.seeds.start, arguments.seeds.stop - 1],
            "rounds": totals.rounds,
            "rounds_by_algorithm": dict(sorted(totals.rounds_by_algorithm.items())),
            "faults": dict(sorted(totals.faults.items())),
            "changes_of_members": dict(sorted(totals.changes.items())),
            "duplicates": totals.duplicates,
            "seeds_with_a_liar": totals.liars,
            "lies": dict(sorted(totals.lies.items())),
            "refusals": dict(totals.refusals.most_common()),
            "virtual_s": totals.virtual_s,
            "cpu_s": totals.cpu_s,
            "failures": totals.failures,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if totals.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
