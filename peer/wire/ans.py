"""Interleaved range asymmetric numeral systems (rANS): tokens below 256 to 16-bit words, order 0, static tables.

A table. Token i of m > 1 has a weight (4 + q mod 4) · 2^⌊q/4⌋ with q = qᵢ of 0 to 63. With W the sum of the weights and
Cᵢ the sum of those before i, token i owns the slots from ⌊Cᵢ (2^14 − m)/W⌋ + i to below the next token's first: its
frequency is at least 1, and all frequencies add up to 2^14. The frame holds the sequence of zigzagged differences qᵢ −
qᵢ₋₁ (q₋₁ = 60) as a Rice code; a single token needs none. In coarse tables all q are multiples of 4, and their quarters
are sent (q₋₁/4 = 15): for short streams, which would not win back the cost of finer weights.

The coder (J. Duda, arXiv:1311.2540; words and lanes as in F. Giesen, arXiv:1402.3392): N lanes, a power of two, of one
32-bit state each. Token number i belongs to lane i mod N. To decode token i with state x of its lane and the table of
its span: slot = x mod 2^14; the token t is the owner of the slot; x ← frequency_t · ⌊x/2^14⌋ + slot − first_t; if then
x < 2^16, x ← 2^16 x + the next word. After the last token every state is 2^16 and no word is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from peer import native
from peer.wire import rice
from peer.wire.bits import ByteArray, IntegerArray, pointer
from peer.wire.errors import MalformedEntropyCode
from peer.wire.reader import Reader
from peer.wire.tokens import counts_of_groups

if TYPE_CHECKING:
    from peer.native._kernels import Kernels

MAX_TOKENS = 256
MAX_TABLES = 16
MAX_LANES_LOG2 = 7
SCALE = 14
LOWEST_STATE = 1 << 16
_MANY_LANES_LOG2 = 5
_FIRST_Q = 60
_LAST_Q = 63
_BAD_BEGIN = "an entropy-coded stream begins in a state that no encoder leaves"
_BEYOND_WEIGHTS = "a table of frequencies leaves the range of its weights"
_WEIGHTS = np.array([(4 + q % 4) << q // 4 for q in range(_LAST_Q + 1)], np.int64)
# Halfway (geometrically) between one weight and the next.
_BETWEEN = np.sqrt(_WEIGHTS[:-1].astype(np.float64) * _WEIGHTS[1:])

WordArray = npt.NDArray[np.uint16]
StateArray = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Spans:
    """Division of a stream of tokens: the number of integers in each span, and the table that it uses."""

    sizes: IntegerArray
    """int64[spans]"""
    tables: ByteArray
    """uint8[spans]"""

    size: int
    """The number of tokens."""

    @classmethod
    def one(cls, size: int) -> Spans:
        """Return a single span."""
        return cls(np.array([size], np.int64), np.zeros(1, np.uint8), size)


@dataclass(frozen=True, eq=False)
class Tables:
    """Division of the 2**14 slots among tokens, in each table of a stream."""

    num_tokens: ByteArray
    """m − 1 of each table: uint8[tables]"""
    bounds: IntegerArray
    """First slot of every token, and 2**14 from the m-th on: int64[tables, 257]"""

    @cached_property
    def frequencies(self) -> IntegerArray:
        """Number of slots of every token, int64[tables, 256]: at least 1 for the m tokens of a table."""
        return self.bounds[:, 1:] - self.bounds[:, :-1]

    @cached_property
    def code_anything(self) -> bool:
        """Whether any table has more than one token."""
        return bool(self.num_tokens.any())


@dataclass(frozen=True, eq=False)
class OwnTables:
    """The tables of a stream that is being written."""

    tables: Tables
    coarse: bool
    parameter: int
    """The best Rice parameter for them, 0 to 3."""
    code: bytes
    """Their Rice code."""
    counts: IntegerArray
    """Occurrences of each token under each table: int64[tables, 256]."""

    @cached_property
    def bits_needed(self) -> float:
        """Number of bits of all tokens."""
        frequencies = np.maximum(self.tables.frequencies, 1)
        return float((self.counts * (SCALE - np.log2(frequencies))).sum())


def make_tables(tokens: ByteArray, spans: Spans) -> OwnTables:
    """Return tables close to the best for the tokens of a stream: uint8[n]."""
    num_tables = int(spans.tables.max()) + 1
    num_tokens, bounds = np.empty(num_tables, np.uint8), np.empty((num_tables, MAX_TOKENS + 1), np.int64)
    tables = Tables(num_tokens, bounds)
    counts = counts_of_groups(tokens, spans.sizes, spans.tables)
    # Octaves cost about 1/32 of a bit a token more than their quarters, and save about two bits of table for each.
    coarse = int(counts.sum()) < 64 * int(np.count_nonzero(counts))
    steps = []
    for number, row in enumerate(counts):
        quantized = _quantized(row, coarse)
        num_tokens[number], bounds[number] = quantized.size - 1, _bounds(quantized)
        if quantized.size > 1:
            scaled = quantized // 4 if coarse else quantized
            changes = np.diff(scaled, prepend=_FIRST_Q // 4 if coarse else _FIRST_Q)
            steps.append((changes << 1) ^ (changes >> 63))
    joined = np.concatenate(steps) if steps else np.zeros(0, np.int64)
    best = min(range(4), key=lambda r: rice.size_in_bits(joined, r))
    return OwnTables(tables, coarse, best, rice.encode(joined, best), counts)


def _quantized(counts: IntegerArray, coarse: bool) -> IntegerArray:
    """Return the q of every token: int64[m]."""
    counts = counts[: int(counts.nonzero()[0][-1]) + 1]
    # A token that does not occur is given a little: the less its weight falls, the shorter the table.
    relative = np.maximum(counts, 0.4) * (float(_WEIGHTS[_FIRST_Q]) / max(int(counts.max()), 1))
    fine = np.searchsorted(_BETWEEN, relative, side="right").astype(np.int64)
    return (fine + 2) // 4 * 4 if coarse else fine


def _bounds(quantized: IntegerArray) -> IntegerArray:
    """Return the first slot of every token of a table, and 2**14 from the m-th on: int64[257]."""
    bounds = np.full(MAX_TOKENS + 1, 1 << SCALE, np.int64)
    total = np.cumsum(_WEIGHTS[quantized])
    slots = (1 << SCALE) - quantized.size
    bounds[: quantized.size] = (total - _WEIGHTS[quantized]) * slots // int(total[-1]) + np.arange(quantized.size)
    return bounds


def read_tables(reader: Reader, num_tokens: bytes, rice_parameter: int, coarse: bool) -> Tables:
    """Return the tables that the reader is at, of `num_tokens` and one more tokens each."""
    bounds = np.empty((len(num_tokens), MAX_TOKENS + 1), np.int64)
    tables = Tables(np.frombuffer(num_tokens, np.uint8), bounds)
    total = sum(last + 1 for last in num_tokens if last)
    if native.lib is not None:
        ahead = reader.data[reader.position : reader.end]
        used = native.lib.wire_read_tables(
            pointer(ahead), len(ahead), pointer(tables.num_tokens), len(num_tokens), rice_parameter, coarse,
            rice.pointer64(bounds),
        )  # fmt: skip
        if used == -3:
            raise MalformedEntropyCode(_BEYOND_WEIGHTS)
        reader.take(rice.checked(used, total))
        return tables
    codes = rice.decode(reader, total, rice_parameter, total * 2 * (_LAST_Q + 1))
    steps = (codes >> 1) ^ -(codes & 1)
    start = 0
    for number, last in enumerate(num_tokens):
        if last == 0:
            bounds[number] = _bounds(np.full(1, _FIRST_Q))
            continue
        quantized = np.cumsum(steps[start : start + last + 1])
        quantized += _FIRST_Q // 4 if coarse else _FIRST_Q
        if coarse:
            quantized *= 4
        if quantized.min() < 0 or quantized.max() > _LAST_Q:
            raise MalformedEntropyCode(_BEYOND_WEIGHTS)
        bounds[number] = _bounds(quantized)
        start += last + 1
    return tables


def lanes_for(num_bits: float) -> int:
    """Return log2 of the number of lanes for a stream of this size: about one lane for every 1024 bytes."""
    return min(max(int(num_bits / 8192), 1).bit_length() - 1, MAX_LANES_LOG2)


def encode(
    tokens: ByteArray, tables: Tables, spans: Spans, lanes_log2: int, num_bits: float
) -> tuple[StateArray, WordArray]:
    """Return the states to start decoding from and the words, of `tokens: uint8[n]`, which take `num_bits`."""
    frequency, first = _flat(tables)
    symbols = _symbols(tokens, spans)
    if lanes_log2 < _MANY_LANES_LOG2:
        return _encode_few_lanes(symbols, frequency, first, 1 << lanes_log2)
    lanes = 1 << lanes_log2
    scale = np.uint64(SCALE)
    # From here on a state would not fit 32 bits after the token.
    limit = frequency << np.uint64(32 - SCALE)
    state = np.full(lanes, LOWEST_STATE, np.uint64)
    words = np.empty(_likely_words(num_bits, tokens.size), np.uint16)
    at = words.size
    for start in range((tokens.size - 1) // lanes * lanes, -1, -lanes):
        row = symbols[start : start + lanes]
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


def decode(states: StateArray, reader: Reader, tables: Tables, spans: Spans, alphabet: ByteArray) -> ByteArray:
    """Return the entry of `alphabet: uint8[256]` for each token, uint8[n]; the reader is left after their last word.
    `states` are changed.

    Raises `MalformedEntropyCode` if words run out or states do not end where they should.
    """
    if native.lib is not None:
        return _decode_native(native.lib, states, reader, tables, spans, alphabet)
    if states.min() < LOWEST_STATE:
        raise MalformedEntropyCode(_BAD_BEGIN)
    words = np.frombuffer(reader.data[reader.position : reader.position + reader.left // 2 * 2], "<u2")
    decode_rows = _decode_few_lanes if states.size < 1 << _MANY_LANES_LOG2 else _decode_many_lanes
    tokens, used = decode_rows(states, words, tables, spans)
    reader.take(2 * used)
    return np.take(alphabet, tokens)


def _likely_words(num_bits: float, num_tokens: int) -> int:
    """Return room for the words of tokens that take `num_bits`, but never more than a word for each token."""
    # A little more, as a state keeps fractions of bits only so exactly.
    return min(int(num_bits * 1.02) // 16 + 16, num_tokens)


def _flat(tables: Tables) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return frequencies and first slots, uint64[256 · tables]: those of table t from 256 t on."""
    return tables.frequencies.astype(np.uint64).reshape(-1), tables.bounds[:, :-1].astype(np.uint64).reshape(-1)


