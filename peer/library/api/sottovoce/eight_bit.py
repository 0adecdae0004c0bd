"""Training in 8 bits in your own loop: an ordinary module, converted, and its attention."""

from peer.train.eight_bit.attention import scaled_dot_product_attention
from peer.train.eight_bit.conversion import convert

__all__ = ["convert", "scaled_dot_product_attention"]
