"""Progress of peers, signed by themselves, and the admission of a peer that finds its state older than its signature.

A device that is put back to yesterday (a snapshot, the image of a card, a copy of a folder) would repeat rounds whose
messages others have used and forgotten. It cannot know that by itself, and must not believe anybody else. From time to
time a peer therefore signs its rounds that would survive a power cut, and its neighbours keep the newest statement.
Shown a later round with its own signature, the peer knows. It then signs an admission, and others need nothing else to
go on without it. An old statement proves nothing to anybody else: only the peer knows its state.

`sotto admin rollback` puts all peers back on purpose. Each then begins an era: among a peer's statements, a later era
counts for more than any round.

Pure: no clock, no disk; `Statements` knows signatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peer.errors import RemoteProtocolError, SecurityError
from peer.node.statements import MAX_PROOF_BYTES, Statements, opened, sealed, unsealed
from peer.proto.sottovoce.v1 import membership_pb2 as pb

PROGRESS = "progress"
"""Topic of a peer's signed progress, in its hello and in notes."""
ADMISSION = "set back"
"""Topic of admissions."""
SIGN_EVERY_ROUNDS = 10
"""Least rounds between two notes with it to a neighbour."""
_MOST = 1 << 62


@dataclass(frozen=True, order=True, kw_only=True)
class Progress:
    """Progress of a peer. Later ones are greater."""

    era: int = 0
    """Times that its state was put back on purpose."""
    round: int = 0
    """Rounds, or steps, completed that would survive a power cut."""


def encode_progress(peer: int, progress: Progress) -> bytes:
    """Return the statement of progress for a peer to sign. `peer`: its number, which tells its incarnation."""
    return _progress(progress, peer=peer).SerializeToString(deterministic=True)


def decode_progress(said: bytes) -> tuple[int, Progress]:
    """Return (number of a peer, its progress); the signature is yet to be checked. Raises SecurityError for other
    bytes."""
    message = opened(pb.Progress, said, "it")
    return message.peer, _read(message, said)


def encode_admission(peer: int, *, state: Progress, signed: Progress) -> bytes:
    """Return the admission, for a peer that was set back to sign, that its `state` is older than what it `signed`."""
    message = pb.Admission(peer=peer, state=_progress(state), signed=_progress(signed))
    return message.SerializeToString(deterministic=True)


def check_admission(statements: Statements, subject: int, said: bytes) -> None:
    """Raise SecurityError unless peer `subject` has signed that it was set back: this alone proves that it is lost,
    whatever others say of it."""
    message = opened(pb.Admission, said, "an admission")
    if not _read(message.state, said) < _read(message.signed, said):
        raise SecurityError("an admission admits nothing")
    if message.peer != subject:
        raise SecurityError("the admission is that of another peer")
    if not statements.check(ADMISSION, subject, said):
        raise SecurityError("the admission is signed by nobody")


class KnownProgress:
    """Signed progress of one peer and of its neighbours. Not for runs that sign nothing."""

    def __init__(self, peer: int, statements: Statements, start: Progress, kept: Mapping[int, bytes]) -> None:
        """`start`: progress of this peer's state when its process begins. `kept`: statements of others, checked when
        they came."""
        self._peer, self._statements = peer, statements
        self.newest = start
        """The latest own progress that this peer knows: an honest neighbour shows it nothing later, unless it was set
        back."""
        self._own: tuple[Progress, bytes] | None = None
        self._last_told: Progress | None = None
        self.kept = dict(kept)
        """Statements kept of others, by number."""
        self._certificate: bytes | None = None
        """Certificate of this process's first signature, which is in all its hellos until it is renewed."""

    # -- own progress --

    def own(self, done: Progress) -> bytes:
        """Return the statement of this progress with its proof; it is signed anew only if the peer went on."""
        if self._own is None or self._own[0] < done:
            said = self._statements.sign(PROGRESS, encode_progress(self._peer, done))
            if self._certificate is None:
                proof = unsealed(said)[1]
                assert proof is not None
                self._certificate = proof.certificate
            self._own, self.newest = (done, said), max(self.newest, done)
        return self._own[1]

    def note(self, done: Progress, *, is_last: bool = False) -> bytes | None:
        """Return the note for all neighbours now; None if it is too early for another. `is_last`: before this process
        ends.

        The certificate is left out if it is that of the hellos, since notes are frequent.
        """
        told = self._last_told
        if done.round == 0 or (told is not None and (done <= told or not (is_last or self._is_due(told, done)))):
            return None
        self._last_told = done
        statement, proof = unsealed(self.own(done))
        assert proof is not None
        if proof.certificate == self._certificate:
            proof.ClearField("certificate")
        return sealed(statement, proof)

    def shown(self, said: bytes) -> Progress | None:
        """Return the progress that this peer has signed and lost, judging by the statement that a neighbour shows it;
        None if it has lost nothing. Raises RemoteProtocolError if it never signed that."""
        try:
            signed = _checked(self._statements, self._peer, said)
        except SecurityError as error:
            raise RemoteProtocolError(f"it shows what this peer is to have said of its progress: {error}") from None
        return signed if signed > self.newest else None

    # -- progress of others --

    def hear(self, peer: int, said: bytes) -> Progress:
        """Return a neighbour's progress by its statement, which is kept if it is news. Raises RemoteProtocolError
        unless the neighbour has signed it."""
        kept = self.kept.get(peer)
        if kept == said:
            return decode_progress(said)[1]
        try:
            progress = _checked(self._statements, peer, _completed(said, kept))
        except SecurityError as error:
            raise RemoteProtocolError(f"told of its progress: {error}") from None
        if kept is None or decode_progress(kept)[1] <= progress:  # Even the same may have a newer certificate.
            self.kept[peer] = _completed(said, kept)
        return progress

    def of(self, peer: int) -> bytes:
        """Return the newest statement that a neighbour has signed, to show it; empty if there is none."""
        return self.kept.get(peer, b"")

    def is_behind(self, peer: int, progress: Progress) -> bool:
        """Return whether a neighbour with this progress was further once."""
        kept = self.kept.get(peer)
        return kept is not None and progress < decode_progress(kept)[1]

    @staticmethod
    def _is_due(told: Progress, done: Progress) -> bool:
        return done.era > told.era or done.round >= told.round + SIGN_EVERY_ROUNDS


def _checked(statements: Statements, peer: int, said: bytes) -> Progress:
    """Return the progress that a peer has signed. Raises SecurityError."""
    if len(said) > MAX_PROOF_BYTES:
        raise SecurityError(f"it has {len(said)} bytes")
    about, progress = decode_progress(said)
    if about != peer:
        raise SecurityError(f"it is that of peer {about}")
    if not statements.check(PROGRESS, peer, said):
        raise SecurityError("nobody has signed it")
    return progress


def _completed(said: bytes, kept: bytes | None) -> bytes:
    """Return a statement with its certificate; if left out, with that of the one before it. Raises SecurityError."""
    statement, proof = unsealed(said)
    if proof is None or proof.certificate or kept is None:
        return said
    before = unsealed(kept)[1]
    assert before is not None
    proof.certificate = before.certificate
    return sealed(statement, proof)


def _progress(progress: Progress, peer: int = 0) -> pb.Progress:
    return pb.Progress(peer=peer, era=progress.era, round=progress.round)


def _read(message: pb.Progress, said: bytes) -> Progress:
    if len(said) > MAX_PROOF_BYTES or message.round >= _MOST:
        raise SecurityError(f"it tells of round {message.round} in {len(said)} bytes")
    return Progress(era=message.era, round=message.round)
