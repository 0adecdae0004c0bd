"""Measures what it costs that nothing is lost: rounds with and without a journal, and how long recovery takes.

    python tools/bench_durability.py [--sizes 270000,11000000] [--rounds 250,70] [--folder DIR] [--json FILE]

Two peers on a directed ring in one process train the task `synthetic` with `quant-sgp`, the largest 1 % of each layer
in 4 bits: the messages are small and the steps cheap, so that the journal's share of a round is as large as it gets.
Three such pairs take turns round by round, another one first each time, so that a busy machine disturbs all alike:
without any durability (the participants alone), with `state.durability = "process"` and with `"power"`. They save and
sync as the daemon does: a checkpoint every 100 rounds or when replaying would take longer than
`state.recover_within_s`, a sync every second, which the daemon leaves to another thread and which is counted apart.

For each: CPU of the thread and seconds by the clock for a round of one peer, as medians; the same of checkpoints,
spread over the rounds; bytes written a round; and how much more CPU that is than without, from the median difference to
the round without durability beside it. In the end the pair with `process` is opened anew from its folder, as after kill
-9, and the time for that is what recovery takes beyond the start of a process and the reading of its data.
The exit code is 1 where the CPU of a round with `process`, checkpoints and syncs included, is more than 10 % above that
without, or recovery takes more than 5 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from peer.config.options import Config, load
from peer.daemon.checkpoint_cadence import EVERY_ROUNDS
from peer.gossip.effects import Effects, OutgoingFrame
from peer.node.disk_state import DiskState, Durability
from peer.node.durable import DurablePeer
from peer.node.participant import Participant
from peer.run.setup import RunSetup
from peer.state.disk import Disk
from peer.train.threads import use_one_thread

PAIR = 2
SYNC_EVERY_S = 1.0
BUDGET = 0.10
RECOVERY_S = 5.0
WARM_UP_ROUNDS = 3


@dataclass
class Cost:
    """Costs of the rounds of a pair of peers, in seconds for a round of one peer."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    save_cpu_s: float = 0.0
    """All checkpoints together; the following fields are totals too."""
    save_wall_s: float = 0.0
    sync_cpu_s: float = 0.0
    sync_wall_s: float = 0.0
    journal_bytes: int = 0
    checkpoint_bytes: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the table: a round of one peer."""

    parameters: int
    durability: str
    cpu_ms: float
    wall_ms: float
    save_cpu_ms: float
    save_wall_ms: float
    sync_cpu_ms: float
    sync_wall_ms: float
    journal_bytes: float
    checkpoint_bytes: float
    cpu_share: float
    """Ratio of the additional CPU of a round, checkpoints and syncs included, to that without durability."""


class Bare:
    """Two peers that forget everything when their process ends."""

    name = "none"

    def __init__(self, setup: RunSetup, folder: Path) -> None:
        del folder
        self.cost = Cost()
        self.peers = make_participants(setup)

    def round(self) -> None:
        """Take both peers through a round."""
        measured(self.cost, self._round)

    def _round(self) -> None:
        frames: dict[int, list[bytes]] = {0: [], 1: []}
        for i, peer in enumerate(self.peers):
            peer.step()
            frames[1 - i] += [outgoing.frame for outgoing in peer.begin(0.0).frames]
        performed = [self.peers[i].receive(1 - i, frame, 0.0) for i in (0, 1) for frame in frames[i]]
        assert sum(effects.finished is not None for effects in performed) == PAIR


class Durable:
    """Two peers that journal."""

    def __init__(self, setup: RunSetup, folder: Path, durability: Durability) -> None:
        self.name, self.cost, self._job, self._folder = durability, Cost(), setup, folder
        self._options = setup.config.state
        self.peers = self.opened()
        for peer in self.peers:
            peer.open()
        self._synced_at = time.monotonic()
        self._to_replay_s = 0.0

    def opened(self) -> list[DurablePeer]:
        """Return the peers that a starting process makes; `open` is still to come."""
        peers = []
        for i, participant in enumerate(make_participants(self._job)):
            folder = self._folder / f"{self.name}-{i}"
            folder.mkdir(parents=True, exist_ok=True)
            state = DiskState(Disk(folder), {"peer": str(i)}, durability=self.name)
            peers.append(DurablePeer(participant, state, neighbors=[1 - i]))
        return peers

    def round(self) -> None:
        """Take both peers through a round; save and sync where it is time to."""
        before = sum(peer.disk_state.journal_bytes for peer in self.peers)
        took = measured(self.cost, self._round)
        self.cost.journal_bytes += sum(peer.disk_state.journal_bytes for peer in self.peers) - before
        self._to_replay_s += took / PAIR
        options = self._options
        done = self.peers[0].round
        if done % EVERY_ROUNDS == 0 or self._to_replay_s > options.recover_within_s:
            cpu, wall = timed(self._save)
            self.cost.save_cpu_s, self.cost.save_wall_s = self.cost.save_cpu_s + cpu, self.cost.save_wall_s + wall
            self.cost.checkpoint_bytes += sum(peer.disk_state.checkpoint_bytes for peer in self.peers)
            self._to_replay_s = 0.0
        if time.monotonic() > self._synced_at + SYNC_EVERY_S:
            cpu, wall = timed(self._sync)
            self.cost.sync_cpu_s, self.cost.sync_wall_s = self.cost.sync_cpu_s + cpu, self.cost.sync_wall_s + wall
            self._synced_at = time.monotonic()

    def _round(self) -> None:
        sent: dict[int, list[tuple[int, bytes]]] = {0: [], 1: []}
        for i, peer in enumerate(self.peers):
            peer.step()
            sent[1 - i] += [(each.seq, each.frame) for each in self._performed(i, peer.begin(0.0))]
        finished = 0
        for i, peer in enumerate(self.peers):
            for seq, frame in sent[i]:
                effects = peer.receive(1 - i, seq, frame, 0.0)
                finished += effects.finished is not None
                self._performed(i, effects)
        assert finished == PAIR

    def _performed(self, i: int, effects: Effects) -> list[OutgoingFrame]:
        for sender, upto in effects.receipts.items():
            self.peers[sender].links.acknowledge(i, upto)
        return self.peers[i].publish(effects)

    def _save(self) -> None:
        for i, peer in enumerate(self.peers):
            for sender, upto in peer.save({}).items():
                self.peers[sender].links.acknowledge(i, upto)

    def _sync(self) -> None:
        for i, peer in enumerate(self.peers):
            for sender, upto in peer.sync().items():
                self.peers[sender].links.acknowledge(i, upto)


def make_participants(setup: RunSetup) -> list[Participant]:
    participants = []
    for i in range(PAIR):
        trainer = setup.trainer(i)
        participants.append(setup.participant(i, trainer, trainer.layout, trainer.initial_vector()))
    return participants


def timed(function: Callable[[], None]) -> tuple[float, float]:
    """Return (CPU of this thread, seconds by the clock) that a call takes."""
    wall, cpu = time.perf_counter(), time.thread_time()
    function()
    return time.thread_time() - cpu, time.perf_counter() - wall


def measured(cost: Cost, function: Callable[[], None]) -> float:
    """Add the round of both peers to the costs; return its seconds by the clock."""
    cpu, wall = timed(function)
    cost.cpu_s.append(cpu / PAIR)
    cost.wall_s.append(wall / PAIR)
    return wall


def settings(size: int, rounds: int) -> Config:
    return load(
        environment={},
        overrides=[
            f"run.rounds={rounds}",
            "training.task=synthetic",
            f"training.task_options.parameters={size}",
            "training.task_options.samples=256",
            "graph.kind=directed-ring",
            "algorithm.name=quant-sgp",
            "compressor.fraction=0.01",
            "compressor.value_bits=4",
        ],
    )


def measure(size: int, rounds: int, folder: Path) -> tuple[list[Row], float, int]:
    """Return the rows of a model size, the seconds of recovery, and the number of rounds replayed."""
    setup = RunSetup.open(settings(size, rounds), folder, PAIR)
    process, power = Durable(setup, folder, "process"), Durable(setup, folder, "power")
    pairs: list[Bare | Durable] = [Bare(setup, folder), process, power]
    for number in range(rounds):
        for turn in range(len(pairs)):
            pairs[(number + turn) % len(pairs)].round()
    rows, bare = [], pairs[0].cost.cpu_s[WARM_UP_ROUNDS:]
    for pair in pairs:
        cost, count = pair.cost, PAIR * rounds
        differences = [mine - theirs for mine, theirs in zip(cost.cpu_s[WARM_UP_ROUNDS:], bare, strict=True)]
        more = statistics.median(differences) + (cost.save_cpu_s + cost.sync_cpu_s) / count
        rows.append(
            Row(
                parameters=size,
                durability=pair.name,
                cpu_ms=1e3 * statistics.median(cost.cpu_s[WARM_UP_ROUNDS:]),
                wall_ms=1e3 * statistics.median(cost.wall_s[WARM_UP_ROUNDS:]),
                save_cpu_ms=1e3 * cost.save_cpu_s / count,
                save_wall_ms=1e3 * cost.save_wall_s / count,
                sync_cpu_ms=1e3 * cost.sync_cpu_s / count,
                sync_wall_ms=1e3 * cost.sync_wall_s / count,
                journal_bytes=cost.journal_bytes / count,
                checkpoint_bytes=cost.checkpoint_bytes / count,
                cpu_share=more / statistics.median(bare),
            )
        )
    for peer in process.peers:
        peer.disk_state.close()
    again = process.opened()[0]
    started = time.perf_counter()
    recovery = again.open()
    return rows, time.perf_counter() - started, recovery.replayed_rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="270000,11000000")
    parser.add_argument("--rounds", default="250,70")
    parser.add_argument("--folder", type=Path, help="where the state folders lie for the time; on the disk in question")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    use_one_thread()
    found, failed = [], False
    for size, rounds in zip(map(int, options.sizes.split(",")), map(int, options.rounds.split(",")), strict=True):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows, recovery_s, replayed = measure(size, rounds, Path(folder))
        print(f"{size:,} parameters, {rounds} rounds; milliseconds and bytes for a round of one peer")
        print(
            f"{'':10}{'CPU':>8}{'clock':>8}{'saves':>8}{'clock':>8}{'syncs':>8}{'clock':>8}{'journal':>11}{'saved':>12}"
        )
        for row in rows:
            print(
                f"{row.durability:10}{row.cpu_ms:8.2f}{row.wall_ms:8.2f}{row.save_cpu_ms:8.2f}{row.save_wall_ms:8.2f}"
                f"{row.sync_cpu_ms:8.2f}{row.sync_wall_ms:8.2f}{row.journal_bytes:11,.0f}{row.checkpoint_bytes:12,.0f}"
                f"  {100 * row.cpu_share:+.1f} % CPU"
            )
        print(f"recovery: {replayed} rounds replayed in {recovery_s:.2f} s\n", flush=True)
        failed |= rows[1].cpu_share > BUDGET or recovery_s > RECOVERY_S
        found.append({"rows": [asdict(row) for row in rows], "recovery_s": recovery_s, "replayed": replayed})
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
