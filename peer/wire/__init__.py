"""Frames: one message as bytes."""

from peer.wire.frame import decode, encode, max_frame_bytes
from peer.wire.message import Message, MessageKind, RepairWish

__all__ = ["Message", "MessageKind", "RepairWish", "decode", "encode", "max_frame_bytes"]
