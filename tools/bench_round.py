"""Measures a whole round of real peers, stage by stage, beside an all-reduce of the same vector.

    python tools/bench_round.py [--sizes 270000,11000000,67000000] [--peers 4,4,2] [--rounds 120,30,8]
                                [--repeats 3] [--json FILE] [--profile DIR]

For every size these take turns, `--repeats` times over, so that a busy machine disturbs all alike: peers that send
compressed differences (`quant-sgp`, and `choco-sgd` on an undirected ring: the largest 1 % of each layer in 4 bits),
peers that send whole models (`sgp`, float32; also without TLS, and with entropy coding whatever the link carries),
peers that add up gradients of all (`allreduce` and `low-rank`, on a complete graph), and `torch.distributed`
averaging a vector of that size with gloo's all-reduce, which also writes and syncs a file of that size. Peers are
processes as `sotto run` starts them, on loopback under mutual TLS, on a directed ring unless another graph is named,
with one compute thread each; they train the task `synthetic`, whose gradient costs a few passes over the model. The
processes of an all-reduce have one compute thread each, too.

Figures are medians over all rounds of all peers, the first rounds of each process left out; where the mean is given it
covers what happens now and then, such as checkpoints. The stages of a round:

    train        the local step: batch, gradient, momentum
    algorithm    what is computed before a message is sent, compression aside
    compress     from the difference (or the model) to payloads
    encode       from payloads to the bytes of a frame
    journal      what a crash must not undo, with the digests by which a replay is checked
    chunks       from frames to envelopes, and from envelopes to frames
    decode       from the bytes of a frame to payloads
    apply        what is computed with the messages of the neighbours
    record       health figures, the guard against divergence, the row of the metrics
    save         checkpoints
    transport    all the rest of the process: gRPC, TLS, sockets, the event loop, the change between threads

CPU is that of all threads of a process; "overhead" is all of it but training. Bytes are what one peer sends: payload
(layers of the frames) and socket (TCP payload as the kernel counts it, with TLS and HTTP/2). For two sizes there is a
budget of CPU, and the exit code is 1 where it is exceeded. With `--profile` every first peer also leaves a profile of
the thread that computes, which makes that peer's times useless.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from peer.lab.study.checkout import commit

ROOT = Path(__file__).resolve().parent.parent

STAGES = ("train", "algorithm", "compress", "encode", "journal", "chunks", "decode", "apply", "record", "save")

BUDGET_MS = {270_000: 10.0, 11_000_000: 150.0}
"""CPU milliseconds a round and peer, training excluded, that the compressed differences may take."""

WARM_UP_ROUNDS = 3
_SYNCED_WRITES = 3
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class System:
    """One way to average."""

    name: str
    settings: tuple[str, ...]
    """Settings of the peers; empty for the all-reduce."""


COMPRESSED = "quant-sgp, top 1 %, 4 bits"
WHOLE = "sgp, float32"
REFERENCE = "gloo all-reduce"
SYSTEMS = (
    System(COMPRESSED, ("algorithm.name=quant-sgp", "compressor.fraction=0.01", "compressor.value_bits=4")),
    System(WHOLE, ("algorithm.name=sgp",)),
    System("sgp, no TLS", ("algorithm.name=sgp", "security.mode=insecure")),
    System("sgp, entropy", ("algorithm.name=sgp", "compressor.coding=entropy")),
    System(
        "choco-sgd, top 1 %, 4 bits",
        ("algorithm.name=choco-sgd", "graph.kind=ring", "compressor.fraction=0.01", "compressor.value_bits=4"),
    ),
    System("low-rank, rank 4", ("algorithm.name=low-rank", "graph.kind=complete")),
    System("allreduce, float32", ("algorithm.name=allreduce", "graph.kind=complete")),
    System("allreduce, no TLS", ("algorithm.name=allreduce", "graph.kind=complete", "security.mode=insecure")),
    System(REFERENCE, ()),
)


# --- in the processes that are measured -------------------------------------------------------------------------------


class StageClock:
    """CPU and wall seconds of each stage, each second counted for the innermost stage of its thread only."""

    def __init__(self) -> None:
        self.cpu = dict.fromkeys(STAGES, 0.0)
        self.wall = dict.fromkeys(STAGES, 0.0)
        self._threads = threading.local()

    def replace(self, owner: Any, name: str, stage: str) -> None:
        """Put a function that counts its time as `stage` in the place of `owner.name`."""
        function, threads, charge = getattr(owner, name), self._threads, self._charge

        # Plain on purpose: it is part of what is measured.
        @wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            outer = threads.__dict__.get("stage")
            charge(outer)
            threads.stage = stage
            try:
                return function(*arguments, **named)
            finally:
                charge(stage)
                threads.stage = outer

        setattr(owner, name, timed)

    def _charge(self, stage: str | None) -> None:
        """Count the time since the last change of this thread for the stage that it was in."""
        cpu, wall = time.thread_time(), time.perf_counter()
        if stage is not None:
            last_cpu, last_wall = self._threads.last
            self.cpu[stage] += cpu - last_cpu
            self.wall[stage] += wall - last_wall
        self._threads.last = cpu, wall


def run_peer(config_file: Path, result_file: Path, profile: bool) -> None:
    """Run one peer to its end, and write the costs of its rounds."""
    from peer import gossip, wire
    from peer.config import options as config
    from peer.gossip import mixing
    from peer.net import tcp_info
    from peer.net.inbox import Inbox
    from peer.net.outbox import Outbox
    from peer.node import divergence_guard
    from peer.node.participant import Participant
    from peer.node.recorded_peer import RecordedPeer
    from peer.records import RoundRecord
    from peer.state.checkpoints import Checkpoints
    from peer.state.journal import Checked, Journal
    from peer.state.metrics import MetricsStore

    loaded = config.load(config_file, environment={})
    clock, algorithm = StageClock(), gossip.ALGORITHMS[loaded.algorithm.name]
    clock.replace(divergence_guard, "reason_to_stop", "record")
    # Only now: the daemon takes that function by its name.
    from peer.daemon import process

    for owner, name, stage in (
        (Participant, "step", "train"),
        (Participant, "begin", "algorithm"),
        (mixing, "compress_layers", "compress"),
        (wire, "encode_counted", "encode"),
        (wire, "entropy_bound_bits", "encode"),
        (RecordedPeer, "digest", "journal"),
        (Checked, "of", "journal"),
        (Journal, "append", "journal"),
        (Outbox, "next_envelope", "chunks"),
        (Inbox, "open", "chunks"),
        (wire, "decode", "decode"),
        (Participant, "receive", "apply"),
        (algorithm, "advance", "apply"),
        (algorithm, "metrics", "record"),
        (MetricsStore, "put", "record"),
        (MetricsStore, "flush", "record"),
        (Participant, "to_checkpoint", "save"),
        (Checkpoints, "save", "save"),
    ):
        clock.replace(owner, name, stage)
    put = MetricsStore.put
    marks: list[dict[str, Any]] = []

    def put_and_mark(store: MetricsStore, *records: Any) -> None:
        put(store, *records)
        if isinstance(records[0], RoundRecord):
            # Asking the kernel takes a while, and only the ends are needed.
            ends = records[0].round in (WARM_UP_ROUNDS, loaded.run.rounds - 1)
            links = tcp_info.connections() if ends else []
            socket_bytes = sum(counters.bytes_sent for link in links if (counters := link.counters()) is not None)
            marks.append(
                {
                    "wall": time.perf_counter(),
                    "cpu": time.process_time(),
                    "stages": dict(clock.cpu),
                    "stage_walls": dict(clock.wall),
                    "payload_bytes": records[0].payload_bytes,
                    **(_memory() | {"socket_bytes": socket_bytes} if ends else {}),
                }
            )

    setattr(MetricsStore, "put", put_and_mark)  # noqa: B010 - for mypy an assignment has another type
    with _profiled_worker(result_file.with_suffix(".prof")) if profile else contextlib.nullcontext():
        code = process.run(loaded, config_file.parent)
    result_file.write_text(json.dumps({"marks": marks, "peak_rss_bytes": _peak_rss_bytes()}))
    sys.exit(code)


@contextlib.contextmanager
def _profiled_worker(path: Path) -> Iterator[None]:
    """Profile everything that the peer does in its worker thread, in CPU seconds."""
    import cProfile
    from concurrent.futures import ThreadPoolExecutor

    profiler, submit = cProfile.Profile(time.thread_time), ThreadPoolExecutor.submit

    def submit_profiled(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *arguments: Any) -> Any:
        return submit(pool, profiler.runcall, function, *arguments)

    setattr(ThreadPoolExecutor, "submit", submit_profiled)  # noqa: B010
    try:
        yield
    finally:
        profiler.dump_stats(path)


def run_all_reduce(rank: int, num_peers: int, size: int, rounds: int, store: Path, result_file: Path) -> None:
    """Average a vector with the other processes in every round, and write the costs of the rounds."""
    import torch
    import torch.distributed as distributed

    from peer.net import tcp_info
    from peer.state.disk import Disk

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_peers)
    vector = torch.randn(size, generator=torch.Generator().manual_seed(rank))
    distributed.barrier()
    links = tcp_info.connections()
    marks = []
    for round_ in range(rounds):
        distributed.all_reduce(vector)
        vector /= num_peers
        ends = round_ in (WARM_UP_ROUNDS, rounds - 1)
        counters = [link.counters() for link in links] if ends else []
        socket_bytes = sum(each.bytes_sent for each in counters if each is not None)
        marks.append(
            {
                "wall": time.perf_counter(),
                "cpu": time.process_time(),
                **(_memory() | {"socket_bytes": socket_bytes} if ends else {}),
            }
        )
    distributed.barrier()
    distributed.destroy_process_group()
    writes = []
    for _ in range(_SYNCED_WRITES if rank == 0 else 0):
        started = time.perf_counter()
        file = Disk(result_file.parent).create("vector")
        file.append([vector.numpy().view("uint8").data])
        file.sync()
        file.close()
        writes.append(time.perf_counter() - started)
    result_file.write_text(json.dumps({"marks": marks, "peak_rss_bytes": _peak_rss_bytes(), "writes": writes}))


def _memory() -> dict[str, int]:
    """Return the memory that this process holds, and how many page faults it has had."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * resource.getpagesize(),
        "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
    }


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- the processes of one trial ---------------------------------------------------------------------------------------


