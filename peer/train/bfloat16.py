"""Training in bfloat16: 16-bit operands and activations around float32 parameters.

torch's autocast gives every convolution, linear layer and product of matrices inside the model's `forward` operands in
bfloat16; the processor adds up in float32 and rounds the result. Operations between them pass bfloat16 on, and norms
add up in float32. The model returns float32, so the loss, and everything computed from it outside the model, is
unchanged: gradients come back as float32, each rounded once by the product that made it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def compute_in_bfloat16_(model: nn.Module) -> None:
    """Let the `forward` of a model compute in bfloat16 from now on. Its parameters stay as they are."""
    images_last = any(isinstance(module, nn.Conv2d) for module in model.modules())
    # nn.Module looks up `forward` on itself first; mypy allows no assignment to a method.
    model.__dict__["forward"] = partial(_forward, model, images_last)


def computes_in_bfloat16(model: nn.Module) -> bool:
    """Return whether `compute_in_bfloat16_` changed the model."""
    return "forward" in model.__dict__ and getattr(model.__dict__["forward"], "func", None) is _forward


def _forward(model: nn.Module, images_last: bool, *inputs: Any, **named: Any) -> Any:
    device = next(model.parameters()).device.type
    if images_last and device == "cpu":
        # oneDNN takes its fastest way through channels-last images, and every layer keeps the layout it is given.
        inputs = tuple(_channels_last(value) for value in inputs)
    # Without its cache, which spares a cast only where a parameter is used twice, but must not be met by a CUDA graph.
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        return _widened(type(model).forward(model, *inputs, **named))


def _channels_last(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 4 and value.is_floating_point():
        return value.contiguous(memory_format=torch.channels_last)
    return value


def _widened(result: Any) -> Any:
    """Return a model's output with every bfloat16 tensor in float32, in tuples, lists and dicts as well."""
    if isinstance(result, torch.Tensor):
        return result.float() if result.dtype == torch.bfloat16 else result
    if type(result) in (tuple, list):
        return type(result)(_widened(part) for part in result)
    if type(result) is dict:
        return {name: _widened(part) for name, part in result.items()}
    return result
