"""Measures every compressor, native and in numpy, beside a copy of the same vector.

    python tools/bench_compress.py [--sizes 270000,11000000] [--runs 9] [--no-numpy] [--json FILE]

The rows of one vector are run in turn, `--runs` times, and each figure is the median of its CPU time on one thread,
so that a busy machine disturbs all rows alike. Rates are MB of float32 input a second. `compress` makes the payload
of one layer that holds the whole vector; `add` adds a decompressed payload to a vector with a weight; `recover` is a
modulo code against the receiver's own vector, `checked` with the hash compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from peer.compress import COMPRESSORS, Layout, Modulo, add_decompressed_, build
from peer.compress.magnitude import max_magnitude
from peer.compress.modulo import recover, recover_checked
from peer.compress.norms import sum_of_squares
from peer.compress.payload import Residues
from peer.compress.selection import largest_magnitudes
from peer.native import available
from peer.random import PhiloxSource

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Set as by `sotto`: otherwise every large array pays for fresh pages.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Variables that the C library reads before Python starts."""

KERNEL_USERS = ("decompress", "float_types", "levels", "modulo", "norms", "selection")

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("none", {"value_type": "bfloat16"}),
    ("top_k", {"fraction": 0.1}),
    ("top_k", {"fraction": 0.01}),
    ("top_k", {"fraction": 0.001}),
    ("top_k", {"fraction": 0.02, "value_bits": 4}),
    ("random_k", {"fraction": 0.01}),
    ("qsgd", {"bits": 4}),
    ("qsgd", {"bits": 8}),
    ("grid", {"step": 0.125}),
    ("sign", {}),
    ("ternary", {}),
    ("modulo", {"bits": 8, "theta": 0.5}),
    ("modulo", {"bits": 1, "theta": 0.5}),
    ("modulo", {"bits": 8, "theta": 0.5, "verified": True}),
]


def rows(size: int) -> dict[str, Callable[[], object]]:
    """Return the measured calls on a vector of `size` numbers, by name; `copy` comes first."""
    rng = np.random.default_rng(0)
    v = rng.standard_t(4, size).astype(np.float32)
    y = v + rng.uniform(-0.4, 0.4, size).astype(np.float32)
    out, layout, draws = np.zeros_like(v), Layout.of_sizes([size]), PhiloxSource(0, 0).draws(0)
    stream = draws.own_stream(0)
    found: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(out, v),
        "Philox uniforms": lambda: stream.uniforms(size, np.float32, out=out),
        "largest magnitude": lambda: max_magnitude(v),
        "sum of squares": lambda: sum_of_squares(v),
        "indices of the top 1 %": lambda: largest_magnitudes(v, size // 100),
    }
    for kind, settings in SETTINGS:
        assert kind in COMPRESSORS
        compressor = build(kind, **settings)
        name = " ".join([kind, *(f"{key}={value}" for key, value in settings.items())])
        payload = compressor.compress(v, 0, draws)
        found[f"{name}: compress"] = partial(compressor.compress, v, 0, draws)
        if not isinstance(compressor, Modulo):
            found[f"{name}: add"] = partial(add_decompressed_, out, (payload,), layout, 0.25)
            continue
        assert isinstance(payload, Residues)
        omega = compressor.omega(v, 0, draws)
        found[f"{name}: recover"] = partial(recover, payload, y, omega, out=out)
        if compressor.verified:
            found[f"{name}: checked"] = partial(recover_checked, payload, y, omega, out=out)
    return found


@contextmanager
def numpy_only() -> Iterator[None]:
    """Run the body without the native kernels."""
    modules = [import_module(f"peer.compress.{name}") for name in KERNEL_USERS] + [import_module("peer.random")]
    kept = [module.__dict__["lib"] for module in modules]
    for module in modules:
        module.__dict__["lib"] = None
    try:
        yield
    finally:
        for module, lib in zip(modules, kept, strict=True):
            module.__dict__["lib"] = lib


def seconds(call: Callable[[], object], at_least: float = 2e-3) -> float:
    """Return the CPU seconds of this thread for one call, over enough calls for the clock."""
    count, start = 0, time.thread_time()
    while count == 0 or time.thread_time() - start < at_least:
        call()
        count += 1
    return (time.thread_time() - start) / count


def measure(size: int, runs: int, with_numpy: bool) -> dict[str, dict[str, float]]:
    """Return the median seconds of each row, `native` and `numpy`."""
    table = rows(size)
    samples: dict[str, dict[str, list[float]]] = {name: {"native": [], "numpy": []} for name in table}
    for _ in range(runs):
        for name, call in table.items():
            samples[name]["native"].append(seconds(call))
    with numpy_only():
        for _ in range((runs + 2) // 3 if with_numpy else 0):
            for name, call in table.items():
                samples[name]["numpy"].append(seconds(call))
    return {
        name: {how: statistics.median(values) for how, values in both.items() if values}
        for name, both in samples.items()
    }


def main() -> None:
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", default="270000,11000000", help="numbers in the vector, separated by commas")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--no-numpy", action="store_true", help="leave out the numpy columns")
    parser.add_argument("--json", metavar="FILE", help="also write the seconds there")
    arguments = parser.parse_args()
    if not available():
        print("The native kernels were not built: the native columns show numpy too.")
    results = {}
    for size in (int(text) for text in arguments.sizes.split(",")):
        results[size] = measure(size, arguments.runs, not arguments.no_numpy)
        copy = results[size]["copy"]["native"]
        print(f"\n{size:,} float32 ({4 * size / 1e6:.1f} MB), median CPU time of {arguments.runs} runs")
        print(f"{'':54}{'ms':>9}{'MB/s':>9}{'x copy':>8}{'numpy ms':>10}{'x native':>9}")
        for name, found in results[size].items():
            native = found["native"]
            line = f"{name:54}{native * 1e3:9.3f}{4 * size / native / 1e6:9.0f}{native / copy:8.1f}"
            if "numpy" in found:
                line += f"{found['numpy'] * 1e3:10.3f}{found['numpy'] / native:9.1f}"
            print(line)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
