"""Decodes a frame once for all peers of a process that receive it."""

from __future__ import annotations

from collections import OrderedDict

import numpy.typing as npt

from peer.compress.layout import Layout
from peer.node.frame_account import decode_from
from peer.wire.message import Message

KEPT = 4
"""Frames kept with their messages. All receivers of a frame take it one after the other if links are alike; the two
kinds of frames of a round, with and without weight, go side by side."""


class SharedDecoding:
    """Implements `Participant`'s `decode`: every receiver gets the same message, whose arrays nobody writes to."""

    def __init__(self) -> None:
        self._newest: OrderedDict[tuple[int, int], tuple[bytes, Message | None, Message]] = OrderedDict()

    def __call__(
        self, sender: int, frame: bytes, layout: Layout, dtype: npt.DTypeLike, *, previous: Message | None = None
    ) -> Message:
        # The frames kept are alive, so that no other object has their identity.
        key = id(frame), id(previous)
        found = self._newest.get(key)
        if found is None:
            found = frame, previous, decode_from(sender, frame, layout, dtype, previous=previous)
            self._newest[key] = found
            if len(self._newest) > KEPT:
                self._newest.popitem(last=False)
        return found[2]
