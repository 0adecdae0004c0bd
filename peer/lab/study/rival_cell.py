"""One cell of a rival: the rounds of its workers in shaped namespaces, and the figures measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from peer.errors import SottoError
from peer.lab.study.cell import CellResult
from peer.lab.study.rivals.worker import Orders, Result, Settings, steps_per_round
from peer.lab.study.study import Rival
from peer.links.measure import measure
from peer.links.network import INTERFACE, LinkNetwork
from peer.links.profiles import Profile

_POLL_S = 0.05


def run_rival(
    name: str,
    rival: Rival,
    shapes: Sequence[Sequence[int]],
    num_workers: int,
    profile: Profile,
    *,
    rounds: int,
    step_s: float,
    limit_s: float,
    settings: Settings | None = None,
    packages: Path | None = None,
) -> CellResult:
    """Run the workers of a rival in shaped namespaces.

    `name` and `settings` choose the method where a program has several. `packages` is a folder of Python packages for
    it alone.

    Raises SottoError if one fails or `limit_s` is exceeded.
    """
    settle = rival.settle_rounds
    rounds += settle
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="sotto-rival-") as folder, LinkNetwork([profile] * num_workers) as network:
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
                    settings=dict(settings or {}),
                )
                for rank in range(num_workers)
            ]
            for orders in all_orders:
                workers.append(_start(rival.program, orders, network.command(orders.rank), packages))
            _wait_for_all(name, workers, Path(folder), limit_s)
            found = [Result(**json.loads(orders.result_file.read_text())) for orders in all_orders]
        finally:
            for process in workers:
                process.kill()
                process.wait()
    round_step_s = step_s * steps_per_round(settings or {})
    result = CellResult.of(
        [worker.ends for worker in found],
        settle,
        link,
        train_s=round_step_s,
        gossip_s=0.0,
        wait_s=0.0,
        cpu_s=statistics.mean(worker.cpu_s for worker in found) / rounds,
        payload_bytes=0.0,
        interface_bytes=statistics.mean(
            (worker.sent_bytes[-1] - worker.sent_bytes[settle - 1]) / (rounds - settle) for worker in found
        ),
    )
    return replace(result, wait_s=result.round_s - round_step_s)


def _start(program: Path, orders: Orders, launcher: Sequence[str], packages: Path | None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if packages is not None:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(packages.resolve()), *([before] if before else [])])
    with _log(Path(orders.folder), orders.rank).open("w") as log:
        return subprocess.Popen(
            [*launcher, sys.executable, str(program), json.dumps(asdict(orders))],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def _wait_for_all(name: str, workers: Sequence[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> None:
    """Return once all workers have ended well. Raises SottoError at the first failure, and after `limit_s`."""
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
