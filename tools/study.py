"""Measures the algorithms on real data, and prints the table with the papers' figures beside it.

    tools/study.py mnist     --data DIR    every algorithm, logistic regression, ring of 8, skew 0 and 0.8
    tools/study.py precision --data DIR    the empirical study: bits of the messages, parameter server and ring
    tools/study.py cifar     --data DIR    six algorithms, ResNet-20, ring of 8, skew 0 and 0.8
    tools/study.py eight-bit --data DIR    8 bits against float32 on one device: MNIST, and ResNet-20 on CIFAR-10
    tools/study.py low-precision --data DIR        8 bits against float32 on 8 peers, MNIST, skew 0 and 0.8
    tools/study.py low-precision-cifar --data DIR  the same with ResNet-20 on CIFAR-10, and its norms at skew 0.8

Every run is a simulation with the algorithms, compressors and bytes of real peers. Its row is appended to a file of
JSON lines (--results) under a key that covers the whole setting, so that the command can be stopped and started again
at will: runs that are there are skipped, and --table only prints. Each row keeps the commit that it was measured with;
remove a line to measure it anew. --hours says how long the missing runs will take.

On one core of an AMD EPYC mnist takes half an hour, precision six minutes, and cifar 1¼ h for each epoch (--epochs, by
default 3); the papers' 200 epochs need a GPU (--device cuda).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer.config import options as configuration
from peer.config.options import Config
from peer.errors import DivergenceError, SottoError
from peer.lab.study.checkout import commit
from peer.report.numbers import MISSING, duration, significant, size
from peer.simulate import run as simulator

PEERS = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of a table."""

    name: str
    """What --only selects."""
    message: str
    """How a message is compressed, in the papers' words."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    paper: str = MISSING
    """The figure that a paper reports for the same or the nearest setting, in percent, and where."""
    twin: str = ""
    """The message of the row of the same name that this one is compared with, in place of the study's reference."""


@dataclass(frozen=True)
class Study:
    """A table: what all its rows share, the rows, and what to compare them with."""

    common: Mapping[str, object]
    settings: Sequence[Setting]
    skews: Sequence[float]
    reference: str
    """The row that the others are compared with, at the same skew."""
    peers: int = PEERS


RING = {"graph.kind": "ring", "graph.weights": "metropolis"}
DIRECTED = {"graph.kind": "directed-ring", "graph.weights": "uniform"}
COMPLETE = {"graph.kind": "complete", "graph.weights": "uniform"}
STAR = {"graph.kind": "star", "graph.weights": "metropolis"}


def top_k(percent: float) -> dict[str, object]:
    return {"compressor.kind": "top_k", "compressor.fraction": percent / 100, "compressor.value_bits": "none"}


def qsgd(bits: int) -> dict[str, object]:
    """b bits a number in all: the sign is one of them."""
    return {"compressor.kind": "qsgd", "compressor.bits": bits - 1}


def modulo(bits: int) -> dict[str, object]:
    return {"compressor.kind": "modulo", "compressor.bits": bits}


def grid(step: float) -> dict[str, object]:
    return {"compressor.kind": "grid", "compressor.step": step}


def setting(
    name: str, message: str, *parts: Mapping[str, object], paper: str = MISSING, **algorithm: object
) -> Setting:
    overrides: dict[str, object] = {"algorithm.name": name}
    for part in parts:
        overrides |= part
    overrides |= {f"algorithm.{key}": value for key, value in algorithm.items()}
    return Setting(name=name, message=message, overrides=overrides, paper=paper)


