"""The record of one round of one peer: what the metrics keep, plots show and the divergence guard judges.

A value without a home in any layer: the algorithms' side fills it in, and everything above reads it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One peer's figures of one round. Bytes are what left this peer in this round."""

    peer: int
    round: int
    time_s: float
    """Seconds since the run began (virtual seconds in a simulation), at the end of the round."""
    loss: float | None = None
    """Mean training loss of the local steps; None in a round without one."""
    rate: float = 0.0
    """γ of the round."""
    messages: int = 0
    values: int = 0
    """Parameters described by the messages sent (a message of a model of n parameters counts n)."""
    payload_bytes: int = 0
    """Layers of the frames, without header and checksum."""
    frame_bytes: int = 0
    """Whole frames."""
    protobuf_bytes: int = 0
    """Frames in their chunks, as handed to gRPC; receipts, heartbeats and bulletins included."""
    entropy_bits: float = 0.0
    """Lower bound of the payload, in bits (`wire.entropy_bound_bits`); 0 in the rounds in which it was not taken."""
    train_s: float = 0.0
    gossip_s: float = 0.0
    """Algorithm, compression, encoding and decoding."""
    wait_s: float = 0.0
    """Waiting for neighbours."""
    cpu_s: float = 0.0
    """CPU seconds of the whole process in this round."""
    late: int = 0
    """Neighbours that this round went on without."""
    push_weight: float = 1.0
    error_norm: float | None = None
    replica_error: float | None = None
    neighbor_distance: float | None = None
    repairs: int = 0
    theta: float | None = None
    fraction: float | None = None
    """top_k, random_k: which part of each layer was sent (a bandwidth budget lets it vary)."""
    bits: int | None = None
    """qsgd, modulo: bits of each number (a bandwidth budget lets them vary)."""
    exchanges: int = 0
    """Asynchronous algorithms, whose rounds are single gradient steps: exchanges with neighbours since the last one."""
    staleness: float | None = None
    """Asynchronous algorithms: exchanges between reading the model and applying the gradient computed there."""
