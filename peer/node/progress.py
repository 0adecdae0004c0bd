"""How far a peer is, as it has signed it itself; and what it says when it finds that its state is older than that.

A device that is put back to yesterday (a snapshot, the image of a card, a copy of a folder) would repeat rounds whose
messages others have used and forgotten. It cannot know that by itself, and must not believe anybody else. So a peer
signs from time to time which rounds would survive a power cut, and its neighbours keep the newest that they got. Shown
a later round of its own, with its own signature, it knows; and what it signs then, the admission, is all that others
need to go on without it. An old statement proves nothing to anybody else: nobody but the peer knows its state.

`sotto rollback` puts all peers back on purpose. Each then begins an era: among what a peer signed, a later era counts
for more than any round.

Pure: no clock, no disk; signatures are the knowledge of `Statements`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from peer.errors import RemoteProtocolError, SecurityError
from peer.node.statements import MAX_PROOF_BYTES, Statements, sealed, unsealed
from peer.proto.sottovoce.v1 import membership_pb2 as pb

PROGRESS = "progress"
"""Topic of what a peer signs of how far it is: in its hello, and in notes."""
ADMISSION = "set back"
"""Topic of admissions."""
SIGN_EVERY_ROUNDS = 10
"""A note with it goes to each neighbour once in so many rounds at most."""
_MOST = 1 << 62


@dataclass(frozen=True, order=True, kw_only=True)
class Progress:
    """How far a peer is. Later ones are greater."""

    era: int = 0
    """How often its state was put back on purpose."""
    round: int = 0
    """Rounds, or steps, completed that would survive a power cut."""


@dataclass(frozen=True, kw_only=True)
class Admission:
    """One peer's word that it has lost what it signed."""

    peer: int
    state: Progress
    """Where its state is."""
    signed: Progress
    """What it has signed before."""


def encode_progress(peer: int, progress: Progress) -> bytes:
    """Return what a peer is to sign of how far it is. `peer`: its number, which tells its incarnation."""
    return _progress(progress, peer=peer).SerializeToString(deterministic=True)


def decode_progress(said: bytes) -> tuple[int, Progress]:
    """Return (number of a peer, how far it says it is); that it says so is yet to be checked. Raises SecurityError for
    bytes that are none."""
    try:
        statement, _ = unsealed(said)
        message = pb.Progress.FromString(statement)
    except DecodeError:
        raise SecurityError("it makes no sense") from None
    return message.peer, _read(message, said)


def encode_admission(admission: Admission) -> bytes:
    """Return what a peer is to sign that was set back."""
    message = pb.Admission(peer=admission.peer, state=_progress(admission.state), signed=_progress(admission.signed))
    return message.SerializeToString(deterministic=True)


def decode_admission(said: bytes) -> Admission:
    """Return what `encode_admission` made; that its peer says so is yet to be checked. Raises SecurityError for bytes
    that are none."""
    try:
        statement, _ = unsealed(said)
        message = pb.Admission.FromString(statement)
    except DecodeError:
        raise SecurityError("an admission makes no sense") from None
    state, signed = _read(message.state, said), _read(message.signed, said)
    if not state < signed:
        raise SecurityError("an admission admits nothing")
    return Admission(peer=message.peer, state=state, signed=signed)


def check_admission(statements: Statements, subject: int, said: bytes) -> None:
    """Raise SecurityError unless peer `subject` has signed that it was set back: this alone proves that it is lost,
    whatever others say of it."""
    if decode_admission(said).peer != subject:
        raise SecurityError("the admission is that of another peer")
    if not statements.check(ADMISSION, subject, said):
        raise SecurityError("the admission is signed by nobody")


class KnownProgress:
    """What one peer has signed of its progress, and has from others of theirs. Not for runs that sign nothing."""

    def __init__(self, peer: int, statements: Statements, start: Progress, kept: Mapping[int, bytes]) -> None:
        """`start`: where the state of this peer is when its process begins. `kept`: what it has from others, checked
        when it came."""
        self._peer, self._statements = peer, statements
        self.newest = start
        """The latest that this peer knows of itself: an honest neighbour shows it nothing later, unless it was set
        back."""
        self._own: tuple[Progress, bytes] | None = None
        self._last_told: Progress | None = None
        self._kept = dict(kept)
        self._certificate: bytes | None = None
        """With which this process signed first, and which is in all its hellos until it is renewed."""

    # -- the own one --

    def own(self, done: Progress) -> bytes:
        """Return the statement that this peer is so far, with its proof; a new signature only where it went on."""
        if self._own is None or self._own[0] < done:
            said = self._statements.sign(PROGRESS, encode_progress(self._peer, done))
            if self._certificate is None:
                proof = unsealed(said)[1]
                assert proof is not None
                self._certificate = proof.certificate
            self._own, self.newest = (done, said), max(self.newest, done)
        return self._own[1]

    def note(self, done: Progress, *, is_last: bool = False) -> bytes | None:
        """Return what to tell all neighbours now; None where it is too early for more. `is_last`: before this process
        ends.

        The certificate is left out where it is that of the hellos: this is told again and again.
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
        """Return what this peer has signed of itself and has lost, by what a neighbour shows it; None where it has lost
        nothing. Raises RemoteProtocolError if it never signed that."""
        try:
            signed = _checked(self._statements, self._peer, said)
        except SecurityError as error:
            raise RemoteProtocolError(f"it shows what this peer is to have said of its progress: {error}") from None
        return signed if signed > self.newest else None

    # -- those of others --

    def hear(self, peer: int, said: bytes) -> Progress:
        """Return how far a neighbour says it is, which is kept if it is news. Raises RemoteProtocolError unless it has
        signed that."""
        kept = self._kept.get(peer)
        if kept == said:
            return decode_progress(said)[1]
        try:
            progress = _checked(self._statements, peer, _completed(said, kept))
        except SecurityError as error:
            raise RemoteProtocolError(f"told of its progress: {error}") from None
        if kept is None or decode_progress(kept)[1] <= progress:  # Even the same may have a newer certificate.
            self._kept[peer] = _completed(said, kept)
        return progress

    def of(self, peer: int) -> bytes:
        """Return the newest that a neighbour has signed, to show it; nothing where there is none."""
        return self._kept.get(peer, b"")

    def is_behind(self, peer: int, progress: Progress) -> bool:
        """Return whether a neighbour that is so far was further once."""
        kept = self._kept.get(peer)
        return kept is not None and progress < decode_progress(kept)[1]

    @property
    def kept(self) -> Mapping[int, bytes]:
        """What is kept of others, by number."""
        return self._kept

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
    """Return a statement with the certificate of the one before it, where it was left out. Raises SecurityError."""
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
