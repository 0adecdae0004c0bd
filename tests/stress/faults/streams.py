"""Streams between the peers of a virtual cluster: late, slow, cut, broken, dialled anew.

What crosses a stream is what crosses a real one: chunks under credit (`peer.net.chunks`), receipts, and before them a
hello that says which frames need not be sent again. A stream delivers in order or breaks; what was on its way is lost
then, and each end learns of it in its own time. Nothing here knows what a frame means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from peer.errors import RemoteError
from peer.net.chunks import Assembler, Cutter
from peer.net.envelope import Piece

CHUNK_BYTES = 96
"""Small, so that the frames of small models come in pieces too."""
WINDOW_BYTES = 8 * 1024
MAX_FRAME_BYTES = 1 << 20
_SILENCE_S = 3.0
"""An end that hears nothing for so long gives its stream up."""


class Schedule(Protocol):
    """Who lets things happen later."""

    @property
    def now(self) -> float: ...
    def at(self, time_s: float, action: Callable[[], None]) -> None: ...
    def note(self, text: str) -> None: ...


class Process(Protocol):
    """One life of a peer: what `peer.net.handler.Handler` has of calls that matter here."""

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]: ...
    def link_down(self, peer: int) -> None: ...
    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None: ...
    def receipt(self, peer: int, upto: int) -> None: ...
    def last_received(self, peer: int) -> int: ...


@dataclass(kw_only=True)
class LinkCondition:
    """How one pair of peers is connected at the moment."""

    delay_s: float = 0.002
    """One-way delay: each envelope takes between half of it and all of it …"""
    spike_chance: float = 0.0
    spike_s: float = 0.0
    """… and, with this chance, up to so much more."""
    rate_bytes_s: float | None = None
    cut_until: float = 0.0
    """Nothing crosses before then."""


class _End:
    """One end of a stream."""

    def __init__(self, me: int, other: int, received: int) -> None:
        self.me, self.other = me, other
        self.cutter = Cutter(chunk_bytes=CHUNK_BYTES, credit_bytes=WINDOW_BYTES)
        self.assembler = Assembler(
            window_bytes=WINDOW_BYTES, chunk_bytes=CHUNK_BYTES, max_frame_bytes=MAX_FRAME_BYTES, last_seq=received
        )
        self.receipt = self.receipt_sent = received
        self.receipt_planned = False
        self.last_arrival = 0.0
        self.held: deque[tuple[int, int]] = deque()
        self.held_bytes = 0

    @property
    def owes_credit(self) -> bool:
        return self.held_bytes < WINDOW_BYTES and self.assembler.owes


@dataclass
class _Stream:
    """One connection of a pair, from its hello to its end."""

    number: int
    ends: dict[int, _End] = field(default_factory=dict)
    broken: bool = False


@dataclass(frozen=True)
class _Envelope:
    pieces: list[Piece]
    credit: int
    receipt: int


class Streams:
    """All streams of a cluster. `port(me)` is what a process of peer `me` has for a transport."""

    def __init__(self, pairs: Iterable[tuple[int, int]], schedule: Schedule, random: Random) -> None:
        """`pairs` (a, b) with a < b are connected; a dials."""
        self._schedule, self._random = schedule, random
        self.conditions = {pair: LinkCondition() for pair in pairs}
        self._processes: dict[int, Process] = {}
        self._current: dict[tuple[int, int], _Stream | None] = {}
        """(me, other) → the stream that `me` takes for the one to `other`."""
        self._redial_planned: set[tuple[int, int]] = set()
        self._gone: set[int] = set()
        self._count = 0
        self.broken = 0
        """Streams that ended before their time."""

    def add(self, pair: tuple[int, int], like: LinkCondition) -> None:
        """Connect one more pair (a, b), a < b, under the conditions of another one, apart from its cuts."""
        self.conditions.setdefault(pair, replace(like, cut_until=0.0))

    def begin(self, me: int, process: Process) -> None:
        """Connect a process that has just started."""
        self._processes[me] = process
        for pair in self.conditions:
            if me in pair:
                self._plan_dial(pair, self._random.uniform(0.0, 0.05))

    def end(self, me: int) -> None:
        """Take note that a process is gone: its neighbours will notice."""
        self._processes.pop(me, None)
        for pair in self.conditions:
            if me in pair:
                other = pair[0] + pair[1] - me
                if (stream := self._current.pop((me, other), None)) is not None:
                    self._break(pair, stream)

    def give_up(self, me: int) -> None:
        """Take note that a process that is gone does not come back: nobody dials it any more."""
        self._gone.add(me)

    def is_up(self, me: int, peer: int) -> bool:
        """Return whether `me` takes itself for connected to a neighbour."""
        return self._current.get((me, peer)) is not None

    def send(self, me: int, peer: int, seq: int, frame: bytes) -> None:
        """Queue a frame if the link is up."""
        if (stream := self._current.get((me, peer))) is not None:
            stream.ends[me].cutter.push(seq, frame)
            self._pump(stream, me)

    def acknowledge(self, me: int, peer: int, upto: int) -> None:
        """Send a receipt soon; receipts wait for company."""
        stream = self._current.get((me, peer))
        if stream is None or upto <= stream.ends[me].receipt:
            return
        end = stream.ends[me]
        end.receipt = upto
        if not end.receipt_planned:
            end.receipt_planned = True

            def due() -> None:
                end.receipt_planned = False
                self._pump(stream, me, receipt=True)

            self._schedule.at(self._schedule.now + self._random.uniform(0.0, 0.5), due)

    def taken(self, me: int, peer: int, upto: int) -> None:
        """Give back the credit of frames up to `upto`."""
        stream = self._current.get((me, peer))
        if stream is None:
            return
        end = stream.ends[me]
        while end.held and end.held[0][0] <= upto:
            end.held_bytes -= end.held.popleft()[1]
        self._pump(stream, me)

    def reset(self, me: int, peer: int) -> None:
        """End the stream to a neighbour; it is dialled anew."""
        if (stream := self._current.get((me, peer))) is not None:
            self._detach(stream, me)
            self._break(_pair(me, peer), stream)

    # -- what befalls links --------------------------------------------------------------------------------------------

    def break_link(self, pair: tuple[int, int]) -> None:
        """Break whatever stream there is between two peers."""
        for me, other in (pair, pair[::-1]):
            if (stream := self._current.get((me, other))) is not None:
                self.broken += 1
                self._break(pair, stream)

    def cut(self, pair: tuple[int, int], until: float) -> None:
        """Let nothing cross between two peers for a while. Streams that outlast it go on where they were."""
        self.conditions[pair].cut_until = max(self.conditions[pair].cut_until, until)
        if until - self._schedule.now > _SILENCE_S:
            self.break_link(pair)

    # -- dialling ------------------------------------------------------------------------------------------------------

    def _plan_dial(self, pair: tuple[int, int], after_s: float) -> None:
        if pair not in self._redial_planned and not self._gone.intersection(pair):
            self._redial_planned.add(pair)
            self._schedule.at(self._schedule.now + after_s, lambda: self._dial(pair))

    def _dial(self, pair: tuple[int, int]) -> None:
        self._redial_planned.discard(pair)
        dialler, listener = pair
        if dialler not in self._processes or self._current.get(pair) is not None:
            return
        condition = self.conditions[pair]
        if listener not in self._processes or self._schedule.now < condition.cut_until:
            self._plan_dial(pair, self._random.uniform(0.1, 0.6))
            return
        self._count += 1
        stream = _Stream(self._count)
        caller, answerer = self._processes[dialler], self._processes[listener]
        dialler_has = caller.last_received(listener)

        def heard_by_listener() -> None:
            reply_at = self._schedule.now + self._delay(condition)
            if self._processes.get(listener) is not answerer or stream.broken:
                stream.broken = True
                self._schedule.at(reply_at, heard_by_dialler)
                return
            listener_has = answerer.last_received(dialler)
            self._schedule.at(reply_at, lambda: heard_by_dialler(listener_has))
            # The listener may write as soon as it has heard the hello, but its own hello comes first.
            self._attach(stream, listener, dialler, dialler_has, listener_has, not_before=reply_at)

        def heard_by_dialler(listener_has: int | None = None) -> None:
            if self._processes.get(dialler) is not caller:
                self._break(pair, stream)
            elif stream.broken or listener_has is None:
                self._plan_dial(pair, self._random.uniform(0.1, 0.6))
            else:
                self._attach(stream, dialler, listener, listener_has, dialler_has)

        self._schedule.at(self._schedule.now + self._delay(condition), heard_by_listener)

    def _attach(
        self, stream: _Stream, me: int, other: int, remote_has: int, received: int, *, not_before: float = 0.0
    ) -> None:
        if (older := self._current.get((me, other))) is not None:
            self._detach(older, me)
            self._break(_pair(me, other), older)
        process = self._processes[me]
        stream.ends[me] = end = _End(me, other, received)
        end.last_arrival = not_before
        self._current[me, other] = stream
        try:
            frames = process.link_up(other, remote_has)
        except RemoteError as error:
            self._schedule.note(f"{me} refuses {other}: {error}")
            self.reset(me, other)
            return
        if self._current.get((me, other)) is not stream:
            return
        for seq, frame in frames:
            end.cutter.push(seq, frame)
        self._pump(stream, me)

    def _detach(self, stream: _Stream, me: int) -> None:
        """Tell a process that its stream is gone, if it had not heard."""
        end = stream.ends.get(me)
        if end is None or self._current.get((me, end.other)) is not stream:
            return
        self._current[me, end.other] = None
        if (process := self._processes.get(me)) is not None:
            process.link_down(end.other)
        pair = _pair(me, end.other)
        if pair[0] == me:
            self._plan_dial(pair, self._random.uniform(0.1, 0.6))

    def _break(self, pair: tuple[int, int], stream: _Stream) -> None:
        """Lose what is on its way; the ends hear of it soon, or by the silence where nothing crosses."""
        if stream.broken:
            return
        stream.broken = True
        condition, now = self.conditions[pair], self._schedule.now
        for me in pair:
            after = self._delay(condition) if now >= condition.cut_until else _SILENCE_S * self._random.uniform(0.5, 1)
            self._schedule.at(now + after, lambda me=me: self._detach(stream, me))  # type: ignore[misc]

    # -- carrying ------------------------------------------------------------------------------------------------------

    def _pump(self, stream: _Stream, me: int, *, receipt: bool = False) -> None:
        """Send whatever an end may send now."""
        end = stream.ends[me]
        while end.cutter.ready or end.owes_credit or (receipt and end.receipt > end.receipt_sent):
            pieces = end.cutter.cut()[0] if end.cutter.ready else []
            credit = end.assembler.grant() if end.owes_credit else 0
            envelope = _Envelope(pieces, credit, end.receipt)
            end.receipt_sent = end.receipt
            condition, now = self.conditions[_pair(me, end.other)], self._schedule.now
            arrival = max(now + self._delay(condition), end.last_arrival, condition.cut_until)
            if condition.rate_bytes_s is not None:
                arrival += sum(len(piece.data) for piece in pieces) / condition.rate_bytes_s
            end.last_arrival = arrival
            if not stream.broken:
                self._schedule.at(
                    arrival,
                    lambda envelope=envelope: self._arrive(stream, end.other, envelope),  # type: ignore[misc]
                )

    def _arrive(self, stream: _Stream, me: int, envelope: _Envelope) -> None:
        end = stream.ends.get(me)
        if stream.broken or end is None or self._current.get((me, end.other)) is not stream:
            return
        process = self._processes[me]
        try:
            if envelope.receipt > 0:
                process.receipt(end.other, envelope.receipt)
            end.cutter.credit_bytes += envelope.credit
            for seq, frame in end.assembler.take(envelope.pieces):
                if process.frame_received(end.other, seq, frame) is False:
                    end.held.append((seq, len(frame)))
                    end.held_bytes += len(frame)
        except RemoteError as error:
            self._schedule.note(f"{me} ends the stream from {end.other}: {error}")
            self.reset(me, end.other)
            return
        if self._current.get((me, end.other)) is stream:
            self._pump(stream, me)

    def _delay(self, condition: LinkCondition) -> float:
        delay = condition.delay_s * self._random.uniform(0.5, 1.0)
        if condition.spike_chance and self._random.random() < condition.spike_chance:
            delay += condition.spike_s * self._random.random()
        return delay


def _pair(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)
