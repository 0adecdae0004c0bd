"""The training side of a peer, as the participants see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from peer.compress.payload import FloatArray
from peer.gossip.base import MomentumRule
from peer.state.journal import Stepped


class StepResult(Protocol):
    """Result of the local step of one round."""

    @property
    def gradient(self) -> FloatArray: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def samples(self) -> int: ...


class LocalSteps(Protocol):
    """The training side of a peer (`train.local_step.Trainer`, or rows of a stacked one)."""

    def rate(self, t: int) -> float: ...
    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> StepResult: ...
    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None: ...
    @property
    def needs_displacement(self) -> bool: ...
    def state(self) -> Mapping[str, npt.NDArray[Any]]: ...
    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None: ...


class RecordedSteps(ABC):
    """Local steps whose code is the user's, which alone can compute them again. They go into the journal, unless the
    code goes back to the newest checkpoint after a crash and repeats its steps since."""

    records_all: bool
    """Whether all steps go into the journal."""
    was_recalled = False
    """Whether the last step came from the journal."""
    differs = False
    """Whether a step was repeated to another result than before. All steps go into the journal from then on."""
    all_speak: Callable[[int], bool] = staticmethod(lambda protocol: True)
    """Whether all members speak a version of the protocol, as far as the peer's driver knows. For any thread."""
    is_stopping = False
    """Whether `gradient` is to raise StepAbandoned as soon as it has a state of the user's code that can be saved."""
    is_saved_after: Callable[[int], bool] = staticmethod(lambda done: False)
    """Whether the driver knows, before a round begins, that a checkpoint is to be taken when so many are done."""

    rule_of_mean: MomentumRule | None = None
    """What the user's code makes of the mean of all peers' gradients, where it averages these."""

    @property
    def can_be_saved(self) -> bool:
        """Whether `state` has a state of the user's code; without one, the journal has to do."""
        return True

    @property
    @abstractmethod
    def record_needs(self) -> int:
        """The version of the protocol whose releases can read the last result of `record`."""

    @abstractmethod
    def record(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the result of the last call of `gradient`, for `recall`; where the code is to repeat it, a digest."""

    def recorded(self, round_: int) -> Stepped:
        """Return the record of the last call of `gradient`, that of a round, for the journal."""
        return Stepped(round_, self.record(), self.record_needs)

    @abstractmethod
    def recall(self, record: Mapping[str, npt.NDArray[Any]]) -> None:
        """Let the next call of `gradient` repeat a result that `record` returned before a crash, or compare its result
        with such a digest. Raises StateError if it cannot be that."""


class StepAbandoned(Exception):
    """Raised by `gradient` if the local step will never be finished. It has changed nothing."""
