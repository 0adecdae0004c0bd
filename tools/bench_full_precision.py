"""Measures a training step of ResNet-20 with EvoNorm-S0 in float32 and in bfloat16.

    python tools/bench_full_precision.py [--sizes 16 32] [--batch 32] [--runs 21] [--isa NAME ...] [--json FILE]

On one core. Ways to compute the same step (forward pass, loss, backward pass):

    composed    float32, with EvoNorm-S0 of torch operators, as it is without the native kernels
    float32     `training.precision = "float32"`
    bfloat16    `training.precision = "bfloat16"`

They take turns, so that a busy machine disturbs all alike. A time is the median CPU time of the thread; by how much a
way is faster than `composed` is the median of the turns' ratios. `--isa` measures what oneDNN does on lesser
processors, by its limits ONEDNN_MAX_CPU_ISA; torch's own operators keep their instructions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch

from peer.native import available
from peer.run.machine import processor_name
from peer.train.bfloat16 import compute_in_bfloat16_
from peer.train.full_precision import norms
from peer.train.full_precision.evonorm import composed
from peer.train.models.resnet import resnet20
from peer.train.threads import use_one_thread

WAYS = ("composed", "float32", "bfloat16")
WARM_UP = 2


class Step:
    """One training step, computed in one way."""

    def __init__(self, way: str, size: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = resnet20()
        if way == "bfloat16":
            compute_in_bfloat16_(self.model)
        self.parameters = list(self.model.parameters())
        self.inputs, self.labels = torch.randn(batch, 3, size, size), torch.arange(batch) % 10
        self.way = way

    def seconds(self) -> float:
        """CPU time of this thread for one step."""
        other_norm = mock.patch.object(norms, "evonorm_s0", composed)
        with other_norm if self.way == "composed" else nullcontext():
            start = time.thread_time()
            loss = torch.nn.functional.cross_entropy(self.model(self.inputs), self.labels)
            torch.autograd.grad(loss, self.parameters)
            return time.thread_time() - start


def measure(size: int, batch: int, runs: int) -> dict[str, dict[str, float]]:
    """Return median milliseconds, and the speed-up over `composed`, of each way."""
    steps = {way: Step(way, size, batch) for way in WAYS}
    turns = [{way: step.seconds() for way, step in steps.items()} for _ in range(WARM_UP + runs)][WARM_UP:]
    return {
        way: {
            "milliseconds": 1e3 * statistics.median(turn[way] for turn in turns),
            "faster_by": statistics.median(turn["composed"] / turn[way] for turn in turns),
        }
        for way in WAYS
    }


def report(figures: dict[int, dict[str, dict[str, float]]]) -> str:
    """Return the table."""
    lines = ["| images | way | ms a step | faster than composed by |", "| --- | --- | ---: | ---: |"]
    for size, ways in figures.items():
        for way, own in ways.items():
            faster = "–" if way == "composed" else f"{own['faster_by']:.2f}×"
            lines.append(f"| {size}×{size} | {way} | {own['milliseconds']:.1f} | {faster} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--isa", nargs="+", help="measure in processes of their own under these limits of oneDNN")
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args()
    if chosen.isa:
        rest = ["--sizes", *map(str, chosen.sizes), "--batch", str(chosen.batch), "--runs", str(chosen.runs)]
        for isa in chosen.isa:
            print(f"\n{isa}", flush=True)
            command = [sys.executable, __file__, *rest]
            subprocess.run(command, env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa}, check=True)
        return 0
    use_one_thread()
    kernels = "in use" if available() else "missing"
    print(f"{processor_name()}, torch {torch.__version__}, native kernels {kernels}", file=sys.stderr)
    figures = {size: measure(size, chosen.batch, chosen.runs) for size in chosen.sizes}
    print(report(figures))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps({"processor": processor_name(), "steps": figures}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
