"""How accurate ordinary models become whose products are in 8 bits: own loops, converted and not, on the same batches.

    python -m tools.eight_bit_accuracy NETWORK --data FOLDER [--seeds 0,1,2] [--rows FILE]

NETWORK and what its folder has to hold:

    table    *.csv with a header, the first one or the one that --table names; --target names the column of the classes
    images   CIFAR-10 in its binary version
    text     what `python -m tools.language_models corpus FOLDER` writes

Both precisions start from the same weights and take the same batches. The rate falls along a cosine to 0, so that a run
is flat at its end. An interrupted run resumes with --rows.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sottovoce.eight_bit
import torch
from torch import Tensor, nn
from torch.nn import functional

from peer.train.datasets.image_files import CIFAR10, read_cifar
from tools.grid import Lines
from tools.language_models import CONTEXT, DOMAINS, HELD

PRECISIONS = ("float32", "int8")


class Loop(NamedTuple):
    """What is trained: a model, the batches of a seed, and the figure that counts."""

    model: Callable[[str], nn.Module]
    """Returns a new model, to be converted unless it is in float32."""
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    steps: int
    rate: float
    measure: Callable[[nn.Module], float]
    unit: str


@dataclass(frozen=True)
class Cell:
    network: str
    precision: str
    seed: int
    steps: int


# -- tables ------------------------------------------------------------------------------------------------------------


def table(file: Path, target: str, steps: int) -> Loop:
    """An MLP on the columns of a table: numbers standardised, categories one-hot, a quarter held out."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    if not rows or target not in rows[0]:
        raise SystemExit(f"{file} has no column {target}: name that of the classes with --target")
    columns: list[np.ndarray] = []
    for name in rows[0]:
        texts = [row[name] for row in rows]
        if name in ("", target):
            continue
        try:
            numbers = np.array(texts, dtype=np.float64)
            columns.append(((numbers - numbers.mean()) / (numbers.std() or 1.0))[:, None])
        except ValueError:
            columns.append(np.eye(len(set(texts)))[[sorted(set(texts)).index(text) for text in texts]])
    x = torch.from_numpy(np.concatenate(columns, axis=1)).float()
    classes = sorted({row[target] for row in rows})
    y = torch.tensor([classes.index(row[target]) for row in rows])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(77))
    held, kept = order[: len(x) // 4], order[len(x) // 4 :]

    def model(_: str) -> nn.Module:
        return nn.Sequential(
            nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, len(classes))
        )

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in _batches(kept, 128, seed):
            yield x[indices], y[indices]

    return Loop(model, batches, steps or 6_000, 2e-3, lambda net: _accuracy(net, x[held], y[held]), "%")


# -- images ------------------------------------------------------------------------------------------------------------


