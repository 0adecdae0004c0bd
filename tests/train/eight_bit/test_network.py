"""An 8-bit network is a module like any other: same parameters, ordinary gradients, deterministic, its ranges local."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from peer.train.eight_bit import Network, RunningRange
from peer.train.eight_bit.ranges import grid_over
from peer.train.layers import EIGHT_BIT, FULL_PRECISION, Layers
from peer.train.models.mlp import mlp

SIZES = (20, 48, 32, 10)


def model(layers: Layers) -> nn.Module:
    torch.manual_seed(1)
    return mlp(SIZES, layers)


def batch(seed: int = 2, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, SIZES[0], generator=generator), torch.randint(0, 10, (size,), generator=generator)


def gradients(network: nn.Module, seed: int = 3) -> list[torch.Tensor]:
    inputs, labels = batch()
    torch.manual_seed(seed)
    loss = nn.functional.cross_entropy(network(inputs), labels)
    return list(torch.autograd.grad(loss, list(network.parameters())))


def test_both_precisions_have_the_same_parameters() -> None:
    full, low = model(FULL_PRECISION), model(EIGHT_BIT)
    assert [name for name, _ in full.named_parameters()] == [name for name, _ in low.named_parameters()]
    for one, other in zip(full.parameters(), low.parameters(), strict=True):
        assert torch.equal(one, other)


def test_gradients_are_close_to_those_of_full_precision() -> None:
    full, low = gradients(model(FULL_PRECISION)), gradients(model(EIGHT_BIT))
    for exact, rounded in zip(full, low, strict=True):
        assert rounded.dtype == torch.float32
        assert (rounded - exact).norm() < 0.1 * exact.norm()


def test_gradients_are_a_function_of_the_seed() -> None:
    first, again, other = gradients(model(EIGHT_BIT)), gradients(model(EIGHT_BIT)), gradients(model(EIGHT_BIT), seed=4)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_the_gradient_of_the_input_is_there_for_who_asks() -> None:
    inputs, _ = batch()
    full, low = model(FULL_PRECISION), model(EIGHT_BIT)
    found = []
    for network in (full, low):
        asked = inputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(network(asked).square().sum(), asked)
        found.append(gradient)
    assert (found[1] - found[0]).norm() < 0.1 * found[0].norm()


def test_frozen_layers_get_no_gradient_and_the_others_the_same() -> None:
    whole, partial = model(EIGHT_BIT), model(EIGHT_BIT)
    names = [name for name, _ in partial.named_parameters()]
    for name, parameter in partial.named_parameters():
        parameter.requires_grad_("linear3" in name)
    inputs, labels = batch()
    torch.manual_seed(3)
    loss = nn.functional.cross_entropy(partial(inputs), labels)
    trained = [parameter for parameter in partial.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, trained)
    expected = dict(zip(names, gradients(whole), strict=True))
    assert torch.equal(found[0], expected["linear3.weight"])
    assert torch.equal(found[1], expected["linear3.bias"])


def test_a_loss_can_be_differentiated_once() -> None:
    loss = model(EIGHT_BIT)(batch()[0]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def test_layers_alone_do_not_compute() -> None:
    with pytest.raises(TypeError, match="network"):
        EIGHT_BIT.linear(3, 4)(torch.zeros(1, 3))
    with pytest.raises(TypeError, match="float32"):
        EIGHT_BIT.network({"linear": nn.Linear(3, 4)})


def test_evaluation_changes_no_range_and_keeps_nothing() -> None:
    network = model(EIGHT_BIT)
    assert isinstance(network, Network)
    gradients(network)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    assert before
    network.eval()
    with torch.no_grad():
        network(batch(seed=5)[0] * 10)
    assert network.last_saved_bytes == 0
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, before[name])


def test_a_network_that_has_seen_nothing_can_be_evaluated() -> None:
    full, low = model(FULL_PRECISION).eval(), model(EIGHT_BIT).eval()
    inputs, _ = batch()
    with torch.no_grad():
        exact, found = full(inputs), low(inputs)
    assert (found - exact).norm() < 0.05 * exact.norm()
    assert not any(buffer.any() for buffer in low.buffers())


def test_weights_that_are_no_numbers_reach_the_loss() -> None:
    network = model(EIGHT_BIT)
    with torch.no_grad():
        next(network.parameters())[0, 0] = math.nan
    loss = nn.functional.cross_entropy(network(batch()[0]), batch()[1])
    assert not math.isfinite(loss.item())


def test_a_range_widens_at_once_and_narrows_slowly() -> None:
    running = RunningRange()
    assert running.grid() is None
    running.observe_(-1.0, 2.0)
    assert running.running_range.tolist() == [-1.0, 2.0]
    running.observe_(-3.0, 1.0)
    low, high = running.running_range.tolist()
    assert low == -3.0
    assert high == pytest.approx(1.99)


def test_without_momentum_all_batches_count_alike() -> None:
    running = RunningRange()
    running.observe_(-9.0, 9.0)
    running.reset_running_stats()
    assert running.grid() is None
    running.momentum = None
    for low, high in ((-1.0, 2.0), (-0.5, 0.5), (0.5, 3.0)):
        running.observe_(low, high)
    assert running.running_range.tolist() == [-1.0, 3.0]


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.5, 2.0), (-2.0, -1.0), (0.0, 0.0), (-1e-3, 70.0)])
def test_zero_is_always_on_the_grid_and_the_ends_within_half_a_step(low: float, high: float) -> None:
    grid = grid_over(low, high)
    assert -128 <= grid.zero_point <= 127
    assert (-128 - grid.zero_point) * grid.scale <= min(low, 0.0) + grid.scale / 2
    assert (127 - grid.zero_point) * grid.scale >= max(high, 0.0) - grid.scale / 2


def input_range(x: torch.Tensor) -> tuple[float, float]:
    network = model(EIGHT_BIT)
    assert isinstance(network, Network)
    network(x)
    low, high = network.input_range.running_range.tolist()
    return low, high


def test_single_values_of_a_table_do_not_take_the_codes_of_all_others() -> None:
    table = torch.randn(1000, SIZES[0], generator=torch.Generator().manual_seed(4)).clamp_(-3.0, 3.0)
    assert input_range(table) == (-3.0, 3.0)
    table[17, 3], table[400, 5] = 46.0, -60.0
    low, high = input_range(table)
    assert -5.0 < low < -3.9
    assert high == -low


@pytest.mark.parametrize("place", ["sparse", "made by a layer", "no number"])
def test_other_inputs_keep_their_whole_range(place: str) -> None:
    x = torch.zeros(100, SIZES[0])
    x[3, 7] = 1.0
    if place == "sparse":
        assert input_range(x) == (0.0, 1.0)
    elif place == "made by a layer":
        x[3, 8] = 0.01
        x[4:] = 0.001
        assert input_range(x.requires_grad_()) == (0.0, 1.0)
    else:
        x[3, 7] = math.nan
        assert all(map(math.isnan, input_range(x)))
