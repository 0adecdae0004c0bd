"""Measures how fast messages become frames and frames messages, on one core, beside memcpy and zstd-1.

    python tools/bench_wire.py [--json] [--repeat 5] [--models resnet20,resnet18,distilbert]

Models are their lists of layer sizes (0.27 M, 11 M and 67 M parameters), filled with heavy-tailed numbers of a
different scale in each layer. All rates are GB of float32 input in a second of one core's time, the best of the
repetitions: `encode` and `decode` are the wire alone; `send` is compression and encoding, `receive` decoding and adding
the numbers to a vector (for modulo codes: recovering them against the receiver's own). With a narrow θ residues are all
but uniform and get packed; with a wide one they are skewed and get entropy-coded.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from peer import compress, native
from peer.compress.base import Compressor
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


def best_of(repeat: int, action: Callable[[], object]) -> float:
    """Return the shortest of several runs, in seconds that the process was computing (others may use the core, too)."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def measure(model: str, repeat: int) -> list[dict[str, Any]]:
    """Return one row for each compressor, and rows for memcpy, CRC-32 and zstd-1 of the raw bytes."""
    layout = Layout.of_sizes(MODELS[model]())
    x = numbers_for(layout)
    draws = PeerDraws(1, 0, 1)
    y = x + np.float32(1e-5)
    target = np.empty_like(x)
    gigabytes = x.nbytes / 1e9

    def rate(action: Callable[[], object]) -> float:
        return gigabytes / best_of(repeat, action)

    packed = zstandard.ZstdCompressor(level=1).compress(x.data)
    base = {"model": model, "parameters": layout.size, "layers": layout.num_layers}
    zstd = zstandard.ZstdCompressor(level=1)
    rows: list[dict[str, Any]] = [
        {**base, "what": "memcpy", "encode": rate(lambda: np.copyto(target, x))},
        {**base, "what": "crc-32", "encode": rate(lambda: zlib.crc32(x.data))},
        {
            **base,
            "what": "zstd-1 of float32",
            "frame_bytes": len(packed),
            "encode": rate(lambda: zstd.compress(x.data)),
            "decode": rate(lambda: zstandard.ZstdDecompressor().decompress(packed)),
        },
    ]
    for what, settings in COMPRESSORS.items():
        compressor = compress.build(**settings)

        def compressed(compressor: Compressor = compressor) -> Message:
            layers = compress.compress_layers(compressor, x, layout, draws)
            return Message(MessageKind.GOSSIP, 1, 1, mixing_weight=1 / 3, layers=layers)

        message = compressed()
        frame = encode(message, layout)

        def receive(frame: bytes = frame, compressor: Compressor = compressor) -> None:
            layers = decode(frame, layout, dtype=np.float32).layers
            if not isinstance(compressor, Modulo):
                compress.add_decompressed_(target, layers, layout)
                return
            if recover_all(layers, y, layout, draws, target, verified=False):
                return
            for number, (part, layer) in enumerate(zip(layout.slices, layers, strict=True)):
                assert isinstance(layer, Residues)
                omega = compressor.omega(y[part], number, draws)
                recover(layer, y[part], omega, out=target[part])

        def send(compressed: Callable[[], Message] = compressed) -> bytes:
            return encode(compressed(), layout)

        target[:] = 0
        rows.append(
            {
                **base,
                "what": what,
                "frame_bytes": len(frame),
                "encode": rate(partial(encode, message, layout)),
                "decode": rate(partial(decode, frame, layout, dtype=np.float32)),
                "send": rate(send),
                "receive": rate(receive),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions of which the best counts")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    options = parser.parse_args()
    rows = [row for model in options.models.split(",") for row in measure(model, options.repeat)]
    if options.json:
        print(
            json.dumps(
                {"native_kernels": native.available(), "unit": "GB of float32 in a second of one core", "rows": rows},
                indent=1,
            )
        )
        return
    built = "built" if native.available() else "missing"
    print(f"native kernels {built}; GB of float32 in a second of a core's time, best of {options.repeat}")
    columns = ("encode", "decode", "send", "receive")
    for model in options.models.split(","):
        mine = [row for row in rows if row["model"] == model]
        print(f"\n{model}: {mine[0]['parameters']:,} parameters in {mine[0]['layers']} layers")
        print(f"{'':26}{'frame bytes':>14}{'bits/param':>12}" + "".join(f"{name:>9}" for name in columns))
        for row in mine:
            size = row.get("frame_bytes")
            sizes = f"{size:>14,}{8 * size / row['parameters']:>12.4f}" if size else " " * 26
            rates = "".join(f"{row[name]:>9.2f}" if name in row else " " * 9 for name in columns)
            print(f"{row['what']:26}{sizes}{rates}")


if __name__ == "__main__":
    main()
