"""Interleaved range asymmetric numeral systems (rANS): tokens below 256 to 16-bit words, order 0, static table.

The table. Every token i of m has a weight (4 + q mod 4) · 2^⌊q/4⌋ with q = qᵢ of 0 to 63. With T the sum of the
weights and Cᵢ the sum of those before i, token i owns the slots from ⌊Cᵢ (2^s − m)/T⌋ + i to below the next token's
first: its frequency is at least 1, and all frequencies add up to 2^s. What travels is the sequence of zigzagged
differences qᵢ − qᵢ₋₁ (q₋₁ = 60) as a Rice code.

The coder (J. Duda, arXiv:1311.2540; words and lanes as in F. Giesen, arXiv:1402.3392): N lanes, a power of two, of one
32-bit state each. Token number i belongs to lane i mod N. To decode token i with state x of its lane:
slot = x mod 2^s; the token t is the owner of the slot; x ← frequency_t · ⌊x/2^s⌋ + slot − first_t; if then x < 2^16,
x ← 2^16 x + the next word. After the last token every state is 2^16 and no word is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from peer import native
from peer.wire import rice
from peer.wire.bits import ByteArray, pointer
from peer.wire.errors import MalformedEntropyCode
from peer.wire.reader import Reader

MAX_TOKENS = 256
MAX_LANES_LOG2 = 10
SCALES = range(8, 16)
LOWEST_STATE = 1 << 16
_FIRST_Q = 60
_LAST_Q = 63
_WEIGHTS = np.array([(4 + q % 4) << q // 4 for q in range(_LAST_Q + 1)], np.int64)
# Halfway (geometrically) between one weight and the next.
_BETWEEN = np.sqrt(_WEIGHTS[:-1].astype(np.float64) * _WEIGHTS[1:])

WordArray = npt.NDArray[np.uint16]
StateArray = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Table:
    """How the 2**scale slots are shared out among tokens. `quantized: int64[m]`, each 0 to 63."""

    quantized: npt.NDArray[np.int64]
    scale: int

    @classmethod
    def of_counts(cls, counts: npt.NDArray[np.int64]) -> Table:
        """Return a table close to the best for tokens that occur `counts: int64[m]` times, m from 1 to 256."""
        relative = counts * (float(_WEIGHTS[_FIRST_Q]) / max(int(counts.max()), 1))
        # Every token keeps at least one slot, so the more tokens, the finer the slots have to be.
        scale = 12 if counts.size <= 48 else 14
        return cls(np.searchsorted(_BETWEEN, relative, side="right").astype(np.int64), scale)

    @cached_property
    def bounds(self) -> npt.NDArray[np.int64]:
        """First slot of every token, and 2**scale: int64[m + 1]."""
        total = np.zeros(self.quantized.size + 1, np.int64)
        np.cumsum(_WEIGHTS[self.quantized], out=total[1:])
        slots = (1 << self.scale) - self.quantized.size
        return total * slots // int(total[-1]) + np.arange(total.size)

    @cached_property
    def frequencies(self) -> npt.NDArray[np.int64]:
        """Number of slots of every token: int64[m], all at least 1."""
        return self.bounds[1:] - self.bounds[:-1]

    @cached_property
    def owners(self) -> ByteArray:
        """The token that owns each slot: uint8[2**scale]."""
        return np.repeat(np.arange(self.quantized.size, dtype=np.uint8), self.frequencies)

    def bits_for(self, counts: npt.NDArray[np.int64]) -> float:
        """Return how many bits tokens with these counts take under this table."""
        return float(counts @ (self.scale - np.log2(self.frequencies)))

    def encode(self) -> tuple[int, bytes]:
        """Return the Rice parameter (0 to 3) and the Rice code of the table."""
        steps = self.quantized.copy()
        steps[0] -= _FIRST_Q
        steps[1:] -= self.quantized[:-1]
        codes = np.where(steps >= 0, 2 * steps, -2 * steps - 1)
        parameter = min(range(4), key=lambda r: rice.size_in_bits(codes, r))
        return parameter, rice.encode(codes, parameter)

    @classmethod
    def decode(cls, reader: Reader, num_tokens: int, scale: int, parameter: int) -> Table:
        """Return the table that the reader is at."""
        codes = rice.decode(reader, num_tokens, parameter, num_tokens * 2 * (_LAST_Q + 1))
        steps = np.where(codes & 1, -(codes + 1 >> 1), codes >> 1)
        quantized = _FIRST_Q + np.cumsum(steps)
        if quantized.min() < 0 or quantized.max() > _LAST_Q:
            raise MalformedEntropyCode("a table of frequencies leaves the range of its weights")
        if scale not in SCALES or num_tokens >= 1 << scale:
            raise MalformedEntropyCode(f"a table of {num_tokens} frequencies cannot have 2**{scale} slots")
        return cls(quantized, scale)


def lanes_for(num_bits: float) -> int:
    """Return log2 of the number of lanes for a stream of this size: about one lane for every 512 bytes."""
    return min(max(int(num_bits / 4096), 1).bit_length() - 1, MAX_LANES_LOG2)


def encode(tokens: ByteArray, table: Table, lanes_log2: int) -> tuple[StateArray, WordArray]:
    """Return the states to start decoding from and the words, of `tokens: uint8[n]`. The table has two or more."""
    if native.lib is not None:
        return _encode_native(tokens, table, lanes_log2)
    lanes = 1 << lanes_log2
    scale = np.uint64(table.scale)
    frequency = table.frequencies.astype(np.uint64)
    first = table.bounds[:-1].astype(np.uint64)
    # The first word of a renormalization leaves the state below 2^16 · frequency / 2^scale · 2^16.
    limit = frequency << (np.uint64(32) - scale)
    state = np.full(lanes, LOWEST_STATE, np.uint64)
    rows: list[WordArray] = []
    for start in range((tokens.size - 1) // lanes * lanes, -1, -lanes):
        row = tokens[start : start + lanes]
        x = state[: row.size]
        full = x >= limit[row]
        rows.append(x[full].astype(np.uint16))
        x = np.where(full, x >> np.uint64(16), x)
        f = frequency[row]
        quotient = x // f
        state[: row.size] = (quotient << scale) + (x - quotient * f) + first[row]
    rows.reverse()
    return state.astype(np.uint32), np.concatenate(rows)


def decode(states: StateArray, words: WordArray, table: Table, count: int) -> ByteArray:
    """Return `uint8[count]` tokens. Raises `MalformedEntropyCode` where states or words do not come out even."""
    if states.min() < LOWEST_STATE:
        raise MalformedEntropyCode("an entropy-coded stream begins in a state that no encoder leaves")
    if native.lib is not None:
        return _decode_native(states, words, table, count)
    lanes = states.size
    scale = np.uint64(table.scale)
    mask = np.uint64((1 << table.scale) - 1)
    owners = table.owners
    frequency = table.frequencies.astype(np.uint64)
    first = table.bounds[:-1].astype(np.uint64)
    tokens = np.empty(count, np.uint8)
    state = states.astype(np.uint64)
    at = 0
    for start in range(0, count, lanes):
        x = state[: count - start]
        slot = x & mask
        row = owners[slot.astype(np.intp)]
        tokens[start : start + lanes] = row
        x = frequency[row] * (x >> scale) + slot - first[row]
        low = (x < LOWEST_STATE).nonzero()[0]
        if low.size > words.size - at:
            raise MalformedEntropyCode("an entropy-coded stream runs out of words")
        x[low] = (x[low] << np.uint64(16)) | words[at : at + low.size]
        at += low.size
        state[: x.size] = x
    _check_end(bool(np.all(state == LOWEST_STATE)) and at == words.size)
    return tokens


def _check_end(even: bool) -> None:
    if not even:
        raise MalformedEntropyCode("an entropy-coded stream does not end in the state that it began with")


def _encode_native(tokens: ByteArray, table: Table, lanes_log2: int) -> tuple[StateArray, WordArray]:
    states = np.empty(1 << lanes_log2, np.uint32)
    # No token needs more than one word. The kernel wants room for a whole row before it begins one.
    words = np.empty(tokens.size + states.size, np.uint16)
    begin = native.lib.wire_rans_encode(
        pointer(tokens),
        tokens.size,
        native.ffi.cast("int64_t *", pointer(table.bounds)),
        table.quantized.size,
        table.scale,
        native.ffi.cast("uint32_t *", pointer(states)),
        states.size,
        native.ffi.cast("uint16_t *", pointer(words)),
        words.size,
    )
    return states, words[begin:]


def _decode_native(states: StateArray, words: WordArray, table: Table, count: int) -> ByteArray:
    states = states.copy()
    tokens = np.empty(count, np.uint8)
    status = native.lib.wire_rans_decode(
        native.ffi.cast("uint32_t *", pointer(states)),
        states.size,
        pointer(words),
        words.size,
        native.ffi.cast("int64_t *", pointer(table.bounds)),
        table.quantized.size,
        table.scale,
        count,
        pointer(tokens),
    )
    _check_end(status == 0)
    return tokens
