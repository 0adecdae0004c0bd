"""Callbacks of the transport to its user."""

from __future__ import annotations

from typing import Any, Protocol

MAX_BULLETIN_BYTES = 64 * 1024
"""Largest note."""
MAX_TOPIC = 64
"""Characters in the topic of a note."""


class Handler(Protocol):
    """The user of a transport. All calls come on the event loop and must not block.

    An error raised by a call is blamed on the neighbour concerned: its connection is closed, with the sentence of a
    RemoteError, and dialled anew. Only StateError and DivergenceError end the transport.
    """

    def link_up(self, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        """Return the frames to send (again), in order. The neighbour durably has those up to `remote_has`."""
        ...

    def link_down(self, peer: int, reason: str) -> None:
        """Note that the link is gone, or that the neighbour refuses us (then no `link_up` came before)."""
        ...

    def frame_received(self, peer: int, seq: int, frame: bytes) -> bool | None:
        """Take a whole frame. Frames come in order; one that is not yet durable may come again.

        Frames with number 0 stand outside the sequence. Returning False withholds the credit of the frame until
        `Transport.taken`.
        """
        ...

    def receipt(self, peer: int, upto: int) -> None:
        """Note that the neighbour durably has our frames up to `upto`."""
        ...

    def bulletin_received(self, peer: int, topic: str, data: bytes) -> None:
        """Take a note of at most 64 kB. The same note may come more than once."""
        ...

    def goodbye(self, peer: int, reason: str) -> None:
        """Note that the neighbour leaves on purpose; `link_down` follows."""
        ...

    def last_received(self, peer: int) -> int:
        """Return the number up to which the neighbour's frames are durable here."""
        ...

    async def control(self, verb: str, arguments: dict[str, Any], caller: str) -> dict[str, Any]:
        """Return the answer (JSON) to a control call that the transport does not answer itself. `caller`: the name in
        its certificate, or its address."""
        ...
