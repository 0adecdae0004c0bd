"""What enters the daemon beside frames, told lies: the real parts of a peer, assembled as in production, no sockets.

Notes, hellos, envelopes, goodbyes, receipts, introductions, certificates, revocation lists, control calls and pieces of
relayed connections are well formed and hostile. Whatever they say, a neighbour is to blame (RemoteError) or a
credential (SecurityError), the peer still answers `status` with JSON that is JSON, nobody else's word stops it, and its
state folder stays as it was.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
import pkgutil
import shutil
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from google.protobuf.message import Message

import peer.proto.sottovoce.v1
from peer.config.options import Config, load
from peer.daemon.assembly import Parts
from peer.daemon.members.signed_statements import SignedStatements
from peer.daemon.process import open_peer
from peer.errors import ConfigError, HandshakeRefused, RemoteError, RemoteProtocolError, SecurityError, SottoError
from peer.gossip.membership import Newcomer
from peer.net.answers import read_answer
from peer.net.handshake import Handshake
from peer.net.hello import HelloInfo, check_identity
from peer.net.inbox import Inbox, LinkLimits, new_pace
from peer.net.rpc import CallRefused
from peer.net.security.certificates import vouched_identity
from peer.net.security.credentials import Credentials
from peer.net.security.proofs import check_proof
from peer.net.security.revocation_list import RevocationList
from peer.node import membership_codec
from peer.node.progress import Progress, encode_admission, encode_progress
from peer.node.statements import sealed
from peer.ops.cluster_files import Host, write_cluster
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.proto.sottovoce.v1 import membership_pb2
from peer.proto.sottovoce.v1.note_pb2 import EvaluationNote
from peer.proto.sottovoce.v1.statement_pb2 import Proof
from peer.state.statement_counter import StatementCounter
from peer.wire.start_model import StartModel
from tests.hostile import forged_certificates as forged
from tests.stress.meaning.answers import Askers, credentials_of
from tests.stress.meaning.calls import Callers
from tests.stress.meaning.protobuf_lies import changed
from tests.stress.meaning.report import Report
from tests.stress.meaning.worlds import PromiseBroken

LEVEL = "handlers"
_ALGORITHMS = ("choco-sgd", "sgp", "quant-sgp", "ad-psgd", "d-psgd")
_ME = 0
HONEST_NOTES: dict[str, tuple[str, dict[str, Any]]] = {
    "evaluation": ("EvaluationNote", {"peer": 1, "round": 20, "split": 1, "correct": [3] * 10, "total": [9] * 10}),
    "diverged": ("DivergenceNote", {"peer": 1, "round": 3, "reason": "the loss is too high"}),
    "replica": ("ReplicaNote", {"round": 3, "digests": [1, 2, 3, 4]}),
    "join": ("Introduction", {"name": "peer-3", "advertise": "192.0.2.3:7700"}),
    "no join": ("RefusalNote", {"reason": "not today"}),
    "progress": ("Progress", {"peer": 1, "round": 3}),
    "classes": ("ClassNote", {"peer": 1, "shares": [100_000] * 10, "samples": 90}),
    "data": ("DataNote", {"train_digest": bytes(16), "test_digest": bytes(16)}),
    "release": ("ReleaseNote", {"peer": 1, "protocol_max": 5, "software": "sottovoce 0.3.0", "said_ms": 1}),
    "lost": ("LossVote", {"voter": 1, "subject": 2, "round": 3}),
    "shares": ("SharesNote", {"peer": 1, "digest": bytes(32)}),
    "share": ("ShareNote", {"peer": 1, "round": 20, "weight": 1.0, "digests": [bytes(16)]}),
    "average": ("AverageNote", {"peer": 1, "round": 20, "shares": bytes(32), "file": bytes(32)}),
    "told": ("ToldNote", {"peer": 1, "owners": [0, 2], "digests": [bytes(32)]}),
}
"""Topic → (name of the message, what its fields may truly hold)."""
_TOPICS = (*HONEST_NOTES, "evaluation", "revoked", "nothing", "")
_MEASURED_EVERY = 16
"""Memory is traced in each so-manieth seed: tracing takes several times the time."""
_MOST_SAMPLES = 1 << 20
"""More than the data set of these runs has."""
_MOST_GROWTH_BYTES = 4 << 20
_WAITING_VERBS = ("snapshot", "leave", "remove")
"""Their answers come from a loop that does not run here."""


@cache
def _cluster(algorithm: str) -> Path:
    """Return the folder of a peer of a run of three, whose configuration and certificates are real."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-handlers-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    settings = ["run.rounds=20", "training.task_options={hidden=4}", f"algorithm.name='{algorithm}'"]
    if algorithm != "ad-psgd":
        settings.append("rounds.lost_after_s=30")
    config = load(environment={}, overrides=settings)
    files = write_cluster(directory, config, [Host("127.0.0.1", 7000 + index) for index in range(3)])
    return files[_ME].parent


