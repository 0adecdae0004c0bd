"""The default averaging rate η: what algorithm and compressor bear, by theory and by measurement."""

from __future__ import annotations

import math

from peer.compress.base import Compressor
from peer.compress.kept_values import KeptValues
from peer.compress.modulo import Modulo
from peer.gossip.base import AlgorithmSpec, Memory
from peer.gossip.theta import resting_rate


def default_averaging_rate(spec: AlgorithmSpec, compressor: Compressor, layout_size: int = 10_000) -> float:
    """Return a rate η that is known to be robust for the pair.

    Exact averaging takes 1, D² ½ (its smallest eigenvalue). With replicas the rate is about 2.5 times the part that the
    compressor keeps. Measured with quant-sgp on an exponential graph of 8, models that nobody trains, 4 bits: at 1, 2
    and 10 % of the coordinates rates of 0.03, 0.05 and 0.2 bring them together by a factor e in 180, 80 and 10 rounds;
    with 0.06, 0.1 and 0.3 they stay apart, and runs end with that distance. With an error memory it is lower (the
    Sparse-Push paper used smaller ones still, for runs of 200 epochs).

    Sparse compressors are taken to keep their fraction of differences to replicas, however few bits the kept values
    have: rounding to nearest leaves 91 % and more of the energy of normal and Laplace numbers, at 1 to 8 bits, 1 to 10
    % kept and 1,000 to 37,000 in a layer. The bound for the worst vector falls to a twentieth of that where layers are
    large.
    """
    if spec.default_averaging_rate is not None:
        return spec.default_averaging_rate
    if isinstance(compressor, Modulo) and spec.modulo:
        # Coarse codes need the slack matrix.
        return math.floor(100 * resting_rate(compressor.bits, compressor.rounding)) / 100
    if not spec.compresses or compressor.kind == "none":
        return 1.0
    if not spec.uses_averaging_rate:
        return 1.0
    if compressor.kind == "sign":
        # Its guarantee, 1/n, is that of a vector with one large coordinate; models and gradients are far from that.
        return 0.3
    # An unbiased compressor of variance ω contracts by 1 / (1 + ω) once it is scaled down (as error feedback does).
    bound = compressor.error_bound(layout_size)
    kept, factor = bound.contraction, 2.5
    if kept is None:
        kept = 1.0 / (1.0 + (bound.variance or 0.0))
    elif spec.memory is Memory.REPLICAS and isinstance(compressor, KeptValues):
        # 2.4: the rate of the default configuration is that of release 0.1.
        kept, factor = compressor.fraction, 2.4
    if spec.memory is Memory.ERRORS:
        # It sends the rest of whole models, a replica only differences (digits, skew 0.8, top 2 % at 4 bits: worst
        # sparse-push peer 93 % at 0.02, 70 % at 0.1; MNIST alike).
        return float(f"{min(1.0, max(0.005, 0.02 * (kept / 0.02) ** 0.7)):.1g}")
    return float(f"{min(1.0, max(0.001, factor * kept)):.2g}")
