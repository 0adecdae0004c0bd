"""Ordinary modules that are converted: which of them compute in 8 bits, and that they compute what they did before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from peer.errors import UsageError
from peer.train.eight_bit import Network
from peer.train.eight_bit.conversion import convert
from peer.train.layers import EIGHT_BIT


def mlp() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 10))


def images() -> nn.Sequential:
    """A network with all that has a counterpart."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding="same"),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class Sentences(nn.Module):
    """A model with a way of its own through its parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(50, 24)
        self.attend = nn.TransformerEncoderLayer(24, 2, 32, dropout=0.0, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Dropout(0.0), nn.Linear(64, 24), nn.Tanh())
        self.blocks = nn.ModuleList([nn.Linear(24, 24)])
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.attend(self.embed(tokens))
        x = self.blocks[0](x + self.mix(x))
        logits: torch.Tensor = self.head(x)
        return logits


def close(model: nn.Module, converted: nn.Module, x: torch.Tensor, *, share: float = 0.15) -> None:
    """Check that two models that share their parameters have about the same outputs and gradients."""
    model, converted = model.train(), converted.train()
    found = []
    for each in (model, converted):
        y = each(x)
        parameters = list(each.parameters())
        found.append((y.detach(), torch.autograd.grad(y.square().mean(), parameters)))
    (y, exact), (low, rounded) = found
    assert 0 < (low - y).norm() < 0.1 * y.norm()
    for one, other in zip(exact, rounded, strict=True):
        assert (other - one).norm() < share * one.norm() + 1e-3


def test_a_converted_network_is_that_of_the_layers() -> None:
    plain = mlp()
    converted = convert(plain)
    built = EIGHT_BIT.network(
        {"0": EIGHT_BIT.flatten(), "1": EIGHT_BIT.linear(20, 48), "2": EIGHT_BIT.relu(), "3": EIGHT_BIT.linear(48, 10)}
    )
    built.load_state_dict(converted.state_dict())
    x = torch.rand(8, 4, 5, generator=torch.Generator().manual_seed(2))
    assert torch.equal(converted(x), built(x))
    assert [name for name, _ in converted.named_parameters()] == [name for name, _ in plain.named_parameters()]
    close(plain, converted, x)


def test_images_are_converted_as_a_whole_with_their_statistics() -> None:
    plain = images()
    converted = convert(plain)
    assert isinstance(converted, Network)
    assert all(one is other for one, other in zip(converted.parameters(), plain.parameters(), strict=True))
    x = torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    close(copy.deepcopy(plain), converted, x, share=0.3)
    # What the converted network learns of batches, the plain one knows.
    norm = plain[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_mean.abs().max() > 0
    assert (converted.eval()(x) - plain.eval()(x)).norm() < 0.1 * plain(x).norm()


def test_a_model_of_ones_own_keeps_its_way_and_its_ties(caplog: pytest.LogCaptureFixture) -> None:
    plain = Sentences()
    converted = convert(plain, leave=["head"])
    assert isinstance(converted, Sentences)
    assert isinstance(converted.blocks[0], Network)
    assert converted.head.weight is converted.embed.weight is plain.embed.weight
    assert isinstance(plain.blocks[0], nn.Linear)
    assert [type(each) for each in converted.mix] == [Network, nn.Dropout, Network, nn.Tanh]
    named = "embed (Embedding), attend (TransformerEncoderLayer), mix.2 (Dropout), mix.4 (Tanh), head (Linear)"
    assert f"in float32 stay {named}: they have no counterpart" in caplog.text
    assert all(one is other for one, other in zip(converted.parameters(), plain.parameters(), strict=True))
    close(plain, converted, torch.arange(40).view(4, 10))


def test_a_part_that_is_there_twice_computes_twice() -> None:
    shared, relu = nn.Linear(16, 16), nn.ReLU()
    plain = nn.Sequential(shared, relu, shared, relu)
    converted = convert(plain)
    close(plain, converted, torch.rand(8, 16, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 2, padding=1),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, (3, 1), padding=(1, 0)),
        nn.Conv2d(4, 4, 3, padding=1, bias=False),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, track_running_stats=False)),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4, affine=False)),
        nn.LSTM(4, 4),
        nn.Sequential(nn.ReLU(), nn.Flatten()),
    ],
    ids=str,
)
def test_what_would_compute_something_else_stays_or_is_refused(layer: nn.Module) -> None:
    with pytest.raises(UsageError, match="nothing in this model has a counterpart"):
        convert(layer)
    model = nn.Sequential(layer, nn.Conv2d(4, 4, 3, padding=1))
    converted = convert(model)
    assert type(converted.get_submodule("0")) is type(layer)


def test_names_that_nothing_has_are_refused() -> None:
    with pytest.raises(UsageError, match=r"leave names 'heads', and the model has no such module"):
        convert(mlp(), leave=["heads"])


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d((2, 2)), nn.MaxPool2d((2, 3)), nn.MaxPool2d(2, ceil_mode=True)]
)
def test_pools_pool_what_they_did(pool: nn.MaxPool2d) -> None:
    plain = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), pool)
    x = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(2))
    converted = convert(plain)
    assert converted(x).shape == plain(x).shape
    assert (converted(x) - plain(x)).norm() < 0.05 * plain(x).norm()
