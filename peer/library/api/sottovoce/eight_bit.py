"""Training in 8 bits in your own loop: an ordinary module, converted."""

from peer.train.eight_bit.conversion import convert

__all__ = ["convert"]
