"""Signatures of this peer, and the check of others'."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from peer.config.options import Config
from peer.errors import SecurityError
from peer.gossip.incarnations import Numbering
from peer.net.security.certificates import Role, der
from peer.net.security.credentials import Access, Credentials
from peer.net.security.keys import parse_key
from peer.net.security.statements import StatementVerifier, signature_of
from peer.node.statements import Statements, Unsigned, sealed, unsealed
from peer.proto.sottovoce.v1.statement_pb2 import Proof
from peer.state.disk import Disk
from peer.state.statement_counter import StatementCounter


def statements_of(config: Config, access: Access | None, disk: Disk) -> Statements:
    """Return the signer of a peer's statements about members, accuracies and divergence, which also judges those of
    others, where the run has certificates. `disk`: its state folder."""
    if not isinstance(access, Credentials):
        return Unsigned()
    return SignedStatements(
        access,
        run=config.run.name,
        listed=[peer.name for peer in config.peers[: config.num_listed]],
        counter=StatementCounter(disk, time.time()),
        unsigned=config.security.unsigned,
    )


class SignedStatements:
    """Implements `Statements` for a run with certificates. May be used from several threads."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        run: str,
        listed: Sequence[str],
        counter: StatementCounter,
        unsigned: Literal["refuse", "accept"],
    ) -> None:
        """`listed`: the names in everybody's list, by number. `unsigned`: what becomes of what has no proof."""
        self._run, self._listed, self._counter, self._unsigned = run, tuple(listed), counter, unsigned
        self._verifier = StatementVerifier(credentials.ca, run)
        self.renewed(credentials)

    def renewed(self, credentials: Credentials) -> None:
        """Sign with this certificate from now on."""
        self._own = credentials.identity.name, parse_key(credentials.key, "our key"), der(credentials.certificate)

    def sign(self, topic: str, statement: bytes) -> bytes:
        """Return a statement with its proof. Raises StateError if no counter can be reserved for it."""
        name, key, certificate = self._own
        counter = self._counter.next()
        signature = signature_of(key, run=self._run, topic=topic, name=name, counter=counter, statement=statement)
        return sealed(statement, Proof(counter=counter, certificate=certificate, signature=signature))

    def check_order(self, topic: str, said: bytes) -> bool:
        """Return that the signature of an operator proves that it said this. Raises SecurityError."""
        statement, proof = unsealed(said)
        if proof is None:
            raise SecurityError("no operator has signed it")
        self._verifier.check(
            proof.certificate,
            proof.signature,
            topic=topic,
            counter=proof.counter,
            statement=statement,
            role=Role.OPERATOR,
        )
        return True

    def check(self, topic: str, issuer: int, said: bytes) -> bool:
        """Return whether the signature of peer `issuer` proves that it said this; without any, it is believed where the
        configuration says so. Raises SecurityError."""
        statement, proof = unsealed(said)
        if proof is None:
            if self._unsigned == "accept":
                return False
            raise SecurityError(
                'it is not signed; while the release of some devices signs nothing, set security.unsigned = "accept"'
            )
        identity = self._verifier.check(
            proof.certificate, proof.signature, topic=topic, counter=proof.counter, statement=statement
        )
        # The certificate of a newcomer has its index, that of a listed peer its name alone. A signed statement names
        # the number of its issuer: a statement from before a device's loss is none of its present ones.
        device = Numbering(len(self._listed)).device(issuer)
        if device < len(self._listed):
            is_issuer = identity.name == self._listed[device] and identity.index in (None, device)
        else:
            is_issuer = identity.index == device
        if not is_issuer:
            raise SecurityError(f"it is signed with the certificate of {identity.name!r}")
        return True
