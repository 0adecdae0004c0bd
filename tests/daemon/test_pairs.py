"""Real peers without rounds: no deadlock, one serial history of all, mass through kills and stops, nobody waits."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from peer.config.options import load
from peer.config.writer import write_peer_file
from peer.errors import INTERRUPTED, RemoteError
from peer.gossip.pairs.events import Event
from peer.ops import control
from peer.ops.local_cluster import Cluster
from peer.ops.peer_processes import ForkServer
from peer.state.checkpoints import find_checkpoints, load_checkpoint
from peer.state.metrics import LinkRoundRecord
from tests.daemon.running_cluster import clusters_in, wait_for
from tests.gossip.event_logs import merge_events, read_event_log

JOB = (
    "graph.kind=ring",
    "training.task_options={hidden=4}",
    "training.warmup_rounds=5",
    "training.learning_rate=0.05",
    "evaluation.every_rounds=50",
    "transport.backoff_max_s=0.5",
    "state.ledger=true",
    "peer.min_step_s=0.02",
)


@pytest.fixture
def prepared(tmp_path: Path, fork_server: ForkServer) -> Iterator[Callable[..., Cluster]]:
    """Prepare clusters that are gone when the test is over, however it ends."""
    with clusters_in(tmp_path, fork_server) as make:
        yield make


def steps(cluster: Cluster) -> list[int]:
    return [peer.round for peer in cluster.poll()]


class History:
    """The logs of all peers of a run that is over."""

    def __init__(self, cluster: Cluster) -> None:
        size = cluster.trainer.layout.size
        logs = [read_event_log(folder / "ledger", size) for folder in cluster.state_folders]
        self.gradients = [gradients for _, gradients in logs]
        self.merged: list[Event] = merge_events([events for events, _ in logs])
        """One serial order in which everything may have happened."""
        self.x0 = cluster.trainer.initial_vector()
        self.final = [np.asarray(x) for x, _ in cluster.final_states()]

    def count(self, kind: str) -> int:
        return sum(event[0] == kind for event in self.merged)

    def moved(self) -> npt.NDArray[np.float64]:
        """Return what the gradient steps of all peers came to."""
        total = np.zeros(self.x0.size)
        position = [0] * len(self.gradients)
        for event in self.merged:
            if event[0] == "step":
                i = event[1]
                total -= event[2] * self.gradients[i][position[i]].astype(np.float64)
                position[i] += 1
        assert position == [len(gradients) for gradients in self.gradients]
        return total

    def replayed(self) -> npt.NDArray[np.float64]:
        """Return the models that the serial order leads to, in double precision: [peer, n]."""
        x = np.tile(self.x0.astype(np.float64), (len(self.gradients), 1))
        position = [0] * len(self.gradients)
        for event in self.merged:
            if event[0] == "step":
                i = event[1]
                x[i] -= event[2] * self.gradients[i][position[i]]
                position[i] += 1
            elif event[0] == "mix":
                x[event[1]] = x[event[2]] = (x[event[1]] + x[event[2]]) / 2
        return x


def test_a_ring_of_five_has_one_history_and_a_slow_peer_slows_nobody(prepared: Callable[..., Cluster]) -> None:
    """An odd ring is not bipartite: whoever waited for its partner's lock would wait for ever."""
    # In full precision, so that one trainer can judge every peer's model: the ranges of 8 bits are each peer's own.
    overrides = [*JOB, "algorithm.name=ad-psgd", "run.rounds=200", "training.precision=float32"]
    config = load(environment={}, overrides=overrides)
    cluster = prepared(config, 5)
    slow = 4
    file = cluster.peer_files[slow]
    own = load(file, environment={})
    slow_down = own.peer.model_copy(update={"slow_down": 7.0})
    write_peer_file(file, own.model_copy(update={"peer": slow_down}), force=True)
    cluster.start()
    wait_for(cluster, lambda: min(steps(cluster)[:slow]) == 200)
    # In a synchronous run nobody could be more than two rounds ahead of it.
    assert steps(cluster)[slow] < 120
    status = control.call(load(cluster.peer_files[0], environment={}), cluster.peer_files[0].parent, None, "status")
    assert status["exchanges"] > 0
    assert status["most_staleness"] >= status["staleness"] > 0
    wait_for(cluster, cluster.finished)
    assert cluster.failed() is None
    assert steps(cluster) == [200] * 5

    history = History(cluster)
    assert history.count("step") == 5 * 200
    assert history.count("mix") > 5 * 100
    np.testing.assert_allclose(np.stack(history.final), history.replayed(), atol=1e-4, rtol=0)
    np.testing.assert_allclose(
        np.sum(history.final, axis=0, dtype=np.float64), 5 * history.x0 + history.moved(), atol=1e-4, rtol=0
    )
    assert np.abs(history.moved()).max() > 1.0, "nobody moved, so nothing was tested"
    # The rows agree with the history: those who had finished answered the slow one to the end.
    records = [record for store in cluster.stores()[1:] for record in store.rounds()]
    assert sum(record.exchanges for record in records) == 2 * history.count("mix")
    assert all(record.staleness is not None for record in records)
    link_rows = [row for store in cluster.stores()[1:] for row in store.written(LinkRoundRecord)[0]]
    assert sum(row.payload_bytes for row in link_rows) == sum(record.payload_bytes for record in records)
    # Every peer knows everybody's last accuracy, and its own row is of the model that it left.
    for peer, store in enumerate(cluster.stores()[1:]):
        last = {r.peer: r for r in store.evaluations() if r.split == "test" and r.round == 200}
        assert sorted(last) == list(range(5))
        assert last[peer].accuracy == cluster.trainer.evaluate(history.final[peer]).accuracy