MNIST = Study(
    common={
        "run.name": "mnist",
        "run.rounds": 2000,
        "training.task": "mnist",
        "training.batch_size": 32,
        "training.momentum": "none",
        "training.learning_rate": 0.1,
        "training.schedule": "cosine",
        "training.warmup_rounds": 0,
        # λ = 10 of the empirical study belongs to the sum over 60,000 images.
        "training.weight_decay": 1.7e-4,
    },
    settings=(
        setting("allreduce", "full precision", COMPLETE, paper="92.35 (study, table 2: server, 16 bits)"),
        setting("low-rank", "rank 4, 8 bits", COMPLETE),
        setting("local", "no messages", RING),
        setting("parameter-server", "grid 2⁻⁵ (4 bits of ±¼)", STAR, grid(2**-5), paper="92.33 (study, table 2)"),
        setting("d-psgd", "full precision", RING),
        setting("naive-quantized", "grid 2⁻⁷ (8 bits of ±1)", RING, grid(2**-7)),
        setting("sgp", "full precision", DIRECTED),
        setting("deep-squeeze", "top 1 %", RING, top_k(1), averaging_rate=0.01),
        setting("sparse-push", "top 1 %", DIRECTED, top_k(1), averaging_rate=0.01),
        setting("scsp", "top 1 %, 40 rounds full", DIRECTED, top_k(1), averaging_rate=0.01),
        setting("choco-sgd", "top 1 %", RING, top_k(1)),
        setting("quant-sgp", "top 1 %", DIRECTED, top_k(1)),
        setting("dcd-psgd", "8 bits", RING, qsgd(8)),
        # Its theory bounds the error itself, not its ratio to what is sent, which grows with t.
        setting("ecd-psgd", "grid 2⁻⁷ (8 bits of ±1)", RING, grid(2**-7)),
        setting("moniqua", "8 bits", RING, modulo(8)),
        setting("moniqua", "1 bit", RING, modulo(1), averaging_rate=0.2),
        setting("d2", "full precision", RING),
        setting("moniqua-d2", "8 bits", RING, modulo(8)),
        setting("ad-psgd", "full precision", RING),
        setting("moniqua-ad-psgd", "8 bits", RING, modulo(8)),
    ),
    skews=(0.0, 0.8),
    reference="allreduce",
)

PRECISION = Study(
    common={**MNIST.common, "run.name": "precision", "run.rounds": 1000},
    settings=(
        setting("allreduce", "32 bits", COMPLETE),
        setting("parameter-server", "32 bits", STAR, {"compressor.kind": "none"}),
        setting("parameter-server", "8 bits of ±¼", STAR, grid(2**-9), paper="92.33 (table 2)"),
        setting("parameter-server", "6 bits of ±¼", STAR, grid(2**-7), paper="92.34 (table 2)"),
        setting("parameter-server", "4 bits of ±¼", STAR, grid(2**-5), paper="92.33 (table 2)"),
        setting("d-psgd", "32 bits", RING),
        setting("naive-quantized", "8 bits of ±½", RING, grid(2**-8)),
        setting("naive-quantized", "6 bits of ±½", RING, grid(2**-6)),
        setting("naive-quantized", "4 bits of ±½", RING, grid(2**-4)),
        setting("moniqua", "8 bits", RING, modulo(8)),
        setting("moniqua", "4 bits", RING, modulo(4)),
        # What CHOCO quantizes is a difference, and small.
        setting("choco-sgd", "8 bits of ±1/16", RING, grid(2**-11)),
        setting("choco-sgd", "4 bits of ±1/16", RING, grid(2**-7)),
    ),
    skews=(0.0,),
    reference="allreduce",
)

CIFAR = Study(
    common={
        "run.name": "cifar10",
        "training.task": "cifar10",
        "training.task_options": '{model = "resnet20", norm = "evonorm"}',
        "training.batch_size": 32,
        "training.momentum": "nesterov",
        "training.learning_rate": 0.1,
        "training.weight_decay": 1e-4,
    },
    settings=(
        setting("allreduce", "full precision", COMPLETE),
        setting("sgp", "full precision", DIRECTED, paper="90.56 / 87.57 (low precision, table 2: DS)"),
        setting("sparse-push", "top 10 %", DIRECTED, top_k(10), paper="91.27 (Sparse-Push, table 2: 4 peers)"),
        setting("quant-sgp", "top 1 %", DIRECTED, top_k(1), paper="89.21 / 85.78 (low precision, table 2)"),
        setting("choco-sgd", "top 1 %", RING, top_k(1), paper="91.73 (Sparse-Push, table 3: 4 peers)"),
        setting("moniqua", "2 bits", RING, modulo(2), paper="91.13 (Moniqua, table 2: 2 bits)", averaging_rate=0.5),
    ),
    skews=(0.0, 0.8),
    reference="allreduce",
)


