"""Kills real peers again and again, and compares every bit of the models with those of a run that nobody disturbed.

    python -m tests.stress.kills [--kills 200] [--peers 8] [--seed 1] [--algorithms d2,moniqua] [--json FILE]

With `--json` the rows are kept in FILE, and algorithms that are in it already are not run again.

For each algorithm the job runs twice with real processes: once undisturbed, once with `kill -9` at random instants.
Peers and instants come from the seed, which is printed: a kill comes some random time after all peers have passed a
random round, or, one time in four, right after the one before, so that peers die while they start and while others are
away. A peer that was killed is started again at once. The row says whether all models are equal to the last bit, and
how long it took from the start of a process until its peer had done another round.

The processes are forked, as under `sotto up`; with `--cold` every peer starts anew and imports its libraries, as on a
device of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peer.config.options import Config, load
from peer.errors import SottoError
from peer.ops.local_cluster import Cluster
from peer.ops.peer_processes import ForkServer

JOBS = {
    "sparse-push": ["compressor.kind=top_k", "compressor.fraction=0.1"],
    "quant-sgp": ["compressor.kind=top_k", "compressor.fraction=0.05", "algorithm.drift_correction=auto"],
    "moniqua": ["graph.kind=ring", "compressor.kind=modulo", "compressor.bits=4"],
    "choco-sgd": ["graph.kind=ring", "compressor.kind=top_k", "compressor.fraction=0.05"],
    # Averaging rate ½ turns W into the slack matrix (W + I) / 2, whose smallest eigenvalue D² can bear.
    "d2": ["graph.kind=ring", "algorithm.averaging_rate=0.5"],
    "low-rank": ["graph.kind=complete", "algorithm.rank=2"],
    "compressed-allreduce": ["graph.kind=complete", "compressor.fraction=0.1"],
}

_RIGHT_AFTER = 0.25
"""The share of kills that do not wait for the cluster to go on."""
_PAUSE_S = 0.6
"""A kill comes up to so long after its cue,"""
_PAUSE_ROUNDS = 0.04
"""and by the time that all have done this share of the run's rounds: on a fast processor 0.6 s outlast the run."""
_POLL_S = 0.02
_STUCK_S = 600.0


@dataclass(kw_only=True)
class Kill:
    """One `kill -9`."""

    peer: int
    after_round: int | None
    """Once all peers have passed this round; None: right after the kill before."""
    pause_s: float
    at_round: int = -1
    """Where the peer was, by its own metrics."""
    was_down: bool = False
    """The peer had not done a round since the kill before: it was still starting, or catching up."""
    back_s: float | None = None
    """From the start of the process that follows until the peer had done a further round."""


@dataclass(kw_only=True)
class Row:
    """What one algorithm's run came to."""

    algorithm: str
    peers: int
    rounds: int
    seed: int
    kills: int = 0
    of_down: int = 0
    """How many of them hit a peer that had not done a round since the kill before."""
    identical: bool = False
    undisturbed_s: float = 0.0
    disturbed_s: float = 0.0
    median_back_s: float | None = None
    most_back_s: float | None = None
    plan: list[Kill] = field(default_factory=list, repr=False)

    def line(self) -> str:
        """Return the row as a line of the table."""
        back = [f"{value:.2f} s" if value is not None else "–" for value in (self.median_back_s, self.most_back_s)]
        bits = "identical" if self.identical else "DIFFERENT"
        return (
            f"{self.algorithm:12} {self.kills:>6} {self.of_down:>14} {bits:>10} "
            f"{self.undisturbed_s:>10.1f} s {self.disturbed_s:>7.1f} s {back[0]:>13} {back[1]:>7}"
        )


def job(algorithm: str, rounds: int, settings: list[str]) -> Config:
    """Return a small job, so that what takes time are the kills."""
    common = [
        f"algorithm.name={algorithm}",
        f"run.rounds={rounds}",
        "training.task_options={hidden=8}",
        "training.warmup_rounds=5",
        "evaluation.every_rounds=0",
        "state.checkpoint_every_rounds=25",
        "transport.backoff_max_s=0.3",
        "transport.linger_s=60",
    ]
    return load(environment={}, overrides=[*common, *JOBS.get(algorithm, []), *settings])


