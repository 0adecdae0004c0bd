"""Measures how fast messages become frames and frames messages, on one core, beside memcpy and zstd-1.

    python tools/bench_wire.py [--json] [--blocks 9] [--models resnet20,resnet18,distilbert]

Models are their lists of layer sizes (0.27 M, 11 M and 67 M parameters), filled with heavy-tailed numbers of a
different scale in each layer. All rates are GB of float32 input in a second of one core's time: `encode` and `decode`
are the wire alone; `send` is compression and encoding, `receive` decoding and adding the numbers to a vector (for
modulo codes: recovering them against the receiver's own). With a narrow θ residues are all but uniform and get packed;
with a wide one they are skewed and get entropy-coded.

The speed of a core changes within seconds where others compute beside it. So the models take turns: in each block, all
of them repeat the same action for a while, and the best repetition counts. A rate is the best of all blocks, and a
ratio between the first two models the median of those of the blocks.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import truediv
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from peer import compress, native
from peer.compress.base import compress_layers
from peer.compress.decompress import add_decompressed_
from peer.compress.layout import Layout
from peer.compress.modulo import Modulo, recover, recover_all
from peer.compress.payload import Residues
from peer.random import PeerDraws
from peer.wire import Message, MessageKind, decode, encode


def resnet20() -> list[int]:
    """Layer sizes of ResNet-20 with EvoNorm and projection shortcuts: 273,258 numbers."""
    sizes = [3 * 16 * 9, *[16] * 3]
    channels = 16
    for width in (16, 32, 64):
        for block in range(3):
            sizes += [channels * width * 9, *[width] * 3, width * width * 9, *[width] * 3]
            if block == 0 and width > 16:
                sizes += [channels * width, *[width] * 3]
            channels = width
    return [*sizes, 640, 10]


def resnet18() -> list[int]:
    """Layer sizes of ResNet-18 for 32×32 images: 11.2 M numbers."""
    sizes = [3 * 64 * 9, 64, 64]
    channels = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            sizes += [channels * width * 9, width, width, width * width * 9, width, width]
            if block == 0 and width > 64:
                sizes += [channels * width, width, width]
            channels = width
    return [*sizes, 5120, 10]


def distilbert() -> list[int]:
    """Layer sizes of DistilBERT with a classifier: 67 M numbers."""
    block = [768 * 768, 768] * 4 + [768, 768] + [768 * 3072, 3072, 3072 * 768, 768] + [768, 768]
    return [30522 * 768, 512 * 768, 768, 768, *block * 6, 768 * 768, 768, 768 * 2, 2]


BLOCK_S = 0.03
"""A few runs of a small message are over before branch predictors and clock have settled. A large one takes longer."""

MODELS: dict[str, Callable[[], list[int]]] = {"resnet20": resnet20, "resnet18": resnet18, "distilbert": distilbert}

COMPRESSORS: dict[str, dict[str, Any]] = {
    "top_k 1 %": {"kind": "top_k", "fraction": 0.01},
    "top_k 1 %, 4 bits": {"kind": "top_k", "fraction": 0.01, "value_bits": 4},
    "modulo 8 bits, narrow θ": {"kind": "modulo", "bits": 8, "theta": 2e-4},
    "modulo 4 bits, narrow θ": {"kind": "modulo", "bits": 4, "theta": 2e-4},
    "modulo 1 bit, narrow θ": {"kind": "modulo", "bits": 1, "theta": 2e-4},
    "modulo 8 bits, wide θ": {"kind": "modulo", "bits": 8, "theta": 0.05},
    "modulo 4 bits, wide θ": {"kind": "modulo", "bits": 4, "theta": 0.05},
    "qsgd 8 bits": {"kind": "qsgd", "bits": 8},
    "qsgd 4 bits": {"kind": "qsgd", "bits": 4},
    "none (float32)": {"kind": "none"},
}


def numbers_for(layout: Layout) -> npt.NDArray[np.float32]:
    """Return float32[n]: Laplace numbers, as gradients and weights are closer to those than to normal ones."""
    rng = np.random.default_rng(3)
    vector = np.empty(layout.size, np.float32)
    for part in layout.slices:
        size = part.stop - part.start
        signs = rng.integers(0, 2, size, dtype=np.int8) * np.float32(2) - np.float32(1)
        vector[part] = rng.standard_exponential(size, dtype=np.float32) * signs * np.float32(0.5 / np.sqrt(size))
    return vector


COLUMNS = ("encode", "decode", "send", "receive")

Action = Callable[[], object]


def seconds_of(action: Action) -> float:
    """Return the shortest of the runs of one block, in seconds that the process was computing."""
    times: list[float] = []
    begun = time.process_time()
    while not times or time.process_time() < begun + BLOCK_S:
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


@dataclass(frozen=True)
class Subject:
    """One kind of message of one model, or a yardstick."""

    actions: dict[str, Action]
    """Actions by column."""
    frame_bytes: int | None = None


@dataclass(frozen=True)
class Model:
    """A model's layers, and the actions on its numbers."""

    layout: Layout
    subjects: dict[str, Subject]
    input_bytes: int


