"""When a peer takes a checkpoint: regularly, after the last round, on request, and before recovery takes too long."""

from __future__ import annotations

import math

from peer.config.options import Config, StateOptions

EVERY_ROUNDS = 100
"""Between checkpoints, where nothing says otherwise."""
_STEPS, _STEPS_OF_LARGE = 16, 256
"""Between checkpoints of a script, which repeats fewer than twice as many after a crash."""
_LARGE = 16_000_000
"""Parameters of a model whose state takes as long to write as many of its steps."""
_LIGHT_BYTES = 1 << 20
"""Frames in the journal that are not worth a checkpoint."""


def regular_interval(config: Config, repeats: int | None) -> int:
    """Return the number of rounds between regular checkpoints; 0: none. `repeats`: number of parameters of a script
    that repeats its steps since the last one; None: nobody does."""
    every = config.state.checkpoint_every_rounds
    if every is not None or repeats is None:
        return EVERY_ROUNDS if every is None else every
    return -(-(_STEPS if repeats <= _LARGE else _STEPS_OF_LARGE) // config.training.local_steps)


def patience_s(config: Config) -> float:
    """Return how long the steps of a script may be that it repeats after a crash, out of reach of the others: an eighth
    of what these wait for it."""
    return min(config.transport.give_up_after_s, config.rounds.lost_after_s or math.inf) / 8.0


class CheckpointCadence:
    """Decides after each round. It knows no file."""

    def __init__(
        self, options: StateOptions, rounds: int, every: int, *, recover_within_s: float | None = None
    ) -> None:
        """`rounds`: how many the run has. `every`: result of `regular_interval`. `recover_within_s`: in the place of
        that of the options."""
        self.snapshot_wanted = False
        """Whether the operator asked for a checkpoint that is not taken yet."""
        self._options, self._rounds, self._every = options, rounds, every
        self._recover_within_s = options.recover_within_s if recover_within_s is None else recover_within_s
        self._to_replay_s = 0.0

    def add_round(self, seconds: float) -> None:
        """Count a round that is in the journal; repeating it would take about so many seconds."""
        self._to_replay_s += seconds

    def saved(self) -> None:
        """Take note that a checkpoint was taken: nothing is left to repeat."""
        self._to_replay_s, self.snapshot_wanted = 0.0, False

    def is_foreseen(self, done: int) -> bool:
        """Return whether it is known before a round that a checkpoint is to be taken when `done` are."""
        return done == self._rounds or bool(self._every and done % self._every == 0) or self.snapshot_wanted

    def is_due(self, done: int, journal_bytes: int, checkpoint_bytes: int | None = None) -> bool:
        """Return whether a checkpoint is to be taken after `done` rounds. `checkpoint_bytes`: size of the last one, if
        the journal is to be no larger."""
        options = self._options
        return (
            self.is_foreseen(done)
            or journal_bytes > options.journal_mbytes << 20
            or (checkpoint_bytes is not None and journal_bytes > max(checkpoint_bytes, _LIGHT_BYTES))
            or self._to_replay_s > self._recover_within_s
        )

    def last_common_round(self, done: int) -> int:
        """Return the last round up to `done` of which every peer has a checkpoint: where a rollback goes back to."""
        return done - done % (self._every or self._rounds)
