"""A peer in which something goes wrong once: `python -m tests.daemon.mishap KIND PYTHON -m peer run …`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

from peer.__main__ import main
from peer.net.connection import Connection
from peer.node.durable import DurablePeer
from peer.node.durable_pair import DurablePair


def damaging(real: Callable[..., None]) -> Callable[..., None]:
    """Return `Connection.send` with frame 3 damaged once; the copy that is kept for a repetition is whole."""
    sent: set[int] = set()

    def send(connection: Connection, seq: int, frame: bytes, *, again: bool) -> None:
        if seq == 3 and seq not in sent:
            sent.add(seq)
            frame = frame[:-1] + bytes([frame[-1] ^ 1])
        real(connection, seq, frame, again=again)

    return send


def raising(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `receive` that raises, for the third frame, what nobody has thought of."""
    calls: list[int] = []

    def receive(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("a bug")
        return real(*arguments)

    return receive


if __name__ == "__main__":
    if sys.argv[1] == "damage":
        mock.patch.object(Connection, "send", damaging(Connection.send)).start()
    else:
        for each in (DurablePeer, DurablePair):
            mock.patch.object(each, "receive", raising(each.receive)).start()
    # What follows the interpreter and "-m peer".
    del sys.argv[1:5]
    main()
