"""The versions of the protocol between peers, and the releases that brought them.

Only that of the release before is spoken beside the newest: version 4 is that of 0.2. The additions of
version 5 are named below, constant by constant, and used once all members speak it.
"""

from __future__ import annotations

OLDEST = 4
NEWEST = 5

GROUNDED = 5
"""The first version whose peers announce no loss without an operator's order or the votes of most members: once all
members speak it, none believes the word of one."""

ADMITS = 5
"""The first version whose peers go on without one that has admitted that it was set back."""
EQUALITY = 5
"""The first version whose peers compare messages that all were told alike, and begin only once all have the same shares
of the classes."""
AVERAGE = 5
"""The first version whose peers form the average of all models after the last round."""
BASED = 5
"""The first version whose peers tell digests of their start model tensor by tensor, so that buffers may differ. Between
two that do, the digest of the whole model is not compared."""
MEANING = 5
"""The first version whose peers tell the meaning of the numbers in their data. Two that do compare it."""
SETTINGS = 5
"""The first version whose peers tell the options that their configurations set, so that a difference is named."""

FULL_WIDTH = 5
"""The first version whose peers repeat a round that was written in full width by their own choice."""
SNAPSHOT = 5
"""The first version whose peers can restore a script's state at the beginning of the round that they had journaled."""

_RELEASES = {4: "0.2", 5: "0.3"}


def release_with(protocol: int) -> str:
    """Return the first release that speaks a version of the protocol, for sentences."""
    return _RELEASES.get(protocol, "a later one")
