"""Predicts rounds and time to an accuracy for numbers of peers that nobody can simulate, and says how wrong it may be.

    python -m tools.predict_scale                                         sgp and quant-sgp on three graphs over LTE
    python -m tools.predict_scale --algorithm sgp --graph ring --link dsl
    python -m tools.predict_scale --simulate 8 --simulate 64 --simulate 512 --peers 10000

Points around centres, 100 samples a peer with label skew 0.8, constant learning rate. Sizes given with --simulate are
simulated until the peers are on average as accurate as --accuracy; for --peers, the power law of
`peer.lab.scaling` is extrapolated. Seconds are rounds times the seconds of a round on the links, which the link
model of studies computes for any size: who sends to whom and how long that takes, with messages weighed at eight peers.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from peer.config.options import Config
from peer.gossip.base import Memory
from peer.lab.scaling import LEAST_SIZES, PowerLaw, Simulated, errors_beyond, fit, mixing_rounds, rounds_to
from peer.lab.study.predict import link_model, round_seconds, weigh
from peer.links.profiles import find
from peer.run.plan import algorithm_spec, build_schedule
from tools.grid import Program

SAMPLES_OF_A_PEER = 100
WEIGHED_PEERS = 8
PROGRAM = Program.named("predict_scale")
OWN = {"sgp": ("compressor.kind=none",)}
HEAD = (
    "| algorithm | graph | peers | mixing, rounds | rounds, simulated | rounds, by the law | error | s a round | time |"
)


def main() -> int:
    arguments = PROGRAM.parse(__doc__)
    print(HEAD)
    print("| --- | --- |" + " ---: |" * 7)
    laws = []
    for algorithm, graph in itertools.product(arguments.algorithm, arguments.graph):
        own = [f"algorithm.name={algorithm}", f"graph.kind={graph}", *OWN.get(algorithm, ()), *arguments.set]
        laws.append((algorithm, graph, predicted(own, arguments)))
    for algorithm, graph, law in laws:
        if law is not None:
            print(f"\n{algorithm} on {graph}: rounds = {law.factor:.1f} · (mixing rounds)^{law.exponent:.3f}", end="")
    print()
    return 0


def predicted(own: list[str], arguments: argparse.Namespace) -> PowerLaw | None:
    """Print the rows of an algorithm on a graph; return the law, if the target was reached often enough for one."""

    def job(peers: int) -> Config:
        samples = f"training.task_options.samples={peers * SAMPLES_OF_A_PEER}"
        return PROGRAM.config(f"run.rounds={arguments.rounds}", samples, *own)

    weight = weigh(job(WEIGHED_PEERS), WEIGHED_PEERS).frame_bytes

    def row(peers: int, simulated: float | None, by_law: float | None, error: float | None) -> None:
        config = job(peers)
        schedule, spec = build_schedule(config, Path(), peers), algorithm_spec(config)
        round_s = round_seconds(
            schedule, link_model(find(arguments.link)), arguments.step_seconds, weight,
            to_all=spec.memory is Memory.REPLICAS, exchanges=spec.exchanges, rounds=max(4, schedule.cycle_rounds + 1),
        )  # fmt: skip
        rounds = simulated if simulated is not None else by_law
        cells = [
            config.algorithm.name, schedule.name, f"{peers:,}", f"{mixing_rounds(schedule):,.3g}", _whole(simulated),
            _whole(by_law), "" if error is None else f"{100 * error:+.0f} %", f"{round_s:.3f}",
            "" if rounds is None else _time(rounds * round_s),
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)

    points = []
    for peers in sorted(arguments.simulate):
        found = rounds_to(job(peers), peers, arguments.accuracy)
        if found is None:
            print(f"{own[0]}, {peers} peers: not in {arguments.rounds} rounds", file=sys.stderr)
            continue
        mixing = mixing_rounds(build_schedule(job(peers), Path(), peers))
        points.append(Simulated(num_peers=peers, mixing_rounds=mixing, rounds=found))
    errors = errors_beyond(points)
    for point in points:
        error = errors.get(point.num_peers)
        row(point.num_peers, point.rounds, None if error is None else point.rounds * (1 + error), error)
    if len(points) < LEAST_SIZES:
        return None
    law = fit(points)
    for peers in arguments.peers:
        row(peers, None, law.rounds(mixing_rounds(build_schedule(job(peers), Path(), peers))), None)
    return law


def _whole(rounds: float | None) -> str:
    return "" if rounds is None else f"{rounds:,.0f}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    raise SystemExit(main())
