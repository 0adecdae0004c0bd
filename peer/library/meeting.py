"""The handover between the thread of a training script and that of its peer.

The peer asks, one request at a time: train on this model, measure that one, take the last one. The script answers when
it has done so; meanwhile the peer's thread waits. Between its answers the script waits too, unless it trains. The
script's own code therefore runs in its own thread only, and at times that it chose.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from peer.node.local_steps import StepAbandoned

_LOOK_EVERY_S = 1.0
"""Interval at which the peer looks whether the script's thread is still there."""


@dataclass(frozen=True)
class Train:
    """Do the local steps of round `t` from z. The answer is a `ScriptStep` of `loop_steps`."""

    z: npt.NDArray[np.float32]
    t: int
    is_noted: bool = True
    """Whether the answer is to have the script's state when the round began."""
    is_for_state: bool = False
    """Whether no step is wanted: the answer is None once that state was noted."""


@dataclass(frozen=True)
class Apply:
    """Take a step by the mean of all gradients. The answer is the model after it: float32[n]."""

    mean: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Evaluate:
    """Measure the model at z. The answer is an `Evaluation`."""

    z: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Finish:
    """Take z for good: no round follows. The answer is None."""

    z: npt.NDArray[np.float32]
    path: Path | None
    """File for the whole model."""


@dataclass(frozen=True)
class End:
    """The peer is no more."""

    error: BaseException | None = None
    reason: str | None = None
    """Why it stopped before the last round."""
    begin_again: Callable[[], None] | None = None
    """For a peer that was declared lost and may take part again: sets its old state aside. Raises StateError."""


@dataclass(frozen=True)
class Restored:
    """Event: the peer has gone back to where it was, without asking for any step."""


Request: TypeAlias = Train | Apply | Evaluate | Finish


class Meeting:
    """The meeting point of script and peer."""

    def __init__(self, owner: threading.Thread, *, takes_turns: bool = False) -> None:
        """`owner`: the script's thread. `takes_turns`: never let both run at the same time; otherwise the peer goes on
        as soon as it is answered."""
        self.owner = owner
        self._changed = threading.Condition()
        self._takes_turns = takes_turns
        self._request: Request | None = None
        self._answer: tuple[Any] | None = None
        self._events: deque[object] = deque()
        self._script_waits, self._script_is_over, self._abandoned = False, False, False
        self._end: End | None = None

    # Called by the peer.

    def ask(self, request: Request) -> Any:
        """Return the script's answer. Raises StepAbandoned if there is never going to be one."""
        with self._changed:
            self._request, self._answer = request, None
            self._changed.notify_all()
            while self._answer is None:
                if self._abandoned or self._script_is_over or not self.owner.is_alive():
                    if self._takes_turns:
                        # Its error is not known before it has ended.
                        self.wait_for_script()
                    raise StepAbandoned
                self._changed.wait(_LOOK_EVERY_S)
            if self._takes_turns:
                self.wait_for_script()
            (answer,) = self._answer
            self._request = self._answer = None
            return answer

    def wait_for_script(self) -> None:
        """Return when the script waits for a request, or is over."""
        with self._changed:
            while self.owner.is_alive() and not (self._script_waits or self._script_is_over):
                self._changed.wait(_LOOK_EVERY_S)

    def tell(self, event: object) -> None:
        """Let the script know of an event as soon as it looks."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def end(self, end: End) -> None:
        """Say that there are no further requests."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    # Called by the script.

    def next(self) -> Request | End | None:
        """Wait until the peer asks for something that was not answered, and return it; None when there are events."""
        with self._changed:
            self._script_waits = True
            self._changed.notify_all()
            try:
                while not (self._events or self._is_asked or self._end):
                    self._changed.wait()
            finally:
                self._script_waits = False
            if self._events:
                return None
            return self._request if self._is_asked else self._end

    def answer(self, value: Any) -> None:
        """Answer the request that `next` returned."""
        with self._changed:
            self._answer = (value,)
            self._changed.notify_all()

    def events(self) -> list[object]:
        """Return the events since the last call."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
            return events

    def abandon(self) -> None:
        """Answer nothing any more: requests raise StepAbandoned there, and `next` returns the end only."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def script_is_over(self) -> None:
        """Take note that the script's thread does nothing any more."""
        with self._changed:
            self._script_is_over = True
            self._changed.notify_all()

    def wait_for_end(self) -> End:
        """Return how the peer ended, once it has."""
        with self._changed:
            self._script_waits = True
            self._changed.notify_all()
            while self._end is None:
                self._changed.wait()
            self._script_waits = False
            return self._end

    @property
    def is_lost(self) -> bool:
        """Whether the peer was declared lost and may take part again: what the script does until then is in vain."""
        return self._end is not None and self._end.begin_again is not None

    @property
    def _is_asked(self) -> bool:
        return self._request is not None and self._answer is None and not self._abandoned