@cache
def _types() -> dict[str, type[Message]]:
    """Return every type of message of the protocol: those that come later, too."""
    found: dict[str, type[Message]] = {}
    for module in pkgutil.iter_modules(peer.proto.sottovoce.v1.__path__):
        if module.name.endswith("pb2"):
            content = importlib.import_module(f"{peer.proto.sottovoce.v1.__name__}.{module.name}")
            for name, value in vars(content).items():
                if isinstance(value, type) and issubclass(value, Message):
                    found[name] = value
    return found


@dataclass
class _Peer:
    """A peer, and what its neighbours could truthfully say to it."""

    algorithm: str
    random: Random
    config: Config = field(init=False)
    parts: Parts = field(init=False)

    def __post_init__(self) -> None:
        self.folder = _cluster(self.algorithm)
        self.config = load(self.folder / "peer.toml", environment={})
        self.parts = open_peer(self.config, self.folder).parts
        transport = self.parts.make_transport()
        self.parts.common.neighbors.connect(transport)
        self.calls = Callers(self.random, transport, self.folder, self.blobs)
        self.askers = Askers(self.config, self.folder, self.parts, transport.control, self.random)
        self.limits = LinkLimits(window_bytes=1 << 20, chunk_bytes=1 << 16, max_frame_bytes=1 << 18)
        self.authority = forged.AUTHORITY.certificate

    def close(self) -> None:
        self.parts.common.local.close()

    @cached_property
    def liar(self) -> SignedStatements:
        """What peer-1 signs, as production does; it may say what it likes."""
        own = credentials_of(self.folder.parent, "peer-1")
        numbers = cast(StatementCounter, SimpleNamespace(next=count(1).__next__))
        names = [entry.name for entry in self.config.peers]
        return SignedStatements(own, run=self.config.run.name, listed=names, counter=numbers, unsigned="refuse")

    @property
    def credentials(self) -> Credentials:
        return credentials_of(self.folder.parent, "peer-0")

    def info(self, name: str) -> HelloInfo:
        return HelloInfo(
            run=self.config.run.name,
            algorithm=self.algorithm,
            run_digest=self.config.run_digest(),
            start=StartModel("1"),
            graph_digest="2",
            num_peers=3,
            name=name,
        )

    @cached_property
    def ours(self) -> Handshake:
        return Handshake(
            me=_ME,
            info=self.info("peer-0"),
            access=self.credentials,
            limits=self.limits,
            heartbeat_s=1.0,
            progress=self.parts.loop.progress,
        )

    @cached_property
    def honest_hello(self) -> pb.Hello:
        theirs = Handshake(me=1, info=self.info("peer-1"), access=None, limits=self.limits, heartbeat_s=1.0)
        neighbor = replace(self.parts.common.local.roster.neighbor(1), index=_ME)
        hello = self.ours.read_hello(theirs.hello(neighbor, received=0, challenge=bytes(16)))
        hello.certificate, hello.proof = forged.certificate(), bytes(70)
        proof = Proof(counter=1, certificate=hello.certificate, signature=bytes(70))
        hello.progress = hello.shown = sealed(encode_progress(1, Progress(round=3)), proof)
        admission = encode_admission(1, state=Progress(), signed=Progress(round=3))
        hello.admission = sealed(admission, proof)
        return hello

    @cached_property
    def blobs(self) -> tuple[bytes, ...]:
        return (forged.certificate(), *forged.CERTIFICATES.values())

    # What is told.

    def note(self) -> None:
        """A note about any topic, of a neighbour or of somebody who is none."""
        random = self.random
        topic = random.choice(_TOPICS)
        content = random.choice((self._protobuf, self._json, self._numbers, self._introduction))()
        kind = _types().get(HONEST_NOTES[topic][0]) if topic in HONEST_NOTES else None
        if kind is not None and random.random() < 0.8:
            honest = kind(**HONEST_NOTES[topic][1])
            if isinstance(honest, EvaluationNote) and random.random() < 0.5:
                # One count is senseless and all else right: changes of any field hardly ever make that.
                counts = random.choice((honest.correct, honest.total))
                counts[random.randrange(len(counts))] = random.choice((0, 2, 10, 1 << 21, 1 << 53))
            content = changed(random, honest, random.choice((0, 1, 1, 2)), self.blobs).SerializeToString()
            if random.random() < 0.3:
                content = self.liar.sign(topic, content)
        self.parts.incoming.bulletin_received(random.choice((1, 1, 2, 3, 900)), topic, content)

    def _protobuf(self) -> bytes:
        kind = self.random.choice([*_types().values()])
        return changed(self.random, kind(), self.random.choice((1, 3, 6, 10)), self.blobs).SerializeToString()

    def _json(self) -> bytes:
        random = self.random

        def value(depth: int = 0) -> object:
            if depth < 3 and random.random() < 0.5:
                return [value(depth + 1) for _ in range(random.randrange(5))]
            numbers = (0, 1, -1, 3, 20, 21, 1 << 53, 1 << 62, 1 << 70, 0.5, 1e308, float("inf"), float("nan"))
            return random.choice((*numbers, "test", "holdout", "x" * 99, None, True, {}, {"a": 1}))

        pairs = [random.randrange(4), random.randrange(24), "test", [random.randrange(9)] * 3, [9] * 3]
        if random.random() < 0.3:
            pairs[random.randrange(len(pairs))] = value()
        content = random.choice((pairs, [random.randrange(24), "the loss is too high"], value()))
        return json.dumps(content).encode() if random.random() < 0.95 else b"[" * 50_000

    def _numbers(self) -> bytes:
        random = self.random
        values = [
            random.choice((0, 1, 5, 20, random.getrandbits(64), (1 << 64) - 1))
            for _ in range(random.choice((1, 2, 5, 7)))
        ]
        return struct.pack(f"<{len(values)}Q", *values) + b"x" * random.choice((0, 0, 0, 3))

    def _introduction(self) -> bytes:
        honest = membership_pb2.Introduction(name="peer-3", advertise="192.0.2.3:7700", certificate=self.blobs[0])
        return changed(self.random, honest, self.random.choice((0, 1, 2)), self.blobs).SerializeToString()

    def introduction(self) -> None:
        """Who a newcomer is said to be, and a change of the members that says so."""
        said = membership_codec.decode_newcomer(self._introduction(), sender=1)
        self.parts.common.local.roster.check(self.random.choice((0, 1, 3, 4, 1000)), said)

    def change(self) -> None:
        """A change of the members, as bytes."""
        random = self.random
        honest = membership_pb2.MembershipChange(kind=3, subject=2, issuer=1, effective_round=9, heard_round=3)  # type: ignore[arg-type]
        frame = b"SM" + changed(random, honest, random.choice((1, 2, 3)), self.blobs).SerializeToString()
        membership_codec.decode(frame, 3, sender=1)

    def hello(self) -> None:
        """The first envelope of a stream, at the end that listens and at the end that dialled."""
        random = self.random
        hello = changed(random, self.honest_hello, random.choice((0, 1, 2, 4)), self.blobs)
        envelope = pb.Envelope(hello=hello)
        if random.random() < 0.1:
            envelope = changed(random, envelope, 1)
        read = self.ours.read_hello(envelope.SerializeToString())
        check_identity(read, expected_name="peer-1", certified_name="peer-1", expected_index=1)
        terms = self.ours.terms(read)
        neighbor = self.parts.common.local.roster.neighbor(1)
        self.ours.answer(read, neighbor, received=terms.received, seen_as="")
        self.ours.judge_progress(read, neighbor)
        self.ours.read_answer(envelope.SerializeToString(), neighbor, bytes(16))

    def caller(self) -> None:
        """A caller whom not everybody lists."""
        self.parts.incoming.hear(
            self.random.choice((0, 1, 2, 3, 4, 1 << 31)), self.random.choice(("peer-1", "\x1b[2J", ""))
        )

    def link(self) -> None:
        """A neighbour is there, with or without frames of ours, confirms some, and goes."""
        random, incoming = self.random, self.parts.incoming
        neighbor = random.choice((1, 2))
        match random.randrange(5):
            case 0:
                incoming.link_up(neighbor, random.choice((0, 0, 1, 5, 1 << 32, 1 << 62)))
            case 1:
                incoming.receipt(neighbor, random.choice((0, 1, 5, 1 << 62, (1 << 64) - 1)))
            case 2:
                reason = random.choice(("gone", "\x1b]0;x\x07", "a\nb"))

                async def go() -> None:
                    incoming.link_down(neighbor, reason)

                asyncio.run(go())
            case 3:
                incoming.last_received(neighbor)
            case 4:
                incoming.frame_received(neighbor, random.choice((0, 1, 2, 1 << 62)), random.randbytes(40))

    def envelope(self) -> None:
        """Envelopes of one stream, with what they complete."""
        random = self.random
        inbox = Inbox(self.limits, received=0, pace=new_pace(0.0))
        honest = pb.Envelope(chunks=[pb.Chunk(sequence=1, data=b"frame")], receipt=3, credit=1000)
        for turn in range(4):
            lie = changed(random, honest, random.choice((0, 1, 3, 8)), self.blobs)
            received = inbox.open(lie.SerializeToString(), now=float(turn))
            for seq, frame in received.frames:
                inbox.hold(seq, len(frame))
            inbox.taken(random.choice((0, 1, 5, 1 << 62)))
            inbox.grant()

    def certificate(self) -> None:
        """Certificates and lists of revoked ones that the run's authority has signed, and mutants of them."""
        random = self.random
        content = random.choice(self.blobs)
        if random.random() < 0.6 and content:
            mutant = bytearray(content)
            for _ in range(random.choice((1, 2, 4))):
                mutant[random.randrange(len(mutant))] ^= 1 << random.randrange(8)
            content = bytes(mutant)
        match random.randrange(4):
            case 0:
                vouched_identity(content, self.authority)
            case 1:
                check_proof(self.credentials, content, random.randbytes(70), bytes(16), prover="peer-1")
            case 2:
                said = Newcomer("peer-3", "192.0.2.3:7700", None, content)
                self.parts.common.local.roster.check(3, said)
            case 3:
                listed = random.choice([*forged.REVOCATIONS.values(), content])
                RevocationList(self.authority).take(forged.armoured(listed, "X509 CRL"))

    def control(self) -> None:
        """A control call with any arguments."""
        random = self.random
        verb = random.choice(("status", "stop ", "shout", "remove", "reload ", *_WAITING_VERBS))
        name = random.choice(("peer-1", "peer-0", "", "\x1b[2J", "x" * 9000, 7, None, [1], {"a": 1}, float("nan")))
        arguments: dict[str, object] = {"name": name, "index": random.choice((0, 1, -1, 1 << 70, "1", None))}

        async def call() -> None:
            try:
                async with asyncio.timeout(0):
                    await self.parts.incoming.control(verb, arguments, "operator")
            except TimeoutError:
                pass  # It waits for the loop of rounds, which has not begun.

        asyncio.run(call())

    def control_call(self) -> None:
        """A control call as bytes, from callers who may make it and who may not."""
        self.calls.control()

    def answer(self) -> None:
        """What a member answers to this peer, and to an operator's commands."""
        self.askers.ask()

    def relay(self) -> None:
        """Pieces of relayed connections, at a relay and at a peer that uses one."""
        self.random.choice((self.calls.relay, self.calls.tunnel))()

    # What must hold.

    def judge(self, before: dict[str, bytes]) -> None:
        """Raise whatever does not hold after lies."""
        status = self.parts.operator.status()
        text = json.dumps(status, allow_nan=False)
        if read_answer("status", text) != json.loads(text):
            raise PromiseBroken("a status holds what those that ask do not read")
        if self.parts.common.runtime.stops:
            raise PromiseBroken(f"another's word stops this peer: {self.parts.common.runtime.stop_reason}")
        newest = self.parts.common.evaluations.newest
        if len(newest) > 6:
            raise PromiseBroken("evaluations of peers that there are not are kept")
        for record in newest.values():
            pairs = list(zip(record.correct, record.total, strict=True))
            if not 0 < sum(record.total) <= _MOST_SAMPLES or not all(0 <= c <= n for c, n in pairs):
                raise PromiseBroken("an evaluation is believed whose counts make no sense")
        if self.state() != before:
            raise PromiseBroken("the state folder is not what it was")

    def state(self) -> dict[str, bytes]:
        """Return the files of the state folder; what is measured, and locks, left out."""
        folder = self.parts.common.local.folder.directory
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".log", ".safetensors")}


