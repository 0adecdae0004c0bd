"""Traffic over each link of one peer, in each round and since the run began.

The daemon reports each frame that it hands to a link; the transport reports its own counters and the kernel's. The
counters of the transport start at zero in every process; the totals here continue from what earlier processes left in
the metrics. Rounds that are repeated after a crash replace their rows, but bytes that were sent twice count twice in
the totals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from peer.gossip.effects import OutgoingFrame
from peer.net.counters import LinkCounters
from peer.state.metrics import LinkRecord, LinkRoundRecord


@dataclass
class _Handed:
    """Frames handed to a link, in the round under way or since this process began."""

    values: int = 0
    payload_bytes: int = 0
    entropy_bits: float = 0.0
    frame_bytes: int = 0
    sampled_values: int = 0
    """Values of the messages for which `entropy_bits` was computed."""


class Traffic:
    """The traffic of all links of one peer."""

    def __init__(self, me: int, before: Iterable[LinkRecord] = ()) -> None:
        """`before`: the totals that earlier processes of the same run left."""
        self._me = me
        self._before = {record.neighbor: record for record in before}
        self._round: defaultdict[int, _Handed] = defaultdict(_Handed)
        self._all: defaultdict[int, _Handed] = defaultdict(_Handed)
        self._last: dict[int, tuple[int, int]] = {}
        """Neighbour → protobuf and socket bytes at the end of the last round."""

    @property
    def payload_bytes(self) -> int:
        """Payload handed to all links since the run began."""
        now = sum(own.payload_bytes for own in self._all.values())
        return now + sum(earlier.payload_bytes for earlier in self._before.values())

    def described(self, peer: int) -> dict[str, float | None]:
        """Return how many parameters this process sent over a link, their payload bits each, and the entropy bound."""
        total = self._all[peer]
        return {
            "values": total.values,
            "bits_per_value": 8 * total.payload_bytes / total.values if total.values else None,
            "entropy_bits_per_value": total.entropy_bits / total.sampled_values if total.sampled_values else None,
        }

    def handed_over(self, outgoing: OutgoingFrame) -> None:
        """Take note of a frame for a neighbour."""
        for account in (self._round[outgoing.receiver], self._all[outgoing.receiver]):
            account.values += outgoing.values
            account.payload_bytes += outgoing.payload_bytes
            account.entropy_bits += outgoing.entropy_bits
            account.frame_bytes += len(outgoing.frame)
            if outgoing.entropy_bits:
                account.sampled_values += outgoing.values

    def close_round(self, round_: int, counters: Mapping[int, LinkCounters]) -> list[LinkRoundRecord]:
        """Return the rows of all links for a round that ends now."""
        rows = []
        for peer, counted in counters.items():
            account = self._round.pop(peer, _Handed())
            protobuf, socket = counted.protobuf_bytes_sent, counted.socket_bytes_sent if counted.connections else 0
            protobuf_before, socket_before = self._last.get(peer, (0, 0))
            self._last[peer] = (protobuf, socket_before if socket is None else socket)
            rows.append(
                LinkRoundRecord(
                    peer=self._me,
                    neighbor=peer,
                    round=round_,
                    values=account.values,
                    payload_bytes=account.payload_bytes,
                    entropy_bits=account.entropy_bits,
                    frame_bytes=account.frame_bytes,
                    protobuf_bytes=max(0, protobuf - protobuf_before),
                    socket_bytes=None if socket is None else max(0, socket - socket_before),
                )
            )
        return rows

    def total(
        self, peer: int, counted: LinkCounters, *, up: bool, offences: int = 0, last_offence: str | None = None
    ) -> LinkRecord:
        """Return the traffic of a link since the run began. `offences` and the last of them are those of the neighbour
        since this process began."""
        # Nothing went over a link of which there is no record, and that is known.
        nothing = LinkRecord(peer=self._me, neighbor=peer, socket_bytes=0, packet_bytes=0)
        before = self._before.get(peer, nothing)
        return LinkRecord(
            peer=self._me,
            neighbor=peer,
            frames=before.frames + counted.frames_sent,
            payload_bytes=before.payload_bytes + self._all[peer].payload_bytes,
            frame_bytes=before.frame_bytes + counted.frame_bytes_sent,
            protobuf_bytes=before.protobuf_bytes + counted.protobuf_bytes_sent,
            socket_bytes=_sum(before.socket_bytes, counted.socket_bytes_sent if counted.connections else 0),
            packet_bytes=_sum(before.packet_bytes, counted.packet_bytes_sent if counted.connections else 0),
            reconnects=before.reconnects + counted.reconnects,
            resent_frames=before.resent_frames + counted.frames_resent,
            offences=before.offences + offences,
            last_offence=last_offence or before.last_offence,
            up=up,
        )


def _sum(before: int | None, now: int | None) -> int | None:
    """Return the sum; None if either part was not counted."""
    return None if before is None or now is None else before + now