def run_trial(
    system: System, size: int, num_peers: int, rounds: int, seed: int, folder: Path, profile: bool
) -> list[dict[str, Any]]:
    """Return the results that the processes of one trial wrote, one entry for each."""
    folder.mkdir()
    results = [folder / f"result-{index}.json" for index in range(num_peers)]
    if system.settings:
        commands = _peer_commands(system, size, num_peers, rounds, seed, folder, results, profile)
    else:
        store = folder / "store"
        commands = [
            ["--as-reducer", str(index), str(num_peers), str(size), str(rounds), str(store), str(result)]
            for index, result in enumerate(results)
        ]
    from peer.ops.peer_processes import peer_environment

    environment = peer_environment() | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    processes, logs = [], [folder / f"log-{index}.txt" for index in range(num_peers)]
    try:
        for command, log in zip(commands, logs, strict=True):
            with open(log, "wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(Path(__file__).resolve()), *command],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=environment,
                    )
                )
        deadline = time.monotonic() + _TIMEOUT_S
        for process, log in zip(processes, logs, strict=True):
            if process.wait(max(1.0, deadline - time.monotonic())) != 0:
                raise RuntimeError(f"{system.name}: a process failed:\n{log.read_text()[-2000:]}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [json.loads(result.read_text()) for result in results]


def _peer_commands(
    system: System,
    size: int,
    num_peers: int,
    rounds: int,
    seed: int,
    folder: Path,
    results: Sequence[Path],
    profile: bool,
) -> list[list[str]]:
    from peer.config import options as config
    from peer.ops.cluster_files import Host, write_cluster
    from peer.ops.local_cluster import free_ports

    settings = (
        "run.name=bench-round",
        f"run.seed={seed}",
        f"run.rounds={rounds}",
        "training.task=synthetic",
        f"training.task_options.parameters={size}",
        "training.task_options.samples=256",
        "graph.kind=directed-ring",
        "evaluation.every_rounds=0",
        *system.settings,
    )
    loaded = config.load(environment={}, overrides=settings)
    hosts = [Host("127.0.0.1", port) for port in free_ports(num_peers)]
    files = write_cluster(folder / "peers", loaded, hosts)
    commands = [["--as-peer", str(file), str(result)] for file, result in zip(files, results, strict=True)]
    if profile:
        commands[0].append("--profiled")
    return commands


# --- what came of it --------------------------------------------------------------------------------------------------


def summarize(processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of one system and size: medians and means of a round of one process, the first left out."""
    runs = [process["marks"][WARM_UP_ROUNDS:] for process in processes]
    steps = [step for marks in runs for step in itertools.pairwise(marks)]

    def spent(key: str) -> list[float]:
        return [after[key] - before[key] for before, after in steps]

    def stage(key: str, name: str) -> list[float]:
        return [after[key][name] - before[key][name] for before, after in steps]

    def between_the_ends(key: str) -> float:
        return statistics.fmean((marks[-1][key] - marks[0][key]) / (len(marks) - 1) for marks in runs)

    cpu = spent("cpu")
    found: dict[str, Any] = {
        "rounds": len(steps),
        "wall_s": _typical(spent("wall")),
        "cpu_s": _typical(cpu),
        "overhead_s": _typical(cpu),
        "page_faults": between_the_ends("page_faults"),
        "socket_bytes": between_the_ends("socket_bytes"),
        "rss_bytes": max(marks[-1]["rss_bytes"] for marks in runs),
        "peak_rss_bytes": max(process["peak_rss_bytes"] for process in processes),
    }
    if "stages" not in steps[0][0]:
        found["write_s"] = statistics.median(seconds for process in processes for seconds in process["writes"])
        return found
    stages = {name: stage("stages", name) for name in STAGES}
    stages["transport"] = [total - sum(parts) for total, *parts in zip(cpu, *stages.values(), strict=True)]
    found["overhead_s"] = _typical([total - train for total, train in zip(cpu, stages["train"], strict=True)])
    found["stage_cpu_s"] = {name: _typical(values) for name, values in stages.items()}
    found["stage_wall_s"] = {name: _typical(stage("stage_walls", name)) for name in STAGES}
    found["payload_bytes"] = statistics.fmean(after["payload_bytes"] for _, after in steps)
    return found


def _typical(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "mean": statistics.fmean(values)}


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions of the figures."""
    from peer.run.machine import machine_facts

    return {
        "commit": commit(),
        "seed": arguments.seed,
        "repeats": arguments.repeats,
        "machine": machine_facts(),
        "processors": os.cpu_count(),
        "load_average": os.getloadavg(),
        "link": "loopback, mutual TLS",
        "systems": {system.name: list(system.settings) for system in SYSTEMS},
    }


def table(size: int, num_peers: int, rounds: int, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures of one size as Markdown."""
    stages = (*STAGES, "transport")
    lines = [
        f"**{size:,} parameters** ({4 * size / 1e6:.1f} MB as float32), {num_peers} peers, {rounds} rounds a process",
        "",
        "| one round of one peer | " + " | ".join(rows) + " |",
        "|---|" + "--:|" * len(rows),
    ]

    def add(label: str, value: Callable[[Mapping[str, Any]], float | None], scale: float, unit: str) -> None:
        cells = [value(row) for row in rows.values()]
        texts = ["–" if cell is None else f"{_digits(cell * scale)} {unit}".strip() for cell in cells]
        lines.append(f"| {label} | " + " | ".join(texts) + " |")

    def figure(key: str, which: str = "median") -> Callable[[Mapping[str, Any]], float | None]:
        return lambda row: row[key][which]

    def stage(name: str) -> Callable[[Mapping[str, Any]], float | None]:
        return lambda row: row["stage_cpu_s"][name]["median"] if "stage_cpu_s" in row else None

    add("seconds", figure("wall_s"), 1e3, "ms")
    add("CPU", figure("cpu_s"), 1e3, "ms")
    for name in stages:
        add(f"– {name}", stage(name), 1e3, "ms")
    add("overhead: CPU without train", figure("overhead_s"), 1e3, "ms")
    add("overhead, mean", figure("overhead_s", "mean"), 1e3, "ms")
    add("payload sent", lambda row: row.get("payload_bytes"), 1e-3, "kB")
    add("socket bytes sent", lambda row: row["socket_bytes"], 1e-3, "kB")
    add("a synced write of the vector", lambda row: row.get("write_s"), 1e3, "ms")
    add("page faults", lambda row: row["page_faults"], 1.0, "")
    add("memory after the last round", lambda row: row["rss_bytes"], 1e-6, "MB")
    add("most memory, start and end included", lambda row: row["peak_rss_bytes"], 1e-6, "MB")
    if REFERENCE in rows:
        reference = rows[REFERENCE]
        limit_s = 3.0 * reference["wall_s"]["median"] + reference["write_s"]
        add("seconds / (3 all-reduces and a synced write)", lambda row: row["wall_s"]["median"] / limit_s, 1.0, "×")
        add("seconds / all-reduce", lambda row: row["wall_s"]["median"] / reference["wall_s"]["median"], 1.0, "×")
        add("overhead / all-reduce", lambda row: row["overhead_s"]["median"] / reference["cpu_s"]["median"], 1.0, "×")
        add("socket bytes / all-reduce", lambda row: row["socket_bytes"] / reference["socket_bytes"], 1.0, "×")
    return "\n".join(lines) + "\n"


def _digits(value: float) -> str:
    """Return three significant digits, and no exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def over_budget(size: int, rows: Mapping[str, Mapping[str, Any]]) -> bool:
    """Print whether the compressed differences keep to the budget of their size; return whether they exceed it."""
    if size not in BUDGET_MS or COMPRESSED not in rows:
        return False
    spent = 1e3 * float(rows[COMPRESSED]["overhead_s"]["mean"])
    over = spent > BUDGET_MS[size]
    print(
        f"Budget: {_digits(spent)} ms of CPU a round beside training, on average; "
        f"{'MORE than' if over else 'within'} the {BUDGET_MS[size]:g} ms for {size:,} parameters.\n"
    )
    return over


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], epilog=__doc__.split("\n", 1)[1], formatter_class=_Formatter
    )
    parser.add_argument("--sizes", default="270000,11000000,67000000", help="parameters, separated by commas")
    parser.add_argument("--peers", default="4,4,2", help="processes for each size")
    parser.add_argument("--rounds", default="120,30,8", help="rounds of a process for each size")
    parser.add_argument("--repeats", type=int, default=3, help="how often the systems take turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="NAME", help="run only systems whose name begins so")
    parser.add_argument("--profile", metavar="DIR", help="profile every first peer, and keep the profiles there")
    parser.add_argument("--json", metavar="FILE", help="also write all figures there")
    parser.add_argument("--as-peer", nargs=2, metavar=("CONFIG", "RESULT"), help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--as-reducer", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_peer:
        run_peer(Path(arguments.as_peer[0]), Path(arguments.as_peer[1]), arguments.profiled)
        return 0
    if arguments.as_reducer:
        rank, num_peers, size, rounds = map(int, arguments.as_reducer[:4])
        run_all_reduce(rank, num_peers, size, rounds, *map(Path, arguments.as_reducer[4:]))
        return 0
    columns = [[int(text) for text in part.split(",")] for part in (arguments.sizes, arguments.peers, arguments.rounds)]
    if len({len(column) for column in columns}) != 1:
        parser.error("--sizes, --peers and --rounds are lists of the same length")
    if min(columns[1]) < 2 or min(columns[2]) < WARM_UP_ROUNDS + 3:
        parser.error(f"at least 2 peers and {WARM_UP_ROUNDS + 3} rounds are needed")
    systems = [s for s in SYSTEMS if not arguments.only or s.name.startswith(tuple(arguments.only))]
    facts = conditions(arguments)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if name not in ("systems", "machine")))
    print(", ".join(f"{name} {value}" for name, value in facts["machine"].items()), "\n")
    results, failed = [], False
    for size, num_peers, rounds in zip(*columns, strict=True):
        found: dict[str, list[Any]] = {system.name: [] for system in systems}
        for repeat in range(arguments.repeats):
            for system in systems:
                with tempfile.TemporaryDirectory(prefix="bench-round-") as temporary:
                    folder = Path(temporary) / "trial"
                    profile = arguments.profile is not None and bool(system.settings)
                    print(f"{size:,} parameters, {system.name}, trial {repeat + 1}", file=sys.stderr)
                    found[system.name] += run_trial(
                        system, size, num_peers, rounds, arguments.seed + repeat, folder, profile
                    )
                    if profile:
                        target = Path(arguments.profile)
                        target.mkdir(parents=True, exist_ok=True)
                        name = f"{system.name.split(',')[0]}-{size}-{repeat}.prof"
                        (target / name).write_bytes((folder / "result-0.prof").read_bytes())
        rows = {name: summarize(processes) for name, processes in found.items()}
        results.append({"parameters": size, "peers": num_peers, "rounds": rounds, "systems": rows})
        print(table(size, num_peers, rounds, rows))
        failed |= over_budget(size, rows)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"conditions": facts, "results": results}, indent=1) + "\n")
    return int(failed)


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    sys.exit(main())