_TOLD: tuple[tuple[str, Callable[[_Peer], None], tuple[type[Exception], ...]], ...] = (
    ("notes", _Peer.note, (RemoteError,)),
    ("notes", _Peer.note, (RemoteError,)),
    ("notes", _Peer.note, (RemoteError,)),
    ("introductions", _Peer.introduction, (RemoteError, SecurityError, ConfigError)),
    ("changes", _Peer.change, (RemoteError,)),
    ("hellos", _Peer.hello, (RemoteError,)),
    ("callers", _Peer.caller, (HandshakeRefused,)),
    ("links", _Peer.link, (RemoteError,)),
    ("envelopes", _Peer.envelope, (RemoteProtocolError,)),
    ("certificates", _Peer.certificate, (SecurityError, ConfigError)),
    ("control calls", _Peer.control, (SottoError,)),
    ("control calls", _Peer.control_call, (CallRefused,)),
    ("relayed pieces", _Peer.relay, ()),
    ("answers", _Peer.answer, (RemoteError, SecurityError)),
    ("answers", _Peer.answer, (RemoteError, SecurityError)),
)
"""Kind, call, and what may be raised."""


def try_handlers(seed: int, cases: int, report: Report) -> None:
    """Tell the handlers of one peer so many lies. What breaks a promise goes to the report."""
    random = Random(f"handlers {seed}")
    told = _Peer(_ALGORITHMS[seed % len(_ALGORITHMS)], random)
    with closing(told):
        before = told.state()
        measured = seed % _MEASURED_EVERY == 0
        held = 0
        for case in range(cases):
            # What the first lies make a process import is not what they fill.
            if measured and case == cases // 2:
                tracemalloc.start()
                held = tracemalloc.get_traced_memory()[0]
            kind, call, expected = random.choice(_TOLD)
            report.cases[kind] += 1
            try:
                call(told)
            except expected as error:
                report.refused(getattr(error, "problem", str(error)))
                continue
            except Exception as error:
                report.find(kind, LEVEL, seed, error, "")
                continue
            if kind in ("notes", "control calls", "links", "relayed pieces", "answers"):
                try:
                    told.judge(before)
                except Exception as error:
                    report.find(kind, LEVEL, seed, error, "")
                    break
        if measured:
            grown = tracemalloc.get_traced_memory()[0] - held
            tracemalloc.stop()
            if grown > _MOST_GROWTH_BYTES:
                report.find("memory", LEVEL, seed, PromiseBroken("lies fill the memory"), f"{grown} bytes")
