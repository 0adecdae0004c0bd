"""One connection to one neighbour, from the hellos to the end of its stream.

Two tasks carry it: one opens incoming envelopes (`inbox`) and hands on their contents, the other packs outgoing ones
(`outbox`). A timer looks for signs of life (`liveness`).

A connection is taken out of use (`detach`) before it ends: from then on further input is dropped, and another
connection to the same neighbour may be in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from peer.foreign_text import printable
from peer.net import tcp_info
from peer.net.chunks import Cutter
from peer.net.counters import LinkCounters
from peer.net.handler import Handler
from peer.net.handshake import FAREWELL_S, OpenedStream, farewell
from peer.net.inbox import Inbox, LinkLimits, Received
from peer.net.liveness import Liveness
from peer.net.outbox import REVOKED_TOPIC, Outbox
from peer.net.receipts import Receipts
from peer.net.rpc import StreamLost
from peer.net.tasks import Tasks
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.rate_limits import Allowance

log = logging.getLogger(__name__)


class Connection:
    """A stream on which both hellos were accepted."""

    def __init__(
        self,
        opened: OpenedStream,
        *,
        limits: LinkLimits,
        heartbeat_s: float,
        relayed: Callable[[], tuple[int, int] | None],
        handler: Handler,
        take_revocations: Callable[[int, bytes], None],
        blame: Callable[[int, Exception], None],
        on_detach: Callable[[Connection, str], None],
        tasks: Tasks,
        pace: Allowance,
    ) -> None:
        """`take_revocations(peer, pem)` takes a revocation list that the neighbour passed on, or raises RemoteError.
        `blame` is that of Links; `on_detach(connection, reason)` is called once; `relayed` goes to SocketMeter, `pace`
        to Inbox."""
        terms, self._loop = opened.terms, asyncio.get_running_loop()
        now = self._loop.time()
        self.neighbor, self.identity = opened.neighbor, opened.identity
        self.nonce, self.remote_has, self.dialled = terms.nonce, terms.received, opened.dialled
        self.protocol, self.software = terms.protocol, terms.software
        self.in_use = True
        """Whether frames pass; false once it was detached."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the stream is gone, and the tasks with it."""
        self.is_parting = False
        """Whether one of the two says goodbye, rather than that the connection is lost."""
        self._stream, self._handler, self._tasks = opened.stream, handler, tasks
        self._take_revocations, self._blame, self._on_detach = take_revocations, blame, on_detach

        self._counters = LinkCounters(connections=1)
        self._meter = SocketMeter(opened.socket, relayed)
        self._inbox = Inbox(limits, received=opened.received, pace=pace, their_chunk_bytes=terms.chunk_bytes)
        self._cutter = Cutter(chunk_bytes=min(limits.chunk_bytes, terms.chunk_bytes), credit_bytes=terms.credit_bytes)
        self._receipts = Receipts(received=opened.received, window_bytes=limits.window_bytes)
        self._outbox = Outbox(self._cutter, self._receipts, self._inbox, self._counters)
        self._wake = asyncio.Event()
        """Set when there may be something to write."""
        self._farewell: tuple[pb.Close.Kind, str] | None = None
        self._reason = "it closed the connection"
        self._writer: asyncio.Task[None] | None = None

        self._liveness = Liveness(
            heartbeat_s=heartbeat_s, their_heartbeat_s=terms.heartbeat_s, chunk_bytes=limits.chunk_bytes, now=now
        )
        self._tick_timer: asyncio.TimerHandle | None = None
        self._receipt_timer: asyncio.TimerHandle | None = None
        self._farewell_timer: asyncio.TimerHandle | None = None

    # -- what its owner asks of it --

    def send(self, seq: int, frame: bytes, *, again: bool) -> None:
        """Queue a frame; `again` if an earlier connection was given it too."""
        self._counters.frames_resent += again
        self._outbox.push_frame(seq, frame)
        self._wake.set()

    def send_note(self, topic: str, data: bytes) -> None:
        """Queue a note."""
        self._outbox.push_note(topic, data)
        self._wake.set()

    def send_revocations(self, pem: bytes) -> None:
        """Queue a revocation list."""
        self._outbox.push_revocations(pem)
        self._wake.set()

    def acknowledge(self, upto: int) -> None:
        """Queue a receipt for frames up to a number."""
        self._receipts.acknowledge(upto, self._loop.time())
        if self._receipt_timer is not None:
            self._receipt_timer.cancel()
        self._await_receipt()

    def taken(self, upto: int) -> None:
        """Release the credit of frames that were held."""
        self._inbox.taken(upto)
        self._wake.set()

    def counters(self) -> LinkCounters:
        """Return the traffic of this connection so far."""
        self._meter.update(self._counters)
        return self._counters

    @property
    def delivered_bytes_per_s(self) -> int:
        """How fast frames get through, as the kernel measures it; 0 where it is not known."""
        self._meter.update(self._counters)
        return self._meter.delivered_bytes_per_s

    def end(self, kind: pb.Close.Kind, reason: str) -> None:
        """Tell the neighbour why, and end the connection soon; the first reason stays.

        Before a goodbye everything that waits is sent. Any other farewell is the next thing said.
        """
        if self._farewell is not None:
            return
        self._farewell, self._reason = (kind, reason), reason
        self.is_parting = kind == pb.Close.GOODBYE
        self._wake.set()
        if kind != pb.Close.GOODBYE:
            # An envelope that is under way over a thin link goes first. But a neighbour that reads nothing blocks the
            # writer for as long as the TCP connection lives, and must not keep itself from being dialled anew.
            self._farewell_timer = self._loop.call_later(self._liveness.silence_s, self._stop_writing)

    def drop(self, kind: pb.Close.Kind, reason: str) -> None:
        """Take the connection out of use at once, and end it."""
        self.end(kind, reason)
        self.detach(reason)

    def detach(self, reason: str) -> None:
        """Take the connection out of use, if it still is in use."""
        if self.in_use:
            self.in_use = False
            self._on_detach(self, reason)

    @property
    def waiting(self) -> int:
        """Frames that wait to be sent, one under way included."""
        return len(self._cutter)

    # -- its life --

    async def run(self) -> None:
        """Carry the connection to its end."""
        self._watch()
        reader = self._tasks.spawn(self._read(), f"read {self.neighbor.name}")
        writer = self._writer = self._tasks.spawn(self._write(), f"write {self.neighbor.name}")
        try:
            # The writer ends after a farewell of ours; the reader after one of theirs, or when the connection is gone.
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            self.detach(self._reason)
            if not reader.done():
                # gRPC loses the last message of a stream that is cancelled, or that ends while the other end writes.
                # Their remaining input is therefore read and dropped until they heard the farewell and end the stream.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FAREWELL_S):
                        await self._stream.done_writing()
                        await asyncio.wait((reader,))
        finally:
            for timer in (self._tick_timer, self._receipt_timer, self._farewell_timer):
                if timer is not None:
                    timer.cancel()
            self.detach(self._reason)
            reader.cancel()
            writer.cancel()
            # gRPC may cancel this very task, once more and at any await, when the stream is gone.
            try:
                await asyncio.wait((reader, writer))
                # What gRPC had taken went to the kernel meanwhile.
                self.counters()
                await self._stream.abandon()
            finally:
                self.ended.set_result(None)

    async def _read(self) -> None:
        try:
            while (data := await self._stream.read()) is not None:
                now = self._loop.time()
                self._liveness.received(now)
                self._counters.protobuf_bytes_received += len(data)
                if not self.in_use:
                    continue
                # The trust boundary. Until here it is bytes of the neighbour, and from here on typed values; whatever
                # is raised for them, it is to blame and its connection pays.
                try:
                    if not self._act_on(self._inbox.open(data, now=now)):
                        return
                except Exception as error:
                    self._blame(self.neighbor.index, error)
        except StreamLost as error:
            self._lost(error)

    def _act_on(self, received: Received) -> bool:
        """Hand on the contents of an envelope; return whether more may follow. Raises RemoteError."""
        peer, handler = self.neighbor.index, self._handler
        for seq, frame in received.frames:
            self._counters.frames_received += 1
            self._counters.frame_bytes_received += len(frame)
            self._receipts.frame_received(len(frame))
            if handler.frame_received(peer, seq, frame) is False:
                self._inbox.hold(seq, len(frame))
        if self._inbox.credit_is_due:
            self._wake.set()
        if received.receipt:
            handler.receipt(peer, received.receipt)
            self.remote_has = max(self.remote_has, received.receipt)
        if received.credit:
            self._cutter.add_credit(received.credit)
            self._wake.set()
        for topic, data in received.notes:
            if topic == REVOKED_TOPIC:
                self._take_revocations(peer, data)
            else:
                handler.bulletin_received(peer, topic, data)
        if received.close is None:
            return True
        reason = printable(received.close.reason)
        if received.close.kind == pb.Close.GOODBYE:
            self._reason, self.is_parting = f"it left: {reason}", True
            handler.goodbye(peer, reason)
        else:
            self._reason = f"it ended the connection: {reason}"
        return False

    async def _write(self) -> None:
        try:
            while True:
                self._wake.clear()
                while (data := self._next_envelope()) is not None:
                    await self._write_one(data)
                    self._liveness.sent(self._loop.time())
                if self._farewell is not None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(FAREWELL_S):
                            await self._write_one(farewell(*self._farewell))
                    return
                await self._wake.wait()
        except StreamLost as error:
            self._lost(error)

    async def _write_one(self, data: bytes) -> None:
        self._counters.protobuf_bytes_sent += len(data)
        await self._stream.write(data)

    def _next_envelope(self) -> bytes | None:
        if self._farewell is not None and self._farewell[0] != pb.Close.GOODBYE:
            return None
        return self._outbox.next_envelope(self._loop.time())

    def _lost(self, error: StreamLost) -> None:
        if self._farewell is None:
            self._reason = f"the connection is lost ({error})"

    # -- its timers --

    def _stop_writing(self) -> None:
        if self._writer is not None:
            self._writer.cancel()

    def _await_receipt(self) -> None:
        self._receipt_timer = None
        wait_s = self._receipts.wait_s(self._loop.time())
        if wait_s:
            self._receipt_timer = self._loop.call_later(wait_s, self._await_receipt)
        elif wait_s is not None:
            self._wake.set()

    def _watch(self) -> None:
        """Look for signs of life, now and from time to time."""
        if not self.in_use:
            return
        now = self._loop.time()
        self._liveness.socket_received(self.counters().socket_bytes_received, now)
        if (verdict := self._liveness.verdict(now)) is not None:
            log.warning("%s: %s", self.neighbor.name, verdict)
            self.drop(pb.Close.VIOLATION, verdict)
            return
        if self._liveness.needs_heartbeat(now):
            self._outbox.push_heartbeat()
            self._wake.set()
        self._tick_timer = self._loop.call_later(self._liveness.tick_s, self._watch)


