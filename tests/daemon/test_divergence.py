"""A run that makes no sense any more ends with the guard's sentence and code 4, wherever it is noticed first."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from peer.compress.payload import FloatArray
from peer.config import GuardOptions, load
from peer.daemon import process
from peer.daemon.divergence import Divergence, Finding, divergence_note, parse_divergence
from peer.daemon.process import Daemon, open_peer
from peer.daemon.rounds import RoundLoop
from peer.errors import DivergenceError, RemoteProtocolError
from peer.node.divergence_guard import reason_to_stop
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from peer.round_record import RoundRecord

# -- notes -------------------------------------------------------------------------------------------------------------


class Ended:
    """What a `Divergence` came to."""

    def __init__(self) -> None:
        self.notes: list[tuple[bytes, int | None]] = []
        self.reasons: list[str] = []
        self.divergence = Divergence(100, broadcast=self.broadcast, stop=self.reasons.append)

    def broadcast(self, topic: str, note: bytes, besides: int | None) -> None:
        assert topic == "diverged"
        self.notes.append((note, besides))


def test_the_first_finding_counts_and_is_passed_on() -> None:
    ended = Ended()
    first = Finding(20, "peer-1: the loss is too high")
    ended.divergence.heard(1, divergence_note(first))
    ended.divergence.declare(Finding(30, "peer-0: the loss is too high"))
    ended.divergence.heard(2, divergence_note(Finding(10, "peer-2: so it is")))
    assert ended.divergence.finding == first
    assert ended.notes == [(divergence_note(first), 1)]
    assert ended.reasons == [first.reason]


def test_an_own_finding_goes_to_all_neighbours() -> None:
    ended = Ended()
    ended.divergence.declare(Finding(20, "peer-0: the loss is too high"))
    assert ended.notes == [(b'[20, "peer-0: the loss is too high"]', None)]


def test_what_a_neighbour_gives_as_its_reason_is_short_and_printable() -> None:
    heard = parse_divergence(json.dumps([3, "\x1b[2Jgone\n" + "x" * 10_000]).encode(), 100)
    assert heard.reason.startswith(" [2Jgone xxx")
    assert len(heard.reason) == 500


@pytest.mark.parametrize(
    "note",
    [b"", b"{}", b"[1]", b'["1", "why"]', b"[1, 2]", b'[-1, "why"]', b'[101, "why"]', b'[1e999, "why"]', b"[" * 60_000],
)
def test_a_note_that_no_honest_peer_sends_is_refused(note: bytes) -> None:
    ended = Ended()
    with pytest.raises(RemoteProtocolError):
        ended.divergence.heard(1, note)
    assert ended.divergence.finding is None
    assert ended.reasons == []


# -- peers -------------------------------------------------------------------------------------------------------------

JOB = (
    "run.rounds=6",
    "graph.kind=ring",
    "graph.weights=metropolis",
    "evaluation.every_rounds=0",
    "training.warmup_rounds=0",
    "training.task_options={hidden=4}",
    "transport.backoff_max_s=0.2",
    "transport.linger_s=5",
)


def write_kits(directory: Path, num_peers: int, *settings: str) -> list[Path]:
    hosts = [Host("127.0.0.1", port) for port in free_ports(num_peers)]
    return write_cluster(directory, load(environment={}, overrides=[*JOB, *settings]), hosts)


def open_peers(files: list[Path]) -> list[Daemon]:
    return [open_peer(load(file, environment={}), file.parent) for file in files]


async def run_all(daemons: list[Daemon]) -> list[int | BaseException]:
    try:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(daemon.main() for daemon in daemons), return_exceptions=True)
    finally:
        for daemon in daemons:
            daemon.close()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(
    ("algorithm", "rate", "says"),
    [
        pytest.param("quant-sgp", "1e38", "layer 0 holds values that are not finite", id="in-the-compressor"),
        pytest.param("d-psgd", "1e39", "the model holds numbers that are not finite after round 0", id="in-full"),
        pytest.param("d-psgd", "1e9", "above guard.max_loss 10000", id="by-the-loss"),
        pytest.param("ad-psgd", "1e39", "the model holds numbers that are not finite after round 0", id="in-pairs"),
        pytest.param("ad-psgd", "1e9", "above guard.max_loss 10000", id="in-pairs-by-the-loss"),
    ],
)
def test_peers_that_diverge_end_with_the_sentence_of_the_guard(
    tmp_path: Path, algorithm: str, rate: str, says: str
) -> None:
    settings = (f"algorithm.name={algorithm}", f"training.learning_rate={rate}")
    ended = asyncio.run(run_all(open_peers(write_kits(tmp_path, 2, *settings))))
    for error in ended:
        assert isinstance(error, DivergenceError), error
        assert error.exit_code == 4
        # Each says its own, or what it heard of the other.
        assert says in str(error)
        assert str(error).startswith(("peer-0: ", "peer-1: "))
        assert str(error).endswith("lower training.learning_rate")


def test_the_guard_is_handed_the_model_that_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """z = x / u, not x: on a star the hub has far more than its share of the weight."""
    daemons = open_peers(
        write_kits(tmp_path, 4, "algorithm.name=sgp", "graph.kind=star", "graph.weights=uniform", "run.rounds=12")
    )
    seen: list[tuple[float, FloatArray]] = []

    def judge(options: GuardOptions, record: RoundRecord, model: FloatArray) -> str | None:
        loop = daemons[record.peer].loop
        assert isinstance(loop, RoundLoop)
        algorithm = loop.participant.algorithm
        np.testing.assert_array_equal(model, algorithm.x / np.float32(algorithm.u))
        seen.append((algorithm.u, model))
        return reason_to_stop(options, record, model)

    monkeypatch.setattr(process, "reason_to_stop", judge)
    assert asyncio.run(run_all(daemons)) == [0] * 4
    assert len(seen) == 4 * 12
    assert max(u for u, _ in seen) > 1.5
    assert min(u for u, _ in seen) < 0.8
