"""A run folder with figures like those of a real run, made from formulas."""

from __future__ import annotations

import math
from pathlib import Path

from peer.config.options import Config, PeerAddress
from peer.config.writer import write_resolved
from peer.gossip.topology import build_schedule
from peer.records import RoundRecord
from peer.report import graph_view
from peer.state.metrics import ConsensusRecord, EvaluationRecord, LinkRecord, MetricsStore, Summary

NAMES = [f"peer-{index}" for index in range(4)]


def write_sample_run(directory: Path, *, rounds: int = 120, peers: int = 4) -> Path:
    """Write a whole run folder, one metrics file for each peer and one for figures over all of them."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"peer-{index}" for index in range(peers)]
    config = Config(peers=tuple(PeerAddress(name=name, advertise="127.0.0.1:7700") for name in names))
    write_resolved(config, directory / "config.toml", directory)
    (directory / "graph.svg").write_text(graph_view.svg(build_schedule(peers, "directed-ring"), names=names))
    for peer in range(peers):
        folder = directory / "peers" / f"peer-{peer}" / "state"
        folder.mkdir(parents=True)
        store = MetricsStore(folder / "metrics.sqlite")
        for number in range(rounds):
            store.put(round_record(peer, number, rounds))
        for done in range(20, rounds + 1, 20):
            store.put(evaluation(peer, done, "test", offset=peer), evaluation(peer, done, "holdout", offset=peer + 1))
        store.put(
            LinkRecord(
                peer=peer,
                neighbor=(peer + 1) % peers,
                frames=rounds,
                payload_bytes=300 * rounds,
                frame_bytes=360 * rounds,
                protobuf_bytes=420 * rounds,
                socket_bytes=700 * rounds,
                packet_bytes=800 * rounds,
                reconnects=peer,
            )
        )
        store.close()
    store = MetricsStore(directory / "metrics.sqlite")
    for done in range(20, rounds + 1, 20):
        store.put(
            evaluation(-1, done, "test", offset=-1),
            ConsensusRecord(round=done, consensus_distance=5 / done, model_norm=10.0),
        )
    store.close()
    sample_summary(names, rounds).save(directory / "summary.json")
    return directory


def as_simulation(run: Path) -> Path:
    """Make a run folder one of a simulation: its peers answer nobody, and their rows are in one file."""
    store = MetricsStore(run / "metrics.sqlite")
    for peer in range(4):
        own = MetricsStore(run / "peers" / f"peer-{peer}" / "state" / "metrics.sqlite", read_only=True)
        store.put(*own.rounds(), *own.evaluations())
        own.close()
    store.close()
    (run / "peers").rename(run / "elsewhere")
    return run


def round_record(peer: int, number: int, rounds: int) -> RoundRecord:
    noise = math.sin(37 * number + peer)
    return RoundRecord(
        peer=peer,
        round=number,
        time_s=0.04 * (number + 1),
        loss=2.3 * math.exp(-4 * number / rounds) * (1.1 + 0.1 * noise) + 0.02,
        rate=0.1,
        messages=1,
        values=9610,
        payload_bytes=300 + number % 5,
        frame_bytes=360,
        entropy_bits=2350.0 if number % 20 == 0 else 0.0,
        train_s=0.002,
        gossip_s=0.001 + 0.0002 * peer,
        wait_s=0.03,
        cpu_s=0.004,
        push_weight=1 + 0.01 * noise,
        error_norm=2 + noise * 0.2,
        replica_error=3.0 / (number + 1),
        neighbor_distance=6.0 / (number + 1),
    )


def evaluation(peer: int, done: int, split: str, *, offset: int) -> EvaluationRecord:
    right = tuple(max(0, min(36, round(36 * (1 - math.exp(-done / 25))) - offset - label % 3)) for label in range(10))
    return EvaluationRecord(peer=peer, round=done, split=split, correct=right, total=(36,) * 10, loss=0.2)


def sample_summary(names: list[str], rounds: int) -> Summary:
    peers = len(names)
    return Summary(
        name="digits",
        algorithm="quant-sgp",
        compressor="top_k 2 %, 4 bits",
        graph="directed-ring",
        num_peers=peers,
        rounds=rounds,
        seed=0,
        parameters=9610,
        seconds=41.2,
        started_at="2026-11-22T10:05:00+00:00",
        commands=["sotto up --peers 4 --name 'my run'"],
        completed_rounds=rounds,
        training_seconds=0.041 * rounds,
        peer_names=names,
        peer_accuracy=[0.95 + 0.002 * index for index in range(peers)],
        averaged_accuracy=0.972,
        single_process_accuracy=0.975,
        class_accuracy=[0.9] * 10,
        consensus_distance=0.31,
        payload_bytes=300 * rounds * peers,
        frame_bytes=360 * rounds * peers,
        protobuf_bytes=420 * rounds * peers,
        socket_bytes=700 * rounds * peers,
        packet_bytes=800 * rounds * peers,
        full_precision_payload_bytes=4 * 9610 * rounds * peers,
        bits_per_parameter=0.25,
        entropy_bits_per_parameter=0.244,
        seconds_per_round=0.041,
        version="0.1.0",
        machine={"processor": "Some CPU", "torch": "2.13.0"},
    )
