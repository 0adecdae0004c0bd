"""Measures how a run starts, beside the import of torch alone: a lone peer, and `sotto up`.

    python tools/bench_start.py [--repeats 5] [--peers 8] [--json FILE]

For each repeat these take turns, so that a busy machine disturbs all alike:

    import torch         `python -c "import torch"`
    sotto run            one peer without neighbours, to its first round (task `synthetic`, 270,000 parameters)
    sotto up             all peers of the same job, from the command to the first round of the last of them
    sotto up, default    the same with the job that `sotto up` runs by default

Seconds are those on the clock until the row of the round is in the peer's metrics; CPU is user and system time of all
processes until then. Ratios are medians over the repeats, each within one repeat. Memory is the kernel's figure at that
moment (`smaps_rollup`): resident, its proportional share (pages that n processes share count as 1/n), and private,
which nobody shares; of `sotto up`, the mean of a peer. Bytecode is read from files, as in an installation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from peer.state.metrics import MetricsStore

_POLL_S = 0.01
_TIMEOUT_S = 300.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_JOB = (
    "training.task=synthetic",
    "training.task_options.parameters=270000",
    "training.task_options.samples=256",
    "evaluation.every_rounds=0",
)
_ENDLESS = ("run.rounds=1000000",)


@dataclass(frozen=True)
class Memory:
    """Memory of one process, in MB (10^6 bytes)."""

    resident: float
    share: float
    private: float


@dataclass(frozen=True)
class Start:
    """One start."""

    seconds: float
    cpu_s: float
    memory: Memory


def memory(rollup: Path) -> Memory:
    """Return the memory of a process from its `smaps_rollup`."""
    text = rollup.read_text()
    sizes = {name: int(kib) * 1024 / 1e6 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    return Memory(sizes["Rss"], sizes["Pss"], sizes["Private_Clean"] + sizes["Private_Dirty"])


def rollup_of(pid: int) -> Path:
    """Return the kernel's file on the present memory of a process."""
    return Path(f"/proc/{pid}/smaps_rollup")


def family(pid: int) -> list[int]:
    """Return a process and all of its descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found.extend(child for child, parent in parents.items() if parent == each)
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the user and system time of processes and of the children they have waited for."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            # utime, stime, cutime and cstime are the fields 14 to 17.
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS_PER_S


@contextmanager
def started(arguments: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Within this context the process runs."""
    with open(folder / "output.txt", "ab") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder
        )
    try:
        yield process
    finally:
        # The second signal ends `sotto up` and its peers at once.
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                process.send_signal(number)
                process.wait(_TIMEOUT_S if number == signal.SIGKILL else 2.0)
                break


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until the condition holds, towards which a process works."""
    until = time.monotonic() + _TIMEOUT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"no first round:\n{(folder / 'output.txt').read_text()[-2000:]}")
        time.sleep(_POLL_S)


def has_round(state: Path) -> bool:
    """Whether a peer has written the row of a round."""
    if not (state / "metrics.sqlite").exists():
        return False
    store = MetricsStore(state / "metrics.sqlite", read_only=True)
    try:
        return bool(store.rounds())
    finally:
        store.close()


def import_torch(folder: Path) -> Start:
    """Measure the import alone."""
    program = "import torch; print(open('/proc/self/smaps_rollup').read(), file=open('smaps', 'w'))"
    begin, before = time.monotonic(), os.times()
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)
    seconds, after = time.monotonic() - begin, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Start(seconds, cpu, memory(folder / "smaps"))


def lone_peer(folder: Path) -> Start:
    """Measure `sotto run` of one peer."""
    settings = [word for each in (*_JOB, *_ENDLESS) for word in ("--set", each)]
    command = ["-m", "peer", "init", "cluster", "kits", "--peers", "1", *settings]
    subprocess.run([sys.executable, *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    begin = time.monotonic()
    with started(["-m", "peer", "run", "--config", "kits/peer-0/peer.toml"], folder) as process:
        wait_for(lambda: has_round(folder / "kits" / "peer-0" / "state"), process, folder)
        return Start(time.monotonic() - begin, cpu_seconds([process.pid]), memory(rollup_of(process.pid)))


def all_peers(folder: Path, num_peers: int, job: Sequence[str]) -> Start:
    """Measure `sotto up`."""
    settings = [word for each in (*job, *_ENDLESS) for word in ("--set", each)]
    states = [folder / "runs" / "start" / "peers" / f"peer-{index}" / "state" for index in range(num_peers)]
    command = ["-m", "peer", "up", "--peers", str(num_peers), "--name", "start", "--no-live", *settings]
    begin = time.monotonic()
    with started(command, folder) as process:
        waiting = list(reversed(states))

        def all_have_begun() -> bool:
            while waiting and has_round(waiting[-1]):
                waiting.pop()
            return not waiting

        wait_for(all_have_begun, process, folder)
        seconds, pids = time.monotonic() - begin, family(process.pid)
        cpu = cpu_seconds(pids)
        peers = [pid for pid in pids if b"--config" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        each = [asdict(memory(rollup_of(pid))) for pid in peers]
        return Start(seconds, cpu, Memory(**{key: statistics.mean(one[key] for one in each) for key in each[0]}))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write every start to this file too")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    systems: dict[str, Callable[[Path], Start]] = {
        "import torch": import_torch,
        "sotto run": lone_peer,
        f"sotto up --peers {arguments.peers}": lambda folder: all_peers(folder, arguments.peers, _JOB),
        "sotto up, default": lambda folder: all_peers(folder, arguments.peers, ()),
    }
    starts: dict[str, list[Start]] = {name: [] for name in systems}
    # The first turn only fills caches: of files, and of bytecode.
    for repeat in range(arguments.repeats + 1):
        for name, measure in systems.items():
            with tempfile.TemporaryDirectory(prefix="sotto-start-") as directory:
                start = measure(Path(directory))
            if repeat:
                starts[name].append(start)
    bare = starts["import torch"]
    print(f"{'median of ' + str(arguments.repeats):20} seconds      CPU  | / import torch: seconds   CPU "
          " | MB resident   share  private")  # fmt: skip
    for name, found in starts.items():
        ratios = [
            statistics.median(getattr(one, of) / getattr(base, of) for one, base in zip(found, bare, strict=True))
            for of in ("seconds", "cpu_s")
        ]
        seconds, cpu = (statistics.median(getattr(one, of) for one in found) for of in ("seconds", "cpu_s"))
        kinds = [(one.memory.resident, one.memory.share, one.memory.private) for one in found]
        sizes = [statistics.median(kind) for kind in zip(*kinds, strict=True)]
        print(
            f"{name:20} {seconds:6.2f} s {cpu:6.2f} s  | {ratios[0]:22.2f} {ratios[1]:6.2f} "
            f" | {sizes[0]:11.0f} {sizes[1]:7.0f} {sizes[2]:8.0f}"
        )
    if arguments.json is not None:
        rows = {name: [asdict(start) for start in found] for name, found in starts.items()}
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
