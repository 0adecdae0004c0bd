"""Measures how speed and memory of the simulator grow with the number of peers.

    python -m tools.scale                                  10 to 10,000 peers, quant-sgp on a one-peer graph
    python -m tools.scale --algorithm sgp --graph ring     another algorithm or graph; both may be repeated
    python -m tools.scale --peers 100000 --rounds 3        as many peers as have been tried
    python -m tools.scale --peers 1000 --profile           where the time goes

The model is an MLP 20-64-10 (1,994 parameters) on points around centres, 20 samples a peer, all peers trained as one
batch. Each measurement is a process of its own with one thread. Times are CPU seconds, so that other work on the
machine matters little. Speed is that of the rounds between the first and the last one, evaluation left out; memory is
the growth of the resident set over a simulation of four peers, which has everything loaded that is needed once.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from peer.config.options import Config
from peer.gossip.base import Memory
from tools.grid import Program

PEER_ROUNDS = 8_000
"""Peers × rounds of a measurement, unless --rounds is given: some ten seconds."""
SAMPLES_OF_A_PEER = 20
PROGRAM = Program.named("scale")
CODED = {"moniqua": ("compressor.kind=modulo", "compressor.bits=4", "algorithm.theta=constant")}
"""Settings that an algorithm needs besides the defaults."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One simulation."""

    peers: int
    stacked: bool
    algorithm: str
    graph: str
    rounds: int
    parameters: int
    setup_s: float
    """CPU seconds in which data, graph and all peers are built."""
    peer_rounds_per_s: float
    """Peers × rounds in a second of CPU time."""
    memory_bytes_per_peer: float
    """Memory at the end of the run."""
    peak_bytes_per_peer: float
    """Memory at the worst moment, setup included."""
    model_bytes: int
    """Size of one vector of parameters, to compare with."""
    messages_per_peer: float
    """Messages in a round."""


def main() -> int:
    arguments = PROGRAM.parse(__doc__)
    modes = {"both": (False, True), "stacked": (True,), "one-by-one": (False,)}[arguments.mode]
    if arguments.here:
        (peers,), (stacked,), (algorithm,), (graph,) = arguments.peers, modes, arguments.algorithm, arguments.graph
        settings = [f"algorithm.name={algorithm}", f"graph.kind={graph}", *CODED.get(algorithm, ()), *arguments.set]
        print(json.dumps(asdict(measure(peers, arguments.rounds, stacked, settings, profile=arguments.profile))))
        return 0
    found = []
    for algorithm, graph, stacked in itertools.product(arguments.algorithm, arguments.graph, modes):
        for peers in arguments.peers:
            found.append(_in_own_process(peers, algorithm, graph, stacked, arguments))
            if arguments.json:
                print(json.dumps(asdict(found[-1])), flush=True)
            else:
                print(f"{algorithm} on {graph}, {peers} peers {_mode(stacked)}: done", file=sys.stderr, flush=True)
    if not arguments.json:
        print_table(found)
    return 0


def measure(peers: int, rounds: int | None, stacked: bool, settings: list[str], *, profile: bool) -> Measurement:
    """Return speed and memory of a simulation in this process."""
    from peer.node.participant import Participant
    from peer.records import RoundRecord
    from peer.simulate.rounds import Simulator

    rounds = rounds or max(5, PEER_ROUNDS // peers)

    def job(count: int, samples: int) -> Config:
        return PROGRAM.config(f"run.rounds={count}", f"training.task_options.samples={samples}", *settings)

    Simulator(job(3, 4 * SAMPLES_OF_A_PEER), Path(), num_peers=4, stacked=stacked).run()
    before = _resident_bytes("VmRSS")

    started = time.process_time()
    left = {1: peers, rounds - 1: peers}
    passed: dict[int, float] = {}
    profiler = cProfile.Profile()

    def after_round(participant: Participant, record: RoundRecord) -> None:
        done = record.round + 1
        if done in left:
            left[done] -= 1
            if left[done] == 0:
                passed[done] = time.process_time()
                # The profile covers the timed rounds alone, without setup and evaluation.
                if profile:
                    profiler.enable() if done == 1 else profiler.disable()

    config = job(rounds, peers * SAMPLES_OF_A_PEER)
    simulator = Simulator(config, Path(), num_peers=peers, stacked=stacked, after_round=after_round)
    setup_s = time.process_time() - started
    simulator.run()
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(35)
    size = simulator.trainer.layout.size
    schedule = simulator.setup.schedule
    messages = schedule.messages_per_round
    if simulator.participants[0].algorithm.spec.memory is Memory.REPLICAS:
        messages = schedule.replica_messages_per_round
    return Measurement(
        peers=peers,
        stacked=stacked,
        algorithm=config.algorithm.name,
        graph=schedule.name,
        rounds=rounds,
        parameters=size,
        setup_s=setup_s,
        peer_rounds_per_s=peers * (rounds - 2) / (passed[rounds - 1] - passed[1]),
        memory_bytes_per_peer=(_resident_bytes("VmRSS") - before) / peers,
        peak_bytes_per_peer=(_resident_bytes("VmHWM") - before) / peers,
        model_bytes=4 * size,
        messages_per_peer=messages / peers,
    )


def print_table(found: list[Measurement]) -> None:
    """Print the measurements as a table in Markdown."""
    print(f"{found[0].parameters:,} parameters ({found[0].model_bytes / 1e3:.0f} kB a model)\n")
    print(
        "| algorithm | graph | peers | trained | messages a peer | rounds | setup, s | peer-rounds / s | kB a peer"
        " | peak kB a peer |"
    )
    print("| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for m in found:
        print(
            f"| {m.algorithm} | {m.graph} | {m.peers:,} | {_mode(m.stacked)} | {m.messages_per_peer:g} | {m.rounds} | "
            f"{m.setup_s:.1f} | {m.peer_rounds_per_s:,.0f} | {m.memory_bytes_per_peer / 1e3:,.0f} | "
            f"{m.peak_bytes_per_peer / 1e3:,.0f} |"
        )


def _in_own_process(
    peers: int, algorithm: str, graph: str, stacked: bool, arguments: argparse.Namespace
) -> Measurement:
    command = [sys.executable, "-m", "tools.scale", "--here", "--peers", str(peers)]
    command += ["--mode", _mode(stacked).replace(" ", "-"), "--algorithm", algorithm, "--graph", graph]
    command += ["--rounds", str(arguments.rounds)] if arguments.rounds else []
    command += [word for change in arguments.set for word in ("--set", change)]
    command += ["--profile"] if arguments.profile else []
    # A simulation of small models is fastest with one thread.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def _mode(stacked: bool) -> str:
    return "stacked" if stacked else "one by one"


def _resident_bytes(field: str) -> int:
    """Return VmRSS or VmHWM, its peak, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("scale: /proc/self/status does not say how much memory is resident; this tool needs Linux")


if __name__ == "__main__":
    raise SystemExit(main())
