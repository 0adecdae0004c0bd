"""A loop with Accelerate needs no adapter: what it prepares is what `join` and `keep` take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sottovoce
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.library.integrations.kits import EVERY, ROUNDS, digits, kit
from tests.library.scripts import digest_of, write_kits

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: the extra huggingface installs it")

STEPS, BATCH, ACCUMULATED = ROUNDS * EVERY, 8, 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 6))


def prepared(where: sottovoce.Place) -> Any:
    """Return accelerator, model, optimizer, loader and scheduler."""
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_plugin=accelerate.utils.GradientAccumulationPlugin(
            num_steps=ACCUMULATED, sync_with_dataloader=False
        ),
    )
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    loader = StatefulDataLoader(TensorDataset(*digits(where.index)), batch_size=BATCH, shuffle=True)
    torch.manual_seed(5 + where.index)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    return accelerator, model, optimizer, loader, scheduler


def with_accelerate(where: sottovoce.Place, fail_at: int | None = None) -> tuple[str, int]:
    torch.set_num_threads(1)
    accelerator, model, optimizer, loader, scheduler = prepared(where)
    with sottovoce.join(model, where, every=EVERY, keep=[optimizer, scheduler, loader]) as peer:
        for inputs, labels in peer.until_done(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                peer.step(loss)
            if peer.steps == fail_at:
                raise RuntimeError("the disk is gone")
    return digest_of(model), peer.steps


def with_bare_loop(where: sottovoce.Place) -> tuple[str, int]:
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    _, _, _, loader, _ = prepared(where)  # The order of its samples is Accelerate's own.
    with sottovoce.join(model, where, every=EVERY, keep=[optimizer, scheduler, loader]) as peer:
        for number, (inputs, labels) in enumerate(peer.until_done(loader), start=1):
            (nn.functional.cross_entropy(model(inputs), labels) / ACCUMULATED).backward()
            if number % ACCUMULATED == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                peer.step()
    return digest_of(model), peer.steps


def test_a_loop_with_accelerate_comes_to_the_bits_of_one_without(tmp_path: Path) -> None:
    trained = sottovoce.simulate(with_accelerate, kit(tmp_path / "a"))
    bare = sottovoce.simulate(with_bare_loop, kit(tmp_path / "b"))
    assert trained.results == bare.results
    assert trained.results[0] == trained.results[1]
    assert trained.results[0][1] == STEPS


def test_a_loop_that_failed_continues_within_the_pass(tmp_path: Path) -> None:
    alone = (f"run.rounds={ROUNDS}", "algorithm.name=local", "graph.kind=complete")
    (whole,) = write_kits(tmp_path / "whole", 1, *alone)
    expected = with_accelerate(sottovoce.place(whole))
    (file,) = write_kits(tmp_path / "cut", 1, *alone)
    # Six batches are a pass of three steps: this is the last step before the second exchange, in the midst of a pass.
    with pytest.raises(RuntimeError, match="disk is gone"):
        with_accelerate(sottovoce.place(file), fail_at=2 * EVERY - 1)
    assert with_accelerate(sottovoce.place(file)) == expected
