"""State that each algorithm keeps between two rounds beside the model, measured on running peers.

    python tools/state_table.py [--parameters 100000] [--json]

Every synchronous algorithm trains a few rounds on a graph that suits it; then the bytes of `Algorithm.state()` are
counted, those of x and of D-PSGD (whose whole state is x) taken off. Buffers of the transport stand apart: those that
only serve repairs (`transport_state`), and the codes that the next ones are told against (`wire.last_codes`).
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from peer.config.options import load
from peer.gossip import specs
from peer.gossip.base import AlgorithmSpec, GraphNeed
from peer.simulate.rounds import Simulator

GRAPHS = {
    GraphNeed.NONE: "ring",
    GraphNeed.COLUMN: "directed-ring",
    GraphNeed.DOUBLY: "ring",
    GraphNeed.SYMMETRIC: "ring",
    GraphNeed.COMPLETE: "complete",
    GraphNeed.SERVER: "star",
}
ROUNDS = 3
PEERS = 8


def measure(spec: AlgorithmSpec, parameters: int) -> dict[str, object]:
    """Return the bytes that a peer of the algorithm keeps after a few rounds."""
    settings = [f"algorithm.name={spec.name}", f"graph.kind={GRAPHS[spec.graph]}", f"run.rounds={ROUNDS}"]
    if spec.modulo:
        settings += ["compressor.kind=modulo", "compressor.bits=8"]
    elif spec.needs_unbiased:
        settings += ["compressor.kind=qsgd", "compressor.bits=8", "compressor.unbiased=true"]
    settings += [
        "training.task=synthetic",
        f"training.task_options.parameters={parameters}",
        "training.momentum=none",
        "algorithm.final_rounds=1",
    ]
    simulator = Simulator(load(environment={}, overrides=settings), Path(), num_peers=PEERS)
    simulator.run()
    algorithm = simulator.participants[1].algorithm
    state = sum(array.nbytes for array in algorithm.state().values())
    return {
        "algorithm": spec.name,
        "parameters": algorithm.x.size,
        "model_bytes": algorithm.x.nbytes,
        "beside_x_bytes": state - algorithm.x.nbytes,
        "transport_buffer_bytes": sum(array.nbytes for array in algorithm.transport_state().values()),
        "last_codes_bytes": 0 if (codes := simulator.participants[1].last_codes) is None else codes.nbytes,
    }


@click.command()
@click.option("--parameters", default=100_000, show_default=True, help="Size of the model.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(parameters: int, as_json: bool) -> None:
    """Print what each algorithm keeps between rounds."""
    rows = [measure(spec, parameters) for spec in specs() if not spec.asynchronous]
    base = next(row for row in rows if row["algorithm"] == "d-psgd")["beside_x_bytes"]
    assert isinstance(base, int)
    for row in rows:
        assert isinstance(row["beside_x_bytes"], int)
        row["beyond_d_psgd_bytes"] = row["beside_x_bytes"] - base
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title=f"bytes kept between rounds, {rows[0]['parameters']:,} parameters, ring of {PEERS}")
    for name in ("algorithm", "beyond D-PSGD", "in models", "for repairs", "last codes"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for row in rows:
        beyond, model, buffer = row["beyond_d_psgd_bytes"], row["model_bytes"], row["transport_buffer_bytes"]
        codes = row["last_codes_bytes"]
        assert isinstance(beyond, int)
        assert isinstance(model, int)
        table.add_row(str(row["algorithm"]), f"{beyond:,}", f"{beyond / model:.2f}", f"{buffer:,}", f"{codes:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
