"""Frames: one message as bytes."""

from peer.wire.describe import FrameReport, LayerReport, describe, entropy_bound_bits
from peer.wire.frame import decode, encode, max_frame_bytes, payload_bytes
from peer.wire.message import Message, MessageKind, RepairWish

__all__ = [
    "FrameReport",
    "LayerReport",
    "Message",
    "MessageKind",
    "RepairWish",
    "decode",
    "describe",
    "encode",
    "entropy_bound_bits",
    "max_frame_bytes",
    "payload_bytes",
]
