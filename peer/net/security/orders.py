"""Orders signed by an operator, which all members believe whichever of them received it."""

from __future__ import annotations

import time

from peer.net.security.certificates import der
from peer.net.security.credentials import Credentials
from peer.net.security.keys import parse_key
from peer.net.security.statements import signature_of
from peer.proto.sottovoce.v1.membership_pb2 import LossOrder
from peer.proto.sottovoce.v1.statement_pb2 import Proof, Statement

_TOPIC = "order"


def loss_order(name: str, run: str, operator: Credentials | None, incarnation: int = 0) -> bytes:
    """Return that the others shall go on without a peer: with the operator's proof, where there is an operator.
    `incarnation`: how often that peer has taken part again after it was lost."""
    statement = LossOrder(name=name, incarnation=incarnation).SerializeToString(deterministic=True)
    if operator is None:
        return statement
    # An operator has no counter: of two orders neither takes back the other.
    counter = int(time.time() * 1000)
    signature = signature_of(
        parse_key(operator.key, "the operator's key"),
        run=run,
        topic=_TOPIC,
        name=operator.identity.name,
        counter=counter,
        statement=statement,
    )
    proof = Proof(counter=counter, certificate=der(operator.certificate), signature=signature)
    return statement + Statement(proof=proof).SerializeToString(deterministic=True)
