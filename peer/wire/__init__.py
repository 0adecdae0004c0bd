"""Frames: the messages between peers as bytes, close to the fewest possible.

This docstring specifies the format, version 1, completely: a peer can be implemented in another language from it.
`proto/sottovoce/v1/exchange.proto` says how frames travel.

# Conventions

- Integers of a fixed number of bytes are little-endian and unsigned. `float32` and `float64` are IEEE 754,
  little-endian.
- A **varint** is unsigned LEB128: seven bits per byte, lowest first, with the top bit set in all bytes but the last. It
  has at most 10 bytes and is below 2^64. If there are several bytes, the last one is not zero.
- **zigzag** maps 0, −1, 1, −2, 2, … to 0, 1, 2, 3, 4, …
- A **bit string** fills bytes from their lowest bit: bit i of the string is bit i mod 8 of byte ⌊i/8⌋. An integer of
  w bits is stored lowest bit first. Unused bits of the last byte are zero.
- n is the number of values of the layer. Both sides know it from the layout, the names and sizes of the model's layers,
  whose digest they compared in the hello; only kind *part* tells sizes.
- `a mod b` is never negative.

A frame that breaks a rule below is refused; each kind of violation has its own error (`peer.wire.errors`). A reader
checks every length before it uses it, and never has to allocate more than a fixed number of bytes for each number of
the layout.

# Frame

| bytes | field |
|---|---|
| 2 | magic `53 56` ("SV") |
| 1 | version, 1 |
| 1 | kind and flags |
| varint | sender |
| varint | round |
| varint | phase |
| weight | mixing weight |
| weight | push weight, not negative |
| 2 varints | only with flag *predicted*: round and phase of the earlier message |
| varint | layer count |
| varints | only in kinds *repair request* and *repair*: layer numbers |
| varints | only in kind *part*: the n of each section |
| 2 bytes each | only in kind *repair request*: wishes |
| | one section for each layer, in order |
| | the pools of the sections (see *Pools*) |
| 4 | CRC-32 (polynomial 04C11DB7 reflected, as in zlib, gzip and PNG) of all bytes before it |

Kind and flags: bits 0–3 are the kind; bit 4, *wide*: scales and θ are float64, otherwise float32; bit 5, *predicted*:
at least one section is coded against an earlier message of the same sender; bits 6 and 7 are zero.

| kind | name | layers |
|---|---|---|
| 0 | gossip | all of the layout |
| 1 | nothing | none |
| 2 | repair request | count and layer numbers of the wishes; no sections |
| 3 | repair | those whose numbers are given |
| 4 | pair request | all of the layout |
| 5 | pair reply | all of the layout |
| 6 | pair busy | none |
| 7 | part | as many as the count says, at most one more than the layout has |

A **weight** is a varint: 0 stands for 0.0; 1 is followed by a float64, which is finite; m + 1 with m ≥ 1 stands for
the float64 nearest to 1/m.

**Parts** hold a part of a vector that peers sum together. Their sections are no layers of the layout. Each n is at
least 1, and their sum is at most the numbers of the layout, or twice that where all sections are levels.

**Layer numbers** ascend. Each is a varint: how many layers were skipped since the previous one.

A **wish** is two bytes: how many low bits of the integers the receiver has (0 to 64), and how many further bits it
requests (0 to 16; 0 requests all).

# Sections

The lowest three bits of the first byte, the **tag**, name the payload. Unless stated otherwise bits 6 and 7 are the
codec of the stream of integers that ends the section (see *Streams*), and bits not mentioned are zero.

| tag | payload | allowed in kinds |
|---|---|---|
| 0 | dense | 0, 4, 5, 7 |
| 1 | levels | 0, 4, 5, 7 |
| 2 | sparse | 0, 4, 5, 7 |
| 3 | residues | 0, 4, 5 |
| 4 | more bits | 3 |
| 5 | whole integers | 3 |

**Dense.** Bits 3–4: value type, 0 float64, 1 float32, 2 bfloat16, 3 float16. Then a stream of n integers of 64, 32,
16 or 16 bits, the bit patterns of the values, all finite. With the entropy codec (of the pool, where pooled), and only
then, every pattern of w bits is rotated left by one before it is coded: exponent, mantissa, sign.

**Levels.** value = scale · (base + step · code) / divisor. Bit 3, *same*: divisor, base, step and bits are those of
the last section (or of the values of the last sparse section) that gave them in this frame. Otherwise follow: one
byte, bits − 1 (0 to 15); varint divisor, 1 to 2^53; varint zigzag(base); varint step, 1 to 2^53; |base| + step ·
2^bits is at most 2^53. Then the scale; scale · (base + step · code) has to be finite in the scale's type for all
codes up to 2^bits. Then a stream of n codes of `bits` bits.

**Sparse.** Bits 3–7 are the code of the indices (see *Indices*). Then varint k, at most n; the k indices; and the k
values: a tag for dense or levels and what belongs to it, with k in the place of n.

**Residues.** Moniqua's K mod 2^bits. Bit 3, *same*: parameters as in the last residues of this frame. Otherwise one
byte: bits 0–3 are bits − 1; bits 4–5 the rounding, 0 nearest, 1 stochastic, 2 dither; bit 6, whether there is a
check; bit 7 zero. Bit 4 of the tag: θ is that of the last residues of this frame; otherwise θ follows, finite. Then,
if there is a check, 8 bytes: the hash of the un-modded integers. Then a stream of n integers of `bits` bits: the
residues or, with bit 5 of the tag, (residue − residue of the earlier message) mod 2^bits. The earlier message is the
one that the header names; its payload of this layer must be residues of as many bits.

**More bits.** Bits `low` to `low + bits − 1` of the same integers. Bit 3, *same*: parameters as in the last such
section. Otherwise two bytes: low and bits − 1 (0 to 15), low + bits being at most 64. Then a stream of n integers of
`bits` bits.

**Whole integers.** One byte, w − 1 (0 to 63); then a stream of n integers of w bits: zigzag(K), K being signed
64-bit.

# Streams

A stream is one or more consecutive spans of integers of w bits. In a section it has one span; in a pool (see *Pools*),
one for each section. It has one of four codecs.

**0, packed.** A bit string of w bits for each integer.

**1, entropy.** Each integer is split into a token (below 256), which is entropy-coded, and some raw bits.

| bytes | field |
|---|---|
| 1 | bits 0–2: log₂ of the lanes; 3: several tables; 4: zero; 5–6: Rice parameter of the tables; 7: coarse tables |
| 1 | map: bits 0–3: e (2 to 8); bit 4: folds; bit 5: whether r follows; bits 6–7: zero |
| 1 | r, below w, if the map says so; otherwise r is 0 |
| varint | centre, below 2^w |
| 1 | T − 1, with T the number of tables, 2 to 16, if there are several; otherwise T is 1 |
| | bit string: for each span ⌈log₂ T⌉ bits, the number of its table, below T, if there are several |
| 1 each | m − 1 for each table, with m the number of its tokens |
| | the tables that have m > 1, if any |
| 4 each | states, one for each lane, at least 2^16, if any table has m > 1 |
| 2 each | words, as many as decoding takes, if any table has m > 1 |
| | bit string of the raw bits |

*From integer to token.* d = (v − centre) mod 2^w. z = d or, if the map folds, z = zigzag of d read as a signed number
of w bits. h = ⌊z/2^r⌋. If h < 2^e the token is h, and the lowest r bits of z are raw. Otherwise, with L = ⌊log₂ h⌋, the
token is 2^e + 4 (L − e) + (⌊h/2^(L−2)⌋ mod 4), and the lowest r + L − 2 bits of z are raw. m is at most 256 and at most
the number of tokens that z < 2^w can have. The raw bits of all integers follow one another in the last bit string.

*Tables of frequencies.* Each table divides 2^14 slots among its tokens. If m = 1, token 0 owns all slots. Otherwise
token i has a weight (4 + q mod 4) · 2^⌊q/4⌋ with q = qᵢ of 0 to 63. With W the sum of the weights and Cᵢ the sum of
those before i, token i owns the slots from ⌊Cᵢ (2^14 − m)/W⌋ + i up to the next token's first slot, and at least one.
The frame contains the numbers zigzag(qᵢ − qᵢ₋₁), with q₋₁ = 60, of all tables with m > 1, one table after another, in
one Rice code (see below). In coarse tables all q are multiples of 4, and the frame contains the numbers zigzag(qᵢ/4 −
qᵢ₋₁/4), with q₋₁/4 = 15.

*Entropy code* (interleaved rANS). With N lanes, token number i of the stream belongs to lane i mod N. To decode it with
the lane's state x and the table of its span: slot = x mod 2^14; the token is the slot's owner, with first slot f and F
slots; x becomes F · ⌊x/2^14⌋ + slot − f; if that is below 2^16, it becomes 2^16 x + the next word. After the last token
every state is 2^16. (An encoder runs backwards from there, through the tokens and the words: if x ≥ F · 2^18, emit
x mod 2^16 and let x become ⌊x/2^16⌋; then x becomes 2^14 ⌊x/F⌋ + (x mod F) + f. A token of a table with m = 1 leaves x
as it is.)

**2, zstd.** A varint, the length; one Zstandard frame (RFC 8878) that declares its content size and needs a window of
at most 8 MiB and no dictionary. The content is the integers, each in as many whole bytes as its kind takes: 1 for codes
and residues of up to 8 bits and 2 above, those of the value type for dense values, 8 for whole integers.

**3, pooled.** Nothing here; the integers are a span of one of the streams at the end of the frame. Not for whole
integers.

A **Rice code** of k non-negative integers with parameter r is one bit string: for each integer v, ⌊v/2^r⌋ zeros and a
one; then the lowest r bits of each. Its first part is no longer than k plus ⌊S/2^r⌋ bits, S being the largest sum
that the integers may have: n − k for gaps, 128 times their number for tables.

# Indices

k strictly ascending numbers below n. The gap of an index is how many numbers were skipped since the previous one.

| code | indices |
|---|---|
| 0–28 | Rice code of the gaps, the code being the parameter (with 0, a bitmap truncated after its last one) |
| 29 | nothing here; the gaps are in the bit string of gaps |
| 30 | nothing here; the gaps are a span of the stream of gaps |
| 31 | nothing, as k = n |

# Pools

After the last section come, in this order and each only if a section has referred to it:

- the **bit string of gaps**: for each layer with code 29, in order, its k gaps, in as many bits each as n − k has;
- the **stream of gaps**: for each layer with code 30 a span of its k gaps, in the entropy codec, of w = ⌊log₂ n⌋ + 1
  bits each, n being that of the largest of those layers;
- the **pools of dense values**, one for each value type, in the order of their numbers;
- the **pools of codes**, one for each w, ascending, for levels, residues and more bits.

A pool is one byte, its codec from 0 to 2, and a stream with one span for each section that refers to it, in the order
of the sections.

# The writer's choices

A writer is free to choose codecs, codes, maps, tables, lanes, what to pool, and whether to predict; a reader must
accept any choice. This writer pools the layers of a frame up to 2^16 numbers, and decides by histograms and exact
lengths. Asked to pack (`compressor.coding`), it packs every stream and writes no gaps in the entropy code.
"""

from peer.wire.entropy_bound import entropy_bound_bits
from peer.wire.frame import allocation_bound, decode, encode, encode_counted, max_frame_bytes
from peer.wire.message import Message, MessageKind, RepairWish

__all__ = [
    "Message",
    "MessageKind",
    "RepairWish",
    "allocation_bound",
    "decode",
    "encode",
    "encode_counted",
    "entropy_bound_bits",
    "max_frame_bytes",
]
