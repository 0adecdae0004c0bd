"""Mixing that bounds the effect of a poisonous model: clipped differences and trimmed means.

Both take the place of η Σ_j W_ij (v_j − v_i), where v_j is a neighbour's model as known here and v_i the own one as
known to the neighbours. Neither conserves Σ x. If nobody lies, that costs accuracy: the more, the further honest models
are apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from peer.compress.float_types import floats_of
from peer.compress.norms import sum_of_squares
from peer.compress.payload import FloatArray, Kept
from peer.gossip.mixing import BLOCK, add_scaled_
from peer.gossip.options import RobustMixing


def add_robust_(x: FloatArray, rule: RobustMixing, rate: float, own: Kept, heard: Sequence[tuple[float, Kept]]) -> None:
    """Add to `x` in place the result of a rule on the models heard. `own`: v_i; `heard`: (W_ij, v_j), ascending
    senders; neither is written to, and neither is `x`."""
    if rule.rule == "clipped":
        add_clipped_(x, rate, own, heard, rule)
    else:
        add_trimmed_mean_(x, rate, own, [values for _, values in heard], rule.attackers)


def add_clipped_(
    x: FloatArray, rate: float, own: Kept, heard: Sequence[tuple[float, Kept]], rule: RobustMixing
) -> None:
    """Add η Σ_j W_ij min(1, τ / ‖v_j − v_i‖₂) (v_j − v_i) to `x` in place.

    He, Karimireddy and Jaggi 2022, Byzantine-Robust Decentralized Learning via ClippedGossip. A copy that was driven
    out of the range of its float type is no model, and has no share.
    """
    finite = [
        (weight, values, distance)
        for weight, values in heard
        if math.isfinite(distance := math.sqrt(square_distance(values, own)))
    ]
    radius = rule.radius
    if radius is None:
        # Models out of range count among the attackers.
        attackers = rule.attackers - (len(heard) - len(finite))
        radius = adaptive_radius([(weight, distance) for weight, _, distance in finite], attackers)
    kept = 0.0
    for weight, values, distance in finite:
        scale = rate * weight * (radius / distance if distance > radius else 1.0)
        add_scaled_(x, scale, values)
        kept += scale
    add_scaled_(x, -kept, own)


def adaptive_radius(neighbours: Sequence[tuple[float, float]], attackers: int) -> float:
    """Return τ = √(Σ_j W_ij ‖v_j − v_i‖² / δ), the radius of the paper's theory, from (W_ij, distance) of each.

    The `attackers` most distant neighbours are taken for liars: δ is the sum of their weights, and the sum is over all
    others. Infinite without attackers, 0 if there is nobody else.
    """
    if attackers < 1:
        return math.inf
    nearest = sorted(neighbours, key=lambda each: each[1])
    trusted, others = nearest[:-attackers], nearest[-attackers:]
    if not trusted:
        return 0.0
    return math.sqrt(sum(w * distance * distance for w, distance in trusted) / sum(w for w, _ in others))


def add_trimmed_mean_(x: FloatArray, rate: float, own: Kept, heard: Sequence[Kept], attackers: int) -> None:
    """Add η (m − v_i) to `x` in place: coordinate by coordinate, m is the mean of the own number and those of the
    neighbours without the b largest and the b smallest.

    Yang and Bajwa 2019, BRIDGE. All numbers that are left weigh the same. Nothing is added where no neighbour is left,
    as it may be in the last rounds with a peer that is lost.
    """
    left = slice(attackers, len(heard) - attackers)
    if left.stop <= left.start:
        return
    rows: FloatArray = np.empty((len(heard), min(BLOCK, x.size)), x.dtype)
    number = x.dtype.type
    for start in range(0, x.size, BLOCK):
        part = slice(start, min(start + BLOCK, x.size))
        block = rows[:, : part.stop - part.start]
        for row, values in zip(block, heard, strict=True):
            row[:] = floats_of(values[part])
        # NaN comes last, and is cut off as the largest.
        block.sort(axis=0)
        own_part = floats_of(own[part])
        mean = own_part.copy()
        for row in block[left]:
            mean += row
        mean /= number(left.stop - left.start + 1)
        mean -= own_part
        add_scaled_(x[part], rate, mean)


def square_distance(a: Kept, b: Kept) -> float:
    """Return ‖a − b‖₂² in float64, with bits that depend on the numbers alone (see `compress.norms`)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return sum(
            sum_of_squares(floats_of(a[start : start + BLOCK]) - floats_of(b[start : start + BLOCK]))
            for start in range(0, a.size, BLOCK)
        )
