"""Measures, on a processor without AMX, what tells how long a step in 8 bits takes in the tier of AMX.

    python -m tests.native.time_for_amx [NETWORK ...] [--seconds 6] [--json FILE]

The networks are those of `tools/bench_eight_bit.py`, on one core. What such steps compute means nothing, but ranges
stay finite, and no arithmetic takes longer than in a true step. Each is timed twice:

- around tiles: tile instructions are left out. In the place of a tile's store are sixteen of vectors, so that memory is
  mapped where it would be (`amx_left_out.h`);
- paced: in their place are instructions on vectors that read the same memory and take about as long (`amx_paced.h`).

It takes a processor with AVX-512, and no AMX; for the second, one that multiplies and adds in 4 cycles, as Zen 4 does.
Beside them stands what tiles were to compute, by the software model (`count_tiles.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from peer import native
from peer.run_summary import processor_name
from peer.train.threads import use_one_thread
from tests.native import amx_model, count_tiles
from tools.bench_eight_bit import NETWORKS, Step

FEWEST = 5
WAYS: dict[str, Callable[[Path], Path]] = {
    "around": amx_model.kernels_without_tiles,
    "paced": amx_model.paced_kernels,
}
Times = dict[str, list[float]]
"""CPU time of each step of each network, in seconds."""


def times(network: str, seconds: float) -> list[float]:
    """Return the CPU times of steps that take so many seconds together, after two that settle ranges. Raises
    FloatingPointError if these become infinite, or no numbers: kernels take other ways then."""
    step = Step(NETWORKS[network], "int8", NETWORKS[network].batch)
    step()
    step()
    found: list[float] = []
    end = time.monotonic() + seconds
    while len(found) < FEWEST or time.monotonic() < end:
        found.append(step.seconds())
    for name, buffer in step.model.named_buffers():
        if not torch.isfinite(buffer).all():
            raise FloatingPointError(f"{network}: {name} is not finite")
    return found


def times_of(networks: Sequence[str], seconds: float, way: str) -> Times:
    """Return the times of each network, from a process with the kernels of one of WAYS."""
    words = ["--seconds", str(seconds), *networks]
    found: Times = amx_model.answer("tests.native.time_for_amx", WAYS[way], words)
    return found


def figures(network: str, found: dict[str, Times], parts: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return the row of a network."""
    row: dict[str, Any] = {"network": network, "processor": processor_name()}
    for way, steps in found.items():
        own = steps[network]
        row[way] = {"steps": len(own), "median_ms": 1e3 * statistics.median(own), "least_ms": 1e3 * min(own)}
    return row | {field: sum(part[field] for part in parts.values()) for field in count_tiles.FIELDS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--seconds", type=float, default=6.0, help="for each network and each way (default: 6)")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--answer", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    networks = chosen.networks or list(NETWORKS)
    if chosen.answer:
        assert native.tier() == "AMX", native.tier()
        use_one_thread()
        torch.set_flush_denormal(True)
        chosen.answer.write_text(json.dumps({network: times(network, chosen.seconds) for network in networks}))
        return 0
    found = {way: times_of(networks, chosen.seconds, way) for way in WAYS}
    counts = count_tiles.counts_of(networks)
    rows = [figures(network, found, counts[network]) for network in networks]
    print(f"{processor_name()}, without AMX; medians and least times\n")
    print("| network | around tiles | least | paced | least | tile products | tile loads | missed lines |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        spent = " | ".join(f"{row[way]['median_ms']:.2f} ms | {row[way]['least_ms']:.2f} ms" for way in WAYS)
        products = count_tiles.products(row)
        print(f"| {row['network']} | {spent} | {products:,} | {row['loads']:,} | {row['missed_lines']:,} |")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