def plan(seed: int, kills: int, peers: int, rounds: int) -> list[Kill]:
    """Return who is killed when: a function of the seed. Not in the last tenth, so that the last kill comes in time."""
    choose = random.Random(f"kills {seed}")
    cues = sorted(choose.randrange(2, max(3, rounds * 9 // 10)) for _ in range(kills))
    return [
        Kill(
            peer=choose.randrange(peers),
            after_round=None if number and choose.random() < _RIGHT_AFTER else cue,
            pause_s=choose.uniform(0.0, _PAUSE_S),
        )
        for number, cue in enumerate(cues)
    ]


class Killer:
    """Runs one cluster, with or without kills."""

    def __init__(self, config: Config, peers: int, directory: Path, kills: list[Kill], **how: Any) -> None:
        """`how`: what peers are started with, as for `Cluster`."""
        directory.mkdir()
        self.cluster = Cluster(config, Path(), num_peers=peers, directory=directory, **how)
        self._waiting = list(kills)
        self._cued_at: float | None = None
        self._last_round = 0
        """The kill that has its cue comes once all have passed this round, however fast that was."""
        self._pause_rounds = int(_PAUSE_ROUNDS * config.run.rounds)
        self._away: dict[int, tuple[Kill, float]] = {}
        """Peer → its kill, and when its next process was started."""
        self.done: list[Kill] = []

    def run(self) -> float:
        """Run to the end; return the seconds it took. Raises SottoError if a peer fails or all stand still."""
        cluster = self.cluster
        started = moved = time.monotonic()
        last: list[int] = []
        try:
            cluster.start()
            while not cluster.finished():
                if (failure := cluster.failure()) is not None:
                    raise failure
                now, rounds = time.monotonic(), [peer.round for peer in cluster.poll()]
                if rounds != last:
                    moved, last = now, rounds
                if now - moved > _STUCK_S:
                    raise SottoError(f"no peer has moved for {_STUCK_S:g} s; rounds {rounds}")
                self._see_who_is_back(rounds, now)
                self._kill_if_due(rounds, now)
                time.sleep(_POLL_S)
            if (failure := cluster.failure()) is not None:
                raise failure
            return time.monotonic() - started
        finally:
            for process in cluster.processes:
                if process.poll() is None:
                    process.kill()
                process.wait()

    def models(self) -> list[bytes]:
        """Return the bits of every peer's x and u at the end."""
        return [x[:].tobytes() + repr(u).encode() for x, u in self.cluster.final_states()]

    def _kill_if_due(self, rounds: list[int], now: float) -> None:
        while self._waiting:
            kill = self._waiting[0]
            if self._cued_at is None:
                if kill.after_round is not None and min(rounds) < kill.after_round:
                    return
                self._cued_at, self._last_round = now, min(rounds) + self._pause_rounds
            if now < self._cued_at + kill.pause_s and min(rounds) < self._last_round:
                return
            self._waiting.pop(0)
            self._cued_at = None
            process = self.cluster.processes[kill.peer]
            if process.poll() is not None:
                continue  # It has finished; the run is as good as over.
            process.send_signal(signal.SIGKILL)
            process.wait()
            kill.at_round, kill.was_down = rounds[kill.peer], kill.peer in self._away
            self.done.append(kill)
            self.cluster.start_peer(kill.peer)
            self._away[kill.peer] = (kill, time.monotonic())

    def _see_who_is_back(self, rounds: list[int], now: float) -> None:
        for peer, (kill, since) in list(self._away.items()):
            if rounds[peer] > kill.at_round:
                kill.back_s = now - since
                del self._away[peer]


def measure(
    algorithm: str, arguments: argparse.Namespace, directory: Path, fork_server: ForkServer | None = None
) -> Row:
    """Run one algorithm with and without kills; `fork_server` as for `Cluster`."""
    config = job(algorithm, arguments.rounds, arguments.set)
    row = Row(algorithm=algorithm, peers=arguments.peers, rounds=arguments.rounds, seed=arguments.seed)
    how = {"launcher": (lambda index: ()) if arguments.cold else None, "fork_server": fork_server}
    undisturbed = Killer(config, arguments.peers, directory / "undisturbed", [], **how)
    row.undisturbed_s = undisturbed.run()
    kills = plan(arguments.seed, arguments.kills, arguments.peers, arguments.rounds)
    disturbed = Killer(config, arguments.peers, directory / "killed", kills, **how)
    row.disturbed_s = disturbed.run()
    row.kills, row.plan = len(disturbed.done), disturbed.done
    row.of_down = sum(kill.was_down for kill in disturbed.done)
    row.identical = disturbed.models() == undisturbed.models()
    if back := [kill.back_s for kill in disturbed.done if kill.back_s is not None]:
        row.median_back_s, row.most_back_s = statistics.median(back), max(back)
    for killer in (undisturbed, disturbed):
        killer.cluster.close()
    return row


def read_rows(arguments: argparse.Namespace) -> list[Row]:
    """Return the rows of the same study that the file holds."""
    if arguments.json is None or not arguments.json.exists():
        return []
    rows = [
        Row(**{**row, "plan": [Kill(**kill) for kill in row["plan"]]}) for row in json.loads(arguments.json.read_text())
    ]
    same = (arguments.peers, arguments.rounds, arguments.seed)
    return [row for row in rows if (row.peers, row.rounds, row.seed) == same]


def main() -> None:
    """Run the algorithms one after the other and print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=1, help="of peers and instants")
    parser.add_argument("--algorithms", default=",".join(JOBS))
    parser.add_argument("--cold", action="store_true", help="start each process anew, libraries and all")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the job")
    parser.add_argument("--json", type=Path, help="write the rows to this file too, with every kill")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}: {arguments.kills} kills of {arguments.peers} peers, {arguments.rounds} rounds")
    print("algorithm     kills  of peers down       bits  undisturbed    killed  back: median    most", flush=True)
    rows = read_rows(arguments)
    for row in rows:
        print(row.line(), "(from the file)")
    for algorithm in arguments.algorithms.split(","):
        if algorithm in [row.algorithm for row in rows]:
            continue
        with tempfile.TemporaryDirectory() as directory:
            row = measure(algorithm, arguments, Path(directory))
        rows.append(row)
        print(row.line(), flush=True)
        if row.kills < arguments.kills:
            print(f"    the run was over before {arguments.kills - row.kills} of the kills: give it more --rounds")
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if not all(row.identical for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
