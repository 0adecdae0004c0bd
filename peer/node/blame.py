"""Whose fault it is when something that came from a neighbour cannot be judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peer.errors import RemoteProtocolError


@contextmanager
def blaming(peer: int) -> Iterator[None]:
    """Turn whatever is raised inside into a RemoteProtocolError that names the neighbour.

    For the time before anything has changed here, in which nothing but the neighbour's bytes is looked at. Broad on
    purpose: an error of ours in judging them must not let a neighbour end this process.
    """
    try:
        yield
    except RemoteProtocolError as error:
        raise type(error)(error.problem, peer=peer) from None
    except Exception as error:
        text = f"sent something that cannot be judged ({type(error).__name__}: {error})"
        raise RemoteProtocolError(text, peer=peer) from error
