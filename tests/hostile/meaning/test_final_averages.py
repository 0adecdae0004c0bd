"""A member that lies while the others form the average of all models after the last round."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from peer.daemon import final_average
from peer.daemon.final_average import FinalAverage
from peer.daemon.notes import notes
from peer.errors import PeerUnreachable
from peer.node.statements import Statements
from peer.proto.sottovoce.v1 import note_pb2 as pb
from peer.state import shares
from peer.state.kept_file import AVERAGE_FILE
from peer.state.shares import digest
from tests.daemon.averaging import COMPLETE, LAYOUT, RING, ROUNDS, Graph, Net, vector, x_of
from tests.node.changing_members import Cluster

LIAR, HONEST = 3, (0, 1, 2)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the share of 330 numbers in four."""
    monkeypatch.setattr(shares, "CHUNK_NUMBERS", 100)


def chunks_of(x: np.ndarray) -> list[bytes]:
    return [x[begin : begin + 100].astype("<f4").tobytes() for begin in range(0, LAYOUT.size, 100)]


def share_of(peer: int, weight: float, digests: list[bytes]) -> bytes:
    return pb.ShareNote(peer=peer, round=ROUNDS, weight=weight, digests=digests).SerializeToString()


def averaged(told_shares: bytes, file: bytes) -> pb.AverageNote:
    return pb.AverageNote(peer=LIAR, round=ROUNDS, shares=told_shares, file=file)


class Liar:
    """Peer 3, which does nothing but what a test says."""

    def __init__(self, net: Net, *, told: dict[int, np.ndarray] | None = None, weight: float = 1.0) -> None:
        """`told`: neighbour → the share that it is told, and given; by default nothing."""
        self.net, self.told, self.weight = net, told or {}, weight
        self.asked: Callable[[int, pb.ShareChunk], pb.ShareChunk | None] = self.honest
        self.statements: Statements | None = net.statements.get(LIAR)

    def share(self, x: np.ndarray) -> bytes:
        return self.signed(
            notes.SHARE,
            share_of(LIAR, self.weight, [*map(digest, chunks_of(x))]),
        )

    def signed(self, topic: str, note: bytes) -> bytes:
        return note if self.statements is None else self.statements.sign(topic, note)

    def tell(self) -> None:
        for peer, x in self.told.items():
            self.net.post(LIAR, peer, notes.SHARE, self.share(x))

    def honest(self, peer: int, ask: pb.ShareChunk) -> pb.ShareChunk | None:
        if ask.owner != LIAR or peer not in self.told:
            return pb.ShareChunk(owner=ask.owner, index=ask.index, asks=False)
        return pb.ShareChunk(owner=ask.owner, index=ask.index, asks=False, data=chunks_of(self.told[peer])[ask.index])

    # What a peer has as well.

    def linked(self, peer: int) -> list[bytes]:
        return [self.share(self.told[peer])] if peer in self.told else []

    def linked_told(self, peer: int) -> list[bytes]:
        return []

    def heard(self, source: int, note: bytes) -> None:
        pass

    def heard_told(self, source: int, note: bytes) -> None:
        """Say whatever the one says that listens."""
        told = notes.decode_averaged(note, ROUNDS)
        if told.peer == source:
            own = averaged(told.shares, told.file)
            self.net.post(LIAR, source, notes.AVERAGE, self.signed(notes.AVERAGE, own.SerializeToString()))

    def frame_received(self, peer: int, frame: bytes) -> None:
        chunk = notes.decode_chunk(frame)
        answer = self.asked(peer, chunk) if chunk.asks else None
        if answer is not None:
            self.net.post(LIAR, peer, "", notes.encode_chunk(answer))


def net_with(tmp_path: Path, graph: Graph, **options: Any) -> Net:
    return Net(tmp_path, graph, give_up_after_s=1.5, **options)


def run_with(net: Net, liar: Liar, attack: Callable[[], None] = lambda: None) -> dict[int, Path | BaseException | None]:
    async def all_of_them() -> dict[int, Path | BaseException | None]:
        net.open(LIAR, formed=cast(FinalAverage, liar))
        for peer in HONEST:
            net.start(peer)
        await asyncio.sleep(0.05)
        attack()
        return await net.finish()

    return asyncio.run(all_of_them())