def _symbols(tokens: ByteArray, spans: Spans) -> npt.NDArray[np.uint8 | np.uint16]:
    """Return each token's position in the flat tables."""
    if not spans.tables.any():
        return tokens
    return np.repeat(spans.tables.astype(np.uint16) << np.uint16(8), spans.sizes) | tokens


def _owners(tables: Tables) -> ByteArray:
    """Return the token that owns each slot: uint8[2**14 · tables]."""
    tokens = np.arange(MAX_TOKENS, dtype=np.uint8)
    return np.concatenate([np.repeat(tokens, frequencies) for frequencies in tables.frequencies])


def _decode_many_lanes(states: StateArray, words: WordArray, tables: Tables, spans: Spans) -> tuple[ByteArray, int]:
    """Return the tokens and the number of words that they take; all lanes at once."""
    lanes, count = states.size, spans.size
    scale = np.uint64(SCALE)
    mask = np.uint64((1 << SCALE) - 1)
    owners = _owners(tables)
    frequency, first = _flat(tables)
    which = np.repeat(spans.tables, spans.sizes) if len(tables.bounds) > 1 else None
    tokens = np.empty(count, np.uint8)
    state = states.astype(np.uint64)
    at = 0
    for start in range(0, count, lanes):
        x = state[: count - start]
        slot = x & mask
        if which is None:
            row = symbol = owners[slot.astype(np.intp)]
        else:
            table = which[start : start + lanes].astype(np.intp)
            row = owners[slot.astype(np.intp) + (table << SCALE)]
            symbol = row + (table << 8)
        tokens[start : start + lanes] = row
        x = frequency[symbol] * (x >> scale) + slot - first[symbol]
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


