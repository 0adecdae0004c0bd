"""Frames that were received and not used yet: those that wait for their round, and those too early to be taken.

Both are kept as the bytes received. A checkpoint holds the waiting ones, which are taken again when it is restored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from peer.node.checkpoint_arrays import Arrays, cut, joined
from peer.wire.message import Message

EARLY_BYTES_MAX = 32 << 20
"""Most bytes kept of a neighbour's frames for rounds that are still far ahead after a power cut."""


@dataclass(frozen=True)
class WaitingFrame:
    """A numbered frame that was taken and whose message waits for a later round."""

    peer: int
    seq: int
    frame: bytes


class WaitingFrames:
    """The newest frames of each neighbour; those whose messages wait in the session are among them."""

    def __init__(self) -> None:
        self._frames: dict[int, deque[WaitingFrame]] = {}

    def add(self, peer: int, seq: int, frame: bytes) -> None:
        """Note a frame that was taken."""
        self._frames.setdefault(peer, deque()).append(WaitingFrame(peer, seq, frame))

    def keep_newest(self, counts: Mapping[int, int]) -> None:
        """Keep this number of each neighbour's frames: messages are used in the order of their rounds, which is that of
        a stream."""
        for peer, frames in list(self._frames.items()):
            while len(frames) > counts.get(peer, 0):
                frames.popleft()

    def forget(self, peer: int) -> None:
        """Keep nothing of a neighbour."""
        self._frames.pop(peer, None)

    def all(self) -> list[WaitingFrame]:
        """Return the frames kept, each neighbour's in order."""
        return [waiting for frames in list(self._frames.values()) for waiting in frames]


def inbox_to_checkpoint(waiting: list[WaitingFrame]) -> tuple[dict[str, object], dict[str, npt.NDArray[Any]]]:
    """Return waiting frames as (JSON values, arrays)."""
    values: dict[str, object] = {"inbox": [[each.peer, each.seq, len(each.frame)] for each in waiting]}
    return values, {"inbox": joined([each.frame for each in waiting])} if waiting else {}


def inbox_from_checkpoint(values: Mapping[str, Any], arrays: Arrays) -> list[WaitingFrame]:
    """Return the frames given to `inbox_to_checkpoint`; nothing for a checkpoint of the first release."""
    described = values.get("inbox", [])
    if not described:
        return []
    frames = cut(arrays["inbox"], [length for _, _, length in described])
    return [WaitingFrame(int(peer), int(seq), frame) for (peer, seq, _), frame in zip(described, frames, strict=True)]


@dataclass(frozen=True)
class EarlyFrame:
    """A frame that comes after those taken of its stream, and has to wait with all that follow it."""

    seq: int
    round: int
    """Round of its message; 0 for a membership notice, which waits for no round but behind the frames before it."""
    frame: bytes


class EarlyFrames:
    """Neighbours' frames that cannot be judged yet: of rounds far ahead of this peer, which a power cut has set back,
    or after changes of members that it has yet to hear of, as it joins.

    They are in no journal and not confirmed, so that their senders keep them too: losing them costs only time.
    """

    def __init__(self) -> None:
        self._frames: dict[int, deque[EarlyFrame]] = {}
        self._newest: dict[int, Message] = {}

    def count(self, peer: int) -> int:
        """Return the number of a neighbour's frames that are kept."""
        return len(self._frames.get(peer, ()))

    def newest(self, peer: int) -> Message | None:
        """Return the message of a neighbour's newest frame, to which the codes of the next one refer."""
        return self._newest.get(peer) if self.count(peer) else None

    def add(self, peer: int, seq: int, frame: bytes, message: Message) -> bool:
        """Keep a frame if there is room; return whether there was."""
        if not self._add(peer, EarlyFrame(seq, message.round, frame)):
            return False
        self._newest[peer] = message
        return True

    def add_notice(self, peer: int, seq: int, frame: bytes) -> bool:
        """Keep a membership notice after the frames kept of its stream if there is room; return whether there was."""
        if not self.count(peer):
            self._newest.pop(peer, None)  # A message that was taken long ago.
        return self._add(peer, EarlyFrame(seq, 0, frame))

    def _add(self, peer: int, early: EarlyFrame) -> bool:
        frames = self._frames.setdefault(peer, deque())
        if sum(len(kept.frame) for kept in frames) + len(early.frame) > EARLY_BYTES_MAX:
            return False
        frames.append(early)
        return True

    def peers(self) -> list[int]:
        """Return the neighbours whose frames are kept."""
        return [peer for peer, frames in self._frames.items() if frames]

    def first(self, peer: int) -> EarlyFrame | None:
        """Return the oldest frame that is kept of a neighbour."""
        frames = self._frames.get(peer)
        return frames[0] if frames else None

    def take(self, peer: int) -> EarlyFrame:
        """Return the oldest frame that is kept of a neighbour, and forget it."""
        return self._frames[peer].popleft()

    def forget(self, peer: int) -> None:
        """Keep nothing of a neighbour."""
        self._frames.pop(peer, None)
        self._newest.pop(peer, None)