def yardsticks(x: npt.NDArray[np.float32], target: npt.NDArray[np.float32]) -> dict[str, Subject]:
    """Return the yardsticks for the bytes of `x`."""
    zstd = zstandard.ZstdCompressor(level=1)
    packed = zstd.compress(x.data)
    return {
        "memcpy": Subject({"encode": lambda: np.copyto(target, x)}),
        "crc-32": Subject({"encode": lambda: zlib.crc32(x.data)}),
        "zstd-1 of float32": Subject(
            {
                "encode": lambda: zstd.compress(x.data),
                "decode": lambda: zstandard.ZstdDecompressor().decompress(packed),
            },
            len(packed),
        ),
    }


def messages(x: npt.NDArray[np.float32], target: npt.NDArray[np.float32], layout: Layout, what: str) -> Subject:
    """Return the subject for one compressor."""
    compressor = compress.build(**COMPRESSORS[what])
    draws = PeerDraws(1, 0, 1)
    y = x + np.float32(1e-5)

    def compressed() -> Message:
        layers = compress_layers(compressor, x, layout, draws)
        return Message(MessageKind.GOSSIP, 1, 1, mixing_weight=1 / 3, layers=layers)

    message = compressed()
    frame = encode(message, layout)

    def receive() -> None:
        layers = decode(frame, layout, dtype=np.float32).layers
        if not isinstance(compressor, Modulo):
            add_decompressed_(target, layers, layout)
            return
        if recover_all(layers, y, layout, draws, target, verified=False):
            return
        for number, (part, layer) in enumerate(zip(layout.slices, layers, strict=True)):
            assert isinstance(layer, Residues)
            omega = compressor.omega(y[part], number, draws)
            recover(layer, y[part], omega, out=target[part])

    return Subject(
        {
            "encode": lambda: encode(message, layout),
            "decode": lambda: decode(frame, layout, dtype=np.float32),
            "send": lambda: encode(compressed(), layout),
            "receive": receive,
        },
        len(frame),
    )


def build(model: str) -> Model:
    """Return a model with its subjects."""
    layout = Layout.of_sizes(MODELS[model]())
    x = numbers_for(layout)
    target = np.zeros_like(x)
    subjects = yardsticks(x, target)
    for what in COMPRESSORS:
        subjects[what] = messages(x, target, layout, what)
    return Model(layout, subjects, x.nbytes)


def measure(names: list[str], blocks: int) -> list[dict[str, Any]]:
    """Return a row for each model and each kind of message. Rows of the first model have the ratios of its rates to the
    second one's."""
    models = {name: build(name) for name in names}
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (name, what): {
            "model": name,
            "parameters": model.layout.size,
            "layers": model.layout.num_layers,
            "what": what,
            "frame_bytes": subject.frame_bytes,
        }
        for name, model in models.items()
        for what, subject in model.subjects.items()
    }
    for what, first in models[names[0]].subjects.items():
        for column in first.actions:
            rates: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(blocks):
                for name, model in models.items():
                    rates[name].append(model.input_bytes / 1e9 / seconds_of(model.subjects[what].actions[column]))
            for name in names:
                rows[name, what][column] = max(rates[name])
            if len(names) > 1:
                ratios = map(truediv, rates[names[0]], rates[names[1]])
                rows[names[0], what].setdefault("ratios", {})[column] = median(ratios)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--blocks", type=int, default=9, help="how often the models take turns")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    options = parser.parse_args()
    names = options.models.split(",")
    rows = measure(names, options.blocks)
    if options.json:
        print(
            json.dumps(
                {"native_kernels": native.available(), "unit": "GB of float32 in a second of one core", "rows": rows},
                indent=1,
            )
        )
        return
    built = "built" if native.available() else "missing"
    print(f"native kernels {built}; GB of float32 in a second of a core's time, best of {options.blocks} blocks")
    for model in names:
        mine = [row for row in rows if row["model"] == model]
        print(f"\n{model}: {mine[0]['parameters']:,} parameters in {mine[0]['layers']} layers")
        print(f"{'':26}{'frame bytes':>14}{'bits/param':>12}" + "".join(f"{name:>9}" for name in COLUMNS))
        for row in mine:
            size = row["frame_bytes"]
            sizes = f"{size:>14,}{8 * size / row['parameters']:>12.4f}" if size else " " * 26
            rates = "".join(f"{row[name]:>9.2f}" if name in row else " " * 9 for name in COLUMNS)
            print(f"{row['what']:26}{sizes}{rates}")
    if len(names) > 1:
        print(f"\nrates of {names[0]} / {names[1]}, medians of the blocks")
        for row in rows:
            if row["model"] == names[0] and row["what"] in COMPRESSORS:
                ratios = "".join(f"{row['ratios'][name]:>9.2f}" for name in COLUMNS)
                print(f"{row['what']:52}{ratios}")


if __name__ == "__main__":
    main()
