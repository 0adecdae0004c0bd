"""The screening's models are GPTs that do not know of each other, and its messages lose nothing."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tools import language_models
from tools.language_models import (
    CHUNK,
    CONTEXT,
    DOMAINS,
    Corpus,
    Mean,
    Models,
    Replicas,
    Shape,
    Shared,
    Sparse,
    Trial,
    compressed,
    run_trials,
)

SHAPE = Shape(width=32, layers=2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder: Path = tmp_path_factory.mktemp("corpus")
    for index, name in enumerate(DOMAINS):
        (folder / f"{name}.train").write_bytes(bytes((7 * index + place * place) % 251 for place in range(9 * CONTEXT)))
        (folder / f"{name}.held").write_bytes(bytes((place * index) % 241 for place in range(17 * CONTEXT)))
    return Corpus(folder, CPU)


def loss_of_one(values: dict[str, Tensor], tokens: Tensor) -> float:
    """The loss of a GPT as its equations say, one model and head after the other."""
    x = values["tokens"][tokens[:, :-1]] + values["positions"]
    hidden = torch.ones(CONTEXT, CONTEXT).tril() == 0
    for layer in range(SHAPE.layers):
        y = functional.layer_norm(x, (32,), *values[f"{layer}.norm1"])
        query, key, value = (y @ values[f"{layer}.qkv"] + values[f"{layer}.qkv bias"]).chunk(3, -1)
        weights = (query @ key.mT / math.sqrt(32)).masked_fill(hidden, -math.inf).softmax(-1)
        x = x + weights @ value @ values[f"{layer}.out"] + values[f"{layer}.out bias"]
        y = functional.layer_norm(x, (32,), *values[f"{layer}.norm2"])
        y = functional.gelu(y @ values[f"{layer}.up"] + values[f"{layer}.up bias"])
        x = x + y @ values[f"{layer}.down"] + values[f"{layer}.down bias"]
    logits = functional.layer_norm(x, (32,), *values["norm"]) @ values["tokens"].T
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def test_each_model_of_a_batch_is_a_gpt_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    starts = torch.stack([SHAPE.start(seed) for seed in range(3)])
    starts += 0.1 * torch.randn(starts.shape, generator=generator)
    models = Models(SHAPE, starts)
    tokens = torch.randint(256, (3, 2, CONTEXT + 1), generator=generator)
    losses = models.losses(tokens)
    torch.autograd.backward(losses.sum())
    with torch.no_grad():
        for index in range(3):
            one = {name: layer[index] for name, layer in models.layers.items()}
            assert losses[index].item() == pytest.approx(loss_of_one(one, tokens[index]), rel=1e-5)
    alone = Models(SHAPE, starts[1:2].clone())
    torch.autograd.backward(alone.losses(tokens[1:2]).sum())
    torch.testing.assert_close(models.gradients[1:2], alone.gradients)


def test_trials_side_by_side_end_as_they_do_alone(corpus: Corpus) -> None:
    def trial(contender: str, **settings: float) -> Trial:
        chosen = dict(language_models.CONTENDERS[contender].settings) | settings
        return Trial(contender, 2, 3, 4, 0.01, tuple(sorted(chosen.items())), Shape(32, 1))

    trials = [trial("ddp"), trial("mean"), trial("shared"), trial("shared", rate=0.2)]
    together = list(run_trials(trials, corpus, True, CPU))
    for one, row in zip(trials, together, strict=True):
        (alone,) = run_trials([one], corpus, True, CPU)
        assert row["worst"] == pytest.approx(alone["worst"], abs=1e-4)
        assert row["worst"] == pytest.approx(row["averaged"], abs=1e-4)  # These leave one model on all.
    assert len({row["worst"] for row in together}) == 4


def test_of_each_chunk_the_largest_are_sent_as_a_sign_and_one_of_two_sizes() -> None:
    x = torch.randn(2, 3, 2 * CHUNK, generator=torch.Generator().manual_seed(0))
    sent = compressed(x, torch.tensor([1 / 64, 1 / 8]), 2).view(2, 3, 2, CHUNK)
    chunks = x.view(2, 3, 2, CHUNK)
    assert (sent[0] != 0).sum(-1).eq(64).all()
    assert (sent[1] != 0).sum(-1).eq(512).all()
    assert (sent * chunks >= 0).all()
    for one, whole in zip(sent.flatten(0, 2), chunks.flatten(0, 2), strict=True):
        assert len(one[one != 0].abs().unique()) == 2
        assert whole[one != 0].abs().min() >= whole[one == 0].abs().max()


@pytest.mark.parametrize("kind", [Sparse, Shared])
def test_what_is_not_sent_is_kept(kind: type[Sparse]) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(1, 4, CHUNK, generator=generator)[:, :1].expand(1, 4, CHUNK).clone()
    settings = {"momentum": 0.0, "rate": 1.0, "decay": 1.0, "fraction": 0.1}
    exchange = kind(start, {name: torch.tensor([[[value]]]) for name, value in settings.items()})
    x, moved = start.clone(), torch.zeros(1, 1, CHUNK)
    for round in range(40):
        step = 0.1 * torch.randn(x.shape, generator=generator) if round < 5 else torch.zeros(x.shape)
        x += step
        moved += step.mean(1, keepdim=True)
        exchange(x, round)
        assert (x == x[:, :1]).all()
    torch.testing.assert_close(x[:, :1], start[:, :1] + moved, atol=2e-2, rtol=0)
    exact = start.clone()
    exact += moved
    Mean(exact, {})(exact, 0)
    torch.testing.assert_close(x, exact, atol=2e-2, rtol=0)


def test_mixing_with_replicas_keeps_the_sum() -> None:
    x = torch.randn(1, 8, CHUNK, generator=torch.Generator().manual_seed(2))
    settings = {"momentum": 0.0, "outer": 1.0, "averaging": 0.4, "fraction": 0.25}
    exchange = Replicas(torch.zeros_like(x), {name: torch.tensor([[[value]]]) for name, value in settings.items()})
    mean, apart = x.mean(1), x.std(1).mean()
    for round in range(60):
        exchange(x, round)
    torch.testing.assert_close(x.mean(1), mean, atol=1e-4, rtol=0)
    assert x.std(1).mean() < 0.2 * apart
