"""The rows that a peer writes to its metrics: its rounds, and the traffic of its links in them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from peer.daemon.neighbors import Neighbors
from peer.gossip.incarnations import Numbering
from peer.net.counters import LinkCounters
from peer.records import RoundRecord
from peer.state.metrics import EvaluationRecord, LinkRecord, LinkRoundRecord, MetricsStore

_FLUSH_EVERY_S = 0.5
"""Readers see new rows this often; each flush is a transaction."""


AnyRecord = TypeVar("AnyRecord", RoundRecord, EvaluationRecord, LinkRecord, LinkRoundRecord)


class MetricsWriter:
    """Combines a round's own figures with the traffic of the links meanwhile."""

    def __init__(self, metrics: MetricsStore, neighbors: Neighbors, numbering: Numbering) -> None:
        """`numbering`: which device a number belongs to. Rows are of devices: one that takes part again after it was
        lost adds to its rows."""
        self.last_round: RoundRecord | None = None
        """The row of the last round, as it was written."""
        self.last_loss: float | None = None
        """The loss of the last round that had a local step."""
        self._metrics, self._neighbors, self._numbering = metrics, neighbors, numbering
        self._protobuf_bytes = 0
        """Bytes sent by the end of the last round, since this process began."""
        self._flushed_at = -math.inf

    def put_round(self, record: RoundRecord, link_round: int | None = None) -> None:
        """Write the row of a round, with the sockets' traffic since the last one, and the rows of its links, under the
        number `link_round` where the round has such rows already."""
        counters = self._neighbors.counters()
        protobuf_bytes = sum(each.protobuf_bytes_sent for each in counters.values())
        # It falls where a neighbour is one no more.
        since = max(0, protobuf_bytes - self._protobuf_bytes)
        self._protobuf_bytes = protobuf_bytes
        self.last_loss = record.loss if record.loss is not None else self.last_loss
        self.last_round = self._of_device(replace(record, protobuf_bytes=record.protobuf_bytes + since))
        rows = self._neighbors.traffic.close_round(record.round if link_round is None else link_round, counters)
        self._metrics.put(self.last_round, *map(self._of_device, rows))

    def put_repeated_round(self, record: RoundRecord, *, with_links: bool) -> None:
        """Write the row of a round that a crash kept out of the metrics, and that was repeated from the journal, and
        those of its links if their frames were counted."""
        counters = dict.fromkeys(self._neighbors.all if with_links else (), LinkCounters())
        rows = self._neighbors.traffic.close_round(record.round, counters)
        self._metrics.put(self._of_device(record), *map(self._of_device, rows))

    def put_evaluations(self, records: Iterable[EvaluationRecord]) -> None:
        """Write accuracies."""
        self._metrics.put(*map(self._of_device, records))

    def put_links(self) -> None:
        """Write the totals of the links, and make everything that was written visible to readers."""
        # Links to peers that were lost stand before those to the same devices that take part again.
        self._metrics.put(*(self._of_device(record) for _, record in sorted(self._neighbors.totals().items())))
        self._metrics.flush()

    def _of_device(self, record: AnyRecord) -> AnyRecord:
        device = self._numbering.device(record.peer)
        return record if device == record.peer else replace(record, peer=device)

    def put_links_if_due(self, now: float) -> None:
        """Do the same, but only now and then. `now` in seconds, on any clock."""
        if now - self._flushed_at > _FLUSH_EVERY_S:
            self._flushed_at = now
            self.put_links()

    def flush(self) -> None:
        """Make all written rows visible to readers and safe from the end of the process."""
        self._metrics.flush()