def nobody_has_it(net: Net, found: dict[int, Path | BaseException | None], why: str) -> None:
    for peer in HONEST:
        error = found[peer]
        assert isinstance(error, PeerUnreachable), error
        assert error.exit_code == 6
        assert why in str(error)
        assert not (net.state(peer) / AVERAGE_FILE).exists()
        assert (net.state(peer) / "model.safetensors").exists()


@pytest.mark.parametrize("worst", [np.nan, np.inf, 1e30, -1e6])
def test_a_share_that_reaches_too_far_is_refused_by_name(tmp_path: Path, worst: float) -> None:
    x = x_of(LIAR)
    x[217] = worst
    net = net_with(tmp_path, COMPLETE)
    found = run_with(net, liar := Liar(net, told=dict.fromkeys(HONEST, x)), lambda: liar.tell())
    nobody_has_it(net, found, "peer-3 has a share that reaches")


@pytest.mark.parametrize(
    "lie",
    [
        {"round": ROUNDS - 1},
        {"weight": 0.0},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"weight": -1.0},
        {"weight": 1e-300},
        {"weight": 100.0},
        {"digests": []},
        {"digests": [bytes(16)] * 5},
        {"digests": [bytes(15)] * 4},
        {"peer": 1 << 31},
    ],
    ids=str,
)
def test_a_note_that_no_honest_member_sends_costs_the_link_and_no_more(tmp_path: Path, lie: dict[str, Any]) -> None:
    net = net_with(tmp_path, COMPLETE, weights=dict.fromkeys(range(4), 1.0))
    liar = Liar(net, told=dict.fromkeys(HONEST, x_of(LIAR)))
    fields = {"peer": LIAR, "round": ROUNDS, "weight": 1.0, "digests": [bytes(16)] * 4, **lie}
    found = run_with(net, liar, lambda: net.post(LIAR, 0, notes.SHARE, pb.ShareNote(**fields).SerializeToString()))
    # What it tells when it is linked is right: the average is formed.
    assert [(who, whom) for who, whom, _ in net.blamed] == [(0, LIAR)]
    for peer in HONEST:
        assert isinstance(found[peer], Path)
        assert np.array_equal(vector(net.state(peer) / AVERAGE_FILE), net.by_hand())


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (notes.encode_chunk(pb.ShareChunk(owner=1, index=0, asks=False, data=bytes(400))), "not asked for"),
        (notes.encode_chunk(pb.ShareChunk(owner=99, index=99, asks=False)), "not asked for"),
        (notes.CHUNK_MAGIC + b"\xff" * 40, "are no ShareChunk"),
        (notes.CHUNK_MAGIC + pb.ShareChunk(owner=1, asks=True, data=b"x").SerializeToString(), "with 1 bytes"),
    ],
)
def test_a_frame_that_no_honest_member_sends_costs_the_link_and_no_more(tmp_path: Path, frame: bytes, why: str) -> None:
    net = net_with(tmp_path, COMPLETE)
    found = run_with(net, Liar(net, told=dict.fromkeys(HONEST, x_of(LIAR))), lambda: net.post(LIAR, 0, "", frame))
    assert [(who, whom) for who, whom, _ in net.blamed] == [(0, LIAR)]
    assert why in net.blamed[0][2]
    assert all(isinstance(found[peer], Path) for peer in HONEST)


def test_requests_without_end_cost_the_link(tmp_path: Path) -> None:
    net = net_with(tmp_path, COMPLETE)
    ask = notes.encode_chunk(pb.ShareChunk(owner=0, index=0, asks=True))

    def attack() -> None:
        for _ in range(3):
            net.post(LIAR, 0, "", ask)

    run_with(net, Liar(net, told=dict.fromkeys(HONEST, x_of(LIAR))), attack)
    assert [(who, whom) for who, whom, _ in net.blamed] == [(0, LIAR)]
    assert "asks for more than 2" in net.blamed[0][2]


