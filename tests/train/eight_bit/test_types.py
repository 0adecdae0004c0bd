"""The 8 bits are real: integer operands in the products, integers kept for the backward pass, and the numbers of a
simulation of the same scheme in float64, written here a second time."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from peer.native import available
from peer.train.eight_bit import boundary, linear_kernels
from peer.train.eight_bit.linear_kernels import Operands, OperandsBack
from peer.train.eight_bit.products import int8_product
from peer.train.eight_bit.scratch import _blocks
from peer.train.eight_bit.tensors import Quantized, Tape
from peer.train.layers import EIGHT_BIT, FULL_PRECISION
from peer.train.models.mlp import mlp

Array = npt.NDArray[np.float64]

SIZES = (96, 256, 192, 10)
BATCH = 128


@dataclass
class Seen:
    """What a step did, as seen from inside."""

    integer_products: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = field(default_factory=list)
    float_products: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    tapes: list[Tape] = field(default_factory=list)
    saved_by_autograd: list[torch.Tensor] = field(default_factory=list)


@pytest.fixture(params=["native", "torch"])
def seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Seen:
    if request.param == "torch":
        monkeypatch.setattr(linear_kernels, "lib", None)
    elif not available():
        pytest.skip("the native kernels were not built")
    record, weight_gradient = Seen(), linear_kernels.weight_gradient
    layer = linear_kernels._layer

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        record.integer_products.append((a.dtype, b.dtype, out.dtype))
        return int8_product(a, b, out)

    def product_in_registers(native: Any, x: Operands | OperandsBack, weight: torch.Tensor) -> Any:
        # Weights and gradients become codes in the call, and sums are int32: test_linear_kernels.py compares the
        # results with those of integers, bit for bit.
        read = x.codes.dtype if isinstance(x, Operands) else torch.int8
        record.integer_products.append((read, torch.int8, torch.int32))
        return layer(native, x, weight)

    def float_product(gradient: torch.Tensor, codes: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        record.float_products.append((gradient.clone(), codes.clone()))
        return weight_gradient(gradient, codes, *rest)

    class Watched(Tape):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            record.tapes.append(self)

    monkeypatch.setattr(linear_kernels, "int8_product", product)
    monkeypatch.setattr(linear_kernels, "_layer", product_in_registers)
    monkeypatch.setattr(linear_kernels, "weight_gradient", float_product)
    monkeypatch.setattr(boundary, "Tape", Watched)
    # Any other product than those would be one in disguise.
    for name in ("matmul", "addmm", "bmm", "einsum"):
        monkeypatch.setattr(torch, name, _forbidden)
    monkeypatch.setattr(nn.functional, "linear", _forbidden)
    return record


def _forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("a product besides the integer ones and those of the weight gradients")


def network() -> nn.Module:
    torch.manual_seed(1)
    return mlp(SIZES, EIGHT_BIT)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(BATCH, SIZES[0], generator=generator)
    return inputs, torch.randint(0, SIZES[-1], (BATCH,), generator=generator)


def warmed_up() -> nn.Module:
    """Return a network whose ranges have seen a batch."""
    model = network()
    model(batch(7)[0])
    return model


def test_forward_and_input_gradient_products_are_of_integers(seen: Seen) -> None:
    model = warmed_up()
    seen.integer_products.clear()
    inputs, labels = batch(8)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    assert seen.integer_products == [(torch.int8, torch.int8, torch.int32)] * 3
    torch.autograd.grad(loss, list(model.parameters()))
    # Two more: nobody asks for the gradient of the network's input.
    assert seen.integer_products == [(torch.int8, torch.int8, torch.int32)] * 5


def test_weight_gradients_come_from_stored_codes_and_gradients_before_quantization(seen: Seen) -> None:
    model = warmed_up()
    inputs, labels = batch(8)
    logits = model(inputs)
    stored = [value for entry in seen.tapes[-1]._entries for value in entry if isinstance(value, Quantized)]
    loss = nn.functional.cross_entropy(logits, labels)
    (at_the_top,) = torch.autograd.grad(loss, logits, retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()))
    assert len(seen.float_products) == 3
    for (gradient, operand), saved in zip(seen.float_products, reversed(stored), strict=True):
        assert gradient.dtype == torch.bfloat16
        assert operand.dtype == saved.data.dtype == torch.int8
        assert torch.equal(operand, saved.data)
    assert torch.equal(seen.float_products[0][0], at_the_top.to(torch.bfloat16))
    # 8 bits around zero have 255 values.
    for gradient, _ in seen.float_products[1:]:
        assert len(gradient.unique()) > 255


def test_nothing_wider_than_int8_is_kept_for_the_backward_pass(seen: Seen) -> None:
    model = warmed_up()
    inputs, labels = batch(8)
    gc.collect()
    before = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}
    with torch.autograd.graph.saved_tensors_hooks(_noted(seen), lambda tensor: tensor):
        logits = model(inputs)
    gc.collect()
    tape = seen.tapes[-1]
    assert {tensor.dtype for tensor in tape.tensors()} == {torch.int8}
    activations = BATCH * sum(SIZES[:-1])
    assert tape.saved_bytes() == activations
    assert model.last_saved_bytes == activations
    assert not seen.saved_by_autograd
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and id(thing) not in before]
    wide = [tensor for tensor in alive if tensor.element_size() > 1 and tensor.numel() >= BATCH]
    wide = [tensor for tensor in wide if tensor.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()]
    assert not wide, [(tensor.dtype, tensor.shape) for tensor in wide]
    # Scratch memory belongs to no step: a second forward pass takes no more of it.
    blocks = {name: len(block) for name, block in _blocks.by_name.items()}
    model(batch(9)[0])
    assert {name: len(block) for name, block in _blocks.by_name.items()} == blocks
    torch.autograd.grad(nn.functional.cross_entropy(logits, labels), list(model.parameters()))
    assert tape.tensors() == []


def test_float32_keeps_four_times_as_much() -> None:
    torch.manual_seed(1)
    full, kept = mlp(SIZES, FULL_PRECISION), []
    own = {parameter.data_ptr() for parameter in full.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        full(batch(8)[0])
    num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())
    model = warmed_up()
    assert num_bytes >= 3.5 * model.last_saved_bytes


def _noted(seen: Seen) -> Any:
    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.saved_by_autograd.append(tensor)
        return tensor

    return note


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("native", [True, False])
def test_a_step_is_that_of_a_simulation_in_float64(steps: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients differ by no more than bfloat16 rounds; float32 without 8 bits is ten times as far away."""
    if not native:
        monkeypatch.setattr(linear_kernels, "lib", None)
    model = network()
    simulation = Simulation(model)
    for step in range(steps):
        inputs, labels = batch(20 + step)
        torch.manual_seed(step)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        found = torch.autograd.grad(loss, list(model.parameters()))
        torch.manual_seed(step)
        seed = int(torch.empty((), dtype=torch.int64).random_(-(2**63), None))
        expected_loss, expected = simulation.step(inputs.double().numpy(), labels.numpy(), seed)
        assert loss.item() == pytest.approx(expected_loss, rel=2e-4)
        for one, other in zip(found, expected, strict=True):
            assert np.linalg.norm(one.double().numpy() - other) < 6e-3 * np.linalg.norm(other)
    torch.manual_seed(1)
    full = mlp(SIZES, FULL_PRECISION)
    inputs, labels = batch(20 + steps - 1)
    exact = torch.autograd.grad(nn.functional.cross_entropy(full(inputs), labels), list(full.parameters()))
    assert np.linalg.norm(exact[0].double().numpy() - expected[0]) > 3e-2 * np.linalg.norm(expected[0])


