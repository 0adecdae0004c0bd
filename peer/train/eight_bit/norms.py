"""Norms in 8 bits: what they compute of the codes of a convolution, and the gradient with regard to these.

Every norm comes down to y = t · factor + shift with one factor and one summand for each channel of each sample, where t
is q or, with EvoNorms, q · gate(v · s · q): q counts the steps s of a channel from zero. Statistics are sums of
integers or extremes of codes, hence exact; results from them, a few numbers for each channel and sample, are computed
in float64. Parameters, running statistics and formulas are those of `peer.train.full_precision.norms` and of torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from peer.train.eight_bit import norm_kernels
from peer.train.eight_bit.norm_kernels import HARD_SIGMOID, PLAIN, SIGMOID, Addend, Ends, Gate, Slopes
from peer.train.eight_bit.ranges import RunningRange, grid_over, rectified
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape
from peer.train.full_precision.norms import CHUNKS, EvoNormS0, RangeBatchNorm, RangeEvoNorm, equal_parts, range_scale


@dataclass(frozen=True, slots=True)
class Affine:
    """y = t · factor + shift, float64[b, c] or [c] each, and the statistics for the backward pass."""

    factor: torch.Tensor
    shift: torch.Tensor
    kept: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Sums:
    """Over the pixels of each channel of a sample, float64[b, c]: of g, of g · t and of g · q² · gate'."""

    plain: torch.Tensor
    weighted: torch.Tensor
    gated: torch.Tensor


M = TypeVar("M", bound=nn.Module)
B = TypeVar("B", nn.BatchNorm2d, RangeBatchNorm)


class NormIn8Bits(ABC, Generic[M]):
    """One norm, with the module that holds its parameters and running statistics."""

    gate: Gate = PLAIN

    def __init__(self, module: M) -> None:
        self._module = module

    def forward(
        self,
        codes: torch.Tensor,
        steps: torch.Tensor,
        output: RunningRange,
        tape: Tape,
        *,
        relu: bool,
        addend: Addend | None = None,
    ) -> tuple[Quantized, tuple[float, float]]:
        """Return y of `codes: uint8[b, n, c]` whose steps are `steps: float32[c]`, with or without a ReLU; with the
        codes of the sum in place of its own if there is an `addend`, and the extremes of that sum."""
        affine = self.affine(codes, steps.double(), tape.training)
        inner = self._inner(steps)
        size = (codes.shape[0], codes.shape[2])
        factor, shift = (value.expand(size) for value in (affine.factor, affine.shift))
        grid = output.grid()
        if grid is None:
            _, ends, _ = norm_kernels.forward(codes, self.gate, inner, _floats(factor), _floats(shift), (0.0, 255.0))
            grid = grid_over(*rectified(ends, relu))
        zero = grid.zero_point + 128
        out, (low, high), ends_of_sum = norm_kernels.forward(
            codes,
            self.gate,
            inner,
            _floats(factor * grid.inverse),
            _floats(shift * grid.inverse + zero),
            (float(zero) if relu else 0.0, 255.0),
            addend,
        )
        if tape.training:
            output.observe_(*rectified(((low - zero) * grid.scale, (high - zero) * grid.scale), relu))
        tape.save(codes, steps, *affine.kept)
        return Quantized(out, grid.scale, zero, rectified=relu), ends_of_sum

    def backward(self, gradient: torch.Tensor, tape: Tape) -> Gradient:
        """Count the gradients of the parameters, and return that of `forward`'s input, for bfloat16[b, n, c]."""
        codes, steps, *kept = tape.take()
        return self._backward(gradient, codes, steps, tuple(kept), tape)

    def _backward(
        self,
        gradient: torch.Tensor,
        codes: torch.Tensor,
        steps: torch.Tensor,
        kept: tuple[torch.Tensor, ...],
        tape: Tape,
    ) -> Gradient:
        inner = self._inner(steps)
        sums = norm_kernels.backward_sums(codes, gradient, self.gate, inner)
        slopes = self.slopes(codes, steps.double(), Sums(*(value.double() for value in sums)), kept, tape)
        size = (codes.shape[0], codes.shape[2])
        slope, linear, constant = (
            _floats(value.expand(size)) for value in (slopes.slope, slopes.linear, slopes.constant)
        )
        slopes = Slopes(slope, linear, constant, slopes.ends)
        return Gradient(*norm_kernels.backward(codes, gradient, self.gate, inner, slopes))

    @abstractmethod
    def affine(self, codes: torch.Tensor, steps: torch.Tensor, training: bool) -> Affine:
        """Return factor and shift for the codes, and let running statistics move on in training."""

    @abstractmethod
    def slopes(
        self, codes: torch.Tensor, steps: torch.Tensor, sums: Sums, kept: tuple[torch.Tensor, ...], tape: Tape
    ) -> Slopes:
        """Count the parameters' gradients and return the parts of the gradient with regard to x = q · steps."""

    def _inner(self, steps: torch.Tensor) -> torch.Tensor | None:
        """Return the factor of q in the gate's argument, float32[c]."""
        return None


