"""Places of numbers as Elias gamma codes of the gaps between them, as decentralizepy sends them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]


def encode_places(places: Places) -> Codes:
    """Return ascending places as Elias gamma codes of their gaps; the first, and the number of bits, in 16 bytes."""
    gaps = np.diff(places)
    lengths = np.log2(gaps).astype(np.int64)
    ends = np.cumsum(2 * lengths + 1)
    bits = np.zeros(int(ends[-1]), np.uint8)
    for weight in range(int(lengths.max()) + 1):
        has = lengths >= weight
        bits[ends[has] - 1 - weight] = (gaps[has] >> weight) & 1
    tail = np.array([places[0], bits.size], np.int64).view(np.uint8)
    return np.concatenate([np.packbits(bits), tail])


def decode_places(codes: Codes) -> Places:
    """Return the places that `encode_places` was given."""
    first, num_bits = np.frombuffer(codes[-16:].tobytes(), np.int64).tolist()
    bits = np.unpackbits(codes[:-16], count=num_bits)
    # A code begins with as many zeros as bits follow its first one: where the next code begins, from every bit on.
    positions = np.arange(num_bits)
    ones = np.minimum.accumulate(np.where(bits, positions, num_bits)[::-1])[::-1]
    following = (2 * ones - positions + 1).tolist()
    starts, start = [], 0
    while start < num_bits:
        starts.append(start)
        start = following[start]
    begins = ones[starts]
    lengths = begins - starts
    gaps = np.zeros(begins.size, np.int64)
    for place in range(int(lengths.max(initial=0)) + 1):
        has = lengths >= place
        gaps[has] = gaps[has] << 1 | bits[begins[has] + place]
    return np.concatenate([[first], first + np.cumsum(gaps)])
