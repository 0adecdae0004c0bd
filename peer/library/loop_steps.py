"""The training side of a peer whose local steps are done by a user's script.

In place of a gradient stands the displacement Δ = z − w: the script got the model z and has moved it to w. With the
outer learning rate γ = 1 and without outer momentum the algorithm's step x ← x − γ Δ is the script's own. With Nesterov
momentum it is the outer step of DiLoCo: m ← β m + Δ, x ← x − γ (Δ + β m).

A checkpoint holds the state that the script had when its last round began. Where arithmetic is repeatable, that is
noted only in rounds which a checkpoint follows, and is in a file until it is written. A script that is started again
trains that round once more from there, and its new answer is not used: work of the script between an exchange and the
next round, such as the scheduler's step, is thus never lost. The rounds since are in the journal. Where arithmetic is
repeatable, that holds nothing of the script: the replay asks it for its steps again. Elsewhere, and once repeated steps
came out otherwise, it holds each answer and each such state, and the script goes on from the last one.

A script may average gradients instead. What it hands over is the gradient then, and the algorithm does not step by the
mean but hands it back to the script, whose optimizer makes the next x of it. A replay asks for both again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from peer.compress.layout import Layout
from peer.compress.payload import FloatArray
from peer.config.options import TrainingOptions
from peer.errors import StateError
from peer.library.meeting import Apply, Evaluate, Finish, Meeting, Train
from peer.library.parameters import ExchangedParameters, Vector
from peer.node.checkpoint_arrays import Arrays, Group, group, grouped
from peer.node.disk_state import model_digest
from peer.node.local_steps import RecordedSteps, StepAbandoned
from peer.protocol import OLDEST, SNAPSHOT
from peer.records import ACCURACY, Criterion, ModelParts
from peer.state.checkpoints import laid_aside
from peer.state.disk import Disk
from peer.train.evaluation import Evaluation
from peer.train.learning_rate import learning_rate
from peer.train.local_step import LocalStep, Split, make_momentum
from peer.train.momentum import Momentum
from peer.wire.data_meaning import Meaning
from peer.wire.start_model import DIGEST_BYTES, StartModel


@dataclass(frozen=True)
class ScriptStep:
    """A script's work in one round."""

    displacement: Vector
    """Δ = z − w; the gradient where gradients are averaged."""
    loss: float | None
    """Mean over the steps, where the script tells."""
    script: Arrays
    """The script's state beside the model when the round began: optimizer, loader, random numbers. Empty where it was
    not noted."""
    is_behind: bool = False
    """Whether it is rather the state with which the script goes on behind the round, as releases before 0.3 read it."""


@dataclass(frozen=True)
class Repeated:
    """The round that a script trains once more after a restart: its displacement is journaled."""

    t: int
    model: Vector
    """The model that the round began with; where exchanges overlap, the one that the script went on with behind it.
    Where gradients are averaged, their mean."""


class RuleOfScript(Momentum):
    """What the optimizer of a script makes of a mean gradient. Its state is in that of the script."""

    def __init__(self, step_by_mean_: Callable[[FloatArray, Vector], None]) -> None:
        """`step_by_mean_(x, mean)` puts the model after the optimizer's step into x."""
        super().__init__()
        self._step_by_mean_ = step_by_mean_

    @property
    def first_step(self) -> float:
        """0: how far an optimizer moves does not follow from the length of a gradient."""
        return 0.0

    def direction(self, gradient: FloatArray, z: FloatArray) -> FloatArray:
        """Let the script step from z: float[n], and return zeros: z is the model after that."""
        self._step_by_mean_(z, np.array(gradient, np.float32))
        return np.zeros_like(z)