def both_precisions(
    name: str, message: str, *parts: Mapping[str, object], papers: tuple[str, str], **algorithm: object
) -> tuple[Setting, Setting]:
    """Return a setting in full precision and in 8 bits; `papers` are the figures of the low-precision paper."""
    full = setting(name, f"float32, {message}", *parts, FLOAT32, paper=papers[0], **algorithm)
    eight = setting(name, f"int8, {message}", *parts, INT8, paper=papers[1], **algorithm)
    return full, dataclasses.replace(eight, twin=full.message)


FLOAT32 = {"training.precision": "float32"}
INT8 = {"training.precision": "int8"}
WHOLE: dict[str, object] = {"compressor.kind": "none"}


def on_one_device(
    name: str, task: str, options: str, *parts: Mapping[str, object], papers: tuple[str, str] = (MISSING, MISSING)
) -> tuple[Setting, Setting]:
    """Return a model trained by one process in full precision and in 8 bits."""
    chosen: dict[str, object] = {"algorithm.name": "local", "training.task": task, "training.task_options": options}
    for part in parts:
        chosen |= part
    return (
        Setting(name=name, message="float32", overrides=chosen | FLOAT32, paper=papers[0]),
        Setting(name=name, message="int8", overrides=chosen | INT8, paper=papers[1], twin="float32"),
    )


EIGHT_BIT = Study(
    common={
        "run.name": "eight-bit",
        "graph.kind": "complete",
        "training.momentum": "nesterov",
        "training.batch_size": 64,
        "training.schedule": "cosine",
    },
    settings=(
        *on_one_device(
            "mnist-logistic",
            "mnist",
            '{model = "logistic"}',
            {"run.rounds": 3000, "training.learning_rate": 0.01, "training.weight_decay": 1e-4},
        ),
        *on_one_device(
            "mnist-mlp",
            "mnist",
            '{model = "mlp", hidden = 256}',
            {"run.rounds": 5000, "training.learning_rate": 0.05, "training.weight_decay": 1e-4},
        ),
        *on_one_device(
            "cifar10-resnet20",
            "cifar10",
            '{model = "resnet20", norm = "range-evonorm"}',
            {"training.learning_rate": 0.1, "training.weight_decay": 1e-4},
            papers=("91.25 (low precision, table 1: 200 epochs, EvoNorm)", "91.12 (table 1: 200 epochs)"),
        ),
    ),
    skews=(0.0,),
    reference="",
    peers=1,
)

LOW_PRECISION_COMMON: Mapping[str, object] = {
    "training.batch_size": 32,
    "training.momentum": "nesterov",
    "training.weight_decay": 1e-4,
}

