"""Late neighbours: rounds that go on without them, and the handling of their messages afterwards.

With `late = "skip"` a round does not wait for everybody. The message of a neighbour that was missed still counts: its
sender has given weight away, or advanced the replica that its receivers keep. A missed message is therefore owed, and
applied between two later rounds, in the order of its sender's rounds. Where everybody is waited for, nothing is kept
here.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from peer.errors import LocalProtocolError
from peer.gossip.session_state import LateState
from peer.wire.message import Message, MessageKind


@dataclass(frozen=True, kw_only=True)
class LatePolicy:
    """Going on without a late neighbour (`late = "skip"`)."""

    after_s: float
    """Seconds after the own message at which a neighbour counts as late; with `adaptive`, the most."""
    max_skipped: int
    """Rounds in a row that a neighbour may be missed before it is waited for."""
    adaptive: bool = False
    """Whether each neighbour has a deadline of its own, from how late it was so far (`Deadlines`)."""
    silent_after_s: float = math.inf
    """With push-sum: seconds that a receiver may confirm nothing before it is left out (`Silence`)."""


class LateNeighbors:
    """Messages owed to one peer: those still missing, those that came late, and the wait for them."""

    def __init__(self, policy: LatePolicy | None) -> None:
        """`policy`: None if everybody is waited for."""
        self._policy = policy
        self.deadlines = None
        """Deadline of each neighbour; None if everybody is waited for."""
        if policy is not None:
            self.deadlines = Deadlines(limit_s=policy.after_s, adaptive=policy.adaptive)
        self._missed: set[tuple[int, int]] = set()
        self._arrived: list[Message] = []
        """Late messages that came, to be applied between rounds."""
        self._skips_in_a_row: dict[int, int] = {}
        self._began_at: dict[int, float] = {}
        """Round → time of its own message, for the round under way and rounds whose messages are owed."""
        self._opened_at = 0.0

    # Messages.

    @property
    def waits_for_all(self) -> bool:
        """Whether no round goes on without anybody, and nothing is left of rounds that did."""
        return self._policy is None and not self.has_any

    @property
    def is_owed(self) -> bool:
        """Whether a message that a round went on without has not come yet."""
        return bool(self._missed)

    def owes(self, round_: int, sender: int) -> bool:
        """Whether the message of a sender of this very round is owed."""
        return (round_, sender) in self._missed

    def first_owed(self, sender: int) -> int | None:
        """Return the first round of which a sender owes its message; None if it owes nothing."""
        if not self._missed:
            return None
        return min((round_ for round_, missed in self._missed if missed == sender), default=None)

    def settle(self, message: Message) -> None:
        """Take a message that was owed."""
        self._missed.discard((message.round, message.sender))
        self.close(message.round)
        # A sender that left this peer out gave it nothing: the debt is settled without anything to apply.
        if message.kind is not MessageKind.NOTHING:
            self._arrived.append(message)

    @property
    def has_any(self) -> bool:
        """Whether a message is owed, or has come late and waits to be applied."""
        return bool(self._missed or self._arrived)

    def is_behind(self, sender: int) -> bool:
        """Whether a message of a sender may not be applied in its own round, since an earlier one was not applied
        yet: a replica takes its differences in order."""
        owing = any(missed == sender for _, missed in self._missed)
        return owing or any(message.sender == sender for message in self._arrived)

    def postpone(self, message: Message) -> None:
        """Keep a message that came in time, of a sender that is behind, until those before it are applied."""
        self._arrived.append(message)

    def has_postponed(self, round_: int, sender: int) -> bool:
        """Whether a sender's message of this round is here and waits for those before it."""
        return any((message.round, message.sender) == (round_, sender) for message in self._arrived)

    def take_arrived(self) -> list[Message]:
        """Return the late messages to apply now, in the order of their rounds, then of their senders."""
        arrived = [message for message in self._arrived if message.kind is not MessageKind.NOTHING]
        self._arrived.clear()
        return sorted(arrived, key=lambda message: (message.round, message.sender))

    def heard(self, sender: int) -> None:
        """Note that a round had its sender's message in time."""
        self._skips_in_a_row.pop(sender, None)

    def skip(self, round_: int, sender: int) -> None:
        """Note that a round goes on without a sender's message; it is owed unless it is here already."""
        if not self.has_postponed(round_, sender):
            self._missed.add((round_, sender))
        self._skips_in_a_row[sender] = self._skips_in_a_row.get(sender, 0) + 1

    # Time.

    def open(self, round_: int, phase: int, awaits: Collection[int], now: float) -> float | None:
        """Note that an exchange begins; return when to look for missing messages."""
        self._opened_at = now
        if self.deadlines is None:
            return None
        if phase == 0:
            self._began_at[round_] = now
        return max((self._deadline(neighbor) for neighbor in awaits), default=None)

    def close(self, round_: int) -> None:
        """Forget when a round that is over began, unless a message of it is owed: its lateness is not known yet."""
        if all(owed != round_ for owed, _ in self._missed):
            self._began_at.pop(round_, None)

    def note_lateness(self, message: Message, now: float) -> None:
        """Let the deadlines know when a new message came. Later phases and repairs do not count: they answer another
        peer's message, so that their lateness says nothing of their sender."""
        if self.deadlines is None or message.phase or message.kind is MessageKind.REPAIR:
            return
        self.deadlines.heard(message.sender, now - self._began_at.get(message.round, now))

    def go_on_at(self, absent: Collection[int], now: float) -> float | None:
        """Return when a round may go on without these senders; None if it has to wait for one of them."""
        if self._policy is None or any(
            self._skips_in_a_row.get(sender, 0) >= self._policy.max_skipped for sender in absent
        ):
            return None
        # A sender that owes an earlier round will not be in time for this one: waiting would only slow everybody.
        owing = {sender for _, sender in self._missed}
        return max((self._deadline(sender) for sender in absent if sender not in owing), default=now)

    def _deadline(self, neighbor: int) -> float:
        assert self.deadlines is not None
        return self._opened_at + self.deadlines.after_s(neighbor)

    # State.

    def state(self) -> LateState:
        """Return the state that must survive a crash. Raises LocalProtocolError while late messages wait to be
        applied."""
        if self._arrived:
            raise LocalProtocolError("late messages are applied before the state is taken")
        lateness = {} if self.deadlines is None else self.deadlines.state()
        return LateState(
            missed=frozenset(self._missed),
            skips_in_a_row=dict(self._skips_in_a_row),
            lateness=lateness,
            began_at=dict(self._began_at),
        )

    def restore(self, state: LateState) -> None:
        """Restore a result of `state`."""
        self._missed = set(state.missed)
        self._skips_in_a_row = dict(state.skips_in_a_row)
        self.restore_lateness(state)

    def restore_lateness(self, state: LateState) -> None:
        """Restore the times of a `state` alone. Messages that were waiting when it was taken are received once more
        after a restart, at a time that says nothing of their lateness."""
        if self.deadlines is not None:
            self.deadlines.restore(state.lateness)
        self._began_at = dict(state.began_at)


