"""Interleaved range asymmetric numeral systems (rANS): tokens below 256 to 16-bit words, order 0, static table.

The table. Every token i of m has a weight (4 + q mod 4) · 2^⌊q/4⌋ with q = qᵢ of 0 to 63. With T the sum of the
weights and Cᵢ the sum of those before i, token i owns the slots from ⌊Cᵢ (2^14 − m)/T⌋ + i to below the next token's
first: its frequency is at least 1, and all frequencies add up to 2^14. What travels is the sequence of zigzagged
differences qᵢ − qᵢ₋₁ (q₋₁ = 60) as a Rice code; a single token needs none. In a coarse table all q are multiples of 4,
and their quarters travel (q₋₁/4 = 15): for short streams, which would not win back what finer weights cost.

The coder (J. Duda, arXiv:1311.2540; words and lanes as in F. Giesen, arXiv:1402.3392): N lanes, a power of two, of one
32-bit state each. Token number i belongs to lane i mod N. To decode token i with state x of its lane:
slot = x mod 2^14; the token t is the owner of the slot; x ← frequency_t · ⌊x/2^14⌋ + slot − first_t; if then x < 2^16,
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
MAX_LANES_LOG2 = 7
SCALE = 14
LOWEST_STATE = 1 << 16
_MANY_LANES_LOG2 = 5
_FIRST_Q = 60
_LAST_Q = 63
_WEIGHTS = np.array([(4 + q % 4) << q // 4 for q in range(_LAST_Q + 1)], np.int64)
# Halfway (geometrically) between one weight and the next.
_BETWEEN = np.sqrt(_WEIGHTS[:-1].astype(np.float64) * _WEIGHTS[1:])

WordArray = npt.NDArray[np.uint16]
StateArray = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Table:
    """How the 2**14 slots are shared out among tokens. `quantized: int64[m]`, each 0 to 63; m from 1 to 256."""

    quantized: npt.NDArray[np.int64]
    coarse: bool = False

    @classmethod
    def of_counts(cls, counts: npt.NDArray[np.int64]) -> Table:
        """Return a table close to the best for tokens that occur `counts: int64[m]` times."""
        # A token that does not occur is given a little: the less its weight falls, the shorter the table.
        relative = np.maximum(counts, 0.4) * (float(_WEIGHTS[_FIRST_Q]) / max(int(counts.max()), 1))
        fine = cls(np.searchsorted(_BETWEEN, relative, side="right").astype(np.int64))
        # Octaves cost about 1/32 of a bit a token more than their quarters, and save about two bits of table for each.
        if int(counts.sum()) >= 64 * counts.size:
            return fine
        return cls((fine.quantized + 2) // 4 * 4, coarse=True)

    @property
    def num_tokens(self) -> int:
        return self.quantized.size

    @cached_property
    def bounds(self) -> npt.NDArray[np.int64]:
        """First slot of every token, and 2**14: int64[m + 1]."""
        total = np.zeros(self.quantized.size + 1, np.int64)
        np.cumsum(_WEIGHTS[self.quantized], out=total[1:])
        slots = (1 << SCALE) - self.quantized.size
        return total * slots // int(total[-1]) + np.arange(total.size)

    @cached_property
    def frequencies(self) -> npt.NDArray[np.int64]:
        """Number of slots of every token: int64[m], all at least 1."""
        return self.bounds[1:] - self.bounds[:-1]

    @cached_property
    def owners(self) -> ByteArray:
        """The token that owns each slot: uint8[2**14]."""
        return np.repeat(np.arange(self.quantized.size, dtype=np.uint8), self.frequencies)

    def bits_for(self, counts: npt.NDArray[np.int64]) -> float:
        """Return how many bits tokens that occur `counts: int64[≥ m]` times take, infinite if one has no slot."""
        if counts[self.num_tokens :].any():
            return float("inf")
        return float(counts[: self.num_tokens] @ (SCALE - np.log2(self.frequencies)))

    @cached_property
    def _steps(self) -> npt.NDArray[np.int64]:
        """What travels, before Rice coding."""
        scaled = self.quantized // 4 if self.coarse else self.quantized
        steps = scaled.copy()
        steps[0] -= _FIRST_Q // 4 if self.coarse else _FIRST_Q
        steps[1:] -= scaled[:-1]
        folded: npt.NDArray[np.int64] = (steps << 1) ^ (steps >> 63)
        return folded

    @cached_property
    def rice_parameter(self) -> int:
        """The best Rice parameter of the table, 0 to 3."""
        return 0 if self.num_tokens == 1 else min(range(4), key=lambda r: rice.size_in_bits(self._steps, r))

    def encode(self) -> bytes:
        """Return the Rice code of the table."""
        return b"" if self.num_tokens == 1 else rice.encode(self._steps, self.rice_parameter)

    @classmethod
    def decode(cls, reader: Reader, num_tokens: int, rice_parameter: int, coarse: bool) -> Table:
        """Return the table that the reader is at."""
        if num_tokens == 1:
            return cls(np.full(1, _FIRST_Q), coarse)
        codes = rice.decode(reader, num_tokens, rice_parameter, num_tokens * 2 * (_LAST_Q + 1))
        quantized = np.cumsum((codes >> 1) ^ -(codes & 1))
        quantized += _FIRST_Q // 4 if coarse else _FIRST_Q
        if coarse:
            quantized *= 4
        if quantized.min() < 0 or quantized.max() > _LAST_Q:
            raise MalformedEntropyCode("a table of frequencies leaves the range of its weights")
        return cls(quantized, coarse)


def lanes_for(num_bits: float) -> int:
    """Return log2 of the number of lanes for a stream of this size: about one lane for every 1024 bytes."""
    return min(max(int(num_bits / 8192), 1).bit_length() - 1, MAX_LANES_LOG2)


def encode(tokens: ByteArray, table: Table, lanes_log2: int, num_bits: float) -> tuple[StateArray, WordArray]:
    """Return the states to start decoding from and the words, of `tokens: uint8[n]`.

    The table has two tokens or more; under it they take `num_bits`.
    """
    if native.lib is not None:
        return _encode_native(tokens, table, lanes_log2, num_bits)
    if lanes_log2 < _MANY_LANES_LOG2:
        return _encode_few_lanes(tokens, table, 1 << lanes_log2)
    lanes = 1 << lanes_log2
    scale = np.uint64(SCALE)
    frequency = table.frequencies.astype(np.uint64)
    first = table.bounds[:-1].astype(np.uint64)
    # From here on a state would not fit 32 bits after the token.
    limit = frequency << np.uint64(32 - SCALE)
    state = np.full(lanes, LOWEST_STATE, np.uint64)
    words = np.empty(_likely_words(num_bits, tokens.size), np.uint16)
    at = words.size
    for start in range((tokens.size - 1) // lanes * lanes, -1, -lanes):
        row = tokens[start : start + lanes]
        x = state[: row.size]
        full = x >= limit[row]
        emitted = x[full].astype(np.uint16)
        if emitted.size > at:
            more = tokens.size - words.size
            words, at = np.concatenate([np.empty(more, np.uint16), words]), at + more
        at -= emitted.size
        words[at : at + emitted.size] = emitted
        x = np.where(full, x >> np.uint64(16), x)
        f = frequency[row]
        quotient = x // f
        state[: row.size] = (quotient << scale) + (x - quotient * f) + first[row]
    return state.astype(np.uint32), words[at:]


def _likely_words(num_bits: float, num_tokens: int) -> int:
    """Return room for the words of tokens that take `num_bits`, but never more than a word for each token."""
    # A little more, as a state keeps fractions of bits only so exactly.
    return min(int(num_bits * 1.02) // 16 + 16, num_tokens)


def decode(states: StateArray, reader: Reader, table: Table, count: int) -> ByteArray:
    """Return `uint8[count]` tokens; the reader is left behind the last word that they take.

    Raises `MalformedEntropyCode` where words run out or states do not end where they should.
    """
    if states.min() < LOWEST_STATE:
        raise MalformedEntropyCode("an entropy-coded stream begins in a state that no encoder leaves")
    if native.lib is not None:
        return _decode_native(states, reader, table, count)
    words = np.frombuffer(reader.data[reader.position : reader.position + reader.left // 2 * 2], "<u2")
    decode_rows = _decode_few_lanes if states.size < 1 << _MANY_LANES_LOG2 else _decode_many_lanes
    tokens, used = decode_rows(states, words, table, count)
    reader.take(2 * used)
    return tokens


def _decode_many_lanes(states: StateArray, words: WordArray, table: Table, count: int) -> tuple[ByteArray, int]:
    """Return the tokens and how many words they take; all lanes at once."""
    lanes = states.size
    scale = np.uint64(SCALE)
    mask = np.uint64((1 << SCALE) - 1)
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
        if low.size:
            if low.size > words.size - at:
                raise MalformedEntropyCode("an entropy-coded stream runs out of words")
            x[low] = (x[low] << np.uint64(16)) | words[at : at + low.size]
            at += low.size
        state[: x.size] = x
    _check_end(bool(np.all(state == LOWEST_STATE)))
    return tokens, at


# With few lanes there is little to do at once, and Python's integers are faster than arrays of a few numbers. Streams
# with few lanes are short.


def _encode_few_lanes(tokens: ByteArray, table: Table, lanes: int) -> tuple[StateArray, WordArray]:
    frequency, first = table.frequencies.tolist(), table.bounds.tolist()
    state = [LOWEST_STATE] * lanes
    words = np.empty(tokens.size, np.uint16)
    at = tokens.size
    lane = tokens.size % lanes
    for token in reversed(tokens.tobytes()):
        lane = (lane or lanes) - 1
        x, f = state[lane], frequency[token]
        if x >= f << 32 - SCALE:
            at -= 1
            words[at] = x & 0xFFFF
            x >>= 16
        quotient, rest = divmod(x, f)
        state[lane] = (quotient << SCALE) + rest + first[token]
    return np.array(state, np.uint32), words[at:]


def _decode_few_lanes(states: StateArray, words: WordArray, table: Table, count: int) -> tuple[ByteArray, int]:
    frequency, first, owners = table.frequencies.tolist(), table.bounds.tolist(), table.owners.tobytes()
    state = states.tolist()
    lanes, mask, left = len(state), (1 << SCALE) - 1, words.size
    tokens = bytearray(count)
    at = 0
    for position in range(count):
        x = state[position % lanes]
        slot = x & mask
        token = owners[slot]
        tokens[position] = token
        x = frequency[token] * (x >> SCALE) + slot - first[token]
        if x < LOWEST_STATE:
            if at == left:
                raise MalformedEntropyCode("an entropy-coded stream runs out of words")
            x = x << 16 | int(words[at])
            at += 1
        state[position % lanes] = x
    _check_end(all(x == LOWEST_STATE for x in state))
    return np.frombuffer(tokens, np.uint8), at


def _check_end(even: bool) -> None:
    if not even:
        raise MalformedEntropyCode("an entropy-coded stream does not end in the state that it began with")


def _encode_native(tokens: ByteArray, table: Table, lanes_log2: int, num_bits: float) -> tuple[StateArray, WordArray]:
    states = np.empty(1 << lanes_log2, np.uint32)
    for size in (_likely_words(num_bits, tokens.size), tokens.size):
        # The kernel wants room for a whole row before it begins one.
        words = np.empty(size + states.size, np.uint16)
        begin = native.lib.wire_rans_encode(
            pointer(tokens),
            tokens.size,
            native.ffi.cast("int64_t *", pointer(table.bounds)),
            table.num_tokens,
            SCALE,
            native.ffi.cast("uint32_t *", pointer(states)),
            states.size,
            native.ffi.cast("uint16_t *", pointer(words)),
            words.size,
        )
        if begin >= 0:
            break
    return states, words[begin:]


def _decode_native(states: StateArray, reader: Reader, table: Table, count: int) -> ByteArray:
    states = states.copy()
    tokens = np.empty(count, np.uint8)
    words = reader.data[reader.position : reader.end]
    used = native.lib.wire_rans_decode(
        native.ffi.cast("uint32_t *", pointer(states)),
        states.size,
        pointer(words),
        len(words) // 2,
        native.ffi.cast("int64_t *", pointer(table.bounds)),
        table.num_tokens,
        SCALE,
        count,
        pointer(tokens),
    )
    _check_end(used >= 0)
    reader.take(2 * used)
    return tokens
