"""What a peer tells Prometheus, over a real socket, in Prometheus's own words."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peer.daemon.operator.exporter import Exporter
from peer.errors import ConfigError
from peer.records import RoundRecord

ROOT = Path(__file__).parents[2]

LINK = {
    "up": True, "frames": 7, "payload_bytes": 700, "frame_bytes": 770, "protobuf_bytes": 800, "socket_bytes": 900,
    "packet_bytes": 1000, "reconnects": 1, "resent_frames": 2, "offences": 3, "unacknowledged_bytes": 55,
    "lateness_s": 0.25, "late_after_s": 1.5,
}  # fmt: skip


def status(**changes: Any) -> dict[str, Any]:
    """Return an answer to `sotto status`, as far as it is exported."""
    answer = {
        "name": "kitchen",
        "run": "digits",
        "round": 40,
        "rounds": 100,
        "accuracy": 0.9,
        "metrics": {"RMSE": 0.25},
    }
    links = {"garage": LINK, "attic": {**LINK, "up": False, "socket_bytes": None, "packet_bytes": None}}
    return {**answer, "waiting_for": ["attic"], "links": links, **changes}


def scrape(*records: RoundRecord, **changes: Any) -> dict[tuple[str, str], float]:
    """Return (metric, neighbour or part) → value, as a scrape after some rounds sees them."""

    async def serve() -> str:
        exporter = Exporter("127.0.0.1:0", lambda: status(**changes), {"algorithm": "scsp", "version": "1"})
        try:
            for record in records:
                exporter.observe(record)
            return await asyncio.to_thread(lambda: _read(exporter.port))
        finally:
            exporter.close()

    found = {}
    for family in text_string_to_metric_families(asyncio.run(serve())):
        for sample in family.samples:
            if sample.name.startswith("sotto_"):
                assert (sample.labels["run"], sample.labels["peer"]) == ("digits", "kitchen")
                found[
                    sample.name,
                    next(
                        (sample.labels[label] for label in ("neighbor", "part", "metric") if label in sample.labels), ""
                    ),
                ] = sample.value
    return found


def _read(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def round_record(round_: int, **fields: Any) -> RoundRecord:
    return RoundRecord(peer=0, round=round_, time_s=float(round_), **fields)


def test_gauges_are_those_of_the_last_round_and_counters_add_up() -> None:
    found = scrape(
        round_record(0, loss=2.5, late=1, messages=2, train_s=0.5, error_norm=3.0),
        round_record(1, loss=1.5, late=2, messages=2, train_s=0.25, error_norm=4.0, push_weight=0.7),
    )
    assert found["sotto_training_loss", ""] == 1.5
    assert found["sotto_error_norm", ""] == 4.0
    assert found["sotto_push_weight", ""] == 0.7
    assert found["sotto_late_messages_total", ""] == 3
    assert (found["sotto_accuracy", ""], found["sotto_metric", "RMSE"]) == (0.9, 0.25)
    assert found["sotto_messages_total", ""] == 4
    assert found["sotto_seconds_total", "train"] == 0.75
    assert (found["sotto_round", ""], found["sotto_rounds", ""], found["sotto_waiting_for", ""]) == (40, 100, 1)


def test_each_link_has_its_own_samples() -> None:
    found = scrape(round_record(0))
    assert found["sotto_link_up", "garage"] == 1
    assert found["sotto_link_up", "attic"] == 0
    assert found["sotto_link_packet_bytes_total", "garage"] == 1000
    assert found["sotto_link_unacknowledged_bytes", "garage"] == 55
    assert found["sotto_link_lateness_seconds", "garage"] == 0.25
    assert found["sotto_link_offences_total", "garage"] == 3
    assert found["sotto_link_deadline_seconds", "garage"] == 1.5


def test_what_is_not_known_is_left_out() -> None:
    found = scrape(accuracy=None)
    names = {name for name, _ in found}
    assert not names & {"sotto_accuracy", "sotto_training_loss", "sotto_theta"}
    assert ("sotto_link_socket_bytes_total", "attic") not in found
    assert found["sotto_late_messages_total", ""] == 0


def test_an_address_that_is_taken_is_named() -> None:
    async def twice() -> None:
        first = Exporter("127.0.0.1:0", status, {})
        try:
            Exporter(f"127.0.0.1:{first.port}", status, {})
        finally:
            first.close()

    with pytest.raises(
        ConfigError, match=r"peer\.metrics_listen: port \d+ is in use by another program; stop that program"
    ):
        asyncio.run(twice())


def test_alerts_and_dashboard_ask_only_for_what_is_exported() -> None:
    everything = {"loss", "error_norm", "replica_error", "neighbor_distance", "theta", "fraction", "staleness"}
    exported = {name for name, _ in scrape(round_record(0, bits=8, **dict.fromkeys(everything, 1.0)))}
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "sottovoce.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = set(re.findall(r"\bsotto_\w+", "\n".join([alerts, *expressions])))
    assert len(asked) > 15
    assert asked <= exported