WINDOW = 32
ENOUGH = 8
"""Rounds to be heard before a deadline replaces the limit: a median of fewer says little."""
SLACK_S = 0.05
"""A pause of the scheduler or the garbage collector is no lateness."""


class Deadlines:
    """Past lateness of each in-neighbour. The time is always an argument or a difference.

    The lateness of a neighbour in a round is the time from our own message to its message, 0 if its message came first.
    Links and devices differ: one limit for all is too long for most of them and too short for some. The deadline of a
    neighbour is `median + 6 × 1.4826 × MAD` of its last 32 latenesses plus a small slack, and never more than the limit
    of the configuration. (MAD is the median absolute deviation; times 1.4826 it estimates σ, and six of these are rare
    even with heavy tails.)

    Messages that came after their round had gone on count with their lateness, too. The deadline of a link that became
    slower thus grows until it is met again or reaches the limit.
    """

    def __init__(self, *, limit_s: float, adaptive: bool) -> None:
        """`limit_s`: the longest deadline, and that of a neighbour whose lateness is not known well."""
        self.limit_s, self.adaptive = limit_s, adaptive
        self._lateness: dict[int, deque[float]] = {}
        self._after_s: dict[int, float] = {}

    def heard(self, neighbor: int, lateness_s: float) -> None:
        """Record that a round's message came `lateness_s` after our own."""
        window = self._lateness.setdefault(neighbor, deque(maxlen=WINDOW))
        window.append(max(0.0, lateness_s))
        self._after_s.pop(neighbor, None)

    def after_s(self, neighbor: int) -> float:
        """Return the seconds after our own message at which this neighbour counts as late."""
        window = self._lateness.get(neighbor, ())
        if not self.adaptive or len(window) < ENOUGH:
            return self.limit_s
        if neighbor not in self._after_s:
            median = statistics.median(window)
            deviation = statistics.median(abs(each - median) for each in window)
            self._after_s[neighbor] = min(self.limit_s, median + 6 * 1.4826 * deviation + SLACK_S)
        return self._after_s[neighbor]

    def state(self) -> dict[int, list[float]]:
        """Return the latenesses heard of each neighbour: a round that is repeated has to decide alike."""
        return {neighbor: list(window) for neighbor, window in self._lateness.items()}

    def restore(self, lateness: Mapping[int, Sequence[float]]) -> None:
        """Restore a result of `state`."""
        self._after_s.clear()
        self._lateness = {neighbor: deque(window, maxlen=WINDOW) for neighbor, window in lateness.items()}

    def lateness_s(self, neighbor: int) -> float | None:
        """Return the median lateness of a neighbour; None before its first message."""
        window = self._lateness.get(neighbor)
        return statistics.median(window) if window else None
