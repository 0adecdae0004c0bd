"""The products of convolutions: int8 × int8 → int32 forwards and for the input gradient, bfloat16 for the weights.

Images lie as [b, h, w, c] here, c a multiple of 4. Each function runs a native kernel (`peer/native/eight_bit_conv.h`)
where these were built and the tensors lie on the CPU, and torch operators elsewhere: with the same bits for the two
integer products, and within the rounding of float32 sums for the weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from peer.native import CData, ffi
from peer.train.eight_bit import kernels
from peer.train.eight_bit.kernels import done, pointer
from peer.train.eight_bit.norm_kernels import rounded_, sum_backward
from peer.train.eight_bit.ranges import inverse_step
from peer.train.eight_bit.scratch import scratch
from peer.train.eight_bit.stored import as_levels

# torch declares no types for these.
_input_gradient: Callable[..., torch.Tensor] = conv2d_input
_weight_gradient: Callable[..., torch.Tensor] = conv2d_weight

LANES = 16
_EXACT_TERMS = 512
"""A product of a uint8 and an int8 is below 2¹⁵, and float32 holds every integer up to 2²⁴."""


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a convolution: `kernel` × `kernel` pixels every `stride`, the edges filled so that stride 1 keeps
    the size."""

    kernel: int
    stride: int
    groups: int = 1

    @property
    def padding(self) -> int:
        """Pixels of filling on each side."""
        return self.kernel // 2

    @property
    def covers(self) -> bool:
        """Whether no pixels lie between two windows."""
        return self.kernel >= self.stride

    def is_native(self, inputs: int, outputs: int) -> bool:
        """Return whether native kernels know it, where each of `outputs` reads `inputs` channels: of groups only those
        of one channel and one output."""
        return self.groups == 1 or (inputs == 1 and outputs == self.groups and outputs % 4 == 0)

    def results(self, size: int) -> int:
        """Return how many windows lie along `size` pixels."""
        return (size + 2 * self.padding - self.kernel) // self.stride + 1


@dataclass(frozen=True, slots=True)
class Weights:
    """The 8-bit weights of one step; they lie in scratch memory, good until those of the next layer are taken."""

    codes: torch.Tensor
    """int8[outputs, rows, columns, inputs]; inputs a multiple of 4, padded with 0."""
    sums: torch.Tensor
    """int32[outputs], the sum of the codes of each."""
    largest: float
    """The largest magnitude of the weights."""
    inputs: int
    """Inputs of each output, without the padding."""

    @property
    def scale(self) -> float:
        """One step of the codes."""
        return self.largest / 127.0


