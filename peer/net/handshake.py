"""The first envelope in each direction of a stream: writing our hello and judging the other end's.

The dialler speaks first and draws a challenge. The listener compares the hello with its own and answers with its hello
and the proof that it holds its certificate (`peer.net.security.proofs`), or with a refusal. The dialler compares too.
Faults of a hello raise only RemoteErrors here: its sender is to blame.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from peer.errors import HandshakeRefused, RemoteProtocolError, SecurityError
from peer.foreign_text import printable, quote
from peer.net import tcp_info
from peer.net.envelope import decode
from peer.net.hello import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    HelloInfo,
    Progress,
    Terms,
    ToldProgress,
    check_identity,
    check_run,
    check_texts,
    read_terms,
    told_settings,
)
from peer.net.inbox import LinkLimits
from peer.net.neighbor import Neighbor
from peer.net.rpc import Stream
from peer.net.security.certificates import Identity
from peer.net.security.credentials import Access, Credentials
from peer.net.security.proofs import CHALLENGE_BYTES, check_proof, prove
from peer.proto.sottovoce.v1 import exchange_pb2 as pb

FAREWELL_S = 1.0
"""Longest wait for a farewell to be sent, and for one to arrive."""


@dataclass(frozen=True, kw_only=True)
class OpenedStream:
    """A stream on which both ends accepted the hello of the other."""

    neighbor: Neighbor
    stream: Stream
    terms: Terms
    identity: Identity | None
    """From the other end's certificate; None without one."""
    dialled: bool
    """Whether this end opened it."""
    received: int
    """The last of the neighbour's frames that are durable here, as our hello said."""
    socket: tcp_info.Connection | None
    """The socket under the stream; None where unknown."""


@dataclass(kw_only=True)
class Handshake:
    """The contents of this process's hellos, and its demands on those of others."""

    me: int
    info: HelloInfo
    access: Access | None
    limits: LinkLimits
    heartbeat_s: float
    needed_protocol: Callable[[], int] = lambda: PROTOCOL_MIN
    """Returns the lowest version that serves the run by now."""
    progress: Progress | None = None
    """None for a run that signs nothing."""

    def __post_init__(self) -> None:
        """Draw the nonce of this process."""
        self._credentials = self.access if isinstance(self.access, Credentials) else None
        self._nonce = secrets.randbits(64)

    def read_hello(self, first: bytes) -> pb.Hello:
        """Return the hello in a first envelope. Raises RemoteError if it holds anything else, or a hello to another
        peer, such as the one that this device was before it was lost: it counts the frames of that one."""
        envelope, _ = decode(first)
        if not envelope.HasField("hello") or len(envelope.ListFields()) != 1:
            raise RemoteProtocolError("its first envelope is not a hello")
        hello = envelope.hello
        check_texts(hello)
        if hello.HasField("receiver") and hello.receiver != self.me:
            here = f"peer {self.me}, {quote(self.info.name)}"
            raise HandshakeRefused(f"this is {here}, not {hello.receiver}; if it lasts, compare the lists of peers")
        return hello

    # -- as the dialler --

    def challenge(self) -> bytes:
        """Return a new challenge, for one stream."""
        return secrets.token_bytes(CHALLENGE_BYTES)

    def hello(self, neighbor: Neighbor, *, received: int, challenge: bytes) -> bytes:
        """Return the envelope with which a dialler begins; the neighbour's frames up to `received` are durable."""
        return _hello_envelope(self._hello(neighbor, received, challenge=challenge))

    def read_answer(self, first: bytes, neighbor: Neighbor, challenge: bytes) -> tuple[Terms, Identity | None]:
        """Return the terms of a listener and whose certificate it proved to hold. Raises RemoteError."""
        hello = self.read_hello(first)
        check_identity(hello, expected_name=neighbor.name, certified_name=None, expected_index=neighbor.index)
        terms, identity = self.terms(hello), None
        if self._credentials is not None:
            try:
                # TLS said only that the name in the certificate is right.
                identity = check_proof(
                    self._credentials, hello.certificate, hello.proof, challenge, prover=neighbor.name
                )
            except SecurityError as error:
                raise HandshakeRefused(str(error)) from None
        self.judge_progress(hello, neighbor)
        return terms, identity

    # -- as the listener --

    def terms(self, hello: pb.Hello) -> Terms:
        """Return the terms of the other end. Raises HandshakeRefused if it trains another run."""
        return read_terms(self.info, hello, check_run(self.info, hello, self.needed_protocol()))

    def answer(self, hello: pb.Hello, neighbor: Neighbor, *, received: int, seen_as: str) -> bytes:
        """Return the envelope that answers the hello of a caller, which is this neighbour."""
        ours = self._hello(neighbor, received, seen_as=seen_as)
        if self._credentials is not None and len(hello.challenge) == CHALLENGE_BYTES:
            ours.certificate, ours.proof = prove(self._credentials, hello.challenge, verifier=neighbor.name)
        return _hello_envelope(ours)

    # -- both --

    def judge_progress(self, hello: pb.Hello, neighbor: Neighbor) -> None:
        """Raise StateBehind where the neighbour, or this peer, is behind its own signed statements."""
        if self.progress is not None:
            told = ToldProgress(own=hello.progress, shown=hello.shown, admission=hello.admission)
            self.progress.judge(neighbor.index, told)

    def _hello(self, neighbor: Neighbor, received: int, *, seen_as: str = "", challenge: bytes = b"") -> pb.Hello:
        info = self.info
        progress = ToldProgress() if self.progress is None else self.progress.told_to(neighbor.index)
        return pb.Hello(
            protocol_min=self.needed_protocol(),
            protocol_max=PROTOCOL_MAX,
            run=info.run,
            algorithm=info.algorithm,
            model_digest=info.start.whole,
            start=pb.StartModel(
                digest=info.start.digest,
                parameters=info.start.parameters.entries,
                buffers=info.start.buffers.entries,
            ),
            meanings=[
                pb.Meaning(kind=each.kind, digest=each.digest, entries=each.entries, count=len(each.names))
                for each in info.meanings
            ],
            settings=told_settings(info.settings),
            machine=told_settings(info.machine),
            graph_digest=info.graph_digest,
            run_digest=info.run_digest,
            num_peers=info.num_peers,
            index=self.me,
            name=info.name,
            nonce=self._nonce,
            received=received,
            window_bytes=self.limits.window_bytes,
            chunk_bytes=self.limits.chunk_bytes,
            heartbeat_ms=max(1, round(self.heartbeat_s * 1000)),
            software=info.software,
            seen_as=seen_as,
            challenge=challenge,
            progress=progress.own,
            shown=progress.shown,
            admission=progress.admission,
            receiver=neighbor.index,
        )


def read_close(first: bytes) -> pb.Close | None:
    """Return the farewell with which a listener answers instead of a hello; None if it is something else.

    Raises RemoteProtocolError if the bytes are no envelope.
    """
    envelope, _ = decode(first)
    return envelope.close if envelope.HasField("close") else None


def farewell(kind: pb.Close.Kind, reason: str) -> bytes:
    """Return the last envelope in a direction."""
    return pb.Envelope(close=pb.Close(kind=kind, reason=printable(reason))).SerializeToString()


def _hello_envelope(hello: pb.Hello) -> bytes:
    return pb.Envelope(hello=hello).SerializeToString()
