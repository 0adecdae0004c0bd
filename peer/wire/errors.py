"""One error for each way in which bytes can lie about being a frame.

All are `FrameError`s: the fault lies with the sender, the message is dropped and the daemon lives on. Nothing else may
escape `wire.decode`.
"""

from __future__ import annotations

from peer.errors import FrameError


class FrameTooLarge(FrameError):
    """The frame is longer than any message about this layout can be."""


class TruncatedFrame(FrameError):
    """A field or section reaches beyond the end of the frame."""


class BadMagic(FrameError):
    """The bytes do not begin like a frame."""


class UnsupportedVersion(FrameError):
    """This program does not speak the version of the frame."""


class ChecksumMismatch(FrameError):
    """The bytes were damaged on their way."""


class TrailingBytes(FrameError):
    """Bytes are left over between the last section and the checksum."""


class MalformedNumber(FrameError):
    """A variable-length integer is longer than its value needs, or than 64 bits."""


class UnknownKind(FrameError):
    """The header names no kind of message, or sets a bit that has no meaning."""


class WeightOutOfRange(FrameError):
    """A mixing or push weight is not finite, or a push weight is negative."""


class LayerCountMismatch(FrameError):
    """The number of layers is not that of the layout and the kind of message."""


class PartTooLarge(FrameError):
    """A part of a sum has an empty section, or more numbers than any part of a vector about this layout can have."""


class LayerNumberOutOfRange(FrameError):
    """A layer number is beyond the layout. (Unsorted and repeated numbers cannot be expressed.)"""


class WishOutOfRange(FrameError):
    """A repair request asks for bits that do not exist."""


class UnknownSection(FrameError):
    """A section's tag names no kind of payload, or one that this kind of message cannot hold."""


class UnknownCodec(FrameError):
    """A stream of integers or indices names no codec."""


class NothingToRepeat(FrameError):
    """A section repeats the parameters of an earlier one, and there is none."""


class ParameterOutOfRange(FrameError):
    """A number of bits, a divisor, a step or a rounding that cannot be."""


class LevelOutOfRange(FrameError):
    """An integer lies outside of its width, or a level beyond the integers that a float64 holds exactly."""


class NonFiniteValue(FrameError):
    """A value, scale or θ is infinite or not a number, or a level times its scale would be."""


class WrongFloatType(FrameError):
    """The frame holds float64 numbers where this run computes in float32."""


class IndexCountOutOfRange(FrameError):
    """A sparse layer claims more entries than it has coordinates, or all of them and another number."""


class IndexOutOfRange(FrameError):
    """A sparse index lies beyond its layer. (Unsorted and duplicate indices cannot be expressed.)"""


class PaddingNotZero(FrameError):
    """The unused bits at the end of a bit string are not zero."""


class MalformedEntropyCode(FrameError):
    """A range-coded stream does not end where it began, or its table of frequencies cannot be."""


class DecompressionBomb(FrameError):
    """A compressed section announces another size than its layer has, or none."""


class MalformedCompression(FrameError):
    """A compressed section cannot be decompressed to the size it announces."""


class MissingPrevious(FrameError):
    """A layer is coded against an earlier message of the same sender that this receiver does not hold."""
