"""Data between layers: codes forwards, gradients backwards, and the tape between the two passes.

Images are of shape [b, c, h, w] to callers, and stored with channels innermost, as uint8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Quantized:
    """A tensor of 8-bit codes: number i is (data[i] − zero_point) · scale."""

    data: torch.Tensor
    """int8, or uint8 where the kernels that follow want it."""
    scale: float
    zero_point: int
    rectified: bool = False
    """Whether it came out of a ReLU: the gradient with regard to it is 0 wherever the code is the zero point, and the
    layer that computes that gradient sees to it."""

    def dequantize(self) -> torch.Tensor:
        """Return the numbers, float32 of the same shape."""
        return (self.data.to(torch.float32) - self.zero_point) * self.scale

    def signed(self) -> Quantized:
        """Return the same numbers in int8."""
        if self.data.dtype == torch.int8:
            return self
        return Quantized((self.data ^ 128).view(torch.int8), self.scale, self.zero_point - 128, self.rectified)

    def unsigned(self) -> Quantized:
        """Return the same numbers in uint8."""
        if self.data.dtype == torch.uint8:
            return self
        return Quantized(self.data.view(torch.uint8) ^ 128, self.scale, self.zero_point + 128, self.rectified)

    def with_data(self, data: torch.Tensor) -> Quantized:
        """Return other codes on the same grid."""
        return Quantized(data, self.scale, self.zero_point, self.rectified)


@dataclass(frozen=True, slots=True)
class Gradient:
    """A layer gradient before its quantization."""

    data: torch.Tensor
    """bfloat16."""
    largest: float
    """The largest magnitude in it; NaN if there is a NaN."""

    def with_data(self, data: torch.Tensor) -> Gradient:
        """Return the same numbers in another shape."""
        return Gradient(data, self.largest)


def as_rows(data: torch.Tensor) -> torch.Tensor:
    """[..., n] → [m, n]."""
    # Most are rows already, and a view of a tensor takes longer than to ask.
    return data if data.dim() == 2 else data.reshape(-1, data.shape[-1])


def rows_like(rows: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """[m, k] → [..., k], for `data: [..., n]` of m rows."""
    return rows if data.dim() == 2 else rows.view(*data.shape[:-1], rows.shape[-1])


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return [b, h, w, c], contiguous, for [b, c, h, w]; a view where channels lie innermost already."""
    return tensor.permute(0, 2, 3, 1).contiguous()


def outermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return the view [b, c, h, w] of [b, h, w, c]."""
    return tensor.permute(0, 3, 1, 2)


def image_codes(x: Quantized) -> Quantized:
    """Return codes uint8[b, h, w, c] of an image [b, c, h, w], c rounded up to a multiple of 4 with zeros."""
    x = x.unsigned()
    codes = innermost(x.data)
    channels = codes.shape[3]
    if channels % 4:
        codes = functional.pad(codes, (0, -channels % 4), value=x.zero_point)
    return x.with_data(codes)


def unpadded(data: torch.Tensor, largest: float, channels: int) -> Gradient:
    """Return the gradient [b, channels, h, w] of bfloat16[b, h, w, c], c ≥ channels."""
    return Gradient(outermost(data[..., :channels]), largest)


def draw_seed() -> int:
    """Return 64 bits of torch's generator."""
    return int(torch.empty((), dtype=torch.int64).random_(-(2**63), None))


@dataclass(slots=True)
class Tape:
    """Values that one forward pass keeps for its backward pass, last in, first out; and the backward pass's
    gradients."""

    recording: bool
    """Whether a backward pass will follow; nothing is kept otherwise."""
    training: bool
    """Whether running ranges and norms may move."""
    seed: int = 0
    """64 bits from which the backward pass draws its stochastic rounding."""
    padding: torch.Tensor | None = None
    """Mask of the padding in the input, bool[b, n], if the first layer found it."""
    _gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients of parameters by their `id`, which takes less time than the hash of a tensor."""
    _entries: list[tuple[Any, ...]] = field(default_factory=list)
    _streams: int = 0

    def save(self, *values: Any) -> None:
        """Keep values for the backward pass of the same layer: `Quantized`, int8 tensors, statistics of a few numbers
        for each channel or row, shapes."""
        if self.recording:
            self._entries.append(values)

    def take(self) -> tuple[Any, ...]:
        """Return the values saved last, and forget them."""
        return self._entries.pop()

    @property
    def position(self) -> int:
        """Number of calls of `save` that were not taken back."""
        return len(self._entries)

    def set_aside(self, position: int) -> list[tuple[Any, ...]]:
        """Return the values saved after `position`, and forget them until `put_back`."""
        aside = self._entries[position:]
        self.rewind(position)
        return aside

    def put_back(self, aside: list[tuple[Any, ...]]) -> None:
        """Save values again that were set aside."""
        self._entries.extend(aside)

    def rewind(self, position: int) -> None:
        """Forget values saved after `position`."""
        del self._entries[position:]

    def draw_keys(self) -> tuple[int, int]:
        """Return the two 32-bit keys of the next stream of draws: a function of the seed and of how many streams were
        drawn before (SplitMix64)."""
        self._streams += 1
        z = (self.seed + self._streams * _GOLDEN) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
        return z & 0xFFFFFFFF, z >> 32

    def add_gradient(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Count a gradient of a parameter, float32, in the backward pass; one that serves twice gets the sum. Somebody
        has to hold the parameter as long as the tape lives."""
        known = self._gradients.get(id(parameter))
        self._gradients[id(parameter)] = value if known is None else known.add_(value)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a parameter; None if nothing was counted."""
        return self._gradients.get(id(parameter))

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that is kept, in the order of saving; the same storage may appear more than once."""
        found: list[torch.Tensor] = []
        for values in self._entries:
            for value in values:
                if isinstance(value, Quantized):
                    found.append(value.data)
                elif isinstance(value, torch.Tensor):
                    found.append(value)
        return found

    def saved_bytes(self) -> int:
        """Return how much memory the tape keeps alive; tensors that share a storage count once."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self.tensors()}
        return sum(storage.nbytes() for storage in storages.values())