def up_to_4(channels: int) -> int:
    """Return the next multiple of 4."""
    return -(-channels // 4) * 4


def quantize_weights(weight: torch.Tensor, largest: float | None = None) -> Weights:
    """Return the codes of `weight: float32[outputs, inputs, rows, columns]` around zero, rounded to nearest; `largest`
    is their largest magnitude, where it is known. It always is of a weight that is codes already, int8."""
    outputs, inputs, rows, columns = weight.shape
    if largest is None:
        low, high = kernels.extremes(weight)
        largest = max(-low, high)
    weight, inverse = as_levels(weight, inverse_step(largest))
    codes = scratch("weights", (outputs, rows, columns, up_to_4(inputs)), torch.int8, weight.device)
    sums = torch.empty(outputs, dtype=torch.int32, device=weight.device)
    if native := kernels.native_for(weight):
        done(
            native.eb_conv_codes(
                pointer(weight), outputs, inputs, rows, columns, inverse, pointer(codes), pointer(sums)
            )
        )
    else:
        levels = kernels.cut(torch.round(weight * inverse), -127)
        codes.zero_()[..., :inputs] = levels.permute(0, 2, 3, 1).to(torch.int8)
        sums.copy_(codes.sum(dim=(1, 2, 3), dtype=torch.int32))
    return Weights(codes, sums, largest, inputs)


def forward(
    x: torch.Tensor,
    zero_point: int,
    weights: Weights,
    window: Window,
    onto: tuple[torch.Tensor, torch.Tensor, tuple[float, float]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes uint8[b, h, w, outputs] of acc · scale + shift, cut to `ends` and rounded to nearest, and the least
    and the greatest acc of each output, int32[outputs].

    acc = Σ (x − zero_point) · weights, for `x: uint8[b, h, w, inputs]`; `onto` are scale and shift, float32[outputs],
    and ends.
    """
    outputs, rows, columns, inputs = weights.codes.shape
    scale, shift, ends = onto
    native = kernels.native_for(x)
    if native is None or not window.is_native(weights.inputs, outputs):
        acc = product(x, zero_point, weights, window)
        return rounded_(acc.to(torch.float32) * scale + shift, ends), acc.amin(dim=(0, 1, 2)), acc.amax(dim=(0, 1, 2))
    packed = packed_room(outputs, rows * columns * inputs)
    if window.groups > 1:
        native.eb_conv_pack_depthwise(
            pointer(weights.codes), outputs, rows, columns, ffi.NULL, rows, ffi.NULL, columns,
            pointer(packed), ffi.NULL,
        )  # fmt: skip
    else:
        native.eb_conv_pack_forward(pointer(weights.codes), outputs, inputs, rows, columns, pointer(packed))
    b, h, w, _ = x.shape
    codes = torch.empty((b, window.results(h), window.results(w), outputs), dtype=torch.uint8)
    lows = torch.full((outputs,), 2**31 - 1, dtype=torch.int32)
    highs = torch.full((outputs,), -(2**31), dtype=torch.int32)
    offset = weights.sums * zero_point
    done(
        native.eb_conv_forward(
            forward_shape(x, zero_point, window, outputs), pointer(x), pointer(packed), pointer(offset), pointer(scale),
            pointer(shift), *ends, pointer(codes), pointer(lows), pointer(highs), ffi.NULL, ffi.NULL,
        )
    )  # fmt: skip
    return codes, lows, highs


def extremes(x: torch.Tensor, zero_point: int, weights: Weights, window: Window) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the greatest acc of each output, int32[outputs], as `forward` does."""
    nothing = torch.zeros(len(weights.codes), device=x.device)
    return forward(x, zero_point, weights, window, (nothing, nothing, (0.0, 0.0)))[1:]


def product(x: torch.Tensor, zero_point: int, weights: Weights, window: Window) -> torch.Tensor:
    """Return acc, int32[b, h, w, outputs], by products of floating-point numbers that hold every integer on the way."""
    codes = weights.codes[..., : weights.inputs]
    dtype = _exact(codes[0].numel(), x.device)
    acc = functional.conv2d(
        (x[..., : weights.inputs * window.groups].to(dtype) - zero_point).permute(0, 3, 1, 2),
        codes.to(dtype).permute(0, 3, 1, 2),
        stride=window.stride,
        padding=window.padding,
        groups=window.groups,
    )
    return acc.permute(0, 2, 3, 1).to(torch.int32).contiguous()


def input_product(codes: torch.Tensor, weights: Weights, window: Window, size: tuple[int, int]) -> torch.Tensor:
    """Return Σ codes · weights, int32[b, *size, inputs], as `product` does."""
    outputs, rows, columns, _ = weights.codes.shape
    dtype = _exact(outputs // window.groups * rows * columns, codes.device)
    inputs = weights.inputs * window.groups
    acc = _input_gradient(
        (len(codes), inputs, *size),
        weights.codes[..., : weights.inputs].to(dtype).permute(0, 3, 1, 2),
        codes.to(dtype).permute(0, 3, 1, 2),
        stride=window.stride,
        padding=window.padding,
        groups=window.groups,
    )
    acc = functional.pad(acc.permute(0, 2, 3, 1), (0, up_to_4(inputs) - inputs))
    return acc.to(torch.int32).contiguous()


def weight_gradient(
    x: torch.Tensor, zero_point: int, gradient: torch.Tensor, inputs: int, window: Window, factor: float
) -> torch.Tensor:
    """Return float32[outputs, inputs / groups, kernel, kernel] = factor · Σ gradient · (x − zero_point), the sums in
    float32, for `gradient: bfloat16[b, h, w, outputs]` and the saved codes x; `inputs` channels of these count."""
    outputs = gradient.shape[3]
    found = torch.empty((outputs, inputs // window.groups, window.kernel, window.kernel), device=x.device)
    if (native := kernels.native_for(x)) and window.is_native(inputs // window.groups, outputs):
        shape = forward_shape(x, zero_point, window, outputs)
        done(native.eb_conv_weight_gradient(shape, pointer(x), pointer(gradient), inputs, factor, pointer(found)))
        return found
    exact = _weight_gradient(
        (x[..., :inputs].to(torch.float32) - zero_point).permute(0, 3, 1, 2),
        list(found.shape),
        gradient.to(torch.float32).permute(0, 3, 1, 2),
        stride=window.stride,
        padding=window.padding,
        groups=window.groups,
    )
    return exact.mul_(factor)


def packed_room(results: int, terms: int) -> torch.Tensor:
    """Return scratch memory for weights in the order in which the native products read them."""
    return scratch("packed", (-(-results // LANES) * terms * LANES,), torch.int8, torch.device("cpu"))


def input_gradient(
    gradient: torch.Tensor,
    largest: float,
    keys: tuple[int, int],
    weight: torch.Tensor,
    largest_weight: float,
    window: Window,
    size: tuple[int, int],
    mask: tuple[torch.Tensor, int] | None,
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float]:
    """Return the input gradient bfloat16[b, *size, inputs], and its largest magnitude, from the layer gradient
    bfloat16[b, h, w, outputs] and the weights float32[outputs, inputs / groups, kernel, kernel], which are quantized
    here, and the largest magnitudes of both.

    `mask` is None, or (uint8 of the result's shape, number): where they are equal the gradient is 0. Before it, `added`
    is added: bfloat16[b, *size, inputs], inputs a multiple of 4, if the window `covers` every pixel.
    """
    b, rows, columns, outputs = gradient.shape
    inputs, depthwise = weight.shape[1], window.groups > 1
    native = kernels.native_for(gradient)
    is_ready = weight.dtype == torch.float32 and weight.is_contiguous()
    if native is None or outputs % 4 or not window.is_native(inputs, outputs) or not is_ready:
        weights = quantize_weights(weight, largest_weight)
        codes, scale = kernels.quantize_gradient(gradient, largest, keys)
        acc, masked = input_product(codes, weights, window, size), mask or (None, 0)
        found = kernels.finish_backward(acc, scale * weights.scale, *masked)
        return found if added is None else sum_backward(found[0], added, *masked)
    terms = window.kernel**2 * outputs
    out = torch.empty((b, *size, outputs if depthwise else up_to_4(inputs)), dtype=torch.bfloat16)
    cpu = gradient.device
    gradient_codes = scratch("gradient", (gradient.numel(),), torch.int8, cpu)
    codes = scratch("weights", (terms * up_to_4(inputs),), torch.int8, cpu)
    of_out = ffi.new("float *")
    layer = ffi.new(
        "ConvInputGradient *",
        {
            "samples": b, "height": size[0], "width": size[1], "inputs": inputs, "kernel": window.kernel,
            "stride": window.stride, "depthwise": depthwise, "gradient": pointer(gradient), "result_height": rows,
            "result_width": columns, "outputs": outputs, "gradient_inverse": inverse_step(largest), "key0": keys[0],
            "key1": keys[1], "weights": pointer(weight), "weights_inverse": inverse_step(largest_weight),
            "factor": (largest / 127.0) * (largest_weight / 127.0), "added": pointer(added),
            "mask": pointer(mask[0] if mask else None), "masked": mask[1] if mask else 0,
            "gradient_codes": pointer(gradient_codes), "codes": pointer(codes),
            "packed": pointer(packed_room(up_to_4(inputs), terms)), "out": pointer(out), "largest": of_out,
        },
    )  # fmt: skip
    done(native.eb_conv_input_gradient(layer))
    return out, of_out[0]


def forward_shape(x: torch.Tensor, zero_point: int, window: Window, outputs: int) -> CData:
    """Return the shape of the forward product for native kernels: a ConvShape."""
    b, h, w, c = x.shape
    rows, columns = window.results(h), window.results(w)
    return ffi.new(
        "ConvShape *",
        {
            "samples": b, "height": h, "width": w, "channels": c, "rows": window.kernel, "columns": window.kernel,
            "step": window.stride, "top": -window.padding, "left": -window.padding,
            "result_height": rows, "result_width": columns, "results": outputs,
            "out_height": rows, "out_width": columns, "out_step": 1, "filling": zero_point,
            "depthwise": window.groups > 1,
        },
    )  # fmt: skip


def _exact(terms: int, device: torch.device) -> torch.dtype:
    # Only on the CPU are float32 products known to be what they say; CUDA may use TF32 or Winograd's transform.
    return torch.float32 if terms <= _EXACT_TERMS and device.type == "cpu" else torch.float64
