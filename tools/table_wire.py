"""Prints what messages cost beside what they have to cost, on real gradients and models.

    python tools/table_wire.py --data cifar-10-binary.tar.gz [--steps 300] [--json]

A ResNet-20 (EvoNorm) is trained on CIFAR-10 for some hundred steps. The next gradient, the model, its change over the
last ten steps and the model one step earlier are then sent through every compressor. The first table gives bits sent a
parameter (the whole frame, header and checksum included), about the fewest bits that could carry that payload (see
`peer.wire.entropy_bound_bits`) and their ratio, also of the indices and of the codes alone: of the codes to the entropy
of all of them taken together, to the sum of the entropies of the layers, and to that with the least that it costs to
tell a reader the frequencies (see `regret_bits`). The second compares bytes a round of one worker with other systems;
it says which figures this run measured and which come from elsewhere. If the package hivemind can be imported, its own
8-bit code is measured. (decentralizepy is on no package index.)
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peer import compress, wire
from peer.compress.base import compress_layers
from peer.compress.layout import Layout
from peer.compress.payload import LayerPayload, Levels, Residues, Sparse
from peer.random import PeerDraws
from peer.train import tasks
from peer.wire import Message, MessageKind
from peer.wire.entropy_bound import log2_choose
from peer.wire.plans import entropy_of
from tools.frame_report import describe

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Snapshot:
    """Real numbers from the middle of a training run, each float32[n]."""

    layout: Layout
    gradient: Vector
    model: Vector
    before: Vector
    """The model one step earlier."""
    change: Vector
    """Change of the model over the last ten steps."""
    loss: float


@dataclass(frozen=True)
class Row:
    """One compressor on one vector."""

    what: str
    of: str
    frame_bytes: int
    sent: float
    """Bits sent per parameter."""
    bound: float
    """Least bits per parameter."""
    ratio: float
    indices: float | None
    """Bits of the indices over log₂ C(n, k)."""
    codes: float | None
    """Bits of the codes over the smaller of their entropy, all taken together, and their width."""
    layers: float | None
    """The same with each layer's own entropy."""
    learned: float | None
    """The same, with the cost that no code avoids which is not told each layer's frequencies: see `regret_bits`."""
    overhead_bytes: int
    """Headers and checksum."""
    overhead_allowed: int
    """Bytes allowed for them: 64 a message and 8 a layer."""


