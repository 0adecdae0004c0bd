"""A run that makes no sense any more ends with the guard's sentence and code 4, wherever it is noticed first."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from peer.compress.payload import FloatArray
from peer.config.options import GuardOptions, load
from peer.daemon import process
from peer.daemon.notes.divergence import Claim, Diverged, Divergence, advice
from peer.daemon.notes.notes import Hearsay, encode_divergence
from peer.daemon.pairs import PairLoop
from peer.daemon.process import Daemon, open_peer
from peer.daemon.rounds import RoundLoop
from peer.errors import DivergenceError, PeerUnreachable
from peer.node.divergence_guard import reason_to_stop
from peer.node.statements import Unsigned
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from peer.ops.rollback import newest_common_round, put_back
from peer.records import RoundRecord

# -- notes -------------------------------------------------------------------------------------------------------------


class Told:
    """A `Divergence` of peer 0, what it sent, and why it stopped."""

    def __init__(self) -> None:
        self.notes: list[tuple[bytes, int | None]] = []
        self.reasons: list[str] = []
        self.up: set[int] = set()
        self.now = 0.0
        self.divergence = Divergence(
            Hearsay(0, range(4), Unsigned(), self.up.__contains__, lambda: self.now),
            100,
            name=lambda peer: f"peer-{peer}",
            advice="without {name}, this one waits",
            broadcast=self.broadcast,
            stop=self.reasons.append,
        )

    def broadcast(self, topic: str, note: bytes, besides: int | None) -> None:
        assert topic == "diverged"
        self.notes.append((note, besides))

    def hear(self, source: int, peer: int, round_: int, reason: str = "the loss is too high") -> None:
        self.divergence.heard(source, encode_divergence(peer, round_, reason))


@pytest.fixture
def told() -> Told:
    return Told()


def test_an_own_finding_goes_to_all_neighbours_and_ends_the_peer(told: Told) -> None:
    told.divergence.declare(Diverged(20, "the loss is too high"))
    told.divergence.declare(Diverged(21, "so it is"))
    assert told.notes == [(encode_divergence(0, 20, "the loss is too high"), None)]
    assert told.reasons == ["it diverged: the loss is too high"]
    assert told.divergence.finding == Diverged(20, "the loss is too high")


def test_what_others_say_is_shown_and_passed_on_and_stops_nobody(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.hear(1, 1, 20)
    told.hear(2, 3, 30)
    assert told.reasons == []
    assert told.divergence.finding is None
    assert told.divergence.claims() == {
        1: Claim(20, "the loss is too high", told_by=1),
        3: Claim(30, "the loss is too high", told_by=2),
    }
    assert [besides for _, besides in told.notes] == [1, 2]
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        'peer-1 says that it diverged after 20 rounds: "the loss is too high"; without peer-1, this one waits'
    )
    assert second.startswith('peer-3 is said by peer-2 to have diverged after 30 rounds: "the loss is too high"; ')
    # It is back, by whatever an operator did.
    told.up.add(1)
    assert list(told.divergence.claims()) == [3]


def test_what_is_known_is_not_passed_on_again(told: Told) -> None:
    for source in (1, 2, 1):
        told.hear(source, 3, 30)
    told.hear(1, 3, 20)
    assert len(told.notes) == 1


def test_nobody_hears_of_itself_of_strangers_or_of_a_connected_neighbour_from_others(told: Told) -> None:
    told.up.update({1, 2})
    for peer in (0, 2, 7):
        told.hear(1, peer, 20)
    assert told.notes == []
    assert told.divergence.claims() == {}
    told.hear(2, 2, 20)
    assert len(told.notes) == 1


def test_one_neighbour_cannot_fill_the_log(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    for round_ in range(100):
        told.hear(1, 1, round_)
        told.hear(1, 2, round_)
        told.hear(1, 1, round_, "another reason")
    assert len(caplog.records) == len(told.notes) == 6
    told.now = 60.0
    told.hear(1, 2, 100)
    assert len(told.notes) == 7


def test_the_advice_fits_the_configuration() -> None:
    wait, skip = load(environment={}), load(environment={}, overrides=["rounds.late=skip"])
    assert advice(wait, asynchronous=False, members_change=True) == (
        "this peer waits where a round needs it, 600 s at most; `sotto remove {name}` goes on without it; `sotto stop` "
        "ends this peer"
    )
    assert "goes on without it for 20 rounds" in advice(skip, asynchronous=False, members_change=True)
    assert "remove" not in advice(wait, asynchronous=False, members_change=False)
    assert "its other neighbours" in advice(wait, asynchronous=True, members_change=False)


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
        pytest.param("d-psgd", "1e9", "guard.max_loss 10000", id="by-the-loss"),
        pytest.param("ad-psgd", "1e39", "the model holds numbers that are not finite after round 0", id="in-pairs"),
        pytest.param("ad-psgd", "1e9", "guard.max_loss 10000", id="in-pairs-by-the-loss"),
    ],
)
def test_peers_that_diverge_end_with_the_sentence_of_the_guard(
    tmp_path: Path, algorithm: str, rate: str, says: str
) -> None:
    settings = (f"algorithm.name={algorithm}", f"training.learning_rate={rate}")
    ended = asyncio.run(run_all(open_peers(write_kits(tmp_path, 2, *settings))))
    for peer, error in enumerate(ended):
        assert isinstance(error, DivergenceError), error
        assert error.exit_code == 4
        # Each found it out itself.
        assert says in str(error)
        assert str(error).startswith(f"peer-{peer}: ")
        assert "lower the learning rate (training.learning_rate, or" in str(error)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_peer_goes_on_where_its_only_neighbour_ended_during_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("algorithm.name=ad-psgd", "training.learning_rate=1e9", "rounds.abandon_after_s=0.5")
    daemons = open_peers(write_kits(tmp_path, 2, *settings))
    slow = daemons[0].loop
    assert isinstance(slow, PairLoop)
    compute, neighbors = slow.participant.compute, slow.frames.neighbors

    def outlast() -> None:
        compute()
        while neighbors.reachable():
            time.sleep(0.01)

    monkeypatch.setattr(slow.participant, "compute", outlast)
    ended = asyncio.run(run_all(daemons))
    assert [type(error) for error in ended] == [DivergenceError] * 2, ended


def test_the_guard_is_handed_the_model_that_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """z = x / u, not x: on a star the hub has far more than its share of the weight."""
    daemons = open_peers(
        write_kits(tmp_path, 4, "algorithm.name=sgp", "graph.kind=star", "graph.weights=uniform", "run.rounds=12")
    )
    seen: list[tuple[float, FloatArray]] = []

    def judge(options: GuardOptions, record: RoundRecord, model: FloatArray, **others: bool) -> str | None:
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


def test_a_neighbour_that_diverges_ends_alone_and_the_others_wait_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = write_kits(
        tmp_path, 3, "algorithm.name=d-psgd", "run.rounds=40", "transport.give_up_after_s=1.5", "guard.action=rollback",
        "state.checkpoint_every_rounds=2",
    )  # fmt: skip

    def judge(options: GuardOptions, record: RoundRecord, model: FloatArray, **others: bool) -> str | None:
        return "the loss is too high" if (record.peer, record.round) == (1, 4) else None

    monkeypatch.setattr(process, "reason_to_stop", judge)
    daemons = open_peers(files)
    first, second, third = asyncio.run(run_all(daemons))
    assert isinstance(second, DivergenceError)
    assert str(second) == "peer-1: the loss is too high; its state is that of round 4"
    for other in (first, third):
        assert isinstance(other, PeerUnreachable), other
        assert "peer-1 has been away" in str(other)
        assert "it left: it diverged: the loss is too high" in str(other)
    assert 'peer-1 says that it diverged after 5 rounds: "the loss is too high"; this peer waits' in caplog.text
    states = [file.parent / "state" for file in files]
    # Nobody but the peer itself lost a file, and it lost none either.
    assert [bool(list(state.glob("set-aside-*"))) for state in states] == [False, True, False]
    assert daemons[0].operator.status()["diverged"] == [
        {"name": "peer-1", "round": 5, "reason": "the loss is too high", "told_by": "peer-1"}
    ]


def test_all_peers_that_an_operator_puts_back_go_on_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("algorithm.name=d-psgd", "run.rounds=8", "state.checkpoint_every_rounds=2")
    calm = write_kits(tmp_path / "calm", 3, *settings)
    assert asyncio.run(run_all(open_peers(calm))) == [0] * 3

    files = write_kits(tmp_path / "wild", 3, *settings, "transport.give_up_after_s=1", "guard.action=rollback")
    with monkeypatch.context() as patched:
        patched.setattr(
            process,
            "reason_to_stop",
            lambda options, record, model, **others: "too high" if (record.peer, record.round) == (1, 4) else None,
        )
        asyncio.run(run_all(open_peers(files)))
    states = [file.parent / "state" for file in files]
    put_back(states, newest_common_round(states, 4))
    assert asyncio.run(run_all(open_peers(files))) == [0] * 3
    for one, other in zip(calm, files, strict=True):
        expected, found = (
            safetensors.numpy.load_file(file.parent / "state" / "model.safetensors") for file in (one, other)
        )
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
