"""Statements of a peer about itself or others, which others pass on, followed by a proof of their issuer.

See `proto/sottovoce/v1/statement.proto`. Here are the bytes; `Statements`, which knows keys and certificates, signs
them and judges proofs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from peer.errors import SecurityError
from peer.proto.sottovoce.v1 import statement_pb2 as pb

MEMBERS = "members"
"""Topic of membership changes. Notes have their own."""
MAX_PROOF_BYTES = 9 * 1024
MAX_COUNTER = 1 << 63

AnyStatement = TypeVar("AnyStatement", bound=Message)


class Statements(Protocol):
    """Signs this peer's statements, and judges those of others."""

    def sign(self, topic: str, statement: bytes) -> bytes:
        """Return a statement of this peer, with its proof where the run has certificates. The counter in it is higher
        than in any statement of this peer before, also after a restart."""
        ...

    def check(self, topic: str, issuer: int, said: bytes) -> bool:
        """Return whether it is proven that peer `issuer` said this; if not, it is to be believed nevertheless. Raises
        SecurityError, with the reason, for a statement not to be believed. The answer never changes."""
        ...

    def check_order(self, topic: str, said: bytes) -> bool:
        """Return whether it is proven that an operator said this, as `check` does. Raises SecurityError, with the
        reason, for an order not to be believed."""
        ...


class Unsigned:
    """`Statements` of a run without certificates: everybody is believed."""

    def sign(self, topic: str, statement: bytes) -> bytes:
        """Return the statement."""
        return statement

    def check(self, topic: str, issuer: int, said: bytes) -> bool:
        """Return that nothing is proven."""
        return False

    def check_order(self, topic: str, said: bytes) -> bool:
        """Return that nothing is proven."""
        return False


def sealed(statement: bytes, proof: pb.Proof) -> bytes:
    """Return a statement followed by its proof."""
    return statement + pb.Statement(proof=proof).SerializeToString(deterministic=True)


def unsealed(said: bytes) -> tuple[bytes, pb.Proof | None]:
    """Return (the bytes that are signed, their proof), or everything and None if there is no proof. Raises
    SecurityError for bytes that are neither."""
    try:
        message = pb.Statement.FromString(said)
        if not message.HasField("proof"):
            return said, None
        suffix = pb.Statement(proof=message.proof).SerializeToString(deterministic=True)
        statement = said[: -len(suffix)]
        # Two proofs would be merged into one, and bytes after a proof are signed by nobody.
        if (
            len(suffix) > MAX_PROOF_BYTES
            or not said.endswith(suffix)
            or pb.Statement.FromString(statement).HasField("proof")
        ):
            raise ValueError
    except (DecodeError, ValueError):
        raise SecurityError("its proof makes no sense") from None
    if not 0 < message.proof.counter < MAX_COUNTER:
        raise SecurityError(f"its proof has the counter {message.proof.counter}")
    return statement, message.proof


def opened(kind: type[AnyStatement], said: bytes, what: str) -> AnyStatement:
    """Return the message that is signed; its proof is yet to be checked. Raises SecurityError, in which the bytes are
    called `what`, if they are no such message."""
    statement, _ = unsealed(said)
    try:
        return kind.FromString(statement)
    except DecodeError:
        raise SecurityError(f"{what} makes no sense") from None


def counter_of(said: bytes) -> int | None:
    """Return the counter of a statement that was checked; None if it has no proof."""
    try:
        _, proof = unsealed(said)
    except SecurityError:
        return None
    return None if proof is None else proof.counter


def is_later(said: bytes, known: bytes, *, unsigned: bool) -> bool:
    """Return whether a statement that was checked has a higher counter than another one of its peer; `unsigned` unless
    both have a proof."""
    now, before = counter_of(said), counter_of(known)
    return unsigned if now is None or before is None else now > before


class OwnWords:
    """This peer's statements about members, signed. A replay repeats them in the same bytes.

    The certificate may be another one by then, and a counter is used once, so the journal holds the signed bytes.
    """

    def __init__(self, statements: Statements, prefix: bytes) -> None:
        """`prefix` stands before the statement in a frame, and is not signed."""
        self._statements, self._prefix = statements, prefix
        self._new: list[bytes] = []
        self._recalled: Mapping[bytes, bytes] = {}
        self._recalls_all = False

    def signed(self, frame: bytes) -> bytes:
        """Return the frame of an own statement with its proof."""
        if frame in self._recalled or self._recalls_all:
            # An earlier release signed nothing.
            return self._recalled.get(frame, frame)
        signed = self._prefix + self._statements.sign(MEMBERS, frame[len(self._prefix) :])
        if signed != frame:
            self._new.append(signed)
        return signed

    def take_new(self) -> tuple[bytes, ...]:
        """Return the statements signed since the last call."""
        new, self._new = tuple(self._new), []
        return new

    def recall(self, signed: Iterable[bytes], *, is_all: bool) -> None:
        """Repeat former statements, in a replay. `is_all`: there were no others. Without any to recall, new ones are
        signed."""
        self._recalled = {self._prefix + unsealed(each[len(self._prefix) :])[0]: each for each in signed}
        self._recalls_all = is_all