def test_whoever_passes_on_another_chunk_is_to_blame_and_the_rest_comes_by_others(tmp_path: Path) -> None:
    net = net_with(tmp_path, RING)
    liar = Liar(net, told={0: x_of(LIAR), 2: x_of(LIAR)})

    def asked(peer: int, ask: pb.ShareChunk) -> pb.ShareChunk | None:
        if ask.owner == LIAR:
            return liar.honest(peer, ask)
        return pb.ShareChunk(owner=ask.owner, index=ask.index, asks=False, data=bytes(400))

    liar.asked = asked
    found = run_with(net, liar)
    assert {whom for _, whom, _ in net.blamed} == {LIAR}
    assert all("sent another chunk than peer-" in why for _, _, why in net.blamed)
    for peer in HONEST:
        assert isinstance(found[peer], Path), found[peer]
        assert np.array_equal(vector(net.state(peer) / AVERAGE_FILE), net.by_hand())


def test_two_shares_of_one_member_lead_nobody_to_a_file(tmp_path: Path) -> None:
    net = net_with(tmp_path, COMPLETE)
    found = run_with(net, liar := Liar(net, told={peer: x_of(LIAR + peer) for peer in HONEST}), lambda: liar.tell())
    nobody_has_it(net, found, "did not say that the same shares are there")


def test_two_signed_shares_of_one_member_prove_who_lies(tmp_path: Path) -> None:
    cluster = Cluster("sgp", seed=0, num_peers=4, num_first=4, signed=True)
    net = net_with(tmp_path, COMPLETE, statements={peer: cluster.statements(peer) for peer in range(4)})
    found = run_with(net, liar := Liar(net, told={peer: x_of(LIAR + peer) for peer in HONEST}), lambda: liar.tell())
    nobody_has_it(net, found, "peer-3 has signed two different shares")


def test_a_share_in_the_name_of_another_costs_the_link(tmp_path: Path) -> None:
    cluster = Cluster("sgp", seed=0, num_peers=4, num_first=4, signed=True)
    net = net_with(tmp_path, COMPLETE, statements={peer: cluster.statements(peer) for peer in range(4)})
    liar = Liar(net, told=dict.fromkeys(HONEST, x_of(LIAR)))
    forged = share_of(1, 1.0, [bytes(16)] * 4)
    found = run_with(net, liar, lambda: net.post(LIAR, 0, notes.SHARE, liar.signed(notes.SHARE, forged)))
    assert [(who, whom) for who, whom, _ in net.blamed] == [(0, LIAR)]
    assert all(isinstance(found[peer], Path) for peer in HONEST)


def test_one_that_says_something_else_without_end_keeps_nobody_from_giving_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_average, "_NEWS", {"rate": 1e3, "burst": 1e3})  # Its notes are as good as endless.
    net = net_with(tmp_path, COMPLETE)
    liar = Liar(net, told=dict.fromkeys(HONEST, x_of(LIAR)))
    monkeypatch.setattr(liar, "heard_told", lambda source, note: None)
    number = count()

    def lie() -> None:
        own = averaged(hashlib.sha256(b"%d" % next(number)).digest(), b"")
        for peer in HONEST:
            net.post(LIAR, peer, notes.AVERAGE, own.SerializeToString())
        asyncio.get_running_loop().call_later(0.02, lie)

    async def in_time() -> dict[int, Path | BaseException | None]:
        async with asyncio.timeout(60):
            return await Net.finish(net)

    monkeypatch.setattr(net, "finish", in_time)
    nobody_has_it(net, run_with(net, liar, lie), "peer-3 did not say that the same shares are there")


def test_one_that_never_says_that_it_has_the_file_keeps_it_from_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = net_with(tmp_path, COMPLETE)
    liar = Liar(net, told=dict.fromkeys(HONEST, x_of(LIAR)))

    def agrees(source: int, note: bytes) -> None:
        told = notes.decode_averaged(note, ROUNDS)
        own = averaged(told.shares, b"")
        if told.peer == source:
            net.post(LIAR, source, notes.AVERAGE, own.SerializeToString())

    monkeypatch.setattr(liar, "heard_told", agrees)
    found = run_with(net, liar)
    for peer in HONEST:
        assert isinstance(found[peer], Path)
        assert (net.state(peer) / "average.part").exists()
        assert np.array_equal(vector(net.state(peer) / AVERAGE_FILE), net.by_hand())
