"""Parts of this package for the program of a rival: its orders, a common start and end of all workers, and the clock.

A program is started once for each worker, in a namespace of its own, with its orders (JSON) as the only argument. It
makes a local step last as long as the orders say, and hands `run` a function that does one round:

    orders = read_orders()
    run(orders, step)

`run` writes the times of the rounds and the bytes of the interface to the worker's result file and ends the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

Settings = Mapping[str, float | str]
"""Settings that a study gives to a program."""
_POLL_S = 0.002
_UTIME = 11
"""Index of the user time among the fields of /proc/ID/stat after the name; system time follows."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The orders of one worker."""

    name: str
    rank: int
    addresses: list[str]
    """Addresses of all workers, by rank."""
    interface: str
    folder: str
    """Folder that all workers share."""
    shapes: list[list[int]]
    """Shapes of the model's parameters."""
    rounds: int
    step_s: float
    """Duration to which a local step is stretched."""
    settings: dict[str, float | str] = field(default_factory=dict)
    """Settings that the study gives to the program."""

    @property
    def num_workers(self) -> int:
        return len(self.addresses)

    @property
    def result_file(self) -> Path:
        """File of the worker's `Result`. Standard output would stay open as long as processes that it started."""
        return Path(self.folder, f"{self.rank}.json")

    def meet(self, what: str) -> None:
        """Wait for all workers, without sending a byte."""
        Path(self.folder, f"{what}-{self.rank}").touch()
        while not all(Path(self.folder, f"{what}-{rank}").exists() for rank in range(self.num_workers)):
            time.sleep(_POLL_S)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of one worker."""

    ends: list[float]
    """Seconds from the common start to the end of each round."""
    sent_bytes: list[int]
    """Bytes that its interface had sent by the end of each round."""
    cpu_s: float
    """Processor time of all its processes, including their start."""


def steps_per_round(settings: Settings) -> int:
    """Return the local steps per communication of a program with these settings."""
    return int(settings.get("period", settings.get("accumulate", 1)))


def read_orders() -> Orders:
    """Return the orders of this process, its only argument."""
    return Orders(**json.loads(sys.argv[1]))


def run(orders: Orders, step: Callable[[], None]) -> NoReturn:
    """Run all rounds, write the result, and exit. Processes that the worker started end with the namespace."""
    counter = Path(f"/sys/class/net/{orders.interface}/statistics/tx_bytes")
    ends, sent = [], []
    orders.meet("start")
    started = time.monotonic()
    for _ in range(orders.rounds):
        step()
        ends.append(time.monotonic() - started)
        sent.append(int(counter.read_text(encoding="utf-8")))
    result = Result(ends=ends, sent_bytes=sent, cpu_s=_namespace_cpu_s())
    orders.result_file.write_text(json.dumps(asdict(result)))
    orders.meet("end")
    # With an orderly shutdown, threads of the libraries abort now and then.
    os._exit(0)


def _namespace_cpu_s() -> float:
    """Return the CPU seconds of all processes in this network namespace: some rivals have several."""
    own, ticks = os.stat("/proc/self/ns/net").st_ino, 0
    for process in Path("/proc").glob("[0-9]*"):
        # One that ended meanwhile.
        with contextlib.suppress(OSError):
            if (process / "ns/net").stat().st_ino == own:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[_UTIME]) + int(fields[_UTIME + 1])
    return ticks / os.sysconf("SC_CLK_TCK")
