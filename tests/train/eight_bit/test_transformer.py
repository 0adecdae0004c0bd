"""Transformer blocks in 8 bits: gradients close to those of full precision, products of integers, padding unseen."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from peer.train.eight_bit import attention_kernels, linear_kernels, products
from peer.train.layers import EIGHT_BIT, FULL_PRECISION, Layers

VOCABULARY, POSITIONS, WIDTH, HEADS, CLASSES = 50, 24, 64, 4, 3


def classifier(layers: Layers) -> nn.Module:
    torch.manual_seed(2)
    return layers.network(
        {
            "embeddings": layers.token_embedding(VOCABULARY, POSITIONS, WIDTH),
            "first": layers.transformer_block(WIDTH, HEADS, 4 * WIDTH),
            "second": layers.transformer_block(WIDTH, HEADS, 4 * WIDTH),
            "token": layers.first_token(),
            "classifier": layers.linear(WIDTH, CLASSES),
        }
    )


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    pieces = torch.randint(1, VOCABULARY, (16, 20), generator=generator)
    pieces[::2, 15:] = 0
    return pieces, torch.randint(0, CLASSES, (16,), generator=generator)


def step(model: nn.Module, pieces: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(4)
    loss = nn.functional.cross_entropy(model(pieces), labels)
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


def test_gradients_are_close_to_those_of_full_precision() -> None:
    full, low = classifier(FULL_PRECISION), classifier(EIGHT_BIT)
    step(low, *sentences())
    loss, exact = step(full, *sentences())
    found_loss, found = step(low, *sentences())
    assert found_loss.item() == pytest.approx(loss.item(), rel=0.02)
    names = [name for name, _ in full.named_parameters()]
    assert names == [name for name, _ in low.named_parameters()]
    for name, one, other in zip(names, exact, found, strict=True):
        if not name.endswith("k_lin.bias"):  # adds the same to all scores of a row: its exact gradient is 0
            assert (one - other).norm() < 0.12 * one.norm(), name


@pytest.mark.parametrize("native", [True, False])
def test_every_product_is_of_integers_and_only_integers_are_kept(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    count, original = 0, products.int8_product

    def counted(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        assert (a.dtype, b.dtype, out.dtype) == (torch.int8, torch.int8, torch.int32)
        return original(a, b, out)

    def forbidden(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("a product of floats")

    monkeypatch.setattr(products, "int8_product", counted)
    monkeypatch.setattr(linear_kernels, "int8_product", counted)
    # Of the first batch each product that is followed by a range runs twice: to measure it, and to quantize it.
    model = classifier(EIGHT_BIT)
    pieces, labels = sentences()
    step(model, pieces, labels)
    count = 0
    if not native:
        monkeypatch.setattr(linear_kernels, "lib", None)
    layer = linear_kernels._layer

    def counted_natively(*operands: Any) -> Any:
        nonlocal count
        count += 1
        return layer(*operands)

    heads, calls = attention_kernels._heads, 0

    def counted_for_all_heads(*operands: Any) -> Any:
        nonlocal calls
        calls += 1
        return heads(*operands)

    monkeypatch.setattr(linear_kernels, "_layer", counted_natively)
    monkeypatch.setattr(attention_kernels, "_heads", counted_for_all_heads)
    for name in ("matmul", "bmm", "addmm"):
        monkeypatch.setattr(torch, name, forbidden)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", forbidden)
    step(model, pieces, labels)
    # Of codes, each for every head: test_attention_kernels.py compares the results with those of integers, bit for bit.
    in_registers = linear_kernels.multiplies_bytes(pieces) is not None
    assert calls == (2 * 4 if in_registers else 0)
    matrices = 0 if in_registers else len(pieces) * HEADS
    assert count == 2 * ((6 + 6) + 6 * matrices) + 2


def test_what_is_kept_is_less_than_a_third_of_float32() -> None:
    pieces, _ = sentences()
    full, low = classifier(FULL_PRECISION), classifier(EIGHT_BIT)
    own = {parameter.data_ptr() for parameter in full.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        full(pieces)
    low(pieces)
    assert sum(kept.values()) > 3.0 * low.last_saved_bytes  # type: ignore[operator]


def test_the_widest_codes_are_forgotten_as_soon_as_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the gradient of the same width they would be most of what a step needs at its peak."""
    model = classifier(EIGHT_BIT)
    pieces, labels = sentences()
    wide = (pieces.numel(), 4 * WIDTH)

    def alive() -> int:
        tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor and found.shape == wide]
        return len({found.data_ptr() for found in tensors if found.dtype == torch.int8})

    counts, original = [], linear_kernels.weight_gradient

    def watched(*values: Any) -> Any:
        counts.append(alive() - before)
        return original(*values)

    step(model, pieces, labels)
    before = alive()
    monkeypatch.setattr(linear_kernels, "weight_gradient", watched)
    step(model, pieces, labels)
    # The classifier, then of each block, backwards: `lin2`, for which those after GELU are looked up once more, `lin1`,
    # and the four layers of attention.
    assert counts == [2, *(3, 1, 1, 1, 1, 1), *(2, 0, 0, 0, 0, 0)]


def test_padding_changes_nothing() -> None:
    model = classifier(EIGHT_BIT)
    pieces, _ = sentences()
    model(pieces)
    model.eval()
    with torch.no_grad():
        longer = torch.cat([pieces, torch.zeros(len(pieces), 4, dtype=torch.int64)], dim=1)
        assert torch.equal(model(pieces), model(longer))
