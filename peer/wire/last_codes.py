"""The last codes of each stream, which both its ends hold, and against which the next ones may be coded.

A stream is the sequence of numbered frames from one peer to one neighbour. They are taken in the order of their numbers
and each only once, whatever happens to connections and processes: a receiver that reads a frame has taken all before
it. A sender may therefore tell its codes as differences to those of the frame before, without knowing which frames have
arrived; a receiver that drops or refuses a frame takes none that follows it.

- The message before has to be that of the round before and to have gone to the same receiver. The message goes out
  whole after a round in which a receiver was left out, on a new stream or edge, or after a state without codes.
- The state of a peer between two rounds has the codes that it sent in the last one, and each neighbour's codes in the
  newest message that a round has used: messages that wait for a later round are taken again after them.
- A round repeated after a power cut gives the same codes if its arithmetic is repeatable. Only then may codes be coded
  against others, since frames of its first run may have been taken. If the codes of the two ends differ nevertheless,
  the receiver is wrong about K, and the hash shows it: it is sent K, both raise θ, and as codes of another θ are told
  whole, the two ends agree again a round later. Hashes are therefore needed, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from peer.compress.layout import Layout
from peer.compress.payload import LayerPayload, Residues, Rounding
from peer.wire.frame import decode, encode
from peer.wire.message import Message, MessageKind

_OWN = "own"


class LastCodes:
    """The last messages of one peer's streams, in both directions."""

    def __init__(self, layout: Layout, dtype: npt.DTypeLike, *, tells_changes: bool) -> None:
        """`tells_changes`: whether the own messages may be coded against the last ones; those of others always may."""
        self._layout, self._dtype, self._tells_changes = layout, np.dtype(dtype), tells_changes
        self.own: Message | None = None
        """The last message that was sent: its frame, after a crash, is read against the one before."""
        self._receivers: frozenset[int] = frozenset()
        self._heard: dict[int, list[Message]] = {}
        """Sender → its newest message that a round has used, and those that wait, in order."""

    def told(self, message: Message, receiver: int) -> Message | None:
        """Return the own message that this one may be coded against for a receiver, if any."""
        own = self.own
        if own is None or not _is_codes(message) or own.round != message.round - 1:
            return None
        if receiver not in self._receivers:
            return None
        pairs = zip(message.layers, own.layers, strict=True)
        layers = tuple(before if _theta(now) == _theta(before) else _NO_CODES for now, before in pairs)
        return replace(own, layers=layers)

    def tell(self, message: Message, receivers: Collection[int]) -> None:
        """Note the message of a round, whose codes are the same for all its receivers."""
        if self._tells_changes and _is_codes(message):
            self.own, self._receivers = message, frozenset(receivers)

    def of(self, sender: int) -> Message | None:
        """Return the message that the next one of a sender may be coded against, if any."""
        heard = self._heard.get(sender)
        return heard[-1] if heard else None

    def hear(self, message: Message) -> None:
        """Note a message that was taken, whatever it was coded against."""
        if _is_codes(message):
            self._heard.setdefault(message.sender, []).append(message)

    def forget_before(self, round_: int) -> None:
        """Forget messages that no state and no other message needs once all rounds before `round_` are over."""
        for messages in self._heard.values():
            while len(messages) > 1 and messages[1].round < round_:
                del messages[0]

    def keep_only(self, senders: Collection[int], round_: int) -> None:
        """Forget messages of other senders from before `round_`: their edges are gone. Senders of later messages are
        coming neighbours."""
        self._heard = {
            sender: messages
            for sender, messages in self._heard.items()
            if sender in senders or messages[-1].round >= round_
        }

    def state(self, round_: int) -> dict[str, npt.NDArray[Any]]:
        """Return the codes as whole frames, uint8[bytes] each, and the receivers of the own; before `round_`."""
        self.forget_before(round_)
        used = {str(sender): messages[0] for sender, messages in self._heard.items() if messages[0].round < round_}
        if self.own is not None:
            used[_OWN] = self.own
        frames = {name: np.frombuffer(encode(message, self._layout), np.uint8) for name, message in used.items()}
        return frames if self.own is None else {**frames, "receivers": np.array(sorted(self._receivers), np.int64)}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`. Raises KeyError, ValueError or a `FrameError` if it does not fit."""
        self.own, self._receivers, self._heard = None, frozenset(), {}
        for name, frame in state.items():
            if name == "receivers":
                continue
            message = decode(frame.tobytes(), self._layout, dtype=self._dtype)
            if name == _OWN:
                self.own, self._receivers = message, frozenset(state["receivers"].tolist())
            else:
                self._heard[int(name)] = [message]

    @property
    def nbytes(self) -> int:
        """Bytes of memory kept beyond those that rounds need anyway: the codes alone."""
        kept = [messages[0] for messages in self._heard.values()] + ([] if self.own is None else [self.own])
        return sum(_code_bytes(message) for message in kept)


_NO_CODES = Residues(1.0, 8, Rounding.DITHER, np.zeros(0, np.uint8), None)
"""Takes the place of codes of another θ: integers of another grid say nothing of these."""


def _theta(layer: LayerPayload) -> float | None:
    return layer.theta if isinstance(layer, Residues) else None


def _is_codes(message: Message) -> bool:
    return message.kind is MessageKind.GOSSIP and message.phase == 0


def _code_bytes(message: Message) -> int:
    arrays = [getattr(layer, "residues", getattr(layer, "values", None)) for layer in message.layers]
    return sum(array.nbytes for array in arrays if array is not None)