class Simulation:
    """The scheme of `peer.train.eight_bit` for an MLP, in float64 and numpy."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [parameter.detach().double().numpy() for parameter in model.parameters()]
        self.weights, self.biases = tensors[0::2], tensors[1::2]
        self.ranges: list[tuple[float, float] | None] = [None] * len(self.weights)

    def step(self, x: Array, labels: npt.NDArray[np.int64], seed: int) -> tuple[float, list[Array]]:
        """Return loss and gradients of one batch; the ranges move on."""
        codes, grids = [], []
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            scale, zero = self._grid(index, x)
            q = np.clip(np.rint(x / scale) + zero, -128, 127)
            codes.append(q)
            grids.append((scale, zero))
            q_weight, w_scale = self._quantized(weight)
            x = scale * w_scale * ((q - zero) @ q_weight.T) + bias
            if index < len(self.weights) - 1:
                x = np.maximum(x, 0.0)
        shifted = x - x.max(1, keepdims=True)
        probabilities = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
        loss = -np.log(probabilities[np.arange(len(x)), labels]).mean()
        gradient = (probabilities - np.eye(x.shape[1])[labels]) / len(x)
        found: list[Array] = []
        for stream, index in enumerate(range(len(self.weights) - 1, -1, -1), start=1):
            gradient = self._bfloat16(gradient)
            (scale, zero), q = grids[index], codes[index]
            found += [gradient.sum(0), scale * gradient.T @ (q - zero)]
            if index == 0:
                break
            g_scale = np.abs(gradient).max() / 127
            g_codes = np.clip(np.floor(gradient / g_scale + self._draws(gradient.shape, seed, stream)), -127, 127)
            q_weight, w_scale = self._quantized(self.weights[index])
            gradient = g_scale * w_scale * (g_codes @ q_weight) * (q != zero)
        return float(loss), found[::-1]

    def _grid(self, index: int, x: Array) -> tuple[float, int]:
        """The grid of the range so far, or of this batch if it is the first; the range then takes in the batch."""
        far = 4.0 * np.sqrt((x[x != 0] ** 2).mean()) if index == 0 else math.inf
        low, high = max(min(x.min(), 0.0), -far), min(max(x.max(), 0.0), far)
        known = self.ranges[index] or (low, high)
        self.ranges[index] = (
            min(low, known[0] + 0.01 * (low - known[0])),
            max(high, known[1] + 0.01 * (high - known[1])),
        )
        scale = (known[1] - known[0]) / 255
        return scale, round(-known[0] / scale) - 128

    @staticmethod
    def _quantized(weight: Array) -> tuple[Array, float]:
        scale = np.abs(weight).max() / 127
        return np.rint(weight / scale), scale

    @staticmethod
    def _bfloat16(x: Array) -> Array:
        """Eight significant bits."""
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.rint(mantissa * 256), exponent - 8)

    @staticmethod
    def _draws(shape: tuple[int, ...], seed: int, stream: int) -> Array:
        z = (seed + stream * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        size = int(np.prod(shape))
        h = np.arange((size + 1) // 2, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(z % 2**32)
        h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B) ^ np.uint32(z >> 32)
        h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
        h ^= h >> np.uint32(16)
        halves = np.stack((h & np.uint32(0xFFFF), h >> np.uint32(16)), axis=1).reshape(-1)[:size]
        uniforms: Array = halves.astype(np.float64).reshape(shape) / 65536
        return uniforms
