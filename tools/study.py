"""Measures the algorithms on real data, and prints the table with the papers' figures beside it.

    python -m tools.study mnist     --data DIR    every algorithm, logistic regression, ring of 8, skew 0 and 0.8
    python -m tools.study precision --data DIR    the empirical study: bits of the messages, parameter server and ring
    python -m tools.study cifar     --data DIR    six algorithms, ResNet-20, ring of 8, skew 0 and 0.8
    python -m tools.study eight-bit --data DIR    8 bits against float32 on one device: MNIST, and ResNet-20 on CIFAR-10
    python -m tools.study low-precision --data DIR        8 bits against float32 on 8 peers, MNIST, skew 0 and 0.8
    python -m tools.study low-precision-cifar --data DIR  the same with ResNet-20 on CIFAR-10, and its norms at skew 0.8

Every run is a simulation with the algorithms, compressors and bytes of real peers. Its row is appended to a file of
JSON lines (--results) under a key that covers the whole setting, so that the command can be stopped and started again
at will: runs that are there are skipped, and --table only prints. Each row keeps the commit that it was measured with;
remove a line to measure it anew. --hours says how long the missing runs will take.

On one core of an AMD EPYC mnist takes half an hour, precision six minutes, and cifar 1¼ h for each epoch (--epochs, by
default 3); the papers' 200 epochs need a GPU (--device cuda).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from peer.config import options as configuration
from peer.config.options import Config
from peer.errors import DivergenceError
from peer.lab import description
from peer.lab.description import read_description
from peer.lab.grid import aligned, one_by_one
from peer.lab.study.checkout import commit
from peer.report.numbers import MISSING, duration, significant, size
from peer.run.plan import algorithm_spec
from peer.simulate import run as simulator
from tools.grid import Lines

STUDIES = {file.stem: file for file in sorted(Path(__file__).with_name("studies").glob("*.toml"))}


class Contender(description.Contender):
    """One row of a table; `--only` selects it by its name."""

    message: str
    """Compression of a message, in the papers' words."""
    paper: str = MISSING
    """The figure that a paper reports for the same or the nearest setting, in percent, and its place."""
    twin: str = ""
    """The message of the row of the same name that this one is compared with, in place of the study's reference."""


class Study(description.Table):
    """A table: the settings of all its rows, the rows, and their references."""

    job: tuple[str, ...]
    contenders: tuple[Contender, ...]
    skews: tuple[float, ...] = Field(min_length=1)
    reference: str = ""
    """The row that the others are compared with, at the same skew."""
    peers: int = 8


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    setting: Contender
    skew: float
    config: Config
    device: str
    peers: int

    @property
    def key(self) -> str:
        """Hex digest of all options set. The others take their defaults, and a new option changes no key."""
        described = json.dumps([self.peers, self.device, self.job()], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def job(self) -> dict[str, Any]:
        """Return all options set, without the place of the data."""
        job = self.config.model_dump(mode="json", exclude_defaults=True)
        job.get("data", {}).pop("directory", None)
        return job


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--results", type=Path, help="JSON lines; by default runs/study-NAME.jsonl")
    parser.add_argument("--rounds", type=int, help="rounds of each run instead of the study's own")
    parser.add_argument("--epochs", type=float, default=3.0, help="cifar: passes over the training data (default 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only rows of this name, or this name and message"
    )
    parser.add_argument("--skew", action="append", type=float, help="only this skew; may be repeated")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for every run")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--table", action="store_true", help="run nothing, print the table of what there is")
    shown.add_argument("--hours", action="store_true", help="run nothing but a few rounds; say how long the rest takes")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown, with seed and commit")
    arguments = parser.parse_args()
    results = arguments.results or Path("runs") / f"study-{arguments.study}.jsonl"
    study = read_description(Study, STUDIES[arguments.study])
    grid = Lines(plan(study, arguments), results, lambda run: run.key, lambda row: row["key"])
    missing, failed = grid.missing(), 0
    if arguments.hours:
        print(f"{len(missing)} of {len(grid.cells)} runs are missing: about {estimate(missing)}")
        return 0

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if not arguments.table:
        outcomes = one_by_one(missing, lambda at, run: tell(f"{at + 1}/{len(missing)}  {describe(run)}"), measure)
        try:
            failed = grid.run(outcomes, lambda _, row: outcome(row), lambda _, text: tell(f"      {text}"))
        except KeyboardInterrupt:
            tell("stopped; the same command goes on from here")
    command = f"python -m tools.study {arguments.study}" if arguments.markdown else None
    print_table(study, grid.cells, grid.rows(), command=command)
    return 1 if failed else 0