def _encode_few_lanes(
    symbols: npt.NDArray[np.uint8 | np.uint16],
    frequencies: npt.NDArray[np.uint64],
    firsts: npt.NDArray[np.uint64],
    lanes: int,
) -> tuple[StateArray, WordArray]:
    frequency, first = frequencies.tolist(), firsts.tolist()
    state = [LOWEST_STATE] * lanes
    words = np.empty(symbols.size, np.uint16)
    at = symbols.size
    lane = symbols.size % lanes
    for symbol in symbols[::-1].tolist():
        lane = (lane or lanes) - 1
        x, f = state[lane], frequency[symbol]
        if x >= f << 32 - SCALE:
            at -= 1
            words[at] = x & 0xFFFF
            x >>= 16
        quotient, rest = divmod(x, f)
        state[lane] = (quotient << SCALE) + rest + first[symbol]
    return np.array(state, np.uint32), words[at:]


def _decode_few_lanes(states: StateArray, words: WordArray, tables: Tables, spans: Spans) -> tuple[ByteArray, int]:
    frequencies, firsts = _flat(tables)
    frequency, first, owners = frequencies.tolist(), firsts.tolist(), _owners(tables).tobytes()
    state = states.tolist()
    lanes, mask, left = len(state), (1 << SCALE) - 1, words.size
    tokens = bytearray(spans.size)
    at = end = 0
    for size, table in zip(spans.sizes.tolist(), spans.tables.tolist(), strict=True):
        start, end = end, end + size
        for position in range(start, end):
            x = state[position % lanes]
            slot = x & mask
            token = owners[table << SCALE | slot]
            tokens[position] = token
            symbol = table << 8 | token
            x = frequency[symbol] * (x >> SCALE) + slot - first[symbol]
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


def _decode_native(
    kernels: Kernels, states: StateArray, reader: Reader, tables: Tables, spans: Spans, alphabet: ByteArray
) -> ByteArray:
    tokens = np.empty(spans.size, np.uint8)
    words = reader.data[reader.position : reader.end]
    used = kernels.wire_rans_decode(
        native.ffi.cast("uint32_t *", pointer(states)),
        states.size,
        pointer(words),
        len(words) // 2,
        rice.pointer64(tables.bounds),
        len(tables.bounds),
        rice.pointer64(spans.sizes),
        pointer(spans.tables),
        spans.sizes.size,
        pointer(alphabet),
        pointer(tokens),
        tokens.size,
    )
    if used == -2:
        raise MalformedEntropyCode(_BAD_BEGIN)
    _check_end(used >= 0)
    reader.take(2 * used)
    return tokens
