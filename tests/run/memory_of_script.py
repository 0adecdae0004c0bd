"""How much more memory a training script with AdamW holds at most with its peer than without; run by `test_memory` in a
process of its own.

    python -m tests.run.memory_of_script SECONDS WIDTH CONFIGURATION [WIDTH CONFIGURATION]…

Trains one model after the other, each as a peer of its own that is so many seconds late. Prints JSON: for each,
parameters, the bytes that the process held at most in the loop alone, those with the peer, and how much of the former
were pages of files.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import sottovoce
import torch
from torch import nn

from peer.train.threads import use_one_thread
from tests.run.memory_of_peers import held


def train(late_s: float, width: int, file: str) -> list[int]:
    """Train a model with eight hidden layers of that width, and return its figures."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    inputs, labels = torch.randn(4, width), torch.arange(4) % 2

    def step() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def evaluate(model: nn.Module) -> tuple[int, int]:
        return int((model(inputs).argmax(1) == labels).sum()), len(labels)

    step()
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    step()
    alone, pages = held("VmHWM"), held("RssFile")
    time.sleep(late_s)
    with sottovoce.join(model, file, every=1, keep=[optimizer], evaluate=evaluate) as peer:
        while not peer.done:
            peer.step(step())
    return [sum(each.numel() for each in model.parameters()), alone, held("VmHWM"), pages]


if __name__ == "__main__":
    use_one_thread()
    models = zip(sys.argv[2::2], sys.argv[3::2], strict=True)
    print(json.dumps([train(float(sys.argv[1]), int(width), file) for width, file in models]))