def plan(study: Study, arguments: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs of a study, those of one skew together."""
    for skew in arguments.skew or study.skews:
        for item in study.contenders:
            if arguments.only and not {item.name, f"{item.name} {item.message}"} & {*arguments.only}:
                continue
            options = [*study.job, *item.options, f"data.skew={skew}", f"run.seed={arguments.seed}"]
            options += [f'data.directory="{arguments.data.resolve()}"', "evaluation.every_rounds=0"]
            options.append(f"peer.device={arguments.device}")
            rounds = arguments.rounds
            if rounds is None and not any(option.startswith("run.rounds=") for option in options):
                # An epoch is one pass of each peer over its share of CIFAR-10's 50,000 images.
                batch_size = configuration.load(overrides=options, environment={}).training.batch_size
                rounds = round(arguments.epochs * 50_000 / study.peers / batch_size)
            options += [*([] if rounds is None else [f"run.rounds={rounds}"]), *arguments.set]
            config = configuration.load(overrides=options, environment={})
            yield Run(item, skew, config, arguments.device, study.peers)


def measure(run: Run) -> dict[str, Any]:
    """Return the row of a run."""
    started = time.monotonic()
    row: dict[str, Any] = {
        "key": run.key,
        "name": run.setting.name,
        "message": run.setting.message,
        "skew": run.skew,
        "seed": run.config.run.seed,
        "rounds": run.config.run.rounds,
        "commit": commit(),
        "device": run.device,
        "config": run.job(),
    }
    try:
        # The peers of asynchronous algorithms go their own ways, and cannot be trained as one batch.
        stacked = not algorithm_spec(run.config).asynchronous
        summary = simulator.run(run.config, Path(), num_peers=run.peers, stacked=stacked, baseline=False).summary
    except DivergenceError as error:
        return row | {"ended": f"diverged: {error}", "seconds": time.monotonic() - started}
    return row | {
        "ended": summary.ended,
        "seconds": time.monotonic() - started,
        "averaged_accuracy": summary.averaged_accuracy,
        "worst_accuracy": summary.worst_accuracy,
        "peer_accuracy": summary.peer_accuracy,
        "consensus_distance": summary.consensus_distance,
        "payload_bytes_per_peer": summary.payload_bytes / run.peers,
        "frame_bytes_per_peer": summary.frame_bytes / run.peers,
        "bits_per_parameter": summary.bits_per_parameter,
        "repairs": summary.repairs,
        "parameters": summary.parameters,
        "machine": summary.machine,
    }


def estimate(missing: Sequence[Run]) -> str:
    """Return the expected duration of the runs, from some rounds of the first one."""
    if not missing:
        return "nothing"
    spent: list[float] = []
    for rounds in (2, 22):
        config = missing[0].config
        config = config.model_copy(update={"run": config.run.model_copy(update={"rounds": rounds})})
        spent.append(measure(replace(missing[0], config=config))["seconds"])
    round_s = max(0.0, spent[1] - spent[0]) / 20
    return duration(sum(spent[0] + round_s * run.config.run.rounds for run in missing))


def describe(run: Run) -> str:
    """Return the setting of a run in a few words."""
    return f"{run.setting.name}, {run.setting.message}, skew {run.skew:g}, {run.config.run.rounds} rounds"


def outcome(row: Mapping[str, Any]) -> str:
    """Return the result of a run in a few words."""
    if row["ended"] != "completed":
        return f"{row['ended']} ({duration(row['seconds'])})"
    sent = size(row["payload_bytes_per_peer"])
    accuracy = f"averaged {percent(row['averaged_accuracy'])}, worst {percent(row['worst_accuracy'])}"
    return f"{accuracy}, {sent} a peer, {duration(row['seconds'])}"


def percent(fraction: float | None) -> str:
    return MISSING if fraction is None else f"{100 * fraction:.2f}"


def print_table(
    study: Study, runs: Sequence[Run], rows: Sequence[tuple[Run, Mapping[str, Any]]], *, command: str | None
) -> None:
    """Print a table for each skew; as Markdown where a command is given, which then ends each row."""
    markdown = command is not None
    header = ["algorithm", "message", "averaged %", "worst %", "− " + (study.reference or "float32")]
    header += ["sent a peer", "bits/number"]
    header += ["consensus", "paper"] + (["seed", "commit", "command"] if markdown else [])
    for skew in dict.fromkeys(run.skew for run in runs):
        part = [(run, row) for run, row in rows if run.skew == skew]
        cells = [header, *(list(_cells(run, row, _base(study, run, part), command)) for run, row in part)]
        rounds = "/".join(str(number) for number in dict.fromkeys(run.config.run.rounds for run, _ in part))
        peers = f"{study.peers} peers" if study.peers > 1 else "one process"
        print(f"\n{'### ' if markdown else ''}skew {skew:g}, {rounds or 'no'} rounds, {peers}\n")
        if not markdown:
            print("\n".join(aligned(cells, left=True)))
            continue
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in (cells[0], ["-" * width for width in widths], *cells[1:]):
            print(f"| {' | '.join(map(str.ljust, line, widths))} |")


def _base(study: Study, run: Run, rows: Sequence[tuple[Run, Mapping[str, Any]]]) -> float | None:
    """Return the accuracy that a row is compared with."""
    for other, row in rows:
        twin = run.setting.twin and (other.setting.name, other.setting.message) == (run.setting.name, run.setting.twin)
        if twin or (not run.setting.twin and other.setting.name == study.reference):
            return row.get("averaged_accuracy")
    return None


def _cells(run: Run, row: Mapping[str, Any], base: float | None, command: str | None) -> Iterator[str]:
    yield from (run.setting.name, run.setting.message)
    averaged = row.get("averaged_accuracy")
    yield percent(averaged) if row["ended"] == "completed" else row["ended"].partition(":")[0]
    yield percent(row.get("worst_accuracy"))
    yield MISSING if averaged is None or base is None else f"{100 * (averaged - base):+.2f}".replace("-", "−")
    yield size(row.get("payload_bytes_per_peer"))
    yield MISSING if "bits_per_parameter" not in row else f"{row['bits_per_parameter']:.2f}"
    yield significant(row.get("consensus_distance"))
    yield run.setting.paper
    if command is not None:
        yield from (str(row["seed"]), f"`{row['commit']}`")
        yield f"`{command} --skew {run.skew:g} --only {run.setting.name}`"


if __name__ == "__main__":
    raise SystemExit(main())
