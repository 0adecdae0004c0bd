"""What the workers of all rivals share: their orders, a common start and end, and the clock.

A program is started with its orders, JSON, as its only argument, once for each worker and in a namespace of its own.
It makes its local step last as long as it is told and hands `run` one call for a round; what is on the interface is
counted there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

_POLL_S = 0.002
_UTIME = 11
"""Of the fields of /proc/ID/stat after the name, user time; system time follows."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What one worker is to do."""

    name: str
    rank: int
    addresses: list[str]
    """Of all workers, by rank."""
    interface: str
    folder: str
    """All workers see it, whatever their network."""
    shapes: list[list[int]]
    """Of the model's parameters."""
    rounds: int
    step_s: float
    """What the local step is made to last."""

    @property
    def num_workers(self) -> int:
        return len(self.addresses)

    @property
    def result_file(self) -> Path:
        """Where the worker's `Result` goes: standard output stays open for as long as a process that it started."""
        return Path(self.folder, f"{self.rank}.json")

    def meet(self, what: str) -> None:
        """Wait for all workers, without a byte on the network."""
        Path(self.folder, f"{what}-{self.rank}").touch()
        while not all(Path(self.folder, f"{what}-{rank}").exists() for rank in range(self.num_workers)):
            time.sleep(_POLL_S)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one worker found."""

    ends: list[float]
    """Seconds from the common start to the end of each round."""
    sent_bytes: list[int]
    """What its interface had sent by then."""
    cpu_s: float
    """Of all its processes, their start included."""


def read_orders() -> Orders:
    """Return the orders of this process, its only argument."""
    return Orders(**json.loads(sys.argv[1]))


def run(orders: Orders, step: Callable[[], None]) -> NoReturn:
    """Make all steps, a round each; write down when each ended and what the interface had sent by then; exit.

    What the worker has started may go on: it ends with the namespace.
    """
    counter = Path(f"/sys/class/net/{orders.interface}/statistics/tx_bytes")
    ends, sent = [], []
    orders.meet("start")
    started = time.monotonic()
    for _ in range(orders.rounds):
        step()
        ends.append(time.monotonic() - started)
        sent.append(int(counter.read_text()))
    result = Result(ends=ends, sent_bytes=sent, cpu_s=_namespace_cpu_s())
    orders.result_file.write_text(json.dumps(asdict(result)))
    orders.meet("end")
    # Taken down in order, threads of the libraries now and then abort.
    os._exit(0)


def _namespace_cpu_s() -> float:
    """Return the CPU seconds of all processes in this network namespace: some rivals are several."""
    own, ticks = os.stat("/proc/self/ns/net").st_ino, 0
    for process in Path("/proc").glob("[0-9]*"):
        # One that ended meanwhile.
        with contextlib.suppress(OSError):
            if (process / "ns/net").stat().st_ino == own:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[_UTIME]) + int(fields[_UTIME + 1])
    return ticks / os.sysconf("SC_CLK_TCK")
