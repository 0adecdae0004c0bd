"""The numbered streams between one peer and all others: the frames that each of them has, and those it still needs.

`delivery` knows one stream in one direction. This file knows all of them, and lets two threads use them: rounds number
and publish frames on one, while connections come up and receipts arrive on another. One lock guards all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from peer.errors import StateBehind
from peer.gossip.effects import OutgoingFrame
from peer.node.checkpoint_arrays import Arrays, cut, joined
from peer.node.delivery import InLink, OutLink


class Links:
    """The streams of one peer. All methods may be called from any thread."""

    def __init__(self, me: int, neighbors: Collection[int]) -> None:
        self._me = me
        self.out: dict[int, OutLink] = {}
        self.incoming: dict[int, InLink] = {}
        self._remote_has: dict[int, int] = {}
        """Neighbour → last frame that it had, for good or not, when it connected: not sent again on this connection."""
        self._remote_durable: dict[int, int] = {}
        """Neighbour → last frame that it says it has for good. After a power cut here that can be more than was sent
        since."""
        self._next_seq: dict[int, int] = {}
        """The next number to assign. Frames of one call are numbered while those of the call before it, from which it
        followed, are not published yet."""
        self._new_receipts: dict[int, int] = {}
        self._lock = threading.Lock()
        # Ascending, so that iterating over the streams has the same order after a restart.
        for peer in sorted(neighbors):
            self._restart(peer)

    def meet(self, peer: int) -> None:
        """Take up the streams with a peer that was not known when this one began, if they are not there yet."""
        with self._lock:
            if peer not in self.out and peer != self._me:
                self._restart(peer)

    def ask_again(self, peer: int, seq: int) -> None:
        """Take a neighbour's frame `seq`, and those that follow it, for not received."""
        with self._lock:
            self.incoming[peer].restore(seq - 1)

    def restart(self, peer: int) -> None:
        """Count from 1 again in both directions, and forget the frames kept for the peer."""
        with self._lock:
            self._restart(peer)

    def give_up(self, peer: int, upto: int | None = None) -> tuple[int, list[bytes]]:
        """Return (last of our frames that a lost peer has for good, the frames after it), and forget its streams.
        `upto`: that number as journaled; by default the last that it has confirmed by now.

        Both in one step: a receipt that came in between would be in the frames and not in the number. A newcomer may
        hear of the loss of a peer that it has never met.
        """
        with self._lock:
            if peer not in self.out:
                self._restart(peer)
            upto = self.out[peer].acknowledged if upto is None else upto
            unreceived = [frame for _, frame in self.out[peer].unacknowledged(upto)]
            self._restart(peer)
        return upto, unreceived

    # Outgoing frames.

    def numbered(self, frames: Iterable[OutgoingFrame]) -> list[OutgoingFrame]:
        """Return the frames with their numbers. All that get one have to be published, or pushed, in this order."""
        numbered = []
        with self._lock:
            for outgoing in frames:
                if outgoing.is_numbered:
                    seq = max(self._next_seq[outgoing.receiver], self.out[outgoing.receiver].next_seq)
                    self._next_seq[outgoing.receiver] = seq + 1
                    outgoing = replace(outgoing, seq=seq)
                numbered.append(outgoing)
        return numbered

    def push(self, receiver: int, frame: bytes) -> int:
        """Keep a frame until its receiver has it for good; return its number."""
        with self._lock:
            return self.out[receiver].push(frame)

    def publish(self, frames: Iterable[OutgoingFrame]) -> list[OutgoingFrame]:
        """Keep the numbered frames of one call; return those to send now to connected receivers. For the others,
        `connected` will return them."""
        sends = []
        with self._lock:
            for outgoing in frames:
                peer, seq = outgoing.receiver, outgoing.seq
                if not seq:
                    sends.append(outgoing)
                    continue
                self.out[peer].push(outgoing.frame)
                # After a power cut, rounds are repeated that a neighbour has already, or even has for good.
                if seq <= self._remote_durable[peer]:
                    self.out[peer].acknowledge(seq)
                if seq > self._remote_has[peer]:
                    sends.append(outgoing)
        return sends

    def connected(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """Return (number, frame) of the frames that a connected neighbour needs; it has those up to `remote_has` for
        good. Raises StateBehind if it has lost frames that it had."""
        with self._lock:
            link = self.out[peer]
            if remote_has < link.acknowledged:
                raise StateBehind(
                    f"it has our frames up to {remote_has}, but had those up to {link.acknowledged} for good before,"
                    " and they are gone: its state is older than what we know; put the newest copy of its state folder"
                    " back, or go on without it (sotto remove)"
                )
            self._remote_has[peer] = remote_has
            self._acknowledge(peer, remote_has)
            return link.unacknowledged(remote_has)

    def acknowledge(self, peer: int, upto: int) -> None:
        """Note that a neighbour has our frames up to `upto` for good."""
        with self._lock:
            self._acknowledge(peer, upto)

    def take_new_receipts(self) -> dict[int, int]:
        """Return neighbour → number of the receipts since the last call, for the journal."""
        with self._lock:
            receipts, self._new_receipts = self._new_receipts, {}
        return receipts

    def receipts_of(self, peer: int) -> tuple[int, int]:
        """Return (number of our frames that a neighbour has confirmed, number of frames for it)."""
        with self._lock:
            return self.out[peer].acknowledged, self.out[peer].next_seq - 1

    def ahead(self) -> list[int]:
        """Return the neighbours that say they have frames of this peer for good that it has not made yet: they were
        made before a power cut, or with a state that is gone."""
        with self._lock:
            return sorted(peer for peer, upto in self._remote_has.items() if upto >= self.out[peer].next_seq)

    # Incoming frames.

    def received(self) -> dict[int, int]:
        """Return neighbour → the last of its frames that was taken."""
        with self._lock:
            return {peer: link.last_seq for peer, link in self.incoming.items()}

    def durable_from(self, peer: int) -> int:
        """Return the last of a neighbour's frames that would survive a power cut: up to it none need be sent again."""
        return self.incoming[peer].durable_seq

    def mark_durable(self, received: Mapping[int, int]) -> dict[int, int]:
        """Note that the frames that `received` returned would survive a power cut now; return the new receipts."""
        receipts = {}
        with self._lock:
            for peer, upto in received.items():
                if upto > self.incoming[peer].durable_seq:
                    if upto > self.incoming[peer].last_seq:
                        continue  # While the disk was busy, the peer was lost, and its streams count from 1 again.
                    self.incoming[peer].mark_durable(upto)
                    receipts[peer] = upto
        return receipts

    # State.

    def to_checkpoint(self) -> tuple[dict[str, object], dict[str, npt.NDArray[Any]]]:
        """Return (JSON values, arrays) of everything that is kept, as of one moment."""
        with self._lock:
            received = {str(peer): link.last_seq for peer, link in self.incoming.items()}
            out = {str(peer): (link.next_seq, tuple(link.frames)) for peer, link in self.out.items()}
        kept = {peer: {"next_seq": seq, "lengths": [*map(len, frames)]} for peer, (seq, frames) in out.items()}
        arrays = {f"out/{peer}": joined(frames) for peer, (_, frames) in out.items() if frames}
        return {"received": received, "out": kept}, arrays

    def restore(self, values: Mapping[str, Any], arrays: Arrays) -> None:
        """Restore a result of `to_checkpoint`. Raises KeyError, TypeError, ValueError or LocalProtocolError if it
        cannot be that."""
        # Before members could change, frames that waited in the inbox were left out of the count.
        known = values["received"] if "received" in values else values["incoming"]
        received = {int(peer): upto for peer, upto in known.items()}
        out: dict[int, tuple[int, list[bytes]]] = {}
        for peer, link in values["out"].items():
            frames = cut(arrays[f"out/{peer}"], link["lengths"]) if link["lengths"] else []
            out[int(peer)] = link["next_seq"], frames
        with self._lock:
            # A joining peer may have heard of members from a peer of whose own join it had not heard yet.
            for peer in sorted({*received, *out} - {*self.out, self._me}):
                self._restart(peer)
            for peer in self.out:
                self.incoming[peer].restore(received.get(peer, 0))
                self.out[peer].restore(*out.get(peer, (1, ())))

    def _restart(self, peer: int) -> None:
        self.out[peer], self.incoming[peer] = OutLink(), InLink()
        self._remote_has[peer] = self._remote_durable[peer] = 0
        self._next_seq[peer] = 1
        self._new_receipts.pop(peer, None)

    def _acknowledge(self, peer: int, upto: int) -> None:
        self._remote_durable[peer] = max(upto, self._remote_durable[peer])
        # After a power cut a neighbour can know more of us than we do; that is acknowledged as it is repeated.
        known = min(upto, self.out[peer].next_seq - 1)
        if known > self.out[peer].acknowledged:
            self.out[peer].acknowledge(known)
            # Not needed for correctness, but to keep no more after a restart than before.
            self._new_receipts[peer] = known
