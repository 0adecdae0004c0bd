"""A loop that does what a task does comes to the same model, and outer momentum is that of DiLoCo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sottovoce
import torch
from torch import nn

from peer.config.options import Config, load
from peer.run.setup import RunSetup
from peer.simulate.run import run
from peer.train import local_step
from peer.train.local_step import LocalStep, Trainer
from tests.library.scripts import Samples, vector_of, write_kits

PEERS = 4
TASK = (
    "run.rounds=25",
    "training.precision=float32",
    "training.momentum=none",
    "training.label_adjustment=false",
    "training.warmup_rounds=5",
    "evaluation.every_rounds=0",
)


def as_displacements(monkeypatch: pytest.MonkeyPatch, task: Config) -> None:
    """Let the local steps of a task hand over what a script's come to: the displacement z − w, in float32, with γ = 1.

    A difference of two models lacks the last digits of γ g. Codes are made of small differences, and such a digit can
    put one on the other side of a step of its grid, so that nothing bounds how far apart two runs end. Therefore both
    runs get the same displacements and have to agree in every bit, and each displacement is held to the γ g of the
    task within its roundings.
    """
    one_step = task.model_copy(update={"training": task.training.model_copy(update={"local_steps": 1})})
    alone = [RunSetup.open(one_step, Path(), PEERS).trainer(peer) for peer in range(PEERS)]
    gradient_of = Trainer.gradient

    def gradient(trainer: Trainer, z: np.ndarray, t: int, rate: float, z_step: float) -> LocalStep:
        rate, steps, w, losses = alone[trainer.peer].rate(t), trainer.options.local_steps, z, []
        for step in range(steps * t, steps * (t + 1)):
            found = gradient_of(alone[trainer.peer], w, step, rate, rate)
            before, w = w, sgd(trainer, w, found.gradient, rate)
            losses.append(found.loss)
            assert_rounded(before - w, before, w, rate * found.gradient.astype(np.float64))
        return LocalStep(z - w, float(np.mean(losses)), steps)

    monkeypatch.setattr(local_step, "learning_rate", lambda options, rounds, t: 1.0)
    monkeypatch.setattr(Trainer, "gradient", gradient)


def sgd(trainer: Trainer, z: np.ndarray, gradient: np.ndarray, rate: float) -> np.ndarray:
    """Return z − γ g as torch.optim.SGD computes it, which on some processors rounds once and on others twice."""
    parts = zip(*(torch.from_numpy(each).split(list(trainer.layout.sizes)) for each in (z, gradient)), strict=True)
    return torch.cat([torch.add(part, of_gradient, alpha=-rate) for part, of_gradient in parts]).numpy()


def assert_rounded(displacement: np.ndarray, z: np.ndarray, w: np.ndarray, step: np.ndarray) -> None:
    """Check that Δ is γ g but for the roundings of γ, of γ g, of w = z − γ g and of Δ = z − w, each by 2⁻²⁴ of its
    result."""
    bound = 2.0**-24 * (2 * np.abs(step) + np.abs(w) + np.abs(displacement)) * (1 + 2.0**-20)
    assert np.all(np.abs(displacement - step) <= bound)
    assert np.linalg.norm(displacement) > 100 * np.linalg.norm(bound)


def plain_sgd(where: sottovoce.Place, task: Config, every: int) -> np.ndarray:
    """Do what the local step of a task does, in a loop of its own."""
    trainer = RunSetup.open(task, Path(), PEERS).trainer(where.index)
    model, t = trainer.model, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with sottovoce.join(model, where, every=every) as peer:
        while not peer.done:
            t, local = divmod(peer.steps, every)
            optimizer.param_groups[0]["lr"] = trainer.rate(t)
            loss = trainer.batch_loss(t, local=local)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            peer.step(loss)
    return vector_of(model).numpy()


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        (("algorithm.name=sgp", "graph.kind=exponential"), 1),
        (("algorithm.name=d-psgd", "graph.kind=ring"), 1),
        (("algorithm.name=d2", "graph.kind=ring"), 1),
        (("algorithm.name=quant-sgp",), 1),
        (("algorithm.name=moniqua", "graph.kind=ring", "compressor.kind=modulo"), 1),
        (("algorithm.name=allreduce", "graph.kind=complete"), 1),
        (("algorithm.name=ad-psgd", "graph.kind=ring"), 1),
        (("algorithm.name=choco-sgd", "graph.kind=ring"), 1),
        (("algorithm.name=deep-squeeze", "graph.kind=ring"), 1),
        (("algorithm.name=sparse-push",), 1),
        (("algorithm.name=scsp", "algorithm.final_rounds=5"), 1),
        (("algorithm.name=naive-quantized", "graph.kind=ring", "compressor.kind=qsgd"), 1),
        (("algorithm.name=parameter-server", "graph.kind=star", "compressor.kind=none"), 1),
        (("algorithm.name=dcd-psgd", "graph.kind=ring", "compressor.kind=qsgd"), 1),
        (("algorithm.name=ecd-psgd", "graph.kind=ring", "compressor.kind=qsgd"), 1),
        (("algorithm.name=moniqua-d2", "graph.kind=ring", "compressor.kind=modulo"), 1),
        (("algorithm.name=moniqua-ad-psgd", "graph.kind=ring", "compressor.kind=modulo"), 1),
        (("algorithm.name=d-psgd", "graph.kind=ring"), 3),
    ],
    ids=lambda value: value[0].partition("=")[2] if isinstance(value, tuple) else f"H = {value}",
)
def test_plain_sgd_is_that_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], every: int
) -> None:
    task = load(environment={}, overrides=[*TASK, *settings, f"training.local_steps={every}"])
    with monkeypatch.context() as patched:
        as_displacements(patched, task)
        expected = run(task, tmp_path, num_peers=PEERS, baseline=False)
    files = write_kits(tmp_path, PEERS, "run.rounds=25", *settings)
    found = sottovoce.simulate(lambda where: plain_sgd(where, task, every), files[0])
    for model, theirs in zip(found.results, expected.models, strict=True):
        np.testing.assert_array_equal(model, theirs)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, samples: Samples, step: int) -> None:
    batch = slice(first := 8 * step % len(samples), first + 8)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(samples.points[batch]), samples.labels[batch]).backward()
    optimizer.step()


def diloco(rounds: int, every: int) -> torch.Tensor:
    """Return the model that DiLoCo comes to (Douillard et al. 2023, Algorithm 1): inner AdamW, outer Nesterov."""
    shared = make_model()
    workers = [make_model() for _ in range(PEERS)]
    inner = [torch.optim.AdamW(worker.parameters(), lr=0.01) for worker in workers]
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for t in range(rounds):
        for index, (worker, optimizer) in enumerate(zip(workers, inner, strict=True)):
            worker.load_state_dict(shared.state_dict())
            for step in range(t * every, (t + 1) * every):
                train(worker, optimizer, Samples(index), step)
        for parameter, *local in zip(shared.parameters(), *(worker.parameters() for worker in workers), strict=True):
            parameter.grad = torch.stack([parameter.detach() - each.detach() for each in local]).mean(0)
        outer.step()
    return vector_of(shared)


@pytest.mark.parametrize("algorithm", ["sgp", "allreduce"])
def test_outer_momentum_on_a_complete_graph_is_that_of_diloco(tmp_path: Path, algorithm: str) -> None:
    rounds, every = 15, 4

    def script(where: sottovoce.Place) -> torch.Tensor:
        model, samples = make_model(), Samples(where.index)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with sottovoce.join(model, where, every=every, outer_momentum=0.9, outer_learning_rate=0.7) as peer:
            while not peer.done:
                train(model, optimizer, samples, peer.steps)
                peer.step()
        return vector_of(model)

    files = write_kits(tmp_path, PEERS, f"run.rounds={rounds}", f"algorithm.name={algorithm}", "graph.kind=complete")
    expected = diloco(rounds, every)
    moved = float(torch.linalg.norm(expected - vector_of(make_model())))
    for found in sottovoce.simulate(script, files[0]).results:
        assert float(torch.linalg.norm(found - expected)) < 1e-5 * moved
