"""Runs real peers for many rounds and shows that nothing grows: memory, file handles, threads, the state on disk.

    python -m tests.stress.soak [--peers 8] [--rounds 20000] [--algorithm quant-sgp] [--json FILE]

The job is small, so that rounds are short: what leaks does so for each round, message or checkpoint, not for each
parameter. Growth is measured from a fifth of the rounds on, when every buffer has been used; the tool ends with 1 if
a peer has grown since by more than `--tolerance-mbytes` or by a file handle.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from peer.config.options import load
from peer.errors import SottoError
from peer.ops.local_cluster import Cluster

_WARM_SHARE = 0.2
_END_SHARE = 0.97
"""Later than this peers evaluate, save their models and say goodbye."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one peer holds at one time."""

    round: int
    resident_mbytes: float
    """In units of 1000² bytes."""
    handles: int
    threads: int
    state_kbytes: float
    """Size of its state folder, in units of 1000 bytes."""


def sample(cluster: Cluster, peer: int, round_: int) -> Sample:
    """Return what a running peer holds."""
    process = Path(f"/proc/{cluster.processes[peer].pid}")
    files = [path for path in cluster.state_folders[peer].rglob("*") if path.is_file()]
    return Sample(
        round=round_,
        resident_mbytes=resident_mbytes(cluster.processes[peer].pid),
        handles=len(list((process / "fd").iterdir())),
        threads=len(list((process / "task").iterdir())),
        state_kbytes=sum(_size(path) for path in files) / 1e3,
    )


def resident_mbytes(pid: int) -> float:
    """Return how much memory a process holds, in units of 1000² bytes. Raises OSError where there is none."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES / 1e6


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # Checkpoints and journals come and go.


def run(arguments: argparse.Namespace, directory: Path) -> tuple[list[list[Sample]], float]:
    """Run the peers; return the samples of each, and the seconds it took. Raises SottoError."""
    config = load(
        environment={},
        overrides=[
            f"algorithm.name={arguments.algorithm}",
            f"run.rounds={arguments.rounds}",
            "training.task=synthetic",
            "training.task_options={parameters=500, layers=3, samples=64}",
            "training.batch_size=4",
            "evaluation.every_rounds=0",
            "state.checkpoint_every_rounds=200",
            *arguments.set,
        ],
    )
    cluster = Cluster(config, Path(), num_peers=arguments.peers, directory=directory)
    samples: list[list[Sample]] = [[] for _ in range(arguments.peers)]
    started = shown = time.monotonic()
    try:
        cluster.start()
        while not cluster.finished():
            if (failure := cluster.failure()) is not None:
                raise failure
            rounds = [peer.round for peer in cluster.poll()]
            if min(rounds) > 0 and max(rounds) < arguments.rounds:
                for peer, round_ in enumerate(rounds):
                    samples[peer].append(sample(cluster, peer, round_))
            if time.monotonic() - shown > 30.0:
                shown = time.monotonic()
                print(f"round {min(rounds)} after {shown - started:.0f} s: {samples[0][-1:]}", flush=True)
            time.sleep(arguments.every_s)
        if (failure := cluster.failure()) is not None:
            raise failure
        return samples, time.monotonic() - started
    finally:
        cluster.stop()
        cluster.close()


def growth(samples: list[Sample], rounds: int) -> tuple[Sample, Sample]:
    """Return what a peer held when it was warm and before it ended. Raises SottoError if it was not looked at then."""
    steady = [each for each in samples if _WARM_SHARE * rounds <= each.round <= _END_SHARE * rounds]
    if len(steady) < 2:
        raise SottoError("the run was over before anything could be measured; give it more rounds")
    return steady[0], steady[-1]


def main() -> None:
    """Run the peers and print what they held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--algorithm", default="quant-sgp")
    parser.add_argument("--every-s", type=float, default=2.0, help="how often the peers are looked at")
    parser.add_argument("--tolerance-mbytes", type=float, default=4.0, help="growth of a peer that is no leak")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the job")
    parser.add_argument("--json", type=Path, help="write all samples to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        samples, seconds = run(arguments, Path(directory))
    print(f"{arguments.rounds} rounds of {arguments.peers} peers in {seconds:.0f} s")
    print(f"{'peer':>4} {'rounds':>15} {'memory, MB':>16} {'handles':>11} {'threads':>11} {'state, kB':>15}")
    grew = False
    for peer, own in enumerate(samples):
        warm, last = growth(own, arguments.rounds)
        grew |= last.resident_mbytes - warm.resident_mbytes > arguments.tolerance_mbytes or last.handles > warm.handles
        print(
            f"{peer:>4} {warm.round:>6} … {last.round:>6} {warm.resident_mbytes:>6.1f} … {last.resident_mbytes:>6.1f} "
            f"{warm.handles:>4} … {last.handles:>4} {warm.threads:>4} … {last.threads:>4} "
            f"{warm.state_kbytes:>6.0f} … {last.state_kbytes:>6.0f}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([[asdict(each) for each in own] for own in samples]) + "\n")
    if grew:
        raise SystemExit("something grows")


if __name__ == "__main__":
    main()
