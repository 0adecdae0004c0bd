"""Measures how long a step in 8 bits takes in the tier of AMX with its tile instructions left out.

    python -m tests.native.time_around_tiles [NETWORK ...] [--seconds 6] [--json FILE]

The networks are those of `tools/bench_eight_bit.py`, on one core. What such steps compute means nothing, but ranges
stay finite, and no arithmetic takes longer than in a true step: see `amx_left_out.h`. Their time is that of everything
around tile instructions. In the place of a tile's store are sixteen of vectors, so that memory is mapped where it would
be. It takes a processor with AVX-512, and no AMX. Beside it stands what was left out, by the software model
(`count_tiles.py`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from peer import native
from peer.run_summary import processor_name
from peer.train.threads import use_one_thread
from tests.native import amx_model, count_tiles
from tools.bench_eight_bit import NETWORKS, Step

FEWEST = 5


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


def times_of(networks: Sequence[str], seconds: float) -> dict[str, list[float]]:
    """Return the times of each network, from a process whose kernels have no tile instructions."""
    words = ["--seconds", str(seconds), *networks]
    found: dict[str, list[float]] = amx_model.answer(
        "tests.native.time_around_tiles", amx_model.kernels_without_tiles, words
    )
    return found


def figures(network: str, found: list[float], parts: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return the row of a network."""
    total = {field: sum(part[field] for part in parts.values()) for field in count_tiles.FIELDS}
    around = {"median_ms": 1e3 * statistics.median(found), "least_ms": 1e3 * min(found)}
    return {"network": network, "processor": processor_name(), "steps": len(found), **around, **total}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--seconds", type=float, default=6.0, help="for each network (default: 6)")
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
    found = times_of(networks, chosen.seconds)
    counts = count_tiles.counts_of(networks)
    rows = [figures(network, found[network], counts[network]) for network in networks]
    print(f"{processor_name()}, tile instructions left out\n")
    print("| network | steps | median | least | tile products | tile loads | missed lines |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        products = row["byte_products"] + row["pair_products"]
        print(
            f"| {row['network']} | {row['steps']} | {row['median_ms']:.2f} ms | {row['least_ms']:.2f} ms | "
            f"{products:,} | {row['loads']:,} | {row['missed_lines']:,} |"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
