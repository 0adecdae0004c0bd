"""Real peers as processes: stopped, killed, started again, late, and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from peer import wire
from peer.compress.decompress import add_decompressed_
from peer.compress.payload import Dense
from peer.config.options import Config, load
from peer.errors import INTERRUPTED
from peer.ops.local_cluster import Cluster
from peer.ops.peer_processes import ForkServer
from peer.simulate.run import run
from peer.wire.message import MessageKind
from tests.daemon import running_cluster
from tests.daemon.running_cluster import clusters_in

JOB = (
    "run.rounds=150",
    "evaluation.every_rounds=50",
    "training.warmup_rounds=5",
    "state.checkpoint_every_rounds=20",
    "transport.backoff_max_s=0.5",
    "transport.linger_s=10",
)

wait_for = partial(running_cluster.wait_for, timeout_s=90.0)


@pytest.fixture
def started(tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., Cluster]]:
    """Start clusters that are gone when the test is over, however it ends."""
    with clusters_in(tmp_path, fork_server) as make:

        def start(config: Config, num_peers: int = 4) -> Cluster:
            cluster = make(config, num_peers)
            cluster.start()
            return cluster

        yield start


def rounds(cluster: Cluster) -> list[int]:
    return [peer.round for peer in cluster.poll()]


def final_models(cluster: Cluster) -> list[bytes]:
    return [(x / np.float32(u)).tobytes() for x, u in cluster.final_states()]


def test_a_peer_that_is_killed_again_and_again_changes_no_bit(started: Callable[..., Cluster], tmp_path: Path) -> None:
    # Slow enough that the kills come in the middle of the run.
    config = load(environment={}, overrides=[*JOB, "peer.slow_down=10"])
    cluster = started(config)
    for victim, after in ((2, 30), (0, 70), (2, 75)):
        wait_for(cluster, lambda after=after: min(rounds(cluster)) >= after)
        cluster.processes[victim].kill()
        cluster.processes[victim].wait()
        cluster.start_peer(victim)
    wait_for(cluster, cluster.finished)
    assert cluster.failed() is None
    undisturbed = run(config, tmp_path, num_peers=4, baseline=False)
    assert final_models(cluster) == [z.tobytes() for z in undisturbed.models]
    # Rounds that were repeated count once.
    assert all([r.round for r in store.rounds()] == list(range(150)) for store in cluster.stores()[1:])


def test_a_run_that_was_stopped_goes_on_where_it_saved(started: Callable[..., Cluster], tmp_path: Path) -> None:
    config = load(environment={}, overrides=[*JOB, "peer.slow_down=10", "algorithm.name=sparse-push"])
    cluster = started(config)
    wait_for(cluster, lambda: min(rounds(cluster)) >= 10)
    cluster.stop()
    assert [process.returncode for process in cluster.processes] == [INTERRUPTED] * 4
    assert max(rounds(cluster)) < 150
    for peer in range(4):
        cluster.start_peer(peer)
    wait_for(cluster, cluster.finished)
    assert cluster.failed() is None
    undisturbed = run(config, tmp_path, num_peers=4, baseline=False)
    assert final_models(cluster) == [z.tobytes() for z in undisturbed.models]


def test_a_second_signal_ends_a_peer_at_once(started: Callable[..., Cluster]) -> None:
    cluster = started(load(environment={}, overrides=[*JOB, "run.rounds=100000"]), num_peers=2)
    wait_for(cluster, lambda: min(rounds(cluster)) >= 3)
    alone, other = cluster.processes
    other.kill()
    other.wait()
    time.sleep(0.2)
    alone.send_signal(signal.SIGTERM)  # It waits for its neighbour, in vain, for some seconds.
    time.sleep(0.3)
    alone.send_signal(signal.SIGTERM)
    assert alone.wait(2.0) == INTERRUPTED


@pytest.mark.usefixtures("warm_python")
def test_peers_end_when_the_process_that_started_them_is_gone(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from peer.config.options import load\nfrom peer.ops.local_cluster import Cluster\n"
        "if __name__ == '__main__':\n"
        f"    c = Cluster(load(environment={{}}, overrides=['run.rounds=100000']), pathlib.Path({str(tmp_path)!r}),\n"
        f"                num_peers=2, directory=pathlib.Path({str(tmp_path)!r}))\n"
        "    c.start()\n"
        "    print(*[p.pid for p in c.processes], flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("algorithm", ["sgp", "sparse-push", "quant-sgp"])
def test_mass_is_conserved_in_every_round_with_late_messages_on_a_changing_graph(
    started: Callable[..., Cluster], tmp_path: Path, algorithm: str
) -> None:
    """Σu = n and Σx = Σx₀ − Σ steps, what is in flight counted in, at every round of every peer."""
    config = load(
        environment={},
        overrides=[
            *JOB,
            "run.rounds=120",
            f"algorithm.name={algorithm}",
            'graph.kind=["four-node-a", "four-node-b", "four-node-c"]',
            "graph.period=3",
            "rounds.late=skip",
            "rounds.late_after_s=0.02",
            "rounds.max_skipped_rounds=4",
            "state.ledger=true",
            # One gradient step is too small to hide behind: what moves Σx must be the gossip alone.
            "training.learning_rate=1e-30",
            "training.momentum=none",
        ],
    )
    cluster = started(config)
    # Stopped processes are what late means: two of them fall behind, by turns.
    wait_for(cluster, lambda: min(rounds(cluster)) >= 3)
    for turn in range(6):
        victim = cluster.processes[turn % 2]
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(victim.pid, signal.SIGCONT)
        time.sleep(0.1)
    wait_for(cluster, cluster.finished)
    assert cluster.failed() is None
    late = sum(r.late for store in cluster.stores()[1:] for r in store.rounds())
    assert late > 0, "nothing was late, so nothing was tested"

    audit = Audit(cluster, algorithm)
    for t in range(40):
        sum_x, sum_u = audit.total(t)
        assert sum_u == pytest.approx(4.0, abs=1e-12)
        np.testing.assert_allclose(sum_x, 4.0 * audit.x0, atol=4e-5)


class Audit:
    """Adds up the ledgers of all peers."""

    def __init__(self, cluster: Cluster, algorithm: str) -> None:
        self.eta = cluster.setup.node(0, cluster.trainer.layout).averaging_rate
        self.layout = cluster.trainer.layout
        self.x0 = cluster.trainer.initial_vector().astype(np.float64)
        self.algorithm = algorithm
        self.states: list[list[tuple[npt.NDArray[np.float64], float]]] = []
        self.sent: dict[tuple[int, int, int], tuple[npt.NDArray[np.float64], float]] = {}
        """(sender, receiver, round) → what the message moves from the sender to the receiver."""
        self.applied_in: dict[tuple[int, int, int], int] = {}
        """(sender, receiver, round) → the receiver's round in which it was applied."""
        for peer, folder in enumerate(cluster.state_folders):
            states = []
            replica = np.zeros(self.layout.size, dtype=np.float32)
            for t, path in enumerate(sorted((folder / "ledger").glob("round-*.npz"))):
                book = np.load(path, allow_pickle=False)
                states.append((book["x"].astype(np.float64), float(book["u"][0])))
                replica = self.read(peer, t, book, replica)
            self.states.append(states)

    def read(
        self, peer: int, t: int, book: dict[str, npt.NDArray[np.generic]], replica: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        start, advanced = 0, False
        for what, round_, other, length in zip(
            book["what"], book["rounds"], book["others"], book["lengths"], strict=True
        ):
            frame = book["frames"][start : start + int(length)].tobytes()
            start += int(length)
            if what == "applied":
                self.applied_in[int(other), peer, int(round_)] = t
                continue
            message = wire.decode(frame, self.layout)
            assert message.kind is MessageKind.GOSSIP
            value = np.zeros(self.layout.size, dtype=np.float32)
            if self.algorithm == "quant-sgp":
                if not advanced:
                    add_decompressed_(replica, message.layers, self.layout)
                    advanced = True
                value = replica
            elif all(isinstance(layer, Dense) for layer in message.layers):
                value = np.concatenate([layer.values for layer in message.layers])  # type: ignore[union-attr]
            else:
                add_decompressed_(value, message.layers, self.layout)
            weight = self.eta * message.mixing_weight
            moved = weight * value.astype(np.float64), weight * message.push_weight
            self.sent[peer, int(other), int(round_)] = moved
        return replica

    def total(self, t: int) -> tuple[npt.NDArray[np.float64], float]:
        """Return Σx and Σu after round t of every peer, with what was sent by then and not applied by then."""
        sum_x, sum_u = np.zeros_like(self.x0), 0.0
        for states in self.states:
            sum_x += states[t][0]
            sum_u += states[t][1]
        for (sender, receiver, round_), (x, u) in self.sent.items():
            if round_ <= t < self.applied_in.get((sender, receiver, round_), 1 << 60):
                sum_x += x
                sum_u += u
        return sum_x, sum_u
