"""Conversion of messages to frames and back, and the costs of a round: the figures of its record.

Every frame that leaves a peer is encoded here, so that none leaves uncounted. Bytes are lengths of frames, never
estimates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy.typing as npt

from peer import wire
from peer.compress.layout import Layout
from peer.errors import RemoteProtocolError
from peer.gossip.effects import OutgoingFrame, Send
from peer.records import RoundRecord
from peer.wire.message import Message, MessageKind

ENTROPY_EVERY = 50
"""Rounds from one entropy bound to the next: it costs more than the encoding."""


class Decode(Protocol):
    """Signature of `decode_from`."""

    def __call__(
        self, sender: int, frame: bytes, layout: Layout, dtype: npt.DTypeLike, *, previous: Message | None = None
    ) -> Message: ...


NUMBERED_KINDS = frozenset({MessageKind.GOSSIP, MessageKind.PART, MessageKind.NOTHING})
"""A round cannot end without these, and applying one twice would mint mass."""


@dataclass
class _Figures:
    """Sums since the last record, of which they are fields."""

    messages: int = 0
    values: int = 0
    payload_bytes: int = 0
    frame_bytes: int = 0
    entropy_bits: float = 0.0
    train_s: float = 0.0
    gossip_s: float = 0.0
    wait_s: float = 0.0
    exchanges: int = 0


class FrameAccount:
    """Encodes the messages of one peer and adds up its figures until they go into a record."""

    def __init__(
        self,
        layout: Layout,
        *,
        packed: bool = False,
        cpu_clock: Callable[[], float] = time.process_time,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`packed`: see `wire.encode`. The two clocks only fill the record of times."""
        self._layout, self.packed = layout, packed
        self._cpu_clock, self.stopwatch = cpu_clock, stopwatch
        self._cpu_mark = cpu_clock()
        self._figures = _Figures()

    def encode(
        self,
        sends: Iterable[Send],
        *,
        previous: Callable[[Message, int], Message | None] | None = None,
        entropy_round: int | None = None,
    ) -> list[OutgoingFrame]:
        """Return the messages of one call as frames, in their order.

        `previous(message, receiver)`: the own message whose codes the receiver can read this one's against, if any.
        `entropy_round`: the round that decides whether the entropy bound is taken; by default that of each message.
        """
        # Receivers that get the same payload with the same weight get the same bytes, encoded once. The messages live
        # until the end of this call, so that the identity of a payload stands for it.
        encoded: dict[tuple[object, ...], OutgoingFrame] = {}
        frames: list[OutgoingFrame] = []
        for receiver, message in sends:
            before = None if previous is None else previous(message, receiver)
            key = (
                id(message.layers),
                message.kind,
                message.round,
                message.phase,
                message.mixing_weight,
                before is None,
            )
            outgoing = encoded.get(key) if message.layers else None
            if outgoing is None:
                takes_entropy = (message.round if entropy_round is None else entropy_round) % ENTROPY_EVERY == 0
                outgoing = encoded[key] = self._encode(receiver, message, before, takes_entropy=takes_entropy)
            frames.append(self._counted(replace(outgoing, receiver=receiver)))
        return frames

    def notice(self, receiver: int, notice: bytes) -> OutgoingFrame:
        """Return a membership notice as a frame: numbered, since it has to come before the frames after it."""
        return self._counted(OutgoingFrame(receiver=receiver, frame=notice, is_numbered=True))

    @contextmanager
    def training(self) -> Iterator[None]:
        """Count the time inside as that of the local step."""
        started = self.stopwatch()
        try:
            yield
        finally:
            self._figures.train_s += self.stopwatch() - started

    def gossiping(self) -> _Gossiping:
        """Count the time inside as that of algorithm, compression, encoding and decoding."""
        return _Gossiping(self)

    def gossiped(self, started: float) -> None:
        """Count the time since `started`, of the stopwatch, as such time."""
        self._figures.gossip_s += self.stopwatch() - started

    def waited(self, seconds: float) -> None:
        """Count time in which nothing could begin."""
        self._figures.wait_s += seconds

    def exchanged(self) -> None:
        """Count a completed exchange of a pair."""
        self._figures.exchanges += 1

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process since the last call."""
        before, self._cpu_mark = self._cpu_mark, self._cpu_clock()
        return self._cpu_mark - before

    def added_to(self, record: RoundRecord) -> RoundRecord:
        """Return the record with the figures since the last call added, which begin anew."""
        figures, self._figures = vars(self._figures), _Figures()
        return replace(record, **{name: getattr(record, name) + figure for name, figure in figures.items()})

    def _encode(self, receiver: int, message: Message, before: Message | None, *, takes_entropy: bool) -> OutgoingFrame:
        frame, payload_bytes = wire.encode_counted(message, self._layout, previous=before, packed=self.packed)
        return OutgoingFrame(
            receiver=receiver,
            frame=frame,
            payload_bytes=payload_bytes,
            is_numbered=message.kind in NUMBERED_KINDS,
            values=_num_values(message, self._layout),
            entropy_bits=wire.entropy_bound_bits(message, previous=before) if takes_entropy else 0.0,
        )

    def _counted(self, outgoing: OutgoingFrame) -> OutgoingFrame:
        figures = self._figures
        figures.messages += 1
        figures.values += outgoing.values
        figures.payload_bytes += outgoing.payload_bytes
        figures.frame_bytes += len(outgoing.frame)
        figures.entropy_bits += outgoing.entropy_bits
        return outgoing


class _Gossiping:
    """Result of `FrameAccount.gossiping`. A class, since every message enters it several times and a generator takes
    four times as long."""

    __slots__ = ("_account", "_started")

    def __init__(self, account: FrameAccount) -> None:
        self._account = account

    def __enter__(self) -> None:
        self._started = self._account.stopwatch()

    def __exit__(self, *_: object) -> None:
        self._account.gossiped(self._started)


def _num_values(message: Message, layout: Layout) -> int:
    if message.kind is MessageKind.PART:
        # Each of n members adds up 1 / n of the model, and a contribution weighs as much.
        return round(message.mixing_weight * layout.size)
    if message.layer_ids is None:
        return layout.size if message.layers else 0
    return sum(layout.sizes[layer] for layer in message.layer_ids)


def decode_from(
    sender: int, frame: bytes, layout: Layout, dtype: npt.DTypeLike, *, previous: Message | None = None
) -> Message:
    """Return the message in a frame from a neighbour; its codes may be coded against those of `previous`. Raises
    RemoteProtocolError, which names the neighbour."""
    try:
        message = wire.decode(frame, layout, dtype=dtype, previous=previous)
    except RemoteProtocolError as error:
        # The wire format knows no connections; only this function knows the sender to blame.
        raise type(error)(error.problem, peer=sender) from None
    if message.sender != sender:
        raise RemoteProtocolError(f"sent a frame in the name of peer {message.sender}", peer=sender)
    return message
