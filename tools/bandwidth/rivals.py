"""What others have built, on the same links: torch's DDP with gloo and its hooks, and D-PSGD on gloo.

Gradients of DDP are averages over all workers, which is what `allreduce` of ours computes; studies count the rounds to
a target with it, for the lossy hooks as well, which favours them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from links.measure import measure
from links.network import INTERFACE, link_network
from links.profiles import Profile

from bandwidth.cell import CellResult
from peer.errors import SottoError

PROGRAMS = ("ddp", "ddp-fp16", "ddp-powersgd", "d-psgd-gloo")
SETTLE_ROUNDS = {"ddp-powersgd": 3}
"""Rounds that are left out, where it is not the first alone, after which DDP arranges its buckets anew: PowerSGD begins
to compress after two."""


def run_rival(
    name: str,
    shapes: Sequence[Sequence[int]],
    num_workers: int,
    profile: Profile,
    *,
    rounds: int,
    step_s: float,
    limit_s: float,
) -> CellResult:
    """Run the workers of a rival in shaped namespaces. Raises SottoError if one fails or `limit_s` is exceeded."""
    program = Path(__file__).with_name("rival_program.py")
    settle = SETTLE_ROUNDS.get(name, 1)
    rounds += settle
    workers: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="sotto-rival-") as folder, link_network([profile] * num_workers) as network:
        link = measure(network, 0, 1, seconds=1.0)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        errors = [(Path(folder) / f"{worker}.log").open("w+") for worker in range(num_workers)]
        try:
            for worker in range(num_workers):
                tail = [name, str(worker), str(num_workers), network.address(0), json.dumps(shapes), str(rounds)]
                command = [*network.command(worker), sys.executable, str(program), *tail, str(step_s)]
                workers.append(
                    subprocess.Popen(
                        command, stdout=subprocess.PIPE, stderr=errors[worker], text=True, env=environment,
                        start_new_session=True,
                    )
                )  # fmt: skip
            printed = [worker.communicate(timeout=limit_s)[0] for worker in workers]
        except subprocess.TimeoutExpired:
            raise SottoError(f"{name} takes longer than {limit_s:.0f} s") from None
        finally:
            for worker_process in workers:
                worker_process.kill()
                worker_process.wait()
        for number, worker_process in enumerate(workers):
            if worker_process.returncode:
                errors[number].seek(0)
                lines = errors[number].read().strip().splitlines()
                raise SottoError(f"{name} failed: {lines[-1] if lines else worker_process.returncode}")
    found = [json.loads(text.splitlines()[-1]) for text in printed]
    ends = [statistics.mean(together) for together in zip(*(each["ends"] for each in found), strict=True)]
    spans = [after - before for before, after in itertools.pairwise(ends[settle - 1 :])]
    return CellResult(
        rounds=rounds - settle,
        round_s=statistics.median(spans),
        mean_round_s=statistics.mean(spans),
        train_s=step_s,
        gossip_s=0.0,
        wait_s=statistics.median(spans) - step_s,
        cpu_s=statistics.mean(each["cpu_s"] for each in found) / rounds,
        payload_bytes=0.0,
        interface_bytes=statistics.mean(each["sent_bytes"][-1] - each["sent_bytes"][settle - 1] for each in found)
        / (rounds - settle),
        goodput_kbit=link.goodput_kbit,
        round_trip_ms=link.round_trip_ms,
        asked_kbit=link.asked_kbit,
        asked_round_trip_ms=link.asked_round_trip_ms,
    )
