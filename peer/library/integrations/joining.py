"""A peer that joins when a framework begins to train, and leaves when the framework ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, Unpack

from torch import nn

from peer.errors import UsageError
from peer.library.events import Evaluated, MemberChange, PeersLate, Rejoined, RoundDone
from peer.library.here import place
from peer.library.kept_state import Keepable
from peer.library.measured import Measure
from peer.library.peer import Peer, join
from peer.library.place import Place
from peer.train.metrics import Metric

log = logging.getLogger("sotto")


class JoinOptions(TypedDict, total=False):
    """Further arguments of `sottovoce.join`."""

    steps: int | None
    private: Sequence[str]
    meaning: Mapping[str, Sequence[str]]
    outer_momentum: float
    outer_learning_rate: float
    overlap: bool
    average: str
    evaluate: Measure | None
    metrics: Sequence[Metric]
    on_round: Callable[[RoundDone], object] | None
    on_late: Callable[[PeersLate], object] | None
    on_member: Callable[[MemberChange], object] | None
    on_evaluation: Callable[[Evaluated], object] | None
    on_rejoin: Callable[[Rejoined], object] | None


class JoiningCallback:
    """Shared parts of the callbacks of all frameworks: the arguments of `join`, and the peer while there is one."""

    def __init__(
        self,
        config: str | os.PathLike[str] | Place | None = None,
        *,
        every: int,
        keep: Sequence[Keepable] = (),
        **options: Unpack[JoinOptions],
    ) -> None:
        """Take the arguments of `sottovoce.join`, without the model. Optimizers and learning-rate schedulers of the
        trainer are kept in any case."""
        # Frameworks change the working directory, and begin to train much later.
        self._config = config if isinstance(config, Place) else place(config)
        self._every, self._keep, self._options = every, keep, options
        self._gradients = options.get("average") == "gradients"
        self._peer: Peer | None = None
        self._is_in = False
        """Whether the peer is in the block that `join` opens."""
        self._replaced_by: list[str] = []
        """Features of the framework that put another model in the place of the run's when training ends."""

    @property
    def peer(self) -> Peer:
        """The peer. Raises UsageError before training has begun."""
        if self._peer is None:
            raise UsageError("there is no peer yet: it joins when the trainer begins to train")
        return self._peer

    def _begin(self, model: nn.Module, keep: Sequence[Keepable], steps: float) -> None:
        """Join. `keep`: what the trainer made. `steps`: how many optimizer steps the trainer is going to take.

        Raises UsageError where these are too few, and the errors of `join`.
        """
        peer = join(model, self._config, every=self._every, keep=[*keep, *self._keep], **self._options)
        peer.__enter__()
        self._peer, self._is_in = peer, True
        if steps < peer.steps_left:
            message = (
                f"the trainer ends after {steps:.0f} optimizer steps, but the run needs {peer.steps_left} more:"
                f" {peer.rounds} rounds of {self._every}; raise the trainer's number of steps or epochs"
            )
            self._end(UsageError(message))
            raise UsageError(message)

    def _end(self, error: BaseException | None) -> None:
        """Leave, as the end of the `with` block of `join` does. Raises the error that ended the peer."""
        if not self._is_in:
            return
        peer, self._is_in = self.peer, False
        if error is None:
            self._tell_replaced()
        peer.__exit__(None if error is None else type(error), error, None)
        if error is None and peer.stopped is not None:
            log.warning("%s left after %d of %d rounds: %s", peer.name, peer.round, peer.rounds, peer.stopped)

    def _tell_replaced(self) -> None:
        """Warn if the run has ended, and the model is another one now. To be called after all that replaces it, too."""
        if self._peer is not None:
            self._peer.tell_replaced(" or ".join(self._replaced_by) or None)