LOW_PRECISION = Study(
    common={
        **LOW_PRECISION_COMMON,
        "run.name": "low-precision",
        "run.rounds": 1000,
        "training.task": "mnist",
        "training.task_options": '{model = "mlp", hidden = 128}',
        "training.learning_rate": 0.02,
        **DIRECTED,
    },
    settings=(
        *both_precisions(
            "quant-sgp",
            "whole",
            WHOLE,
            papers=(
                "90.96 / 87.87 (table 2: CHOCO, CIFAR-10)",
                "90.30 / 87.06 (table 2: LP-CHOCO)",
            ),
        ),
        *both_precisions(
            "quant-sgp", "top 1 %", top_k(1), papers=("89.21 / 85.78 (CHOCO, 99 %)", "88.23 / 84.79 (LP-CHOCO, 99 %)")
        ),
        *both_precisions(
            "sparse-push", "whole", WHOLE, papers=("90.56 / 87.57 (table 2: DS)", "90.57 / 87.68 (table 2: LP-DS)")
        ),
        *both_precisions(
            "sparse-push",
            "top 1 %",
            top_k(1),
            papers=("88.67 / 85.43 (DS, 99 %)", "87.58 / 84.44 (LP-DS, 99 %)"),
            averaging_rate=0.01,
        ),
        *both_precisions(
            "quant-sgp",
            "QGM, whole",
            WHOLE,
            {"training.momentum": "qg-nesterov"},
            papers=("91.07 / 87.64 (table 3: QGM)", "90.20 / 87.16 (table 3)"),
        ),
        *both_precisions(
            "quant-sgp",
            "QGM, top 1 %",
            top_k(1),
            {"training.momentum": "qg-nesterov"},
            papers=("89.87 / 86.76 (table 3: QGM, 99 %)", "89.12 / 85.52 (table 3, 99 %)"),
            # At the default rate quasi-global momentum drives the peers apart.
            averaging_rate=0.01,
        ),
    ),
    skews=(0.0, 0.8),
    reference="",
)


def resnet20(norm: str) -> dict[str, object]:
    return {"training.task_options": f'{{model = "resnet20", norm = "{norm}"}}'}


def on_cifar(item: Setting) -> Setting:
    """Return the setting with the paper's norm for its precision."""
    norm = "evonorm" if item.message.startswith("float32") else "range-evonorm"
    return dataclasses.replace(item, overrides={**item.overrides, **resnet20(norm)})


LOW_PRECISION_CIFAR = Study(
    common={
        **LOW_PRECISION_COMMON,
        "run.name": "low-precision-cifar",
        "training.task": "cifar10",
        "training.learning_rate": 0.1,
        **DIRECTED,
    },
    settings=(
        *(on_cifar(item) for item in LOW_PRECISION.settings),
        # The paper's figure 1, whose EvoNorm is the first row of all.
        *(
            setting("quant-sgp", f"float32, {norm}", WHOLE, FLOAT32, resnet20(norm), paper=f"{where} (figure 1)")
            for norm, where in (
                ("range-evonorm", "as EvoNorm"),
                ("group", "below EvoNorm"),
                ("batch", "below EvoNorm"),
                ("range-batch", MISSING),
            )
        ),
    ),
    skews=(0.8, 0.0),
    reference="quant-sgp",
)

STUDIES = {
    "mnist": MNIST,
    "precision": PRECISION,
    "cifar": CIFAR,
    "eight-bit": EIGHT_BIT,
    "low-precision": LOW_PRECISION,
    "low-precision-cifar": LOW_PRECISION_CIFAR,
}


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    setting: Setting
    skew: float
    config: Config
    device: str
    peers: int

    @property
    def key(self) -> str:
        """Hex digest of everything that is set. What is not takes its default, and a new option changes no key."""
        return key_of(self.job(), self.device, self.peers)

    def job(self) -> dict[str, Any]:
        """Return what is set, without the place of the data."""
        job = self.config.model_dump(mode="json", exclude_defaults=True)
        job.get("data", {}).pop("directory", None)
        return job


