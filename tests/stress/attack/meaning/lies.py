"""All lies, each a function that says something once, or for a while, and then returns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from peer.compress.payload import Levels, Payload
from peer.daemon.notes.notes import DIVERGED, EVALUATION, JOIN
from peer.errors import RemoteProtocolError
from peer.gossip.membership import Change, ChangeKind, Newcomer
from peer.gossip.mixing import whole_layer
from peer.net import handshake
from peer.net.outbox import REVOKED_TOPIC
from peer.net.relay import PieceStream
from peer.net.rpc import Channel
from peer.net.security import proofs
from peer.net.services import RELAY_SERVICE
from peer.node import membership_codec
from peer.node.loss_votes import LOST
from peer.node.statements import OwnWords
from peer.proto.sottovoce.v1 import note_pb2
from peer.proto.sottovoce.v1.membership_pb2 import LossVote
from peer.proto.sottovoce.v1.relay_pb2 import Piece
from peer.wire.message import MessageKind, RepairWish
from tests.hostile.forged_certificates import armoured, certificate, revocations
from tests.stress.attack.meaning.insider import HONEST, ME, Insider

FAR = 1 << 62
LIST = "X509 CRL"


@dataclass(frozen=True)
class Lie:
    """One attack."""

    name: str
    what: str
    strike: Callable[[Insider], Awaitable[None]]
    settings: tuple[str, ...] = ()
    admitted: bool = False
    """Whether a member can still do that: SECURITY.md says so."""


LIES: dict[str, Lie] = {}


def lie(
    *settings: str, admitted: bool = False
) -> Callable[[Callable[[Insider], Awaitable[None]]], Callable[[Insider], Awaitable[None]]]:
    """Enter a function in the table under its name, with the settings of the run that it needs."""

    def enter(strike: Callable[[Insider], Awaitable[None]]) -> Callable[[Insider], Awaitable[None]]:
        name = strike.__name__.replace("_", "-")
        LIES[name] = Lie(name, (strike.__doc__ or "").strip(), strike, settings, admitted)
        return strike

    return enter


# -- notes -------------------------------------------------------------------------------------------------------------


def _evaluation(peer: int, round_: int, correct: list[int], total: list[int]) -> bytes:
    note = note_pb2.EvaluationNote(peer=peer, round=round_, split="TEST", correct=correct, total=total)
    return note.SerializeToString()


def _diverged(peer: int, round_: int, reason: str) -> bytes:
    return note_pb2.DivergenceNote(peer=peer, round=round_, reason=reason).SerializeToString()


@lie()
async def evaluation_counts(me: Insider) -> None:
    """A note about an evaluation of another peer, whose counts are the largest number there is, and more than all."""
    me.tell(EVALUATION, _evaluation(1, me.round, [(1 << 64) - 1, 5], [1, 0]))


@lie()
async def evaluation_correct_of_none(me: Insider) -> None:
    """More right than there are: 5 of 0."""
    me.tell(EVALUATION, _evaluation(1, me.round, [5], [0]))


@lie()
async def evaluation_infinity(me: Insider) -> None:
    """Infinity and NaN for counts and rounds, as JSON."""
    me.tell(EVALUATION, b'[1, Infinity, "test", [NaN], [Infinity]]')
    me.tell(EVALUATION, b'[1, 9, "test", [NaN], [1e999]]')
    me.tell(DIVERGED, b'[Infinity, "told so"]')


@lie()
async def evaluation_nesting(me: Insider) -> None:
    """A note nested 30,000 deep."""
    # Groups of an unknown field, each within the one before.
    for topic in (EVALUATION, DIVERGED):
        me.tell(topic, b"\x7b" * 30_000 + b"\x7c" * 30_000)


@lie()
async def evaluation_far_round(me: Insider) -> None:
    """An evaluation of another peer after round 2^62."""
    me.tell(EVALUATION, _evaluation(1, FAR, [1], [2]))


@lie("guard.action=rollback")
async def divergence_rollback(me: Insider) -> None:
    """A note that the run diverged in round 0, where the peers go back to a checkpoint by themselves."""
    me.tell(DIVERGED, _diverged(ME, 0, "it makes no sense any more"))


@lie()
async def divergence_stop(me: Insider) -> None:
    """The same with default settings, in the name of another peer, with terminal escapes."""
    me.tell(DIVERGED, _diverged(1, me.round, "peer-1: \x1b[2J\x1b[31m\nsotto: all is well\u202e"))


@lie()
async def senseless_notes(me: Insider) -> None:
    """Notes that make no sense, as many as the rate limit lets through, for 5 s."""
    end = time.monotonic() + 5.0
    number = 0
    while time.monotonic() < end:
        for _ in range(12):
            number += 1
            me.tell(EVALUATION, json.dumps([number, "x" * 400]).encode())
        await asyncio.sleep(0.05)
    me.report["notes"] = number


# -- messages of rounds ------------------------------------------------------------------------------------------------


@lie("algorithm.name=sgp")
async def weight_early(me: Insider) -> None:
    """A frame with a mixing weight of 2, sent a round early."""
    me.insert(lambda peer: me.forged(peer, mixing_weight=2.0))


@lie("algorithm.name=d-psgd")
async def weight_early_dpsgd(me: Insider) -> None:
    """The same to peers that run d-psgd."""
    me.insert(lambda peer: me.forged(peer, mixing_weight=2.0))


def _filled(me: Insider, value: float) -> Payload:
    return tuple(whole_layer(np.full(size, value, np.float32)) for size in me.layout.sizes)


def _replaced(name: str, what: str, *settings: str, filled: float | None = None, **fields: float) -> None:
    """Enter a lie in the table: one message to each honest peer in the place of the right one, with other fields, or
    with a model of one number."""

    async def strike(me: Insider) -> None:
        layers = {} if filled is None else {"layers": _filled(me, filled)}
        for peer in HONEST:
            me.replace_next(peer, **fields, **layers)
        await asyncio.sleep(0.5)

    LIES[name] = Lie(name, what, strike, settings)


_SGP, _CHOCO = "algorithm.name=sgp", "algorithm.name=choco-sgd"
_ALL_REDUCE = ("algorithm.name=allreduce", "graph.kind=complete")
_INSTEAD = "in the place of the right one"
_replaced("weight-negative-zero", f"A mixing weight of −0.0 {_INSTEAD}.", _SGP, mixing_weight=-0.0)
_replaced("push-weight-huge", f"One frame with push-sum weight 1e300 {_INSTEAD}.", _SGP, push_weight=1e300)
_replaced(
    "push-weight-more-than-all", "A push-sum weight of 5, where all peers together have 4.", _SGP, push_weight=5.0
)
_replaced("push-weight-zero", "A push-sum weight of 0.", _SGP, push_weight=0.0)
_replaced("values-huge", "A model of finite numbers near the end of float32.", _SGP, filled=3e38)
_replaced(
    "values-huge-compressed",
    "A difference of finite numbers near the end of float32, to peers that compress what they hold of it.",
    _CHOCO,
    filled=3e38,
)
_replaced("values-implausible", "A model of numbers that can be added up and end the training: 1e6.", _SGP, filled=1e6)
_replaced("values-implausible-compressed", "A difference of 1e30 in each number.", _CHOCO, filled=1e30)
_replaced("gradients-implausible", "A gradient of 1e6 in each number.", *_ALL_REDUCE, filled=1e6)


@lie("algorithm.name=sgp")
async def far_round(me: Insider) -> None:
    """A message of round 2^62."""
    me.insert(lambda peer: me.forged(peer, round=FAR))


@lie("algorithm.name=sgp", "training.task_options={hidden=1024}")
async def wrong_phases(me: Insider) -> None:
    """1,500 messages of phases that no exchange has, each of 50 bytes on the wire and 150 kB in memory."""
    sizes = me.layout.sizes
    zeros = tuple(Levels(1.0, divisor=7, base=-7, step=1, bits=16, codes=np.zeros(n, np.uint16)) for n in sizes)
    last = {peer: me.message(peer) for peer in HONEST}
    for number in range(500):
        for peer in HONEST:
            round_ = last[peer].round + 1 + number % 2
            me.insert(me.forged(peer, round=round_, phase=3 + number, layers=zeros), peer)
        if number % 50 == 49:
            await asyncio.sleep(0.001)


@lie("algorithm.name=sgp")
async def repair_request(me: Insider) -> None:
    """A request of 17 bytes for a repair, to peers whose algorithm has none."""
    me.bare(lambda peer: _repair(me, peer))


@lie("algorithm.name=d-psgd")
async def repair_request_dpsgd(me: Insider) -> None:
    """The same to peers that run d-psgd."""
    me.bare(lambda peer: _repair(me, peer))


def _repair(me: Insider, peer: int) -> bytes:
    last = me.message(peer)
    return me.forged(
        peer, kind=MessageKind.REPAIR_REQUEST, layers=(), wanted=(RepairWish(0, 8, 1),), round=last.round,
        mixing_weight=0.0, push_weight=1.0,
    )  # fmt: skip


@lie("algorithm.name=sgp")
async def someone_elses_message(me: Insider) -> None:
    """A message in the name of another peer."""
    me.insert(lambda peer: me.forged(peer, sender=(peer + 1) % 3))


# -- members -----------------------------------------------------------------------------------------------------------


def _change(kind: ChangeKind, subject: int, issuer: int, effective: int, newcomer: Newcomer | None = None) -> bytes:
    heard = max(0, effective - 1) if kind is ChangeKind.LOST else 0
    return membership_codec.encode(Change(kind, subject, issuer, effective, heard, newcomer))


def _signed(me: Insider, notice: bytes) -> bytes:
    return OwnWords(me.daemon.local.statements, membership_codec.MAGIC).signed(notice)


@lie("algorithm.name=sgp")
async def leave_past(me: Insider) -> None:
    """A notice of 10 bytes that the attacker left three rounds ago."""
    me.insert(_change(ChangeKind.LEAVE, ME, ME, me.round - 3))


@lie("algorithm.name=sgp")
async def lost_past(me: Insider) -> None:
    """A notice of 10 bytes that an honest peer was lost three rounds ago."""
    me.insert(_change(ChangeKind.LOST, 1, ME, me.round - 3), 0, 2)


@lie("algorithm.name=sgp")
async def lost_yourself(me: Insider) -> None:
    """A notice to an honest peer that it is lost itself, some rounds from now."""
    me.insert(_change(ChangeKind.LOST, 0, ME, me.round + 10), 0)


@lie("algorithm.name=sgp")
async def leave_of_another(me: Insider) -> None:
    """A notice that an honest peer leaves, told to it."""
    me.insert(_change(ChangeKind.LEAVE, 0, 0, me.round + 10), 0)


@lie("algorithm.name=sgp")
async def lost_another(me: Insider) -> None:
    """A signed notice to two honest peers that the third is lost from a coming round on."""
    me.insert(_signed(me, _change(ChangeKind.LOST, 1, ME, me.round + 12)), 0, 2)


@lie("algorithm.name=sgp", "rounds.lost_after_s=600", "transport.give_up_after_s=900")
async def lost_by_its_own_vote(me: Insider) -> None:
    """Votes on itself and on all others, and a notice that another is lost, with its own vote for each peer."""
    for subject in (*HONEST, ME):
        message = LossVote(voter=ME, subject=subject, round=me.round).SerializeToString(deterministic=True)
        said = me.daemon.local.statements.sign(LOST, message)
        me.tell(LOST, said, *(peer for peer in HONEST if peer != subject))
    loss = Change(ChangeKind.LOST, 1, ME, me.round + 12, votes=(said,) * 4)
    me.insert(_signed(me, membership_codec.encode(loss)), 0, 2)


@lie("algorithm.name=sgp")
async def lost_in_answers(me: Insider) -> None:
    """All links are refused for 6 s, and whoever asks what became of it is answered that it was declared lost."""
    transport, roster = me.daemon.neighbors.transport, me.daemon.local.roster

    def proofs(name: object) -> dict[str, object]:
        frames = [_signed(me, _change(ChangeKind.LOST, peer, ME, me.round + 12)) for peer in HONEST]
        me.said += frames
        losses = {str(peer): frame.hex() for peer, frame in zip(HONEST, frames, strict=True)}
        return {"losses": losses, "numbers": {roster.name(peer): peer for peer in (*HONEST, ME)}}

    setattr(me.daemon.operator, "proofs", proofs)  # noqa: B010
    for peer in HONEST:
        transport.remove_neighbor(peer, "it is none of ours")
    await asyncio.sleep(6.0)
    for peer in HONEST:
        transport.add_neighbor(roster.neighbor(peer))
    me.report["answered"] = len(me.said)


@lie("algorithm.name=sgp", admitted=True)
async def another_model_for_each(me: Insider) -> None:
    """A model for each neighbour that is not its own, within all bounds."""
    for peer in HONEST:
        me.replace_next(peer, layers=_filled(me, 0.1 * (1 + peer)))
    await asyncio.sleep(0.5)


@lie("algorithm.name=sgp")
async def far_change(me: Insider) -> None:
    """A notice that the attacker leaves in round 2^62 − 1."""
    me.insert(_change(ChangeKind.LEAVE, ME, ME, FAR - 1))


@lie("algorithm.name=sgp")
async def notices_without_effect(me: Insider) -> None:
    """3,000 notices that a sitting member joins, each another one."""
    first = me.round + 20
    for number in range(1000):
        me.insert(_change(ChangeKind.JOIN, 1, ME, first + number))
        if number % 50 == 49:
            await asyncio.sleep(0.01)


@lie("algorithm.name=sgp")
async def join_with_a_bad_certificate(me: Insider) -> None:
    """A newcomer whose certificate is of version 74."""
    for made in (certificate(version=73), certificate(version=-1), b""):
        newcomer = Newcomer("eve", "127.0.0.1:7", None, made)
        me.insert(_change(ChangeKind.JOIN, 4, ME, me.round + 10, newcomer), 0)
        me.tell(JOIN, membership_codec.encode_newcomer(newcomer))
        await asyncio.sleep(1.5)


# -- certificates, relay, pickles --------------------------------------------------------------------------------------


@lie()
async def hello_with_a_bad_certificate(me: Insider) -> None:
    """A certificate of version 74 in the answer to a hello."""
    wrong = certificate(version=73)
    setattr(handshake, "prove", lambda *a, **k: (wrong, proofs.prove(*a, **k)[1]))  # noqa: B010
    for peer in HONEST:
        me.daemon.neighbors.transport.blame(peer, RemoteProtocolError("dial again"))
    me.said.append(wrong)
    await asyncio.sleep(4.0)
    setattr(handshake, "prove", proofs.prove)  # noqa: B010


@lie()
async def revocations_of_a_bad_version(me: Insider) -> None:
    """Lists of revoked certificates of versions that do not exist."""
    for version in (None, 2, 73):
        me.tell(REVOKED_TOPIC, armoured(revocations(version=version), LIST))
        await asyncio.sleep(1.5)


@lie()
async def tunnels_to_oneself(me: Insider) -> None:
    """Relayed connections from the attacker to itself through an honest peer, as many as it carries."""
    address = me.config.peers[0].advertise
    assert address is not None
    name = f"peer-{ME}"
    channels: list[PieceStream] = []

    def stream(method: str) -> PieceStream:
        opened = PieceStream(Channel(address, "peer-0", me.daemon.local.access, []).stream(RELAY_SERVICE, method))
        channels.append(opened)
        return opened

    async def accept() -> None:
        waits = stream("Accept")
        await waits.write(Piece(sender=name))
        await waits.read()
        await asyncio.sleep(10)

    async def connect() -> bool:
        calls = stream("Connect")
        await calls.write(Piece(sender=name, peer=name))
        async with asyncio.timeout(5):
            answer = await calls.read()
        return answer is not None and not answer.refusal and bool(answer.peer)

    open_ = 0
    tasks = []
    for _ in range(80):
        tasks.append(asyncio.ensure_future(accept()))
        await asyncio.sleep(0.02)
        with contextlib.suppress(Exception):
            open_ += await connect()
        me.report["tunnels"] = open_
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in channels:
        with contextlib.suppress(Exception):
            await each.abandon()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


@lie()
async def pickle_bombs(me: Insider) -> None:
    """Pickles that write a file, as notes of every kind, as a notice and as frames."""
    bomb = pickle.dumps(_Bomb(me.folder / "bombed"))
    for topic in (EVALUATION, DIVERGED, JOIN, REVOKED_TOPIC, "replica", "release", "no join", "pickle"):
        me.tell(topic, bomb)
        await asyncio.sleep(0.3)
    for frame in (bomb, b"SM" + bomb, b"SV\x01\x00" + bomb):
        me.insert(frame, 0)
        await asyncio.sleep(1.0)


# -- an attacker that does not relent ----------------------------------------------------------------------------------


@lie("algorithm.name=sgp", "rounds.late=skip")
async def weight_again_and_again(me: Insider) -> None:
    """A mixing weight of 2 in every other round for 6 s, to peers that skip who is late."""
    end = time.monotonic() + 6.0
    while time.monotonic() < end:
        for peer in HONEST:
            me.replace_next(peer, mixing_weight=2.0)
        await asyncio.sleep(0.25)