class SocketMeter:
    """Reads the counters of one connection."""

    def __init__(self, socket: tcp_info.Connection | None, relayed: Callable[[], tuple[int, int] | None]) -> None:
        """`socket` is None where it is not known. `relayed` returns the bytes to and from the neighbour through a relay
        since this process began, None if nothing did."""
        self._socket, self._relayed = socket, relayed
        self._tcp = None if socket is None else socket.counters()
        self._relayed_before = relayed() or (0, 0)

    @property
    def delivered_bytes_per_s(self) -> int:
        """See `TcpCounters`; that of the last `update`."""
        return 0 if self._tcp is None else self._tcp.delivered_bytes_per_s

    def update(self, counters: LinkCounters) -> None:
        """Bring the counters of the socket up to date; those of a closed one keep their last values."""
        if self._socket is None:
            if (relayed := self._relayed()) is not None:
                # The bytes that a socket to the neighbour would have carried.
                counters.socket_bytes_sent = relayed[0] - self._relayed_before[0]
                counters.socket_bytes_received = relayed[1] - self._relayed_before[1]
            return
        self._tcp = self._socket.counters() or self._tcp
        if self._tcp is not None:
            counters.socket_bytes_sent = self._tcp.bytes_sent
            counters.socket_bytes_received = self._tcp.bytes_received
            counters.packet_bytes_sent = self._tcp.packet_bytes_sent
            counters.packet_bytes_received = self._tcp.packet_bytes_received
            counters.retransmitted_bytes = self._tcp.bytes_retransmitted
