"""Measures which part of a peer's processor time goes into signing statements, and into checking those of others.

    python tools/bench_signatures.py [--peers 4,8] [--told-every 250,20,1] [--rounds 500] [--repeats 3] [--json FILE]

Real peers, as `sotto run` starts them, train the digits with `quant-sgp` under mutual TLS on loopback. `--told-every`
is the number of rounds after which every peer measures its model and tells all others its accuracy, signed; by default
that is 250 (`evaluation.every_rounds` times `share_every`). Each accuracy is signed once and checked once by every
other peer. The cases take turns, `--repeats` times over, so that a busy machine disturbs all alike.

Signing is `Statements.sign`, with the counter that is reserved on disk; checking is `Statements.check`, with the
certificate. Both are counted in the processes that are measured, in processor time of their thread, and compared with
the processor time of the whole process from round 3 on. Figures are medians over all peers and repeats. The exit code
is 1 where the default takes more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from peer.config import options as config
from peer.daemon import process
from peer.daemon.members.signed_statements import SignedStatements
from peer.lab.study.checkout import commit
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from peer.ops.peer_processes import peer_environment
from peer.records import RoundRecord
from peer.state.metrics import MetricsStore

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = 250
BUDGET = 0.02
WARM_UP_ROUNDS = 3
_TIMEOUT_S = 600.0

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(kw_only=True)
class Spent:
    """Costs of one peer from round `WARM_UP_ROUNDS` on."""

    signed: int = 0
    checked: int = 0
    sign_s: float = 0.0
    check_s: float = 0.0
    rounds: int = 0
    process_s: float = 0.0
    """Processor time of the whole process."""

    @property
    def share(self) -> float:
        """The part of signing and checking."""
        return (self.sign_s + self.check_s) / self.process_s


def run_peer(config_file: Path, result_file: Path) -> None:
    """Run one peer to its end, and write its costs."""
    spent, begun = Spent(), list[float]()

    def counted(function: Callable[P, R], count: str, seconds: str) -> Callable[P, R]:
        @wraps(function)
        def timed(*arguments: P.args, **named: P.kwargs) -> R:
            began = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                if begun:
                    setattr(spent, seconds, getattr(spent, seconds) + time.thread_time() - began)
                    setattr(spent, count, getattr(spent, count) + 1)

        return timed

    setattr(SignedStatements, "sign", counted(SignedStatements.sign, "signed", "sign_s"))  # noqa: B010
    setattr(SignedStatements, "check", counted(SignedStatements.check, "checked", "check_s"))  # noqa: B010
    put_round = MetricsStore.put

    @wraps(put_round)
    def put(store: MetricsStore, *records: RoundRecord) -> None:
        put_round(store, *records)
        if isinstance(records[0], RoundRecord):
            if records[0].round == WARM_UP_ROUNDS:
                begun.append(time.process_time())
            elif begun:
                spent.rounds, spent.process_s = records[0].round - WARM_UP_ROUNDS, time.process_time() - begun[0]

    setattr(MetricsStore, "put", put)  # noqa: B010
    code = process.run(config.load(config_file, environment={}), config_file.parent)
    result_file.write_text(json.dumps(asdict(spent)))
    sys.exit(code)


def measure(peers: int, told_every: int, rounds: int, folder: Path) -> list[Spent]:
    """Return the costs of each peer."""
    settings = (
        "run.name=bench-signatures",
        f"run.rounds={rounds}",
        "algorithm.name=quant-sgp",
        f"evaluation.every_rounds={min(told_every, 50)}",
        f"evaluation.share_every={max(1, told_every // 50)}",
    )
    hosts = [Host("127.0.0.1", port) for port in free_ports(peers)]
    files = write_cluster(folder / "peers", config.load(environment={}, overrides=settings), hosts)
    results = [folder / f"result-{index}.json" for index in range(peers)]
    environment = peer_environment() | {"PYTHONPATH": str(ROOT)}
    running = []
    try:
        for file, result in zip(files, results, strict=True):
            command = [sys.executable, str(Path(__file__).resolve()), "--as-peer", str(file), str(result)]
            with open(file.parent / "log.txt", "wb") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        deadline = time.monotonic() + _TIMEOUT_S
        for each, file in zip(running, files, strict=True):
            if each.wait(max(1.0, deadline - time.monotonic())):
                raise RuntimeError(f"a peer failed:\n{(file.parent / 'log.txt').read_text()[-2000:]}")
    finally:
        for each in running:
            if each.poll() is None:
                each.kill()
                each.wait()
    return [Spent(**json.loads(result.read_text())) for result in results]


def line(peers: int, told_every: int, spent: list[Spent]) -> str:
    """Return a row of the table."""

    def middle(figure: Callable[[Spent], float]) -> float:
        return statistics.median(map(figure, spent))

    sign_us = middle(lambda each: 1e6 * each.sign_s / each.signed if each.signed else 0.0)
    check_us = middle(lambda each: 1e6 * each.check_s / each.checked if each.checked else 0.0)
    return (
        f"{peers:>5} {told_every:>10} {middle(lambda each: each.signed / each.rounds):>12.3f} "
        f"{middle(lambda each: each.checked / each.rounds):>13.3f} {sign_us:>8.0f} {check_us:>9.0f} "
        f"{middle(lambda each: 1e3 * each.process_s / each.rounds):>12.2f} {middle(lambda each: each.share):>8.2%}"
    )


def main() -> None:
    """Measure all cases in turn and print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="4,8")
    parser.add_argument("--told-every", default=f"{DEFAULT},20,1")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-peer", nargs=2, type=Path, metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_peer:
        run_peer(*arguments.as_peer)
    cases = [
        (int(peers), int(every)) for peers in arguments.peers.split(",") for every in arguments.told_every.split(",")
    ]
    found: dict[tuple[int, int], list[Spent]] = {case: [] for case in cases}
    for repeat in range(arguments.repeats):
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                found[case] += measure(*case, arguments.rounds, Path(folder))
            print(f"repeat {repeat}: {case[0]} peers, told every {case[1]} rounds", file=sys.stderr, flush=True)
    print(f"commit {commit()}, {arguments.rounds} rounds, {arguments.repeats} repeats, medians over all peers")
    print("peers told every signed/round checked/round  µs/sign  µs/check  ms CPU/round    share")
    for case in cases:
        print(line(*case, found[case]))
    if arguments.json is not None:
        rows = [
            {"peers": peers, "told_every": every, **asdict(each)}
            for (peers, every), all_ in found.items()
            for each in all_
        ]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    default = [each.share for (_, every), all_ in found.items() if every == DEFAULT for each in all_]
    if default and statistics.median(default) > BUDGET:
        sys.exit(f"signing and checking take more than {BUDGET:.0%} of the processor")


if __name__ == "__main__":
    main()
