"""The versions of the protocol between peers, and the releases that brought them.

Version 2: with mutual TLS, listeners prove their certificate in the hello. Version 3: notes are protobuf messages.
Peers of version 2 could neither read them nor be read. Version 4: peers tell all others which versions they speak, and
the addition of version 4 is used once all members speak it: a device that was declared lost may take part again.
Version 5: its additions are named below, constant by constant.
"""

from __future__ import annotations

OLDEST = 3
NEWEST = 5

REJOINS = 4
"""The first version whose peers understand that a device that was lost takes part again."""
GROUNDED = 5
"""The first version whose peers announce no loss without an operator's order or the votes of most members: once all
members speak it, none believes the word of one."""

ADMITS = 5
"""The first version whose peers go on without one that has admitted that it was set back."""
EQUALITY = 5
"""The first version whose peers compare messages that all were told alike, and begin only once all have the same shares
of the classes."""
BASED = 5
"""The first version whose peers tell digests of their start model tensor by tensor, so that buffers may differ. Between
two that do, the digest of the whole model is not compared."""
MEANING = 5
"""The first version whose peers tell the meaning of the numbers in their data. Two that do compare it."""

SNAPSHOT = 5
"""The first version whose peers can restore a script's state at the beginning of the round that they had journaled."""

_RELEASES = {3: "0.1", 4: "0.2", 5: "0.3"}


def release_with(protocol: int) -> str:
    """Return the first release that speaks a version of the protocol, for sentences."""
    return _RELEASES.get(protocol, "a later one")
