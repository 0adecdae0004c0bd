"""A member that lies in its notes, against real peers: the run ends as it would without a lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from peer.config.options import load
from peer.daemon.notes.notes import DIVERGED, EVALUATION, JOIN, REFUSAL, REPLICA, encode_divergence, encode_evaluation
from peer.daemon.process import Daemon, open_peer
from peer.ops.cluster_files import Host, write_cluster
from peer.ops.local_cluster import free_ports
from peer.state.metrics import EvaluationRecord

ROUNDS = 12
LIAR = 3
JOB = (
    f"run.rounds={ROUNDS}",
    "algorithm.name=quant-sgp",
    "graph.kind=ring",
    "evaluation.every_rounds=4",
    "evaluation.share_every=1",
    "training.warmup_rounds=0",
    "training.task_options={hidden=4}",
    "transport.backoff_max_s=0.2",
    # Lies about it are in `tests/hostile/meaning/test_final_averages.py`.
    "run.average=false",
    "guard.action=rollback",
    "state.checkpoint_every_rounds=3",
)


def evaluation(peer: int, done: int, correct: int, total: int) -> bytes:
    return encode_evaluation(
        EvaluationRecord(peer=peer, round=done, split="test", correct=(correct,) * 10, total=(total,) * 10)
    )


def forged_divergences() -> Iterator[tuple[str, bytes]]:
    for number in count():
        yield DIVERGED, encode_divergence(number % 4, number % ROUNDS, f"\x1b[2J\nlie {number}")


def forged_evaluations() -> Iterator[tuple[str, bytes]]:
    for number in count():
        yield EVALUATION, evaluation(number % 4, ROUNDS, 0, 1 + number)


def old_notes() -> Iterator[tuple[str, bytes]]:
    """What the release before sent, with the numbers that ended it."""
    for number in count():
        yield (DIVERGED, b'[1, "why"]') if number % 2 else (EVALUATION, b'[1, 1e999, "test", [1], [2]]')


def noise() -> Iterator[tuple[str, bytes]]:
    topics = (EVALUATION, DIVERGED, REPLICA, JOIN, REFUSAL, "a topic of a later version")
    for number in count():
        yield topics[number % len(topics)], bytes([number % 256]) * (number % 97)


def prepare(directory: Path) -> list[Daemon]:
    hosts = [Host("127.0.0.1", port) for port in free_ports(4)]
    files = write_cluster(directory, load(environment={}, overrides=JOB), hosts)
    return [open_peer(load(file, environment={}), file.parent) for file in files]


async def run(daemons: list[Daemon], lies: Iterator[tuple[str, bytes]]) -> int:
    """Run all peers to their end; return how many lies were on their way by then."""
    told, liar = 0, daemons[LIAR].neighbors

    async def lie() -> None:
        nonlocal told
        while not liar.met:
            await asyncio.sleep(0.01)
        for topic, note in lies:
            told += sum(liar.transport.bulletin(neighbor, topic, note) for neighbor in liar.all)
            # An operator asks meanwhile.
            daemons[0].operator.status()
            await asyncio.sleep(0.002)

    async with asyncio.timeout(120):
        peers = [asyncio.create_task(daemon.main()) for daemon in daemons]
        lying = asyncio.create_task(lie())
        try:
            assert await asyncio.gather(*peers) == [0] * 4
            if lying.done():
                lying.result()
            return told
        finally:
            lying.cancel()
            for daemon in daemons:
                daemon.close()


def models(directory: Path) -> list[dict[str, np.ndarray]]:
    folders = [directory / f"peer-{peer}" / "state" for peer in range(LIAR)]
    return [safetensors.numpy.load_file(folder / "model.safetensors") for folder in folders]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    directory = tmp_path_factory.mktemp("undisturbed")
    assert asyncio.run(run(prepare(directory), iter(()))) == 0
    return models(directory)


# Each note that is malformed costs the liar its connections, so that it cannot tell many.
@pytest.mark.parametrize(
    ("lies", "least"), [(forged_divergences, 50), (forged_evaluations, 50), (old_notes, 10), (noise, 10)]
)
def test_honest_peers_end_as_they_would_without_a_lie(
    tmp_path: Path,
    undisturbed: list[dict[str, np.ndarray]],
    caplog: pytest.LogCaptureFixture,
    lies: Callable[[], Iterator[tuple[str, bytes]]],
    least: int,
) -> None:
    daemons = prepare(tmp_path)
    assert asyncio.run(run(daemons, lies())) > least
    for expected, found in zip(undisturbed, models(tmp_path), strict=True):
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
    for peer in range(LIAR):
        assert not list((tmp_path / f"peer-{peer}" / "state").glob("set-aside-*"))
        # Nobody's accuracy is what the liar says, but its own may be.
        own = daemons[peer].parts.common.evaluations.own()
        assert own is not None
        assert own.correct != (0,) * 10
    assert "\x1b" not in caplog.text
