"""Counts the tile instructions that a training step of each network takes in the tier of AMX, with the software model.

    python -m tests.native.count_tiles [NETWORK ...]

The networks are those of `tools/bench_eight_bit.py`. As Intel publishes them, a product of full tiles takes 16 cycles
and a load at least 8, side by side. Lines are those of 64 bytes that loads and stores touch; missed are those that a
first-level cache does not hold (`amx_model.c`). From these the time on a processor with AMX can be argued, but not how
long a missed line takes. The last column has the instructions that weight gradients would take in vectors of AVX-512, a
cycle each at best. How long everything around tiles takes, `time_around_tiles.py` measures.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from peer import native
from peer.train.eight_bit import kernels, linear_kernels
from tests.native import amx_model
from tools.bench_eight_bit import NETWORKS, Step

DEFAULT = ("mlp-512", "linear-1024", "resnet-20-batchnorm", "resnet-18", "vgg-11")
MODELLED = "--modelled"
"""Says that the model stands before the kernels already."""
PARTS = {
    "eb_linear_codes": "forward",
    "eb_linear_floats": "forward",
    "eb_linear_product": "forward",
    "eb_linear_backward": "input gradients",
    "eb_linear_weight_gradient": "weight gradients",
    "eb_conv_forward": "forward",
    "eb_conv_batch_norm_forward": "forward",
    "eb_conv_backward": "input gradients",
    "eb_conv_input_gradient": "input gradients",
    "eb_conv_weight_gradient": "weight gradients",
}


class Counting:
    """The native kernels, and what those with products took."""

    def __init__(self) -> None:
        self.found: dict[str, list[int]] = defaultdict(lambda: [0] * len(amx_model.AmxCounts._fields_))
        self.vectors = 0
        self._counts = ctypes.CDLL(None).amx_model_counts
        self._counts.restype = amx_model.AmxCounts

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(native.lib, name)
        if name not in PARTS:
            return kernel

        def counted(*values: Any) -> Any:
            if name == "eb_conv_weight_gradient" and not values[0].depthwise:
                s = values[0]
                pixels = (s.samples + 1) // 2 * s.result_height * s.result_width
                self.vectors += s.rows * s.columns * s.channels * pixels * -(-s.results // 16)
            if name == "eb_linear_weight_gradient":
                rows, outputs, inputs = values[3:6]
                self.vectors += (rows + 1) // 2 * outputs * -(-inputs // 16)
            before = self._counts()
            result = kernel(*values)
            after = self._counts()
            for index, (field, _) in enumerate(amx_model.AmxCounts._fields_):
                self.found[PARTS[name]][index] += getattr(after, field) - getattr(before, field)
            return result

        return counted


def count(network: str) -> Counting:
    """Return what one step takes, after one that settles ranges."""
    step = Step(NETWORKS[network], "int8", NETWORKS[network].batch)
    step()
    counting = Counting()
    kernels.lib = linear_kernels.lib = counting
    step()
    kernels.lib = linear_kernels.lib = native.lib
    return counting


def main() -> int:
    if MODELLED not in sys.argv:
        with tempfile.TemporaryDirectory() as folder:
            library = amx_model.modelled_kernels(Path(folder))
            order = [sys.executable, "-m", "tests.native.count_tiles", MODELLED, *sys.argv[1:]]
            return subprocess.run(order, env={**os.environ, "LD_PRELOAD": str(library)}).returncode
    assert native.tier() == "AMX", native.tier()
    print("| network | product | configurations | loads | stores | products | lines | missed lines | in vectors |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for network in [name for name in sys.argv[1:] if name != MODELLED] or DEFAULT:
        counting = count(network)
        for part, (configurations, loads, stores, of_bytes, of_pairs, lines, missed) in counting.found.items():
            vectors = f"{counting.vectors:,}" if part == "weight gradients" else ""
            products = of_bytes + of_pairs
            numbers = (configurations, loads, stores, products, lines, missed)
            print(f"| {network} | {part} | {' | '.join(f'{number:,}' for number in numbers)} | {vectors} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
