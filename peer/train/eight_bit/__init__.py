"""Training in real 8 bits: integer operands in the forward and input-gradient products, integer tensors kept for the
backward pass.

The scheme is that of Banner et al., "Scalable methods for 8-bit training of neural networks" (2018), which the
low-precision decentralized paper follows, on gemmlowp's affine codes:

    activations  q = round(a / s) + z, int8, one scale and zero point a tensor, from running ranges (`ranges`)
    weights      q = round(w / s), int8, symmetric, taken anew from the float32 master weights in every step
    gradients    q = ⌊g / s + u⌋, int8, symmetric, stochastic rounding, s from the largest magnitude
    forward      y = s_a s_w (Σ q_a q_w − z Σ q_w) + b                      int8 × int8 → int32
    backward     ∂a = s_g s_w Σ q_g q_w                                     int8 × int8 → int32
    weights      ∂w = s_a Σ g (q_a − z), g before its quantization          bfloat16 × bfloat16, sums in float32

Using two sets of gradients is the paper's *gradient bifurcation*; rounding counts as the identity in the backward
pass (straight-through estimator).

autograd cannot carry integers, so a whole network is one step for it (`boundary`): inside, layers hand each other
`Quantized` tensors forwards and `Gradient` tensors backwards, and keep what they need on a `Tape`. Which kernels
compute is decided in `kernels` and `products`: native ones where they were built, torch operators elsewhere, with equal
bits.
"""

from peer.train.eight_bit.boundary import Network
from peer.train.eight_bit.conv import ConvUnit, RectifiedConv
from peer.train.eight_bit.layer import Flatten, Layer, ReLU, Sequential
from peer.train.eight_bit.linear import Linear
from peer.train.eight_bit.pooling import AveragePool, MaxPool
from peer.train.eight_bit.ranges import RunningRange
from peer.train.eight_bit.residual import Residual
from peer.train.eight_bit.transformer import FirstToken, TokenEmbedding, TransformerBlock

__all__ = [
    "AveragePool",
    "ConvUnit",
    "FirstToken",
    "Flatten",
    "Layer",
    "Linear",
    "MaxPool",
    "Network",
    "ReLU",
    "RectifiedConv",
    "Residual",
    "RunningRange",
    "Sequential",
    "TokenEmbedding",
    "TransformerBlock",
]
