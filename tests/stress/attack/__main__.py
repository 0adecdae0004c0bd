"""The command: attacks a cluster of its own and prints a table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.stress import attack
from tests.stress.attack.attacker import Attacker
from tests.stress.attack.attacks import ATTACKS
from tests.stress.attack.cluster import Cluster
from tests.stress.attack.meaning import command
from tests.stress.attack.meaning.lies import LIES


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attack."""

    attack: str
    attempts: int
    told: str
    """What the attacker was told most often."""
    before_ms: float
    """Median duration of a round over the four honest peers."""
    during_ms: float
    after_ms: float
    slowest_before_ms: float
    slowest_during_ms: float
    memory_mb: float
    """Of the victim, the most during the attack."""
    handles: int
    log_bytes: int
    """What the victim wrote into its log meanwhile."""


def attack_now(name: str, kits: Path, port: int, seconds: float) -> None:
    """Run one attack in this process and print what it met with as JSON."""
    os.nice(10)
    me = Attacker(kits, port, time.monotonic() + seconds)

    async def limited() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + 2.0):
                await ATTACKS[name](me)

    asyncio.run(limited())
    print(json.dumps({"attempts": me.attempts, "reasons": me.reasons}), flush=True)
    os._exit(0)  # gRPC takes its time with hundreds of half-open calls.


def measure(cluster: Cluster, name: str, seconds: float) -> Row:
    """Attack once, with a quiet span before and after."""
    offsets = cluster.clock_offsets()
    begin = time.monotonic()
    time.sleep(seconds)
    log_before = cluster.figures()[2]
    memory, handles, log = 0.0, 0, 0
    attacked = time.monotonic()
    command = [sys.executable, "-m", "tests.stress.attack", "--attack-now", name]
    command += [str(cluster.kits), str(cluster.port), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as attacker:
        while attacker.poll() is None:
            now = cluster.figures()
            memory, handles, log = max(memory, now[0]), max(handles, now[1]), now[2]
            time.sleep(0.1)
            if time.monotonic() > attacked + seconds + 120:
                attacker.kill()
        assert attacker.stdout is not None
        assert attacker.stderr is not None
        output, trouble = attacker.stdout.read(), attacker.stderr.read()
    over = time.monotonic()
    time.sleep(seconds + 1.0)  # The peers write their figures twice a second.
    failed = json.dumps({"attempts": 0, "reasons": {f"the attacker failed: {trouble[-300:]!r}": 1}})
    met = json.loads(output or failed)
    before, during = cluster.durations_ms(begin, attacked, offsets), cluster.durations_ms(attacked, over, offsets)
    return Row(
        attack=name,
        attempts=met["attempts"],
        told=max(met["reasons"], key=met["reasons"].get, default="nothing"),
        before_ms=statistics.median(before),
        during_ms=statistics.median(during),
        after_ms=statistics.median(cluster.durations_ms(over, over + seconds, offsets)),
        slowest_before_ms=max(before),
        slowest_during_ms=max(during),
        memory_mb=memory,
        handles=handles,
        log_bytes=log - log_before,
    )


def describe(row: Row) -> str:
    """Return a row as one line."""
    rounds = f"{row.before_ms:.0f} / {row.during_ms:.0f} / {row.after_ms:.0f} ms"
    slowest = f"{row.slowest_before_ms:.0f} / {row.slowest_during_ms:.0f}"
    cost = f"{row.memory_mb:.0f} MB, {row.handles} handles, {row.log_bytes} B of log"
    return f"{row.attack:<18} {row.attempts:>6} x   round {rounds}, slowest {slowest}   {cost}   {row.told}"


def main() -> None:
    """Attack a cluster of its own and print a table."""
    parser = argparse.ArgumentParser(description=(attack.__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each attack lasts")
    parser.add_argument("--only", nargs="+", choices=[*ATTACKS, *LIES], help="these attacks alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--meaning", action="store_true", help="lies of a member, rather than attacks on the transport")
    parser.add_argument("--release", type=Path, metavar="PATH", help="--meaning: the installation of the honest peers")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="--meaning: leave the peers' folders there")
    parser.add_argument("--attack-now", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.meaning:
        command.main(arguments)
        return
    if arguments.attack_now:
        name, kits, port, seconds = arguments.attack_now
        attack_now(name, Path(kits), int(port), float(seconds))
        return
    rows = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="sotto-attack-") as folder, Cluster(Path(folder)) as cluster:
        cluster.wait_for_round(20)
        for name in arguments.only or ATTACKS:
            row = measure(cluster, name, arguments.seconds)
            rows.append(row)
            print(describe(row), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
