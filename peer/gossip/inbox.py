"""Messages of one peer's rounds that were received and not used yet."""

from __future__ import annotations

from peer.wire.message import Message, MessageKind


class Inbox:
    """At most one message for each round, phase and sender, of the round under way or a later one."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int, int], Message] = {}

    def put(self, message: Message) -> bool:
        """Keep a message; return False if there is one already."""
        key = (message.round, message.phase, message.sender)
        if key in self._messages:
            return False
        self._messages[key] = message
        return True

    def has(self, round_: int, phase: int, sender: int) -> bool:
        """Whether a message is here."""
        return (round_, phase, sender) in self._messages

    def take(self, round_: int, phase: int, sender: int) -> Message | None:
        """Return a message that is here, and keep it no longer."""
        return self._messages.pop((round_, phase, sender), None)

    def drop(self, sender: int, from_round: int) -> None:
        """Forget a sender's messages of a round and of later ones."""
        self._messages = {
            key: message for key, message in self._messages.items() if key[2] != sender or key[0] < from_round
        }

    def clear(self) -> None:
        """Forget everything."""
        self._messages.clear()

    def rounds_of(self, sender: int) -> list[int]:
        """Return the rounds of the sender's messages."""
        return [round_ for round_, _, each in self._messages if each == sender]

    def unconsumed_counts(self) -> dict[int, int]:
        """Return, for each sender, the number of its messages that wait for a later round. They are its newest ones,
        kept as frames in a checkpoint between rounds. Repairs are asked for again instead."""
        counts: dict[int, int] = {}
        for (_, _, sender), message in self._messages.items():
            if message.kind is not MessageKind.REPAIR:
                counts[sender] = counts.get(sender, 0) + 1
        return counts