def images(folder: Path, steps: int) -> Loop:
    """Six convolutions with group norm, on CIFAR-10."""
    parts = read_cifar(folder, CIFAR10)
    pixels, y = (torch.cat(some) for some in zip(*(parts[name] for name in CIFAR10.train), strict=True))
    held, of_held = (torch.cat(some) for some in zip(*(parts[name] for name in CIFAR10.test), strict=True))

    def floats(x: Tensor) -> Tensor:
        return (x.float() - 120.0) / 64.0

    def model(_: str) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs, pools in ((3, 24, 0), (24, 24, 1), (24, 48, 0), (48, 48, 1), (48, 96, 0), (96, 96, 0)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if pools else []
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        flips = torch.Generator().manual_seed(seed)
        for indices in _batches(torch.arange(len(pixels)), 64, seed):
            x = floats(pixels[indices])
            is_flipped = torch.rand(len(x), 1, 1, 1, generator=flips) < 0.5
            yield torch.where(is_flipped, x.flip(3), x), y[indices]

    return Loop(model, batches, steps or 4_000, 3e-3, lambda net: _accuracy(net, floats(held), of_held), "%")


# -- text --------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        parts = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = self.attend(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, d))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """GPT-2's layout on bytes, with tied embeddings: 1.05 million parameters."""

    def __init__(self, attend: Callable[..., Tensor], width: int = 128, blocks: int = 5) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, width // 32, attend) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * blocks) if is_deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.transpose(1, 2)


def text(folder: Path, steps: int) -> Loop:
    """A GPT on bytes, its attention in 8 bits too."""

    def read(suffix: str) -> list[Tensor]:
        return [torch.from_numpy(np.fromfile(folder / f"{name}.{suffix}", np.uint8)) for name in DOMAINS]

    kept, held = torch.cat(read("train")), [each[: HELD // 4].view(-1, CONTEXT) for each in read("held")]

    def model(precision: str) -> nn.Module:
        eight = sottovoce.eight_bit.scaled_dot_product_attention
        return GPT(eight if precision == "int8" else functional.scaled_dot_product_attention)

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        starts = torch.Generator().manual_seed(seed)
        while True:
            at = torch.randint(0, len(kept) - CONTEXT - 1, (4, 1), generator=starts)
            found = kept[at + torch.arange(CONTEXT + 1)].long()
            yield found[:, :-1], found[:, 1:]

    def loss(net: nn.Module) -> float:
        of_domains = []
        for windows in held:
            parts = windows.long().chunk(len(windows) // 16)
            sums = [functional.cross_entropy(net(part[:, :-1]), part[:, 1:]).item() * len(part) for part in parts]
            of_domains.append(sum(sums) / len(windows))
        return sum(of_domains) / len(of_domains)

    return Loop(model, batches, steps or 2_500, 2e-3, loss, "nats a byte")


# -- runs --------------------------------------------------------------------------------------------------------------


def _batches(indices: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of shuffled passes for ever."""
    order = torch.Generator().manual_seed(seed)
    while True:
        passed = indices[torch.randperm(len(indices), generator=order)]
        yield from passed[: len(passed) // size * size].view(-1, size)


def _accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    count = -(-len(x) // 500)
    parts = zip(x.chunk(count), y.chunk(count), strict=True)
    return 100 * sum(int((net(some).argmax(1) == classes).sum()) for some, classes in parts) / len(y)


def train(loop: Loop, cell: Cell) -> float:
    """Train one model, and return its figure."""
    torch.manual_seed(cell.seed)
    net = loop.model(cell.precision)
    if cell.precision == "int8":
        net = sottovoce.eight_bit.convert(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=loop.rate, betas=(0.9, 0.95), weight_decay=0.01)
    warm = loop.steps // 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda at: min((at + 1) / warm, (1 + math.cos(math.pi * max(at - warm, 0) / (loop.steps - warm))) / 2),
    )
    for _, (x, y) in zip(range(loop.steps), loop.batches(cell.seed), strict=False):
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(net(x), y))
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    net.eval()
    with torch.no_grad():
        return loop.measure(net)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=("table", "images", "text"))
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--table", default="*.csv", metavar="PATTERN", help="by default the first *.csv")
    parser.add_argument("--target", default="class", help="by default class")
    parser.add_argument("--seeds", default="0,1,2", help="by default 0,1,2")
    parser.add_argument("--steps", type=int, default=0, help="by default those of docs/studies/eight-bit.md")
    parser.add_argument(
        "--rows", type=Path, default=Path("eight-bit-accuracy.jsonl"), metavar="FILE", help="where rows are kept"
    )
    options = parser.parse_args()
    name = options.network
    if name == "table":
        file = min(options.data.glob(options.table), default=None)
        if file is None:
            raise SystemExit(f"{options.data} has no file {options.table}")
        name, loop = file.stem, table(file, options.target, options.steps)
    else:
        loop = images(options.data, options.steps) if name == "images" else text(options.data, options.steps)
    cells = [Cell(name, how, int(seed), loop.steps) for seed in options.seeds.split(",") for how in PRECISIONS]
    lines = Lines(
        cells, options.rows, lambda cell: cell, lambda row: Cell(*(row[key] for key in Cell.__dataclass_fields__))
    )
    for cell in cells:
        row = lines.get(cell)
        if row is None:
            row = vars(cell) | {"figure": round(train(loop, cell), 4)}
            lines.put(cell, row)
        print(f"{cell.network:12} {cell.precision:8} seed {cell.seed}: {row['figure']:.4g} {loop.unit}", flush=True)


if __name__ == "__main__":
    main()