def snapshot(data: str, steps: int, batch: int, seed: int) -> Snapshot:
    """Return the vectors after training for `steps` steps of SGD with Nesterov momentum."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = tasks.cifar10(directory=data, norm="evonorm")
    model = task.make_model()
    train = task.train_data()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    parameters = dict(model.named_parameters())
    layout = Layout(tuple(parameters), tuple(p.numel() for p in parameters.values()))

    def flat(tensors: Any) -> Vector:
        return np.concatenate([t.detach().reshape(-1).numpy() for t in tensors]).astype(np.float32)

    history: list[Vector] = []
    loss = torch.zeros(())
    for step in range(steps + 1):
        indices = torch.randint(len(train), (batch,), generator=generator)
        loss = task.loss(model, task.augment(train.batch(indices), torch.rand(batch, 4, generator=generator)))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if step < steps:
            optimizer.step()
            if step >= steps - 11:
                history.append(flat(parameters.values()))
    gradient = flat(p.grad for p in parameters.values())
    return Snapshot(layout, gradient, history[-1], history[-2], history[-1] - history[0], loss.item())


def rows_of(shot: Snapshot) -> list[Row]:
    """Return the table."""
    rows: list[Row] = []
    for fraction in (0.1, 0.01, 0.001):
        for name, vector in (("gradient", shot.gradient), ("change of the model", shot.change)):
            rows.append(row(f"top-k {fraction:.1%}, exact", name, vector, shot, kind="top_k", fraction=fraction))
            rows.append(
                row(f"top-k {fraction:.1%}, 4 bits", name, vector, shot, kind="top_k", fraction=fraction, value_bits=4)
            )
    for bits in (8, 4, 2, 1):
        rows.append(row(f"qsgd {bits} bits", "gradient", shot.gradient, shot, kind="qsgd", bits=bits))
        rows.append(row(f"qsgd {bits} bits", "change of the model", shot.change, shot, kind="qsgd", bits=bits))
    # Twice the largest change of a step, near which an adaptive θ would settle; and the constant of the papers.
    tight = 2 * float(np.abs(shot.model - shot.before).max())
    for theta, note in ((tight, f"θ {tight:.2g}"), (2.0, "θ 2")):
        for bits in (8, 4, 2, 1):
            settings: dict[str, Any] = {"kind": "modulo", "bits": bits, "theta": theta}
            what = f"modulo {bits} bits, {note}"
            rows.append(row(f"{what}, dither", "model", shot.model, shot, **settings, rounding="dither"))
            # A dither is drawn anew in every round, which the difference of two codes has to carry, too.
            for rounding in ("dither", "nearest"):
                settings["rounding"] = rounding
                rows.append(
                    row(f"{what}, {rounding}", "model, against the last", shot.model, shot, shot.before, **settings)
                )
    for value_type in ("float32", "bfloat16"):
        rows.append(row(f"none, {value_type}", "model", shot.model, shot, kind="none", value_type=value_type))
    return rows


def row(what: str, of: str, vector: Vector, shot: Snapshot, before: Vector | None = None, **settings: Any) -> Row:
    """Return the cost of one message."""
    compressor = compress.build(**settings)

    def message_of(x: Vector, number: int) -> Message:
        layers = compress_layers(compressor, x, shot.layout, PeerDraws(1, 0, number))
        return Message(MessageKind.GOSSIP, 3, number, mixing_weight=1 / 3, push_weight=0.9876543, layers=layers)

    message = message_of(vector, 300)
    previous = None if before is None else message_of(before, 299)
    frame = wire.encode(message, shot.layout, previous=previous)
    report = describe(frame, shot.layout, previous=previous)
    n = shot.layout.size
    index_bits = 8 * report.index_bytes
    index_bound = sum(log2_choose(p.size, p.indices.size) for p in message.layers if isinstance(p, Sparse))
    inner = [p.values if isinstance(p, Sparse) else p for p in message.layers]
    codes = layers = learned = None
    if all(isinstance(p, (Levels, Residues)) for p in inner):
        other = index_bound + 8 * sum(layer.scale_bytes + layer.check_bytes for layer in report.layers)
        codes = 8 * report.value_bytes / together_bits(inner)
        layers = 8 * report.value_bytes / (report.bound_bits - other)
        learned = 8 * report.value_bytes / (report.bound_bits - other + regret_bits(inner))
    return Row(
        what,
        of,
        len(frame),
        8 * len(frame) / n,
        report.bound_bits / n,
        8 * len(frame) / report.bound_bits,
        index_bits / index_bound if index_bound else None,
        codes,
        layers,
        learned,
        report.overhead_bytes,
        64 + 8 * shot.layout.num_layers,
    )


def codes_of(layer: LayerPayload) -> npt.NDArray[Any]:
    """Return the codes of a layer of any kind."""
    assert isinstance(layer, (Levels, Residues))
    return layer.codes if isinstance(layer, Levels) else layer.residues


def together_bits(layers: Sequence[LayerPayload]) -> float:
    """Return the empirical entropy of all codes of a message as one source, or their width where that is less."""
    counts = np.unique(np.concatenate([codes_of(layer) for layer in layers]), return_counts=True)[1]
    width = max(layer.bits for layer in layers if isinstance(layer, (Levels, Residues)))
    return float(counts.sum()) * min(entropy_of(counts), float(width))


def regret_bits(layers: Sequence[LayerPayload]) -> float:
    """Return the bits beyond their entropy that codes cost a reader who is not told their frequencies: Shtarkov's
    minimax regret (1987) of a memoryless source for each layer, those with fewer than 256 codes taken together as for
    the entropy. No code undercuts it for all frequencies alike; it may where layers resemble each other.
    """
    sources: dict[object, list[npt.NDArray[Any]]] = {}
    for number, layer in enumerate(layers):
        assert isinstance(layer, (Levels, Residues))
        codes = codes_of(layer)
        sources.setdefault(number if codes.size >= 256 else f"{layer.bits} bits", []).append(codes)
    joined = [np.concatenate(codes) for codes in sources.values()]
    return sum(log2_complexity(codes.size, np.unique(codes).size) for codes in joined)


def log2_complexity(n: int, symbols: int) -> float:
    """Return log₂ of the sum over all sequences of n symbols of their greatest likelihood, by the recurrence of
    Kontkanen and Myllymäki (2007): C(1) = 1, C(2) a sum over the counts, C(m + 2) = C(m + 1) + (n / m) C(m)."""
    if symbols == 1 or n == 0:
        return 0.0
    before, now, exponent = 1.0, 2.0, 0.0
    for h in range(1, n):
        log_choose = math.lgamma(n + 1) - math.lgamma(h + 1) - math.lgamma(n - h + 1)
        now += math.exp(log_choose + h * math.log(h / n) + (n - h) * math.log((n - h) / n))
    for m in range(1, symbols - 1):
        before, now = now, now + n / m * before
        if now > 2.0**500:
            before, now, exponent = before * 2.0**-500, now * 2.0**-500, exponent + 500
    return exponent + math.log2(now)


def elias_gamma_bytes(vector: Vector, fraction: float) -> int:
    """Return the bytes of decentralizepy's top-k: gaps over the flat vector in Elias gamma, values in float32."""
    k = max(1, round(fraction * vector.size))
    where = np.sort(np.argpartition(-np.abs(vector), k - 1)[:k])
    gaps = np.diff(where, prepend=-1)
    bits = int((2 * np.floor(np.log2(gaps)) + 1).sum())
    return (bits + 7) // 8 + 4 * k


