"""EvoNorm-S0 as a function: one native kernel each way, or the torch operators that say the same.

The kernels (`peer/native/evonorm.h`) serve float32 and bfloat16 on the CPU where they were built. torch operators serve
everything else: other devices and types, peers stacked by vmap, and tracing, so that an exported model consists of them
alone. The two differ by rounding, because they add in another order. Peers and simulator take the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from peer.native import CData, ffi, lib


def evonorm_s0(
    x: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, epsilon: float
) -> torch.Tensor:
    """Return y = x · σ(v x) / √(s² + ε) · γ + β of `x: [b, c, h, w]`, in its type and layout.

    s² is the variance of a sample over one of equal `groups` of channels; `v`, `weight` (γ) and `bias` (β) have a
    number for each channel. It computes in the parameters' type, float32 as a rule, for any type of x.
    """
    parameters = (v, weight, bias)
    # In this order: torch.compile follows the code until the first False, and cannot look at a library.
    if not _traced() and lib is not None and _readable(x, parameters):
        return _Fused.apply(x, *parameters, groups, epsilon)
    return composed(x, *parameters, groups, epsilon)


def composed(
    x: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, epsilon: float
) -> torch.Tensor:
    """Return the same of torch operators."""
    b, c, h, w = x.shape
    wide = x.to(weight.dtype)
    # Two passes by hand: torch's own variance takes twenty times as long on a CPU.
    grouped = wide.reshape(b, groups, c // groups, h, w)
    centred = grouped - grouped.mean(dim=(2, 3, 4), keepdim=True)
    variance = centred.square().mean(dim=(2, 3, 4))
    scale = torch.rsqrt(variance + epsilon).repeat_interleave(c // groups, dim=1) * weight
    gate = torch.sigmoid(wide * v.view(c, 1, 1))
    y = wide * gate * scale.view(b, c, 1, 1) + bias.view(c, 1, 1)
    return y.to(x.dtype)


class _Fused(torch.autograd.Function):
    """The native kernels. Backward computes the statistics again, which is cheaper than keeping the gates; only x is
    kept."""

    apply: ClassVar[Callable[..., torch.Tensor]]

    @staticmethod
    def forward(
        x: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, groups: int, epsilon: float
    ) -> torch.Tensor:
        assert lib is not None
        x, layout = _dense(x)
        y = torch.empty_like(x)
        scratch = torch.empty(2 * x.shape[1])
        lib.en_forward(
            _pointer(x), *layout, groups, _floats(v), _floats(weight), _floats(bias), epsilon, _pointer(y),
            _floats(scratch),
        )  # fmt: skip
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, v, weight, _, groups, epsilon = inputs
        ctx.save_for_backward(x, v, weight)
        ctx.groups, ctx.epsilon = groups, epsilon

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert lib is not None
        x, v, weight = ctx.saved_tensors
        x, layout = _dense(x)
        gradient = gradient.contiguous(memory_format=_format(x))
        result, scratch = torch.empty_like(x), torch.empty(x[0].numel() + 6 * x.shape[1])
        of_v, of_weight, of_bias = torch.empty_like(v), torch.empty_like(v), torch.empty_like(v)
        lib.en_backward(
            _pointer(x), _pointer(gradient), *layout, ctx.groups, _floats(v), _floats(weight), ctx.epsilon,
            _pointer(result), _floats(of_v), _floats(of_weight), _floats(of_bias), _floats(scratch),
        )  # fmt: skip
        return result, of_v, of_weight, of_bias, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
        """Compute the peers of a stack by torch operators."""
        *tensors, groups, epsilon = arguments

        def one(x: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return composed(x, v, weight, bias, groups, epsilon)

        y: torch.Tensor = torch.vmap(one, in_dims[:4])(*tensors)
        return y, 0


def _readable(x: torch.Tensor, parameters: tuple[torch.Tensor, ...]) -> bool:
    """Return whether the kernels can read these tensors."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and all(
            each.device.type == "cpu" and each.dtype == torch.float32 and each.is_contiguous() for each in parameters
        )
        and x.numel() > 0
    )


def _traced() -> bool:
    """Return whether torch records operators rather than running them."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _format(x: torch.Tensor) -> torch.memory_format:
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


def _dense(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int, int, int]]:
    """Return x without gaps, in either layout, and its description for the kernels."""
    if not x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous()
    b, c, h, w = x.shape
    return x, (x.dtype == torch.bfloat16, _format(x) is torch.channels_last, b, c, h * w)


def _pointer(tensor: torch.Tensor) -> CData:
    return ffi.cast("void *", tensor.data_ptr())


def _floats(tensor: torch.Tensor) -> CData:
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    return ffi.cast("float *", tensor.data_ptr())
