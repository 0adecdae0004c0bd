"""Measures how long a step in 8 bits takes in the tier of AMX with its tile instructions left out.

    python -m tests.native.time_around_tiles [NETWORK ...] [--seconds 6]

The networks are those of `tools/bench_eight_bit.py`, on one core. What such steps compute means nothing (see
`amx_left_out.h`); their time is that of everything around tile instructions, whose number `count_tiles.py` tells. It
takes a processor with AVX-512, and no AMX.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from peer import native
from peer.train.threads import use_one_thread
from tests.native import amx_model
from tools.bench_eight_bit import ENVIRONMENT, NETWORKS, Step

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


def processor() -> str:
    """Return the name that the kernel gives to this processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--seconds", type=float, default=6.0, help="for each network (default: 6)")
    parser.add_argument("--left-out", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if not chosen.left_out:
        with tempfile.TemporaryDirectory() as folder:
            library = amx_model.kernels_without_tiles(Path(folder))
            order = [sys.executable, "-m", "tests.native.time_around_tiles", "--left-out", *sys.argv[1:]]
            return subprocess.run(order, env={**os.environ, **ENVIRONMENT, "LD_PRELOAD": str(library)}).returncode
    assert native.tier() == "AMX", native.tier()
    use_one_thread()
    torch.set_flush_denormal(True)
    print(f"{processor()}, tile instructions left out\n")
    print("| network | steps | median | least |")
    print("| --- | ---: | ---: | ---: |")
    for network in chosen.networks or NETWORKS:
        found = times(network, chosen.seconds)
        print(
            f"| {network} | {len(found)} | {1e3 * statistics.median(found):.2f} ms | {1e3 * min(found):.2f} ms |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
