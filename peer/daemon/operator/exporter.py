"""Metrics for Prometheus: the state of training and of the links, over HTTP at /metrics.

prometheus-client, from the extra "metrics", serves in a thread of its own. Each scrape asks the event loop for the
figures that `sotto status` shows. Counters of rounds start at zero in every process, as Prometheus expects; those of
links continue, since the peer keeps them on disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from peer.errors import ConfigError
from peer.net.address import not_bound
from peer.records import RoundRecord

_ROUND_GAUGES = {
    "loss": ("training_loss", "Mean training loss of the last local steps."),
    "rate": ("learning_rate", "Learning rate of the last round."),
    "push_weight": ("push_weight", "Push-sum weight u; 1 where the algorithm has none."),
    "error_norm": ("error_norm", "Norm of the error memory."),
    "replica_error": ("replica_error", "Norm of the difference between the model and its replica."),
    "neighbor_distance": ("neighbor_distance", "Distance between this model and what is known of the neighbours'."),
    "theta": ("theta", "Moniqua's theta."),
    "fraction": ("sent_fraction", "Which part of each layer is sent."),
    "bits": ("sent_bits", "Bits of each number that is sent."),
    "staleness": ("staleness_exchanges", "Exchanges between reading a model and applying its gradient."),
}
"""Field of RoundRecord → (metric, help). A field that is None has no sample."""

_ROUND_COUNTERS = {
    "messages": ("messages", "Messages handed to links."),
    "late": ("late_messages", "Neighbours that a round went on without."),
    "repairs": ("repairs", "Messages that had to be asked for again in another form."),
    "exchanges": ("exchanges", "Exchanges with neighbours, of algorithms without rounds."),
    "payload_bytes": ("payload_bytes", "Compressed numbers, without headers."),
    "frame_bytes": ("frame_bytes", "Whole frames."),
}

_PARTS = {"train_s": "train", "gossip_s": "gossip", "wait_s": "wait"}
"""Field of RoundRecord → the part of a round that its seconds belong to."""

_LINK_GAUGES = {
    "unacknowledged_bytes": ("link_unacknowledged_bytes", "Frames that the neighbour does not have for good yet."),
    "lateness_s": ("link_lateness_seconds", "How late the neighbour's messages came of late, as a median."),
    "late_after_s": ("link_deadline_seconds", "After how long rounds go on without the neighbour."),
}
"""Key of a link in the status → (metric, help). Without a value where rounds wait for everybody."""

_LINK_COUNTERS = {
    "frames": ("link_frames", "Frames sent over the link."),
    "resent_frames": ("link_resent_frames", "Frames sent again after a connection was lost."),
    "reconnects": ("link_reconnects", "Connections beyond the first."),
    "payload_bytes": ("link_payload_bytes", "Compressed numbers sent over the link."),
    "frame_bytes": ("link_frame_bytes", "Whole frames sent over the link."),
    "protobuf_bytes": ("link_protobuf_bytes", "Frames in their chunks, receipts, heartbeats and notes."),
    "socket_bytes": ("link_socket_bytes", "TCP payload as the kernel counted it, TLS and retransmissions included."),
    "offences": ("link_offences", "How often the neighbour broke the protocol."),
    "packet_bytes": ("link_packet_bytes", "TCP payload and the headers of its segments."),
}
"""Key of a link in the status → (metric, help)."""


class Exporter:
    """Serves the figures of one peer until it is closed."""

    def __init__(self, listen: str, status: Callable[[], Mapping[str, Any]], labels: Mapping[str, str]) -> None:
        """Listen on "address:port", port 0 being any that is free. Call it in a running event loop.

        `status` is called in that loop; `labels` describe the run here (algorithm, version, …). Raises ConfigError if
        the address cannot be used or prometheus-client is missing.
        """
        try:
            import prometheus_client
        except ImportError:
            problem = "needs prometheus-client: pip install 'sottovoce[metrics]', or leave it empty"
            raise ConfigError(problem, key="peer.metrics_listen", value=listen) from None
        self._status, self._labels = status, dict(labels)
        self._loop = asyncio.get_running_loop()
        self._last: RoundRecord | None = None
        self._last_round_at = time.time()
        self._counted: dict[str, float] = dict.fromkeys([*_ROUND_COUNTERS, *_PARTS], 0.0)
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        prometheus_client.ProcessCollector(registry=registry)
        address, _, port = listen.rpartition(":")
        try:
            self._server, _ = prometheus_client.start_http_server(int(port), address.strip("[]") or "0.0.0.0", registry)
        except OSError as error:
            why = not_bound(error, address, int(port), key="peer.metrics_listen")
            raise why.error("peer.metrics_listen", listen) from None
        except (ValueError, OverflowError):
            raise ConfigError(
                "is not an address with a port",
                key="peer.metrics_listen",
                value=listen,
                valid="address:port, such as 127.0.0.1:9470",
            ) from None

    @property
    def port(self) -> int:
        return self._server.server_port

    def observe(self, record: RoundRecord) -> None:
        """Take note of a round that has ended."""
        self._last, self._last_round_at = record, time.time()
        for field in self._counted:
            self._counted[field] += getattr(record, field)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def describe(self) -> Iterable[Any]:
        """Return nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. Called by the server's threads, never by the loop itself."""
        status, last, counted, last_round_at = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(10)
        own = {"run": str(status["run"]), "peer": str(status["name"])}

        def gauge(name: str, help_: str, value: float | None) -> Any:
            return _metric("gauge", name, help_, own, [({}, value)])

        yield _metric("gauge", "info", "What runs here; always 1.", own, [(self._labels, 1.0)])
        yield gauge("round", "Rounds done.", status["round"])
        yield gauge("rounds", "Rounds of the whole run.", status["rounds"])
        help_ = "Unix time at which the last round ended, or the process began."
        yield gauge("last_round_timestamp_seconds", help_, last_round_at)
        help_ = "Accuracy of this peer's model on the common test set, from 0 to 1."
        yield gauge("accuracy", help_, status["accuracy"])
        help_ = "A metric of the task or script, of this peer's model on the common test set."
        yield _metric("gauge", "metric", help_, own, [({"metric": n}, v) for n, v in status["metrics"].items()])
        days_left = (status.get("certificate") or {}).get("days_left")
        help_ = "Days until the certificate of this peer, or of the authority, ends."
        yield gauge("certificate_days_left", help_, days_left)
        privacy = status.get("privacy") or {}
        yield gauge("privacy_epsilon", "The ε that private local steps have spent at most.", privacy.get("epsilon"))
        limits = status.get("limits")
        if limits is not None:
            yield gauge("limits_reached", "Limits of this device that are reached.", len(limits["reached"]))
            help_ = "What the links have carried in this calendar day and month."
            carried = [({"period": period}, limits[f"{period}_bytes"]) for period in ("day", "month")]
            yield _metric("gauge", "limits_carried_bytes", help_, own, carried)
        waiting = None if "waiting_for" not in status else len(status["waiting_for"])
        yield gauge("waiting_for", "Neighbours whose message the round under way lacks.", waiting)
        for field, (name, help_) in _ROUND_GAUGES.items():
            yield gauge(name, help_, None if last is None else getattr(last, field))
        for field, (name, help_) in _ROUND_COUNTERS.items():
            yield _metric("counter", name, help_, own, [({}, counted[field])])
        help_ = "Seconds of the rounds: the local step, algorithm and codec, waiting for neighbours."
        yield _metric("counter", "seconds", help_, own, [({"part": p}, counted[f]) for f, p in _PARTS.items()])
        links = status["links"]
        help_ = "Whether the neighbour is connected."
        yield _metric("gauge", "link_up", help_, own, [({"neighbor": n}, float(v["up"])) for n, v in links.items()])
        for field, (name, help_) in _LINK_GAUGES.items():
            yield _metric("gauge", name, help_, own, [({"neighbor": n}, v.get(field)) for n, v in links.items()])
        for field, (name, help_) in _LINK_COUNTERS.items():
            yield _metric("counter", name, help_, own, [({"neighbor": n}, v[field]) for n, v in links.items()])

    async def _read(self) -> tuple[Mapping[str, Any], RoundRecord | None, dict[str, float], float]:
        """Return figures that belong together, read in the event loop, which changes them."""
        return self._status(), self._last, dict(self._counted), self._last_round_at


def _metric(
    kind: str, name: str, help_: str, own: Mapping[str, str], samples: Iterable[tuple[Mapping[str, str], Any]]
) -> Any:
    """Return a family named sotto_NAME; samples that are None are left out."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    present = [({**own, **labels}, float(value)) for labels, value in samples if value is not None]
    names = list(present[0][0]) if present else list(own)
    family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(f"sotto_{name}", help_, labels=names)
    for labels, value in present:
        family.add_metric(list(labels.values()), value)
    return family
