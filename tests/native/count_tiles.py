"""Counts the tile instructions that a training step of each network takes in the tier of AMX, with the software model.

    python -m tests.native.count_tiles [NETWORK ...] [--json FILE]

The networks are those of `tools/bench_eight_bit.py`. As Intel publishes them, a product of full tiles takes 16 cycles
and a load at least 8, side by side. Lines are those of 64 bytes that loads and stores touch; missed are those that a
first-level cache does not hold (`amx_model.c`). From these the time on a processor with AMX can be argued, but not how
long a missed line takes. The last column has the instructions that weight gradients would take in vectors of AVX-512, a
cycle each at best. `time_for_amx.py` measures what can be measured of such a step without AMX.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer import native
from peer.train.eight_bit import kernels, linear_kernels
from peer.train.threads import use_one_thread
from tests.native import amx_model
from tools.bench_eight_bit import NETWORKS, Step

DEFAULT = ("mlp-512", "linear-1024", "resnet-20-batchnorm", "resnet-18", "vgg-11")
FIELDS = [field[0] for field in amx_model.AmxCounts._fields_]
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
"""Other kernels that use tiles count as parts of their own."""


class Counting:
    """The native kernels, and what those with products took."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}
        self.vectors = 0
        self._counts = ctypes.CDLL(None).amx_model_counts
        self._counts.restype = amx_model.AmxCounts

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(native.lib, name)
        if not name.startswith("eb_"):
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
            if after.configurations > before.configurations:
                part = self.found.setdefault(PARTS.get(name, name), dict.fromkeys(FIELDS, 0))
                for field in FIELDS:
                    part[field] += getattr(after, field) - getattr(before, field)
            return result

        return counted


def count(network: str) -> Counting:
    """Return what one step takes, after one that settles ranges: in vectors, which are faster than the model."""
    step = Step(NETWORKS[network], "int8", NETWORKS[network].batch)
    native.use_tier("AVX-512")
    step()
    native.use_tier("AMX")
    counting = Counting()
    kernels.lib = linear_kernels.lib = counting
    step()
    kernels.lib = linear_kernels.lib = native.lib
    return counting


def counts_of(networks: Sequence[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the counts of each part of each network, from a process that has the model."""
    found: dict[str, dict[str, dict[str, int]]] = amx_model.answer(
        "tests.native.count_tiles", amx_model.modelled_kernels, networks
    )
    return found


def products(counts: dict[str, int]) -> int:
    """Return how many products of tiles were counted, of bytes and of pairs."""
    return counts["byte_products"] + counts["pair_products"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--answer", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    networks = chosen.networks or DEFAULT
    if chosen.answer:
        assert native.tier() == "AMX", native.tier()
        use_one_thread()
        found = {}
        for network in networks:
            counting = count(network)
            found[network] = counting.found
            if "weight gradients" in found[network]:
                found[network]["weight gradients"]["vectors"] = counting.vectors
        chosen.answer.write_text(json.dumps(found))
        return 0
    found = counts_of(networks)
    print("| network | product | configurations | loads | stores | products | lines | missed lines | in vectors |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for network, parts in found.items():
        for part, of in parts.items():
            numbers = (of["configurations"], of["loads"], of["stores"], products(of), of["lines"], of["missed_lines"])
            vectors = f"{of['vectors']:,}" if "vectors" in of else ""
            print(f"| {network} | {part} | {' | '.join(f'{number:,}' for number in numbers)} | {vectors} |")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
