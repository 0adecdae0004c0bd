"""The four peers that are attacked, and the folder of a fifth, who attacks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from peer import __version__, wire
from peer.config.options import load
from peer.errors import SottoError
from peer.net.security.authority import CertificateAuthority
from peer.ops import control
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from peer.ops.peer_processes import peer_environment
from peer.run.setup import RunSetup
from peer.state.metrics import MetricsStore
from peer.wire.message import Message, MessageKind, RepairWish

HONEST = 4
VICTIM = 0
MALLORY = 4


class Cluster:
    """Four real peers, and the folder of a fifth."""

    def __init__(self, directory: Path) -> None:
        self.kits = directory
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
        hosts = [Host("127.0.0.1", port) for port in free_ports(HONEST)]
        self.port = hosts[VICTIM].port
        self.files = write_cluster(directory, config, [*hosts, Host(None, 0)])
        authority = CertificateAuthority.load(directory / "ca.pem", directory / "ca.key")
        lost = authority.issue(f"peer-{MALLORY}")
        lost.write(directory / "revoked-peer.pem", directory / "revoked-peer.key")
        pem = authority.revoke(b"", [lost.identity.serial])
        for file in self.files:
            file.with_name("revoked.pem").write_bytes(pem)
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for file in self.files[:HONEST]:
            with open(file.with_name("log.txt"), "wb") as log:
                command = [sys.executable, "-m", "peer", "run", "--config", str(file)]
                self.processes.append(subprocess.Popen(command, stderr=log, stdout=log, env=peer_environment()))
        self._write_hello()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _write_hello(self) -> None:
        """Write down the facts of a proper hello, which whoever holds the configuration can compute."""
        config, base = load(self.files[MALLORY], environment={}), self.files[MALLORY].parent
        setup = RunSetup.open(config, base, len(self.files))
        trainer = setup.trainer(MALLORY)
        facts = {
            "run": config.run.name,
            "algorithm": config.algorithm.name,
            "model_digest": trainer.start_model().whole,
            "graph_digest": setup.schedule.digest,
            "run_digest": config.run_digest(),
            "num_peers": setup.num_peers,
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
        while time.monotonic() < end:
            with contextlib.suppress(SottoError):
                if all(self.status(peer)["round"] >= round_ for peer in range(HONEST)):
                    return
            if any(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.3)
        logs = "\n".join(file.with_name("log.txt").read_text()[-600:] for file in self.files[:HONEST])
        raise SystemExit(f"the cluster does not train:\n{logs}")

    def status(self, peer: int) -> dict[str, Any]:
        config = load(self.files[peer], environment={})
        return control.call(config, self.files[peer].parent, None, "status")

    def clock_offsets(self) -> list[float]:
        """Return what to add to a monotonic time of ours to get the run's clock of each peer."""
        return [float(self.status(peer)["seconds"]) - time.monotonic() for peer in range(HONEST)]

    def durations_ms(self, begin: float, end: float, offsets: list[float]) -> list[float]:
        """Return the durations of the rounds that the honest peers ended in a span of our monotonic clock."""
        found: list[float] = []
        for peer in range(HONEST):
            store = MetricsStore(self.files[peer].with_name("state") / "metrics.sqlite", read_only=True)
            times = [record.time_s - offsets[peer] for record in store.rounds()]
            store.close()
            found += [1000 * (two - one) for one, two in itertools.pairwise(times) if begin <= one and two <= end]
        return found

    def figures(self) -> tuple[float, int, int]:
        """Return megabytes of memory, open files and bytes of log of the victim."""
        pid = self.processes[VICTIM].pid
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        handles = len(os.listdir(f"/proc/{pid}/fd"))
        log = self.files[VICTIM].with_name("log.txt").stat().st_size
        return int(fields["VmRSS"].split()[0]) / 1024, handles, log