def key_of(job: Mapping[str, Any], device: str, peers: int = PEERS) -> str:
    """Return the key of a row."""
    return hashlib.sha256(json.dumps([peers, device, job], sort_keys=True).encode()).hexdigest()[:16]


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
    study = STUDIES[arguments.study]
    runs = list(plan(study, arguments))
    done = read(results)
    missing = [run for run in runs if run.key not in done]
    failed = 0
    try:
        if arguments.hours:
            print(f"{len(missing)} of {len(runs)} runs are missing: about {estimate(missing)}")
            return 0
        if not arguments.table:
            for number, run in enumerate(missing, start=1):
                print(f"{number}/{len(missing)}  {describe(run)}", file=sys.stderr, flush=True)
                try:
                    row = measure(run)
                except SottoError as error:
                    print(f"      cannot run: {error}", file=sys.stderr, flush=True)
                    failed += 1
                    continue
                done[run.key] = row
                append(results, row)
                print(f"      {outcome(row)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
    command = f"tools/study.py {arguments.study}" if arguments.markdown else None
    print_table(study, [(run, done.get(run.key)) for run in runs], command=command)
    return 1 if failed else 0


def plan(study: Study, arguments: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs of a study, those of one skew together."""
    for skew in arguments.skew or study.skews:
        for item in study.settings:
            words = f"{item.name} {item.message}"
            if arguments.only and not any(only in (item.name, words) for only in arguments.only):
                continue
            values: dict[str, object] = {
                **study.common,
                **item.overrides,
                "data.skew": skew,
                "run.seed": arguments.seed,
            }
            rounds = arguments.rounds
            if rounds is None and "run.rounds" not in values:
                # An epoch is one pass of each peer over its share of CIFAR-10's 50,000 images.
                rounds = round(arguments.epochs * 50_000 / study.peers / int(str(values["training.batch_size"])))
            values |= {"data.directory": f'"{arguments.data.resolve()}"', "evaluation.every_rounds": 0}
            values |= {"peer.device": arguments.device} | ({"run.rounds": rounds} if rounds is not None else {})
            overrides = [*(f"{key}={value}" for key, value in values.items()), *arguments.set]
            config = configuration.load(overrides=overrides, environment={})
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
        summary = simulator.run(
            run.config, Path(), num_peers=run.peers, stacked=stacks(run.config), baseline=False
        ).summary
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


def stacks(config: Config) -> bool:
    """Return whether the run's peers are trained as one batch: those of asynchronous algorithms go their own ways."""
    from peer.run.plan import algorithm_spec

    return not algorithm_spec(config).asynchronous


def estimate(missing: Sequence[Run]) -> str:
    """Return how long the runs take, from some rounds of the first one."""
    if not missing:
        return "nothing"
    spent: list[float] = []
    for rounds in (2, 22):
        config = missing[0].config
        config = config.model_copy(update={"run": config.run.model_copy(update={"rounds": rounds})})
        spent.append(measure(dataclasses.replace(missing[0], config=config))["seconds"])
    round_s = max(0.0, spent[1] - spent[0]) / 20
    return duration(sum(spent[0] + round_s * run.config.run.rounds for run in missing))


def read(results: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a results file by key; none if there is no file yet."""
    if not results.exists():
        return {}
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {row["key"]: row for row in rows}


def append(results: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a results file."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


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


def print_table(study: Study, runs: Sequence[tuple[Run, Mapping[str, Any] | None]], *, command: str | None) -> None:
    """Print a table for each skew; as Markdown where a command is given, which then ends each row."""
    markdown = command is not None
    header = ["algorithm", "message", "averaged %", "worst %", "− " + (study.reference or "float32")]
    header += ["sent a peer", "bits/number"]
    header += ["consensus", "paper"] + (["seed", "commit", "command"] if markdown else [])
    for skew in dict.fromkeys(run.skew for run, _ in runs):
        part = [(run, row) for run, row in runs if run.skew == skew and row is not None]
        cells = [header, *(list(_cells(run, row, _base(study, run, part), command)) for run, row in part)]
        rounds = "/".join(str(number) for number in dict.fromkeys(run.config.run.rounds for run, _ in part))
        peers = f"{study.peers} peers" if study.peers > 1 else "one process"
        print(f"\n{'### ' if markdown else ''}skew {skew:g}, {rounds or 'no'} rounds, {peers}\n")
        widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
        for number, line in enumerate(cells):
            padded = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
            print(f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip())
            if number == 0 and markdown:
                print(f"| {' | '.join('-' * width for width in widths)} |")


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
