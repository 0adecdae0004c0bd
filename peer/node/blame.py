"""Blame for input that cannot be judged: it goes to the neighbour that sent it."""

from __future__ import annotations

from peer.errors import RemoteProtocolError


class blaming:
    """Turn any error raised inside into a RemoteProtocolError that names the neighbour.

    For use before anything has changed here, while only the neighbour's bytes are looked at. Broad on purpose: an error
    of ours in judging them must not let a neighbour end this process. A class, since every message enters it twice and
    a generator takes four times as long.
    """

    __slots__ = ("_peer",)

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RemoteProtocolError):
            raise type(error)(error.problem, peer=self._peer) from None
        if isinstance(error, Exception):
            text = f"sent something that cannot be judged ({type(error).__name__}: {error})"
            raise RemoteProtocolError(text, peer=self._peer) from error
