"""A training script of one's own on several devices: AdamW, clipping, a scheduler, accumulation and autocast.

    sotto init cluster kits --peers 4 --set training.task=loop --set run.rounds=40 \\
        --set graph.kind=exponential --set compressor.fraction=0.2
    for K in 0 1 2 3; do python docs/examples/digits_loop.py kits/peer-$K/peer.toml & done; wait

A script that was killed goes on where it was when it is started again. Without an argument the same loop trains in
this process alone, on all data.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import sottovoce
import torch
from torch import nn

EVERY = 25
"""Optimizer steps in each round."""
STEPS = 1000
ACCUMULATED = 2
"""Batches for each optimizer step."""


class Batches:
    """Shuffled batches without end, which know where they are: `keep` takes whatever has these two methods."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, size: int) -> None:
        self.inputs, self.labels, self.size = inputs, labels, size
        self.position = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        per_pass = len(self.labels) // self.size
        while True:
            number, place = divmod(self.position, per_pass)
            order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(number))
            chosen = order[place * self.size : (place + 1) * self.size]
            self.position += 1
            yield self.inputs[chosen], self.labels[chosen]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def samples(part: str, index: int = 0, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels of every `count`-th sample: what is this device's own."""
    task = sottovoce.resolve_task("digits")  # These stand for your own data.
    data = task.train_data() if part == "train" else task.test_data()
    inputs, labels = data.batch(torch.arange(index, len(data), count))
    return inputs.flatten(1), labels


def accuracy(model: nn.Module) -> tuple[int, int]:
    """Return how many test samples the model gets right, and of how many."""
    inputs, labels = samples("test")
    model.eval()
    with torch.no_grad():
        right = int((model(inputs).argmax(1) == labels).sum())
    model.train()
    return right, len(labels)


def train(where: sottovoce.Place | None) -> tuple[int, int]:
    """Train as one of several peers, or alone on all data; return the accuracy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    weights = [each for each in model.parameters() if each.ndim > 1]
    biases = [each for each in model.parameters() if each.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.01}, {"params": biases}], lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    if where is None:
        # As many samples in each step as all peers have together.
        batches = Batches(*samples("train"), size=4 * 16)
    else:
        batches = Batches(*samples("train", where.index, where.num_peers), size=16)

    def step(micro: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        total = torch.zeros(())
        for inputs, labels in (next(micro) for _ in range(ACCUMULATED)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs), labels) / ACCUMULATED
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return total

    micro = iter(batches)
    if where is None:
        for _ in range(STEPS):
            step(micro)
        return accuracy(model)
    with sottovoce.join(
        model, where, every=EVERY, keep=[optimizer, scheduler, batches], evaluate=accuracy, on_late=print
    ) as peer:
        while not peer.done:
            peer.step(step(micro))
        peer.save(f"{where.name}.safetensors")
    return accuracy(model)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        right, total = train(sottovoce.place(sys.argv[1]) if len(sys.argv) > 1 else None)
        print(f"right: {right} of {total}")
