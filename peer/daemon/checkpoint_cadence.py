"""When a peer takes a checkpoint: regularly, after the last round, on request, and before recovery takes too long."""

from __future__ import annotations

from peer.config.options import StateOptions


class CheckpointCadence:
    """Decides after each round. It knows no file."""

    def __init__(self, options: StateOptions, rounds: int) -> None:
        """`rounds`: how many the run has."""
        self.snapshot_wanted = False
        """Whether the operator asked for a checkpoint that is not taken yet."""
        self._options, self._rounds = options, rounds
        self._to_replay_s = 0.0

    def add_round(self, seconds: float) -> None:
        """Count a round that is in the journal; repeating it would take about so many seconds."""
        self._to_replay_s += seconds

    def saved(self) -> None:
        """Take note that a checkpoint was taken: nothing is left to repeat."""
        self._to_replay_s, self.snapshot_wanted = 0.0, False

    def is_due(self, done: int, journal_bytes: int) -> bool:
        """Return whether a checkpoint is to be taken after `done` rounds."""
        options, every = self._options, self._options.checkpoint_every_rounds
        return (
            done == self._rounds
            or bool(every and done % every == 0)
            or self.snapshot_wanted
            or journal_bytes > options.journal_mbytes << 20
            or self._to_replay_s > options.recover_within_s
        )

    def last_common_round(self, done: int) -> int:
        """Return the last round up to `done` of which every peer has a checkpoint: where a rollback goes back to."""
        return done - done % (self._options.checkpoint_every_rounds or self._rounds)