class LoopSteps(RecordedSteps):
    """The local steps of one peer, done elsewhere."""

    needs_displacement = False

    def __init__(
        self,
        parameters: ExchangedParameters,
        meeting: Meeting,
        options: TrainingOptions,
        rounds: int,
        *,
        criteria: tuple[Criterion, ...] = (ACCURACY,),
        overlap: bool = False,
        gradients: bool = False,
        meanings: tuple[Meaning, ...] = (),
    ) -> None:
        """`options`: outer learning rate and momentum. `criteria`: of its evaluations. `overlap`: whether the script
        goes on from z − displacement while the exchange is under way. `gradients`: whether it hands over gradients, and
        its optimizer steps by their mean. `meanings`: what the numbers in its data stand for."""
        self.meeting, self.meanings, self.criteria = meeting, meanings, criteria
        self._t = 0
        self.disk: Disk | None = None
        """Where checkpoints are written, if they are."""
        self._begun: tuple[Arrays, Repeated | None] | None = None
        """`script` and `repeats`; None where they were not noted."""
        self.was_restored = False
        """Whether `script` is that of an earlier process."""
        self._parameters, self._overlap = parameters, overlap
        self._options = options
        self._momentum, self._rounds = make_momentum(options), rounds
        self._start_model = parameters.start_model()
        self._stepped: ScriptStep | None = None
        self._recalled: ScriptStep | None = None
        self._is_under_way = False
        """Whether the script was asked for a step."""
        self._expected: npt.NDArray[Any] | None = None
        """Digest of what the coming step came to before a crash."""
        self._recorded: Arrays = {}
        """The script's state in the journal that is replayed, and in the checkpoint before it."""
        self._written: Arrays = {}
        """The script's state in the record that this process wrote for the round before; empty if it wrote none."""
        self.rule_of_mean = RuleOfScript(self._step_by_mean_) if gradients else None
        # Where gradients are averaged, the script alone makes x, in a replay too.
        self.records_all = not (parameters.are_on_cpu or gradients)
        self.repeatable = parameters.are_on_cpu or not gradients
        self._records_next = False
        """Whether the next step is recorded in any case: what is saved of the script is no beginning of a round."""

    def anew(self, meeting: Meeting) -> LoopSteps:
        """Return the local steps of the same script for a peer that joins the run once more, without outer momentum:
        the model that the run began with stays the same."""
        fresh = copy.copy(self)
        fresh.meeting, fresh._begun, fresh.was_restored = meeting, None, False
        fresh._momentum = make_momentum(self._options)
        fresh._stepped = fresh._recalled = None
        fresh._recorded, fresh._written, fresh._records_next = {}, {}, True
        return fresh

    # The script's state when a round began.

    @property
    def script(self) -> Arrays:
        """The state that the script goes on with."""
        return {} if self._begun is None else self._begun[0]

    @property
    def repeats(self) -> Repeated | None:
        """The round that `script` is the beginning of, once its displacement is known."""
        return None if self._begun is None else self._begun[1]

    @property
    def can_be_saved(self) -> bool:
        """Whether there is such a state."""
        return self._begun is not None

    @property
    def notes_all(self) -> bool:
        """Whether the script's state is needed from the beginning of each round, and not just of those that a
        checkpoint goes back to."""
        return self.records_all or self._overlap or self.rule_of_mean is not None

    def held(self, arrays: dict[str, npt.NDArray[Any]]) -> Arrays:
        """Return flat arrays as they are now, and use them up. Those for a checkpoint alone are in a file until it is
        written: they are larger than the model."""
        if self.disk is None or self.notes_all or self._records_next:
            return {name: np.array(arrays.pop(name)) for name in [*arrays]}
        return cast(Arrays, laid_aside(self.disk, arrays))

    def begin_with(self, capture: Callable[[], dict[str, npt.NDArray[Any]]]) -> Arrays:
        """Return what `capture` returns, the state with which the script begins the round that it was asked for. It is
        the one to be saved from then on, and the one before is let go first: each may be larger than the model."""
        if not self.records_all:
            self._begun, self._written = None, {}
        script = self.held(capture())
        self._begun = script, None
        return script

    # Members of peers in every kind of training.

    @property
    def layout(self) -> Layout:
        return self._parameters.layout

    def initial_vector(self) -> Vector:
        """Return the vector that the script joins with."""
        return self._parameters.vector()

    def start_model(self) -> StartModel:
        """Return digests of the model that the script first joined with."""
        return self._start_model

    def class_counts(self) -> tuple[int, ...]:
        """Return one number: nothing is known of the script's test data."""
        return (0,)

    def rate(self, t: int) -> float:
        """Return the outer learning rate of round t."""
        return learning_rate(self._options, self._rounds, t)

    def gradient(self, z: FloatArray, t: int, rate: float, z_step: float) -> LocalStep:
        """Return the result of the script's steps from z, once they are done. Raises StepAbandoned if they never
        are."""
        recalled, self._recalled = self._recalled, None
        self.was_recalled = recalled is not None and not self._is_under_way
        if recalled is None or self._is_under_way:
            is_behind_then = self._overlap or self.rule_of_mean is not None
            lent = np.array(z, np.float32) if is_behind_then else self._lent(z)
            is_noted = self.notes_all or self._records_next or self.is_stopping or not self.all_speak(SNAPSHOT)
            stepped = self.meeting.ask(Train(lent, t, is_noted or self.is_saved_after(t + 1), self.is_stopping))
            if stepped is None:
                raise StepAbandoned
            self._is_under_way = True
            assert isinstance(stepped, ScriptStep)
            if recalled is not None:
                # A script that repeats earlier steps comes by here, and what it comes to is not used.
                stepped = replace(stepped, displacement=recalled.displacement, loss=recalled.loss)
            elif self._expected is not None and self._expected[0] != model_digest(stepped.displacement):
                self.differs = True
                self.records_all = self.rule_of_mean is None
            self._expected, recalled = None, stepped
        self._stepped = recalled
        self._begun, self._t = (recalled.script, self.repeats) if recalled.script else None, t
        if self.rule_of_mean is not None:
            return LocalStep(recalled.displacement, recalled.loss)
        if recalled.script:
            began = np.subtract(z, recalled.displacement) if self._overlap else z
            again = None if recalled.is_behind else Repeated(t, self.held({"": np.asarray(began, np.float32)})[""])
            self._begun = recalled.script, again
        return LocalStep(self._momentum.direction(recalled.displacement, z), recalled.loss)

    def _lent(self, z: FloatArray) -> Vector:
        """Return a model for the time until the script has answered: not a copy where exchanges change it at the end of
        rounds alone."""
        return np.array(z, np.float32) if self.records_all else np.asarray(z, np.float32)

    def _step_by_mean_(self, x: FloatArray, mean: Vector) -> None:
        """Put the model after the optimizer's step by a mean gradient into x. Raises StepAbandoned if there is never
        going to be one."""
        x[...] = self.meeting.ask(Apply(mean))
        self._begun = self.script, Repeated(self._t, mean)

    def after_round(self, z_before: FloatArray, z_after: FloatArray, rate: float) -> None:
        """Do nothing: the outer momentum follows displacements."""

    def evaluate(self, z: FloatArray, split: Split = "test") -> Evaluation:
        """Return the script's evaluation of the model at z; an empty one if it has none."""
        found: Evaluation = self.meeting.ask(Evaluate(self._lent(z)))
        return found

    def save_model(self, z: FloatArray, path: Path) -> None:
        """Hand the last model to the script, and write it with all that is not exchanged."""
        self.meeting.ask(Finish(self._lent(z), path))

    def model_parts(self) -> ModelParts | None:
        """See `train.model_file.model_parts`; of the model as it is now."""
        return self._parameters.parts()

    # State that survives a crash.

    @property
    def record_needs(self) -> int:
        """The version of the protocol whose releases read the last local step."""
        return OLDEST if self.repeats is None and self.rule_of_mean is None else SNAPSHOT

    def record(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the last local step for the journal; where the script is to repeat it, a digest of it. Parts of the
        script's state that have not changed since the record before it are left out."""
        assert self._stepped is not None
        # The displacement is of no use once the round has begun with it.
        stepped, before, self._stepped = self._stepped, self._written, None
        records = self.records_all or self._records_next or stepped.is_behind
        if self.rule_of_mean is not None or not records:
            self._written = {}
            return {"digest": np.array([model_digest(stepped.displacement)], np.uint64)}
        self._written, self._records_next = stepped.script, stepped.is_behind
        loss = np.array([np.nan if stepped.loss is None else stepped.loss])
        step = {"displacement": stepped.displacement, "loss": loss}
        if stepped.is_behind:
            return grouped(step=step, script=stepped.script)
        same = [name for name, array in stepped.script.items() if name in before and _are_equal(array, before[name])]
        news = {name: array for name, array in stepped.script.items() if name not in same}
        return grouped(step=step, script=news, start={"same": np.frombuffer("\n".join(same).encode(), np.uint8)})

    def recall(self, record: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take a step from the journal as the next one, or as what it is to come to."""
        if record.keys() == {"digest"}:
            self._expected = record["digest"]
            return
        step, script, start = group(record, "step"), group(record, "script"), group(record, "start")
        if step.keys() != {"displacement", "loss"} or step["displacement"].shape != (self.layout.size,):
            raise StateError("the journal holds a local step of another model; use a new state folder")
        if start:
            same = start["same"].tobytes().decode().splitlines()
            if not self._recorded.keys() >= {*same}:
                raise StateError("the journal holds a local step that refers to one before it, which is not there")
            script |= {name: self._recorded[name] for name in same}
        loss, self._recorded, self._records_next = float(step["loss"][0]), script, not start
        loss_or_none = None if np.isnan(loss) else loss
        self._recalled = ScriptStep(step["displacement"], loss_or_none, script, is_behind=not start)
        self.was_restored = True

    def state(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the outer momentum, and the state with which the script goes on."""
        model = self._start_model
        # Earlier releases neither wrote nor read any but the first.
        parts = {
            "digest": model.whole.encode(),
            "parameters": model.digest + model.parameters.entries,
            "buffers": model.buffers.entries,
        }
        groups: dict[str, Arrays] = {"start": {name: np.frombuffer(value, np.uint8) for name, value in parts.items()}}
        if self.records_all:
            groups["records"] = {"all": np.ones(1, bool)}
        if self.repeats is not None:
            groups["repeats"] = {"round": np.array([self.repeats.t]), "model": self.repeats.model}
        return grouped(momentum=self._momentum.state(), script=self.script, **groups)

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a result of `state`."""
        momentum, repeats = group(state, "momentum"), group(state, "repeats")
        for name, vector in (("outer momentum", momentum.get("m")), ("the repeated round", repeats.get("model"))):
            if vector is not None and vector.size != self.layout.size:
                raise ValueError(f"{name} has {vector.size} numbers, expected {self.layout.size}")
        self._momentum.restore(momentum)
        self._restore_start(group(state, "start"))
        again = Repeated(int(repeats["round"][0]), repeats["model"]) if repeats else None
        self._begun, self._records_next, self.was_restored = (Group(state, "script"), again), again is None, True
        self._recorded, self.records_all = self.script, self.records_all or bool(group(state, "records"))

    def _restore_start(self, start: Arrays) -> None:
        parts = {name: value.tobytes() for name, value in start.items()}
        whole = parts["digest"].decode()
        if "parameters" in parts:
            told, now = parts["parameters"], self._start_model
            self._start_model = replace(
                now,
                whole=whole,
                digest=told[:DIGEST_BYTES],
                parameters=replace(now.parameters, entries=told[DIGEST_BYTES:]),
                buffers=replace(now.buffers, entries=parts["buffers"]),
            )
        elif whole != self._start_model.whole:
            # A state of release 0.2, of a script that begins with another model by now.
            self._start_model = StartModel(whole)


def _are_equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two arrays of bytes are equal. A change of an optimizer's state mostly shows at its beginning."""
    return one.size == other.size and np.array_equal(one[:64], other[:64]) and np.array_equal(one, other)
