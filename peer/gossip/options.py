"""Settings of single algorithms, besides those that all of them read from a `NodeContext`.

One dataclass for each family; an algorithm reads its own and none of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

ThetaMode: TypeAlias = Literal["constant", "theorem", "verified"]
"""Rule for choosing θ: see `theta`."""

RobustRule: TypeAlias = Literal["clipped", "trimmed-mean"]
"""Rule that bounds the effect of a poisonous model on mixing: see `robust`."""


FactorExponents: TypeAlias = Literal["vector", "layer"]
"""What has one exponent in sums of low-rank factors."""


@dataclass(frozen=True, kw_only=True)
class ModuloOptions:
    """Options of the algorithms that send modulo codes (Moniqua, on D² and in pairs as well)."""

    theta: tuple[float, ...] = ()
    """θ: constant (one entry), a sequence (one a round), or the first θ in verified mode."""
    theta_mode: ThetaMode = "constant"
    verified: bool = False
    """Carry hashes and repair exactly. The mode "verified" needs it; a constant θ can have it."""
    step_size_decay: tuple[float, ...] = (1.0,)
    """C_α of Theorem 2, by which γ fell, one for each round, the last of them for all that follow; 1 for a constant
    γ."""
    bits_between: tuple[int, int] | None = None
    """The fewest and the most bits that a neighbour's codes may have; None: those of the own compressor."""


@dataclass(frozen=True, kw_only=True)
class RobustMixing:
    """Options of the algorithms with `spec.robust_mixing`."""

    rule: RobustRule
    attackers: int = 1
    """b, the number of a peer's neighbours that are taken to lie, 1 or more."""
    radius: float | None = None
    """τ of clipped differences; None: from the distances of each round."""


@dataclass(frozen=True, kw_only=True)
class FinalRounds:
    """Options of SCSP, whose last rounds average in full precision and have no local step."""

    count: int = 0
    averaging_rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LowRankOptions:
    """Options of low-rank all-reduce."""

    rank: int = 4
    """Vectors of each factor, 1 or more."""
    bits: int = 8
    """Bits of each number that is sent, 2 to 16."""
    exponents: FactorExponents = "vector"
    """Whether each vector is rounded with an exponent of its own, or all vectors of a layer with the largest of them.
    """


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the parameter server."""

    peer: int = 0
    """Index of the peer that is the server."""
    model_bits: int | None = None
    """Bits of the quantized model; None: the model is sent in full precision."""
    model_range: float = 1.0
    """The grid of a quantized model spans ± this."""
    gradient_range: float | None = None
    """The grid of the gradients that go with it; None: that of the model."""
