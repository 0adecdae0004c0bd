"""The four peers that are attacked, and the folder of a fifth, who attacks."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any, Self

from peer import __version__, wire
from peer.config.options import load
from peer.net.security.authority import CertificateAuthority
from peer.ops import control, local_cluster
from peer.ops.cluster_files import Host
from peer.state.metrics import MetricsStore
from peer.wire.message import Message, MessageKind, RepairWish
from tests.stress.soak import resident_mbytes

HONEST = 4
VICTIM = 0
MALLORY = 4


class Cluster(local_cluster.Cluster):
    """Four real peers, each started anew, and the folder of a fifth."""

    def __init__(self, directory: Path) -> None:
        settings = (
            "algorithm.name=choco-sgd", "graph.kind=complete", "run.rounds=1000000",
            "rounds.late=skip", "rounds.max_skipped_rounds=10000000", "rounds.late_after_s=2",
            "evaluation.every_rounds=0", "peer.min_step_s=0.02",
            "training.schedule=constant", "training.learning_rate=0.01",
            # The attacker's own messages never come: each round keeps a vector of the model for them, in memory and in
            # checkpoints, which `rounds.max_skipped_rounds` bounds elsewhere. With a small model that is little.
            "training.task_options={hidden=32}",
        )  # fmt: skip
        config = load(environment={}, overrides=list(settings))
        hosts = [*(Host("127.0.0.1", port) for port in local_cluster.free_ports(HONEST)), Host(None, 0)]
        super().__init__(
            config, directory, num_peers=len(hosts), directory=directory, hosts=hosts, launcher=lambda index: ()
        )
        self.port, self.kits = hosts[VICTIM].port, directory / "peers"
        authority = CertificateAuthority.load(self.kits / "ca.pem", self.kits / "ca.key")
        lost = authority.issue(f"peer-{MALLORY}")
        lost.write(self.kits / "revoked-peer.pem", self.kits / "revoked-peer.key")
        pem = authority.revoke(b"", [lost.identity.serial])
        for file in self.peer_files:
            file.with_name("revoked.pem").write_bytes(pem)

    def __enter__(self) -> Self:
        for peer in range(HONEST):
            self.start_peer(peer)
        self._write_hello()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self.close()

    def _write_hello(self) -> None:
        """Write down the facts of a proper hello, which whoever holds the configuration can compute."""
        config = load(self.peer_files[MALLORY], environment={})
        trainer = self.setup.trainer(MALLORY)
        facts = {
            "run": config.run.name,
            "algorithm": config.algorithm.name,
            "model_digest": trainer.start_model().whole,
            "graph_digest": self.setup.schedule.digest,
            "run_digest": config.run_digest(),
            "num_peers": self.setup.num_peers,
            "software": f"sottovoce {__version__}",
        }
        (self.kits / "hello.json").write_text(json.dumps(facts))
        request = Message(MessageKind.REPAIR_REQUEST, MALLORY, 0, wanted=(RepairWish(0, 0, 0),))
        others = {
            "test_classes": [int(count) for count in trainer.class_counts()],
            "repair_request": wire.encode(request, trainer.layout).hex(),
        }
        (self.kits / "facts.json").write_text(json.dumps(others))

    def wait_for_round(self, round_: int, limit_s: float = 120.0) -> None:
        end = time.monotonic() + limit_s
        while min(peer.round for peer in self.poll()[:HONEST]) < round_:
            if self.failed() is not None or time.monotonic() > end:
                raise SystemExit(f"the cluster does not train: {[*map(self.last_words, range(HONEST))]}")
            time.sleep(0.3)

    def status(self, peer: int) -> dict[str, Any]:
        config = load(self.peer_files[peer], environment={})
        return control.call(config, self.peer_files[peer].parent, None, "status")

    def clock_offsets(self) -> list[float]:
        """Return what to add to a monotonic time of ours to get the run's clock of each peer."""
        return [float(self.status(peer)["seconds"]) - time.monotonic() for peer in range(HONEST)]

    def durations_ms(self, begin: float, end: float, offsets: list[float]) -> list[float]:
        """Return the durations of the rounds that the honest peers ended in a span of our monotonic clock."""
        found: list[float] = []
        for peer in range(HONEST):
            store = MetricsStore(self.state_folders[peer] / "metrics.sqlite", read_only=True)
            times = [record.time_s - offsets[peer] for record in store.rounds()]
            store.close()
            found += [1000 * (two - one) for one, two in itertools.pairwise(times) if begin <= one and two <= end]
        return found

    def figures(self) -> tuple[float, int, int]:
        """Return megabytes of memory, open files and bytes of log of the victim."""
        pid = self.processes[VICTIM].pid
        log = self.peer_files[VICTIM].with_name("log.txt").stat().st_size
        return resident_mbytes(pid), len(os.listdir(f"/proc/{pid}/fd")), log