class _OverBatch(NormIn8Bits[B]):
    """A norm over batch and positions, with running statistics."""

    def _centred(self, steps: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor, training: bool) -> Affine:
        factor = self._module.weight.detach() * inverse
        shift = self._module.bias.detach() - factor * mean
        return Affine(factor * steps, shift, (mean, inverse, torch.tensor(training)))

    def _counted(
        self, tape: Tape, steps: torch.Tensor, sums: Sums, mean: torch.Tensor, inverse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the gradients of γ and β; return γ/σ, Σg and Σg (x − μ) of each channel."""
        plain = sums.plain.sum(dim=0)
        weighted = sums.weighted.sum(dim=0) * steps - mean * plain
        _count(tape, self._module.weight, weighted * inverse)
        _count(tape, self._module.bias, plain)
        return self._module.weight.detach() * inverse, plain, weighted


class _BatchNorm(_OverBatch[nn.BatchNorm2d]):
    def affine(self, codes: torch.Tensor, steps: torch.Tensor, training: bool) -> Affine:
        module = self._module
        assert module.running_mean is not None
        assert module.running_var is not None
        if training:
            found = norm_kernels.statistics(codes)
            count = codes.shape[0] * codes.shape[1]
            mean = found.sums.sum(dim=0) / count * steps
            variance = found.squares.sum(dim=0) / count * steps.square() - mean.square()
            share = count_batch(module)
            unbiased = variance * (count / max(1, count - 1))
            module.running_mean.add_(share * (mean.float() - module.running_mean))
            module.running_var.add_(share * (unbiased.float() - module.running_var))
        else:
            mean, variance = module.running_mean.double(), module.running_var.double()
        return self._centred(steps, mean, torch.rsqrt(variance + module.eps), training)

    def slopes(
        self, codes: torch.Tensor, steps: torch.Tensor, sums: Sums, kept: tuple[torch.Tensor, ...], tape: Tape
    ) -> Slopes:
        mean, inverse, training = kept
        slope, plain, weighted = self._counted(tape, steps, sums, mean, inverse)
        count = codes.shape[0] * codes.shape[1] if training else float("inf")
        # dx = γ/σ (g − mean(g) − (x − μ)/σ² mean(g (x − μ)))
        linear = -slope * inverse.square() * weighted / count
        return Slopes(slope, linear * steps, -slope * plain / count - linear * mean)

    def _backward(
        self,
        gradient: torch.Tensor,
        codes: torch.Tensor,
        steps: torch.Tensor,
        kept: tuple[torch.Tensor, ...],
        tape: Tape,
    ) -> Gradient:
        mean, inverse, training = kept
        weight, bias = self._module.weight, self._module.bias
        count = codes.shape[0] * codes.shape[1] if training else math.inf
        found = norm_kernels.batch_norm_backward(codes, gradient, steps, mean, inverse, weight.detach(), count)
        if found is None:
            return super()._backward(gradient, codes, steps, kept, tape)
        of_input, largest, of_gamma, of_beta = found
        _count(tape, weight, of_gamma)
        _count(tape, bias, of_beta)
        return Gradient(of_input, largest)


class _RangeBatchNorm(_OverBatch[RangeBatchNorm]):
    def affine(self, codes: torch.Tensor, steps: torch.Tensor, training: bool) -> Affine:
        module = self._module
        if not training:
            scale = module.running_scale.double() + module.epsilon
            return self._centred(steps, module.running_mean.double(), 1.0 / scale, training)
        b, n, c = codes.shape
        parts = equal_parts(b, CHUNKS)
        found = norm_kernels.statistics(codes)
        highs, lows = found.highs.view(parts, -1, c).amax(dim=1), found.lows.view(parts, -1, c).amin(dim=1)
        spread = (highs.double() - lows.double()).mean(dim=0) * steps
        mean = found.sums.sum(dim=0) / (b * n) * steps
        scale = range_scale(b // parts * n) * spread
        module.follow_(mean.float(), scale.float())
        affine = self._centred(steps, mean, 1.0 / (scale + module.epsilon), training)
        return Affine(affine.factor, affine.shift, (*affine.kept, lows, highs))

    def slopes(
        self, codes: torch.Tensor, steps: torch.Tensor, sums: Sums, kept: tuple[torch.Tensor, ...], tape: Tape
    ) -> Slopes:
        mean, inverse, training, *extremes = kept
        slope, plain, weighted = self._counted(tape, steps, sums, mean, inverse)
        none = torch.zeros_like(slope)
        b, n, c = codes.shape
        size = (b, c)
        if not training:
            lows = highs = torch.zeros(size, dtype=torch.uint8, device=codes.device)
            nothing = _floats(none.expand(size))
            return Slopes(slope, none, none, Ends(lows, highs, nothing, nothing))
        parts = len(extremes[0])
        lows, highs = (end.repeat_interleave(b // parts, dim=0) for end in extremes)
        at_low, at_high = (
            found.view(parts, -1, c).sum(dim=1).repeat_interleave(b // parts, dim=0)
            for found in norm_kernels.ties(codes, lows, highs)
        )
        # The mean of the parts' ranges, each the greatest less the least; equals share alike.
        of_range = -slope * inverse * weighted * (range_scale(b // parts * n) / parts)
        ends = Ends(lows, highs, _floats(-of_range / at_low), _floats(of_range / at_high))
        return Slopes(slope, none, -slope * plain / (b * n), ends)


class _GroupNorm(NormIn8Bits[nn.GroupNorm]):
    def affine(self, codes: torch.Tensor, steps: torch.Tensor, training: bool) -> Affine:
        mean, variance = _group_moments(codes, steps, self._module.num_groups)
        inverse = torch.rsqrt(variance + self._module.eps)
        factor = self._module.weight.detach() * _by_channel(inverse, codes)
        shift = self._module.bias.detach() - factor * _by_channel(mean, codes)
        return Affine(factor * steps, shift, (mean.float(), inverse.float()))

    def slopes(
        self, codes: torch.Tensor, steps: torch.Tensor, sums: Sums, kept: tuple[torch.Tensor, ...], tape: Tape
    ) -> Slopes:
        mean, inverse = (_by_channel(value.double(), codes) for value in kept)
        weighted = (sums.weighted * steps - mean * sums.plain) * inverse
        _count(tape, self._module.weight, weighted.sum(dim=0))
        _count(tape, self._module.bias, sums.plain.sum(dim=0))
        weight = self._module.weight.detach()
        groups = self._module.num_groups
        count = codes.shape[1] * codes.shape[2] // groups
        plain_mean = _by_channel(_by_group(weight * sums.plain, groups).sum(dim=2) / count, codes)
        weighted_mean = _by_channel(_by_group(weight * weighted, groups).sum(dim=2) / count, codes)
        linear = -inverse.square() * weighted_mean
        return Slopes(inverse * weight, linear * steps, -inverse * plain_mean - linear * mean)


class _EvoNorm(NormIn8Bits[EvoNormS0]):
    gate = SIGMOID

    def affine(self, codes: torch.Tensor, steps: torch.Tensor, training: bool) -> Affine:
        mean, variance = _group_moments(codes, steps, self._module.groups)
        inverse = torch.rsqrt(variance + self._module.epsilon)
        factor = self._module.weight.detach() * _by_channel(inverse, codes) * steps
        return Affine(factor, self._module.bias.detach().double(), (mean.float(), inverse.float()))

    def slopes(
        self, codes: torch.Tensor, steps: torch.Tensor, sums: Sums, kept: tuple[torch.Tensor, ...], tape: Tape
    ) -> Slopes:
        mean, inverse = (_by_channel(value.double(), codes) for value in kept)
        slope = self._counted(tape, steps, sums, inverse)
        of_inverse = self._of_group(steps, sums, codes)
        count = codes.shape[1] * codes.shape[2] // self._module.groups
        # Through 1/√(s² + ε), s² the mean of (x − μ)².
        linear = -of_inverse * inverse**3 / count
        return Slopes(slope, linear * steps, -linear * mean)

    def _inner(self, steps: torch.Tensor) -> torch.Tensor:
        return self._module.v.detach() * steps

    def _counted(self, tape: Tape, steps: torch.Tensor, sums: Sums, inverse: torch.Tensor) -> torch.Tensor:
        """Count the gradients of γ, β and v, and return γ / scale: y = x · gate(v x) · inverse · γ + β."""
        slope = self._module.weight.detach() * inverse
        _count(tape, self._module.weight, (sums.weighted * steps * inverse).sum(dim=0))
        _count(tape, self._module.bias, sums.plain.sum(dim=0))
        _count(tape, self._module.v, (sums.gated * steps.square() * slope).sum(dim=0))
        return slope

    def _of_group(self, steps: torch.Tensor, sums: Sums, codes: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the group's 1 / scale, for each channel of a sample, float64[b, c]."""
        by_channel = self._module.weight.detach() * sums.weighted * steps
        return _by_channel(_by_group(by_channel, self._module.groups).sum(dim=2), codes)


class _RangeEvoNorm(_EvoNorm):
    gate = HARD_SIGMOID

    def affine(self, codes: torch.Tensor, steps: torch.Tensor, training: bool) -> Affine:
        found = norm_kernels.statistics(codes)
        groups = self._module.groups
        high = _by_group((found.highs.double() - 128.0) * steps, groups).amax(dim=2)
        low = _by_group((found.lows.double() - 128.0) * steps, groups).amin(dim=2)
        count = codes.shape[1] * codes.shape[2] // groups
        inverse = 1.0 / (range_scale(count) * (high - low) + self._module.epsilon)
        factor = self._module.weight.detach() * _by_channel(inverse, codes) * steps
        return Affine(factor, self._module.bias.detach().double(), (inverse.float(), found.lows, found.highs))

    def slopes(
        self, codes: torch.Tensor, steps: torch.Tensor, sums: Sums, kept: tuple[torch.Tensor, ...], tape: Tape
    ) -> Slopes:
        inverse, (lows, highs) = _by_channel(kept[0].double(), codes), kept[1:]
        slope = self._counted(tape, steps, sums, inverse)
        groups = self._module.groups
        count = codes.shape[1] * codes.shape[2] // groups
        of_range = -self._of_group(steps, sums, codes) * inverse.square() * range_scale(count)
        at_low, at_high = norm_kernels.ties(codes, lows, highs)
        # A channel whose own extreme is not the group's has no part in its range; equals share alike.
        reach = ((lows.double() - 128.0) * steps, (highs.double() - 128.0) * steps)
        takes_low = _by_group(reach[0], groups) == _by_group(reach[0], groups).amin(dim=2, keepdim=True)
        takes_high = _by_group(reach[1], groups) == _by_group(reach[1], groups).amax(dim=2, keepdim=True)
        shares = []
        for takes, found in ((takes_low, at_low), (takes_high, at_high)):
            equals = (_by_group(found, groups) * takes).sum(dim=2, keepdim=True)
            shares.append((takes / equals).flatten(1))
        ends = Ends(lows, highs, _floats(-of_range * shares[0]), _floats(of_range * shares[1]))
        none = torch.zeros_like(slope)
        return Slopes(slope, none, none, ends)


def norm_in_8_bits(module: nn.Module) -> NormIn8Bits[Any]:
    """Return the 8-bit layer for `module`, a float32 one of `full_precision.norms.make_norm`."""
    if type(module) not in _NORMS:
        raise TypeError(f"{type(module).__name__} has no counterpart in 8 bits")
    return _NORMS[type(module)](module)


_NORMS: Mapping[type[nn.Module], type[NormIn8Bits[Any]]] = {
    nn.BatchNorm2d: _BatchNorm,
    RangeBatchNorm: _RangeBatchNorm,
    nn.GroupNorm: _GroupNorm,
    EvoNormS0: _EvoNorm,
    RangeEvoNorm: _RangeEvoNorm,
}


def count_batch(norm: nn.BatchNorm2d) -> float:
    """Count a batch, and return the share of its statistics in the running ones."""
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    return 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


def _group_moments(codes: torch.Tensor, steps: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of each group of channels of each sample, float64[b, groups]."""
    found = norm_kernels.statistics(codes)
    count = codes.shape[1] * codes.shape[2] // groups
    mean = _by_group(found.sums * steps, groups).sum(dim=2) / count
    squares = _by_group(found.squares * steps.square(), groups).sum(dim=2) / count
    return mean, (squares - mean.square()).clamp_(min=0.0)


def _by_group(values: torch.Tensor, groups: int) -> torch.Tensor:
    """[b, c] → [b, groups, c / groups]."""
    return values.view(len(values), groups, -1)


def _by_channel(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[b, groups] → [b, c]."""
    return values.repeat_interleave(codes.shape[2] // values.shape[1], dim=1)


def _count(tape: Tape, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.requires_grad:
        tape.add_gradient(parameter, gradient.float())


def _floats(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32).contiguous()