def answers(cluster: Cluster, peer: int) -> bool:
    """Whether a peer answers its operator."""
    file = cluster.peer_files[peer]
    with contextlib.suppress(RemoteError):
        control.call(load(file, environment={}), file.parent, None, "status")
        return True
    return False


@pytest.mark.parametrize("algorithm", ["ad-psgd", "moniqua-ad-psgd"])
def test_mass_survives_kills_and_stops(prepared: Callable[..., Cluster], algorithm: str) -> None:
    settings = [f"algorithm.name={algorithm}", "run.rounds=300", "state.checkpoint_every_rounds=40"]
    if algorithm == "moniqua-ad-psgd":
        # A first θ that is too small: kills come in the middle of repairs too.
        settings += ["compressor.kind=modulo", "compressor.bits=4", "algorithm.theta_value=0.001"]
    cluster = prepared(load(environment={}, overrides=[*JOB, *settings]), 3)
    cluster.start()
    for victim, after in ((1, 15), (0, 45)):
        # Nobody waits for the others here: whoever is not killed may be far ahead of one that starts again.
        wait_for(cluster, lambda victim=victim, after=after: steps(cluster)[victim] >= after)
        cluster.processes[victim].kill()
        cluster.processes[victim].wait()
        done = steps(cluster)[victim]
        cluster.start_peer(victim)
    if algorithm == "ad-psgd":
        # What it has done is in its metrics before it heeds signals; who answers does.
        wait_for(cluster, lambda: steps(cluster)[victim] > done and answers(cluster, victim))
        cluster.stop()
        assert [process.returncode for process in cluster.processes] == [INTERRUPTED] * 3
        assert min(steps(cluster)) < 300
        for peer in range(3):
            cluster.start_peer(peer)
    wait_for(cluster, cluster.finished)
    assert cluster.failed() is None

    history = History(cluster)
    assert history.count("step") == 3 * 300
    total = np.sum(history.final, axis=0, dtype=np.float64)
    np.testing.assert_allclose(total, 3 * history.x0 + history.moved(), atol=1e-4, rtol=0)
    if algorithm == "ad-psgd":
        np.testing.assert_allclose(np.stack(history.final), history.replayed(), atol=1e-4, rtol=0)
    else:
        repairs = [
            load_checkpoint(find_checkpoints(f)[-1]).arrays["algorithm/counters"][2] for f in cluster.state_folders
        ]
        assert sum(repairs) > 0


def test_a_peer_that_is_gone_for_good_is_given_up_and_the_others_finish_their_steps(
    prepared: Callable[..., Cluster],
) -> None:
    settings = ["algorithm.name=ad-psgd", "run.rounds=200", "rounds.abandon_after_s=0.5", "transport.give_up_after_s=3"]
    cluster = prepared(load(environment={}, overrides=[*JOB, *settings]), 4)
    cluster.start()
    wait_for(cluster, lambda: min(steps(cluster)) >= 20)
    cluster.processes[2].kill()
    cluster.processes[2].wait()
    others = [0, 1, 3]
    wait_for(cluster, lambda: all(steps(cluster)[peer] == 200 for peer in others))
    # They stay for its last evaluation and its last model, in vain, for as long as the configuration says.
    wait_for(cluster, lambda: all(cluster.processes[peer].poll() is not None for peer in others))
    assert [cluster.processes[peer].returncode for peer in others] == [6, 6, 6]
    # On a busy machine one of the others may be late, too.
    told = r"peer-2\b.* told no model after the last round"
    assert [bool(re.search(told, cluster.last_words(peer))) for peer in others] == [True] * 3
    assert all((cluster.peer_files[peer].parent / "state" / "model.safetensors").exists() for peer in others)
