"""Fuzzes what messages mean: well-formed lies, told to production peers of every algorithm.

    python -m tests.stress.fuzz_meaning --seconds 60                       # all levels, all algorithms
    python -m tests.stress.fuzz_meaning --cases 5000000 --level memory --workers 2
    python -m tests.stress.fuzz_meaning --algorithm moniqua --first-seed 17 --seeds 1    # one seed again
    python -m tests.stress.fuzz_meaning --json report.json --resume        # go on where a run ended

Three levels: `memory` is a peer with session, participant and links; `journal` the same through disk, restarts and
recovery; `handlers` what enters the daemon beside frames. What is promised is in `tests.stress.meaning`. A seed is one
run of each algorithm, with hundreds of lies in it; results depend on the seed alone. Ends with 1 where a promise was
broken.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.stress.meaning.circumstances import ALGORITHMS, circumstances_of
from tests.stress.meaning.handlers import try_handlers
from tests.stress.meaning.report import Report
from tests.stress.meaning.trial import JOURNAL, MEMORY, Trial

LEVELS = ("memory", "journal", "handlers")
_JOURNAL_EVERY = 4
"""A journal costs ten times what memory does: it is tried for each so-manieth seed, where there are other levels."""
_HANDLER_CASES = 500
_SAVE_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one seed is to try."""

    levels: tuple[str, ...]
    algorithms: tuple[str, ...]


def try_seed(plan: Plan, seed: int) -> Report:
    """Return what came of one seed."""
    quiet()
    report = Report()
    for algorithm in plan.algorithms:
        circumstances = circumstances_of(algorithm, seed)
        if "memory" in plan.levels:
            Trial(circumstances, seed, MEMORY, report).run()
        if "journal" in plan.levels and (plan.levels == ("journal",) or seed % _JOURNAL_EVERY == 0):
            Trial(circumstances, seed, JOURNAL, report).run()
    if "handlers" in plan.levels:
        try_handlers(seed, _HANDLER_CASES, report)
    report.seeds += 1
    gc.collect()
    return report


def quiet() -> None:
    """Let nothing be logged, and garbage wait for the end of a seed: peers are cycles, and are copied by thousands."""
    logging.disable(logging.CRITICAL)
    # Numbers at the ends of their range overflow; whether that matters is for the promises to say.
    warnings.simplefilter("ignore")
    gc.disable()


def results(plan: Plan, seeds: Iterator[int], workers: int) -> Iterator[tuple[int, Report]]:
    """Yield (seed, report), in the order of seeds."""
    if workers == 1:
        for seed in seeds:
            yield seed, try_seed(plan, seed)
        return
    with ProcessPoolExecutor(workers) as pool:
        while batch := [seed for _, seed in zip(range(workers), seeds, strict=False)]:
            yield from zip(batch, pool.map(try_seed, [plan] * len(batch), batch), strict=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="lies to tell, over all algorithms")
    parser.add_argument("--seconds", type=float, help="time to spend")
    parser.add_argument("--seeds", type=int, help="how many seeds to try")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--algorithm", action="append", choices=ALGORITHMS, help="only this one; may be repeated")
    parser.add_argument("--level", action="append", choices=LEVELS, help="only this one; may be repeated")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the report is written, every now and then and at the end")
    parser.add_argument("--resume", action="store_true", help="go on after the seeds that the report has")
    options = parser.parse_args(arguments)
    plan = Plan(levels=tuple(options.level or LEVELS), algorithms=tuple(options.algorithm or ALGORITHMS))
    total, first, spent_s = Report(), options.first_seed, 0.0
    if options.resume and options.json is not None and options.json.exists():
        saved = json.loads(options.json.read_text())
        total, first, spent_s = Report.from_json(saved), saved["next_seed"], saved["seconds"]
    seeds = iter(range(first, first + options.seeds)) if options.seeds else count(first)
    started = saved_at = time.monotonic()
    tried, next_seed = 0, first
    for seed, report in results(plan, seeds, options.workers):
        total.add(report)
        tried, next_seed = tried + 1, seed + 1
        now = time.monotonic()
        if now > saved_at + _SAVE_EVERY_S:
            saved_at = now
            save(options.json, total, next_seed, spent_s + now - started)
            print(f"{total.num_cases:,} cases, {len(total.findings)} findings, next seed {next_seed}", flush=True)
        if options.cases and total.num_cases >= options.cases:
            break
        if options.seconds and now - started >= options.seconds:
            break
    elapsed = spent_s + time.monotonic() - started
    save(options.json, total, next_seed, elapsed)
    print(*total.lines(), f"{elapsed:.0f} s, next seed {next_seed}", sep="\n")
    return 1 if total.findings else 0


def save(path: Path | None, report: Report, next_seed: int, seconds: float) -> None:
    """Write the report, if it is wanted; whole, whenever somebody reads it."""
    if path is None:
        return
    content = {**report.as_json(), "next_seed": next_seed, "seconds": round(seconds, 1)}
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(content, indent=1, ensure_ascii=False))
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