def hivemind_bytes(vector: Vector) -> tuple[int, str]:
    """Return the bytes of hivemind's uniform 8-bit quantization of one flat tensor, and the code that gave them.

    Hivemind's own code is used if it can be imported; otherwise it is a byte a number, 256 float32 and their count.
    """
    try:
        from hivemind.compression import CompressionInfo, Uniform8BitQuantization
    except ImportError:
        return vector.nbytes // 4 + 4 * 256 + 8, "as its source has it"
    tensor = torch.from_numpy(vector.copy())
    message = Uniform8BitQuantization().compress(tensor, CompressionInfo.from_tensor(tensor))
    return len(message.SerializeToString()), "its own code"


ELSEWHERE = (
    ("gloo, all-reduce (DDP)", 1938),
    ("gloo, all-reduce, fp16 hook", 980),
    ("gloo, all-reduce, PowerSGD rank 2", 142),
    ("gloo, D-PSGD, undirected ring", 2167),
    ("hivemind, averaging, 8 bit", 2503),
    ("decentralizepy, full model, undirected ring", 2191),
    ("decentralizepy, CHOCO 1 %, plain", 67),
    ("decentralizepy, CHOCO 1 %, Elias + fpzip", 27),
)
"""kB a worker and round, 8 workers, this model: bytes that left one worker's network interface, packet headers
included. Measured once, by running those systems; not by this tool."""


def comparison(shot: Snapshot, rows: list[Row]) -> list[tuple[str, str, float]]:
    """Return (name, source of the figure, kB a round of one worker with two neighbours)."""
    n = shot.layout.size
    found = [(name, "elsewhere, on the interface", float(kilobytes)) for name, kilobytes in ELSEWHERE]
    coding = "this run, its coding alone"
    found.append(("float32, 2 neighbours", coding, 2 * 4 * n / 1000))
    eight_bits, origin = hivemind_bytes(shot.model)
    found.append((f"hivemind's uniform 8 bit ({origin}), 2 neighbours", coding, 2 * eight_bits / 1000))
    elias = elias_gamma_bytes(shot.change, 0.01)
    found.append(("decentralizepy's Elias gamma + float32, top 1 %, 2 neighbours", coding, 2 * elias / 1000))
    for r in rows:
        if r.of in ("change of the model", "model, against the last") and "θ 2," not in r.what:
            found.append((f"sottovoce {r.what}, 2 neighbours", "this run, whole frames", 2 * r.frame_bytes / 1000))
    return found


LEGEND = """
sent, bound: bits a parameter; index: bits over log2 C(n, k); codes: bits over the entropy of all codes together
layers: codes over the entropies of the layers; told: over those with the least cost of telling frequencies
header: bytes, of at most
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the official binary CIFAR-10: its folder or archive")
    parser.add_argument("--steps", type=int, default=300, help="training steps before the snapshot")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    shot = snapshot(options.data, options.steps, options.batch, options.seed)
    rows = rows_of(shot)
    compared = comparison(shot, rows)
    if options.json:
        print(json.dumps({"loss": shot.loss, "rows": [asdict(r) for r in rows], "comparison": compared}, indent=1))
        return
    layout = shot.layout
    print(
        f"ResNet-20, {layout.size:,} parameters in {layout.num_layers} layers, after {options.steps} steps of batch "
        f"{options.batch} (loss {shot.loss:.3f}, seed {options.seed})\n"
    )
    columns = "".join(f"{name:>7}" for name in ("ratio", "index", "codes", "layers", "told"))
    print(f"{'':36}{'of':26}{'frame B':>9}{'sent':>9}{'bound':>9}{columns}{'header B':>10}")
    for r in rows:
        ratios = (r.indices, r.codes, r.layers, r.learned)
        parts = "".join(f"{v:>7.3f}" if v is not None else f"{'–':>7}" for v in ratios)
        print(
            f"{r.what:36}{r.of:26}{r.frame_bytes:>9,}{r.sent:>9.4f}{r.bound:>9.4f}{r.ratio:>7.3f}{parts}"
            f"{r.overhead_bytes:>6}/{r.overhead_allowed}"
        )
    print(LEGEND)
    print(f"{'one worker, one round':66}{'kB':>9}  measured")
    for name, where, kilobytes in compared:
        print(f"{name:66}{kilobytes:>9.1f}  {where}")


if __name__ == "__main__":
    main()
