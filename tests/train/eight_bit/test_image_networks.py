"""Convolutional networks in 8 bits: gradients near those of float32, a quarter of the memory, and they learn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from peer.train.eight_bit import ConvUnit, Network, Residual
from peer.train.full_precision.norms import NORMS, Norm, activates
from peer.train.layers import EIGHT_BIT, FULL_PRECISION, Layers


def small_resnet(layers: Layers, norm: Norm) -> nn.Module:
    """Every kind of block: with and without shortcut, stride 1 and 2."""
    torch.manual_seed(1)
    last = not activates(norm)
    first = {
        "first": layers.conv_unit(16, 16, norm=norm),
        "second": layers.conv_unit(16, 16, norm=norm, activate=False),
    }
    second = {
        "first": layers.conv_unit(16, 32, stride=2, norm=norm),
        "second": layers.conv_unit(32, 32, norm=norm, activate=False),
    }
    around = layers.conv_unit(16, 32, kernel=1, stride=2, norm=norm, activate=False)
    return layers.network(
        {
            "stem": layers.conv_unit(3, 16, norm=norm),
            "first": layers.residual(first, None, activate=last),
            "second": layers.residual(second, around, activate=last),
            "average": layers.average_pool(),
            "head": layers.linear(32, 4),
        }
    )


def small_vgg(layers: Layers) -> nn.Module:
    torch.manual_seed(1)
    return layers.network(
        {
            "0": layers.conv_unit(3, 16),
            "1": layers.max_pool(2),
            "2": layers.conv_unit(16, 32),
            "3": layers.max_pool(3, stride=2, padding=1),
            "4": layers.flatten(),
            "5": layers.linear(32 * 9, 24),
            "6": layers.relu(),
            "7": layers.linear(24, 4),
        }
    )


def small_mobilenet(layers: Layers) -> nn.Module:
    torch.manual_seed(1)
    main = {
        "expand": layers.conv_unit(8, 24, kernel=1, norm="evonorm"),
        "depthwise": layers.conv_unit(24, 24, groups=24, norm="evonorm"),
        "project": layers.conv_unit(24, 8, kernel=1, norm="evonorm", activate=False),
    }
    return layers.network(
        {
            "stem": layers.conv_unit(3, 8, stride=2, norm="evonorm"),
            "block": layers.residual(main, None, activate=False),
            "average": layers.average_pool(),
            "head": layers.linear(8, 4),
        }
    )


MODELS: dict[str, Callable[[Layers], nn.Module]] = {
    **{name: lambda layers, norm=name: small_resnet(layers, norm) for name in NORMS},  # type: ignore[misc]
    "vgg": small_vgg,
    "mobilenet": small_mobilenet,
}


def images(count: int, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of 12 × 12 with a bright quarter, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    pictures = torch.randn(count, 3, 12, 12, generator=generator)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        y, x = 6 * (label // 2), 6 * (label % 2)
        picture[:, y : y + 6, x : x + 6] += torch.linspace(0.8, 1.6, 36).view(6, 6)
    return pictures, labels


def gradients(network: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    loss = functional.cross_entropy(network(batch[0]), batch[1])
    return list(torch.autograd.grad(loss, list(network.parameters())))


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return functional.cosine_similarity(one.reshape(1, -1), other.reshape(1, -1)).item()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_point_where_those_of_float32_do(name: str) -> None:
    full, low = MODELS[name](FULL_PRECISION), MODELS[name](EIGHT_BIT)
    names = [parameter for parameter, _ in full.named_parameters()]
    assert names == [parameter for parameter, _ in low.named_parameters()]
    for one, other in zip(full.parameters(), low.parameters(), strict=True):
        assert torch.equal(one, other)
    batch = images(16)
    exact, found = gradients(full, batch), gradients(low, batch)
    assert cosine(flat(exact), flat(found)) > 0.97
    for parameter, one, other in zip(names, exact, found, strict=True):
        assert other.dtype == torch.float32
        assert other.shape == one.shape
        assert cosine(one, other) > 0.7, parameter


@pytest.mark.parametrize("name", ["range-evonorm", "evonorm", "vgg"])
def test_a_network_in_8_bits_learns(name: str) -> None:
    network = MODELS[name](EIGHT_BIT)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for step in range(25):
        pictures, labels = images(32, seed=10 + step)
        optimizer.zero_grad()
        functional.cross_entropy(network(pictures), labels).backward()
        optimizer.step()
    pictures, labels = images(200, seed=5)
    network.eval()
    with torch.no_grad():
        assert (network(pictures).argmax(dim=1) == labels).float().mean() > 0.8


@pytest.mark.parametrize("name", ["batch", "range-evonorm", "vgg"])
def test_what_is_kept_is_8_bits_wide(name: str) -> None:
    pictures, _ = images(32)
    full, low = MODELS[name](FULL_PRECISION), MODELS[name](EIGHT_BIT)
    assert isinstance(low, Network)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = full(pictures)
    low(pictures)
    assert output.requires_grad
    assert 3.5 * low.last_saved_bytes < sum(kept.values())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vgg"])
def test_sums_in_passes_of_layers_are_those_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def two_steps() -> list[torch.Tensor]:
        network = MODELS[name](EIGHT_BIT)
        found = [gradient for seed in (5, 6) for gradient in gradients(network, images(8, seed=seed))]
        return [*found, *network.buffers()]

    together = two_steps()
    monkeypatch.setattr(Residual, "_sum_with", lambda *_: None)
    monkeypatch.setattr(ConvUnit, "can_add", False)
    for one, other in zip(together, two_steps(), strict=True):
        assert torch.equal(one, other)


def test_the_gradient_of_an_image_is_there_for_who_asks() -> None:
    pictures, _ = images(4)
    found = []
    for layers in (FULL_PRECISION, EIGHT_BIT):
        asked = pictures.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(small_vgg(layers)(asked).square().sum(), asked)
        found.append(gradient)
    assert found[1].shape == pictures.shape
    assert cosine(*found) > 0.95


def test_evaluation_uses_running_statistics_and_moves_nothing() -> None:
    network = MODELS["batch"](EIGHT_BIT)
    for seed in range(3):
        network(images(32, seed=seed)[0])
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.eval()
    with torch.no_grad():
        alone, together = network(images(8)[0][:1]), network(images(8)[0])[:1]
    assert torch.equal(alone, together)
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_weights_that_are_no_numbers_reach_the_loss() -> None:
    for name in ("range-evonorm", "batch", "vgg"):
        network = MODELS[name](EIGHT_BIT)
        with torch.no_grad():
            next(network.parameters())[0, 0] = float("nan")
        assert not torch.isfinite(network(images(4)[0])).any()
