"""What others have built, on the same links.

torch's DDP with gloo and its hooks, and D-PSGD on gloo, need nothing but torch. hivemind is on PyPI. decentralizepy is
on no package index; its CHOCO is a program of ours that sends what it sends, over ZeroMQ as it does.

Gradients of DDP, and the models of hivemind, are averages over all workers, which is what `allreduce` of ours computes;
studies count the rounds to a target with it, for the lossy hooks and 8 bits as well, which favours them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from links.measure import measure
from links.network import INTERFACE, link_network
from links.profiles import Profile

from bandwidth.cell import CellResult
from bandwidth.rival_worker import Orders, Result
from peer.errors import SottoError


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A program, and what a study has to know of it before it runs."""

    program: str
    sent_models: float
    """About how many float32 models a worker sends in a round."""
    settle_rounds: int = 1
    """How many rounds are left out. All workers start together; after the first DDP arranges its buckets anew."""
    settle_models: float = 5.0
    """About how many float32 models a worker sends until then. DDP begins with the first worker's."""


RIVALS = {
    "ddp": Rival(program="torch_program.py", sent_models=1.75),
    "ddp-fp16": Rival(program="torch_program.py", sent_models=0.9),
    # PowerSGD begins to compress after two rounds.
    "ddp-powersgd": Rival(program="torch_program.py", sent_models=0.1, settle_rounds=3, settle_models=8.5),
    "d-psgd-gloo": Rival(program="torch_program.py", sent_models=2.0),
    # Mostly matchmaking.
    "hivemind-8": Rival(program="hivemind_program.py", sent_models=2.0),
    "decentralizepy-choco-1%": Rival(program="decentralizepy_program.py", sent_models=0.03),
}
_POLL_S = 0.05


def run_rival(
    name: str,
    shapes: Sequence[Sequence[int]],
    num_workers: int,
    profile: Profile,
    *,
    rounds: int,
    step_s: float,
    limit_s: float,
    packages: Path | None = None,
) -> CellResult:
    """Run the workers of a rival in shaped namespaces. `packages` is a folder of Python packages for them alone.

    Raises SottoError if one fails or `limit_s` is exceeded.
    """
    settle = RIVALS[name].settle_rounds
    rounds += settle
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="sotto-rival-") as folder, link_network([profile] * num_workers) as network:
        link = measure(network, 0, 1, seconds=1.0)
        try:
            addresses = [network.address(worker) for worker in range(num_workers)]
            all_orders = [
                Orders(
                    name=name,
                    rank=rank,
                    addresses=addresses,
                    interface=INTERFACE,
                    folder=folder,
                    shapes=[list(shape) for shape in shapes],
                    rounds=rounds,
                    step_s=step_s,
                )
                for rank in range(num_workers)
            ]
            for orders in all_orders:
                workers.append(_start(orders, network.command(orders.rank), packages))
            _wait_for_all(name, workers, Path(folder), limit_s)
            found = [Result(**json.loads(orders.result_file.read_text())) for orders in all_orders]
        finally:
            for process in workers:
                process.kill()
                process.wait()
    ends = [statistics.mean(together) for together in zip(*(result.ends for result in found), strict=True)]
    spans = [after - before for before, after in itertools.pairwise(ends[settle - 1 :])]
    return CellResult(
        rounds=rounds - settle,
        round_s=statistics.median(spans),
        mean_round_s=statistics.mean(spans),
        train_s=step_s,
        gossip_s=0.0,
        wait_s=statistics.median(spans) - step_s,
        cpu_s=statistics.mean(result.cpu_s for result in found) / rounds,
        payload_bytes=0.0,
        interface_bytes=statistics.mean(
            (result.sent_bytes[-1] - result.sent_bytes[settle - 1]) / (rounds - settle) for result in found
        ),
        goodput_kbit=link.goodput_kbit,
        round_trip_ms=link.round_trip_ms,
        asked_kbit=link.asked_kbit,
        asked_round_trip_ms=link.asked_round_trip_ms,
    )


def _start(orders: Orders, launcher: Sequence[str], packages: Path | None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if packages is not None:
        environment["PYTHONPATH"] = str(packages.resolve())
    program = Path(__file__).with_name(RIVALS[orders.name].program)
    with _log(Path(orders.folder), orders.rank).open("w") as log:
        return subprocess.Popen(
            [*launcher, sys.executable, str(program), json.dumps(asdict(orders))],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def _wait_for_all(name: str, workers: Sequence[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> None:
    """Return once all workers have ended well. Raises SottoError when the first has not, and after `limit_s`."""
    until = time.monotonic() + limit_s
    while True:
        codes = [worker.poll() for worker in workers]
        for rank, code in enumerate(codes):
            if code:
                lines = _log(folder, rank).read_text().strip().splitlines()
                raise SottoError(f"{name} failed: {lines[-1] if lines else f'exit code {code}'}")
        if None not in codes:
            return
        if time.monotonic() > until:
            raise SottoError(f"{name} takes longer than {limit_s:.0f} s")
        time.sleep(_POLL_S)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"
