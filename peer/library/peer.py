"""A peer in a training script: what a script calls, and what comes of it in the script's thread."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from peer.config.options import Config, TrainingOptions
from peer.errors import DivergenceError, StateError, UsageError
from peer.library.events import Evaluated, MemberChange, PeersLate, Rejoined, RoundDone
from peer.library.here import SIMULATED, is_alone, place
from peer.library.kept_state import Keepable, Kept, LooseValues, digest, pack, unpack
from peer.library.loop_steps import LoopSteps, Repeated, ScriptStep
from peer.library.measured import Measure, Measures
from peer.library.meeting import Apply, End, Evaluate, Finish, Restored, Train
from peer.library.parameters import ExchangedParameters, Vector, factors_apart
from peer.library.place import Place, derive_config
from peer.library.random_state import RandomNumbers, draw_apart
from peer.library.weight_copies import WeightCopies
from peer.node.checkpoint_arrays import Arrays, group, grouped
from peer.protocol import SNAPSHOT
from peer.run.plan import algorithm_spec
from peer.train.evaluation import Evaluation
from peer.train.metrics import Metric
from peer.train.model_file import not_in_files, save_model
from peer.train.moving import buffers_kept
from peer.wire.data_meaning import meanings_of

log = logging.getLogger("sotto")

Batch = TypeVar("Batch")

_MOST_ACCUMULATED = 1000
"""Batches that may pass without a step: scripts accumulate gradients, over the end of a pass too."""

_UNHEARD = 20
"""Steps of an optimizer after which a script that counts none has forgotten to."""
_COUNTS = {False: "peer.step() after optimizer.step()", True: "peer.average_gradients() before optimizer.step()"}
"""The line of a loop that counts its steps, by whether gradients are averaged."""

_joined_models: set[int] = set()
"""Identities of the models that are in a `with` block of this process."""


class Peer:
    """One peer of a run, in a training script. `join` makes it; it trains inside its `with` block."""

    def __init__(
        self,
        model: nn.Module,
        where: Place,
        *,
        every: int,
        steps: int | None,
        keep: Sequence[Keepable],
        private: Sequence[str],
        meaning: Mapping[str, Sequence[str]],
        outer_momentum: float,
        outer_learning_rate: float,
        overlap: bool,
        average: str,
        evaluate: Measure | None,
        metrics: Sequence[Metric],
        callbacks: dict[type, Callable[[Any], object]],
    ) -> None:
        _check_numbers(every, steps, outer_momentum, outer_learning_rate, overlap)
        outer: dict[str, Any] = {"outer_momentum": outer_momentum, "outer_learning_rate": outer_learning_rate}
        self._gradients = _averages_gradients(average, every, keep, {"overlap": overlap, "private": private, **outer})
        if steps is None and is_alone(where):
            raise UsageError("nothing says how long to train alone; give join the number of steps, steps=N")
        for event, call in ((None, evaluate), *callbacks.items()):
            if call is not None and not callable(call):
                name = "evaluate" if event is None else f"the callback for {event.__name__}"
                raise UsageError(f"{name} is of type {type(call).__name__}; give a function, without calling it")
        self._parameters, self._kept = ExchangedParameters(model, private), Kept(keep)
        try:
            self._meanings = meanings_of(meaning)
        except (ValueError, TypeError, AttributeError):
            raise UsageError(
                f"meaning is {meaning!r}; give a list of names for each of a few kinds, such as "
                "meaning={'classes': ['cat', 'dog']}"
            ) from None
        for number, each in enumerate(keep):
            shared = self._parameters.shares_with(each) if isinstance(each, nn.Module) else None
            if shared is not None:
                raise UsageError(
                    f"keep[{number}] ({type(each).__name__}) holds {shared} of the model that joins, which is saved in"
                    " any case; leave it out of keep"
                )
        self._loose = LooseValues({"the model": self._parameters.model, **self._kept.modules()})
        self._copies = WeightCopies(keep, self._parameters.exchanged, every)
        without = not_in_files(self._parameters.model)
        if without:
            log.warning(
                "%s of the model is no tensor: it survives a crash, but saved models are without it", ", ".join(without)
            )
        apart = factors_apart(self._parameters.model)
        if apart is not None:
            warnings.warn(
                f"{apart} trains both factors of LoRA: averaging A and B apart does not average B A, and sends twice"
                " the bytes; call sottovoce.lora.freeze_a(model) before the optimizer is made",
                stacklevel=3,
            )
        self._place, self._every, self._overlap = where, every, overlap
        self._evaluate, self._measures, self._callbacks = evaluate, Measures(metrics), callbacks
        outer["outer_momentum"] = None if self._gradients else outer_momentum

        def derive(config: Config) -> Config:
            return derive_config(config, every=every, steps=steps, **outer)

        self._config = derive(where.config)
        self._host = where.host(derive)
        self._loop_steps: LoopSteps
        self._process = os.getpid()
        self._steps = 0
        self._steps_ahead: int | None = None
        """Steps beyond `every` for each round of the run: fewer than none where this peer was no member in all of them.
        None until the peer asks for the first round."""
        self._losses: list[torch.Tensor | float] = []
        self._losses_not_finite = 0
        self._moves = False
        """Whether the script has moved a parameter."""
        self._frozen_move = False
        """Whether it has moved a frozen one."""
        self._base: Vector | None = None
        """The parameters when the steps of this round began; None outside of the block."""
        self._request: Train | None = None
        """The round that the peer waits for; None while it exchanges."""
        self._repeats: Repeated | None = None
        """The round that is trained once more after a restart, until its exchange."""
        self._start: Arrays = {}
        """The script's whole state beside the model when the round began; empty where it was not noted."""
        self._followers: dict[str, int] = {}
        """Digests of what follows the optimizers, as it was then; empty where the loop is to come by its head."""
        self._at_entry = 0
        """Digest of the state with which the script went into the block."""
        self._awaits_step = False
        """Whether no step was counted since the round began."""
        self._mean: Vector | None = None
        """The mean gradient that the peer hands over."""
        self._is_stepping = False
        """Whether the script has the mean gradient of a step, and has not come to the head of its loop since."""
        self._catches_up = False
        """Whether it takes a step once more that the peer knows the model after."""
        self._head: object = None
        """Position at which the loop reads `done` first: a script that is started again begins there."""
        self._passes_head = False
        """Whether it has done so since the exchange before."""
        self._has_exchanged = False
        """Whether this process has; until then, the round began with the block."""
        self._mixes = False
        """Whether a model that is written from now on is that of the script, mixed."""
        self._hooks: list[RemovableHandle] = []
        self._is_heard, self._unheard = False, 0
        """Steps of the first optimizer in `keep` before the first call that counts one."""
        self._said_order = False
        self._last_round = 0
        self._has_rejoined = False
        """Whether the peer takes part again, and the script has yet to hear of it."""
        self._random = RandomNumbers({each.device for each in model.parameters()})
        self._is_untried = False
        """Whether `evaluate` was never called in this run."""
        self._passes = 0
        """Passes over the data that `until_done` has ended."""
        self._loops = 0
        """Calls of `until_done`."""
        self._resumed_random: dict[str, Any] | None = None
        """State from which a resumed script's random numbers continue, until its first step."""
        self._state: Literal["new", "training", "stopped", "completed", "closed"] = "new"
        self._stop_reason: str | None = None
        self._saved_as = "the state folder of a real run"
        """Place of the run's final model."""
        self._is_replacement_told = False
        self._round = 0
        self._is_torn = False
        """Whether a call of `step` did not come to its end: what it was to hand over may be on its way, or not."""

    # -- what is known of it -------------------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """Number of this peer, from 0."""
        return self._place.index

    @property
    def num_peers(self) -> int:
        """Number of listed peers."""
        return self._place.num_peers

    @property
    def name(self) -> str:
        """Name of this peer."""
        return self._place.name

    @property
    def steps(self) -> int:
        """Number of calls of `step` since the run began, earlier processes included: a position in the data that
        survives a crash."""
        return self._steps

    @property
    def round(self) -> int:
        """Rounds that the model of this peer has been through."""
        return self._round

    @property
    def rounds(self) -> int:
        """Rounds of the whole run."""
        return self._config.run.rounds

    @property
    def steps_left(self) -> int:
        """Number of further calls of `step` that the run needs."""
        return max(0, (self._last_round + 1) * self._every - self._steps_in_run)

    @property
    def _steps_in_run(self) -> int:
        """Steps that a peer has behind it which was a member in all rounds up to this one."""
        return self._steps - (self._steps_ahead or 0)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to train: the run is complete, or this peer was stopped.

        Read it at the head of the loop. A script that is started again goes on there, from its state when it read this
        first since the exchange.
        """
        caller = sys._getframe(1)
        self._pass_by((caller.f_code, caller.f_lineno))
        return self._is_done

    @property
    def _is_done(self) -> bool:
        return self._state in ("completed", "stopped", "closed")

    @property
    def losses_not_finite(self) -> int:
        """Number of losses given to `step` since this process began that are not finite, in rounds that have finite
        ones too. A round without any ends the run as diverged."""
        return self._losses_not_finite

    @property
    def stopped(self) -> str | None:
        """Why this peer ended before the last round; None if it did not. The next start of the script goes on."""
        return self._stop_reason

    # -- the block -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Peer:
        """Join: go back to where an earlier process of this script was, or begin with the model as it is."""
        if self._state != "new":
            raise UsageError("this peer was in a with block already; call sottovoce.join again for another one")
        if id(self._parameters.model) in _joined_models:
            raise UsageError("this model is in the with block of another peer; each peer needs a model of its own")
        try:
            self._enter()
        except BaseException:
            # An interrupt may come anywhere, and the same process may join again.
            self._leave("the script could not begin")
            raise
        return self

    def _enter(self) -> None:
        draw_apart(self._config.run.seed, self.index)
        with self._random.kept():
            self._meeting = self._host.meet()
            steps = self._loop_steps = LoopSteps(
                self._parameters,
                self._meeting,
                self._outer_options(),
                self.rounds,
                criteria=self._measures.criteria,
                overlap=self._overlap,
                gradients=self._gradients,
                meanings=self._meanings,
            )
            self._last_round = self._host.open(steps, self._config)
            steps.begin_with(lambda: self._script_state(self._parameters.vector() if self._keeps_model else None))
            _joined_models.add(id(self._parameters.model))
            self._host.start()
            self._await_restored()
            model = self._resume(steps.script) if steps.was_restored else None
            self._repeats = steps.repeats if steps.was_restored else None
            self._is_untried = self._steps == 0 and (self.index == 0 or SIMULATED.get() is None)
            self._state = "training"
            if self._repeats is None:
                self._await_model(model if self._keeps_model else None)
                if model is not None and not self._keeps_model and steps is self._loop_steps:
                    self._parameters.write(model)  # It had moved the one that the round began with.
            else:
                self._catches_up = self._gradients
                self._round, self._steps_ahead = self._repeats.t, self._steps - self._repeats.t * self._every
                self._begin_round(np.asarray(self._repeats.model) if model is None else model)
        if self._resumed_random is not None:
            self._random.set(self._resumed_random)
        if self._state == "training":
            # The loaded state may be in another order now.
            if steps.was_restored:
                self._note_beginning(self._moved_model)
            else:
                self._start = steps.script
            self._at_entry = digest(self._script_state(self._moved_model()))
            self._mixes = True
            self._hooks = [each.register_step_pre_hook(self._look_at_order) for each in self._kept.optimizers()]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave. Before the last round, the peer stops and its state is kept: the next start of the script goes on."""
        if os.getpid() != self._process:
            return
        if self._is_stepping and error is None:
            try:
                self._pass_by(None)  # It has broken out of its loop behind a step.
            except BaseException:
                self._leave("the script could not end its step")
                raise
        if self._state == "completed":
            try:
                self.tell_replaced()
                # It has all it needs of the script; what is left are goodbyes.
                end = self._meeting.wait_for_end()
            finally:
                self._leave("the run is complete")
            if end.error is not None and error is None:
                raise end.error
            return
        self._leave("the script left the with block" if error is None else f"the script raised {type(error).__name__}")

    def _leave(self, reason: str) -> None:
        self._host.stop(reason)
        for hook in self._hooks:
            hook.remove()
        _joined_models.discard(id(self._parameters.model))
        if self._state == "training":
            self._stop_reason = reason
        self._state = "closed"

    # -- training ------------------------------------------------------------------------------------------------------

    def step(self, loss: torch.Tensor | float | None = None) -> bool:
        """Count one gradient step of the script; after every so many, exchange and mix. To be called after
        `optimizer.step()`.

        A call that exchanges waits for the neighbours, and writes the mixed model into the parameters; with `overlap`
        it hands over the steps and takes the model of the exchange before. If the others have declared this peer lost,
        any call drops the steps since the last exchange, waits until the peer takes part again, and writes the model
        that it gets into the parameters. Returns whether the parameters were written. `loss` is only reported. Raises
        UsageError for a model that has changed, and otherwise the error that ended the peer.
        """
        self._check_step("step")
        if self._gradients:
            raise UsageError(
                "this run averages gradients: call peer.average_gradients(loss) before optimizer.step(), and no step()"
            )
        number = None if loss is None else _number(loss)
        self._is_torn = self._is_heard = True
        is_written = self._count_step(number)
        self._is_torn = False
        return is_written

    def average_gradients(self, loss: torch.Tensor | float | None = None, *, weight: float = 1.0) -> None:
        """Replace the gradients of the exchanged parameters by their mean over all devices, and count a step. To be
        called between `backward()` and `optimizer.step()`, with `join(…, average="gradients")`, in a loop that has its
        head at `until_done` or `done`: coming there again ends the step.

        What changes gradients comes after it, such as clipping. A parameter without a gradient has zeros, here and
        afterwards. `loss` is only reported. `weight`: factor of this device's gradients, 1 on average over the devices
        and steps: the tokens of its batch, divided by a number that is the same on all. Raises UsageError for a
        model that has changed and a loop without a head, and otherwise the error that ended the peer, also for a
        gradient that is not finite.
        """
        self._check_step("average_gradients")
        self._check_average(weight)
        if loss is not None:
            self._losses.append(_number(loss))
        self._parameters.check()
        if self._base is None or not self._parameters.is_at(self._base):
            raise UsageError(
                "the model has changed since the head of the loop; call average_gradients() before optimizer.step(),"
                " and read peer.done behind that"
            )
        gradients = self._finite(self._parameters.gradients, self._steps_in_run + 1)
        gradients *= np.float32(weight)
        self._is_torn = self._is_heard = True
        mean = self._mean_of(gradients, self._mean_loss())
        if mean is not None:
            self._parameters.write_gradients(mean)
            self._is_stepping = True
        self._is_torn = False

    def _mean_of(self, gradients: Vector, loss: float | None) -> Vector | None:
        """Return the mean of all devices' gradients; None if the peer was stopped."""
        self._resumed_random, self._awaits_step = None, False
        repeats, self._repeats = self._repeats, None
        if repeats is not None:
            return repeats.model
        self._request = None
        self._note_beginning(self._parameters.vector)
        self._meeting.answer(ScriptStep(gradients, loss, self._start))
        self._await_request()
        mean, self._mean = self._mean, None
        return mean

    def _check_average(self, weight: float) -> None:
        if not self._gradients:
            raise UsageError('average_gradients() belongs to sottovoce.join(…, every=1, average="gradients")')
        if self._is_stepping:
            raise UsageError(
                "average_gradients() was called again before the loop came to its head; loop with peer.until_done(…)"
                " or `while not peer.done`, and call it once for each optimizer step"
            )
        if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0.0):
            raise UsageError(f"weight is {weight!r}; it is a number, 0 or more")

    def _end_step(self) -> None:
        """Hand over the model that the optimizer has made of the mean gradient, and wait until the next step is due."""
        assert self._base is not None
        self._is_stepping, self._steps = False, self._steps + 1
        self._look_at(has_moved=not self._parameters.is_at(self._base))
        if not self._catches_up:
            self._meeting.answer(self._parameters.vector())
        self._catches_up = False
        self._await_request()
        if self._request is not None:
            self._begin_round(self._request.z)

    def _count_step(self, loss: torch.Tensor | float | None) -> bool:
        self._steps, self._resumed_random = self._steps + 1, None
        if self._awaits_step:
            self._awaits_step = False
            self._note_beginning(self._parameters.vector)
        if loss is not None:
            self._losses.append(loss)
        self._parameters.check_frozen()
        if not self._moves:
            self._copies.look()
        if self._meeting.is_lost:
            self._parameters.check()
            self._await_model(None)
            return True
        if self._steps_in_run % self._every:
            self._tell_events()
            return False
        self._parameters.check()
        self._exchange()
        return True

    def until_done(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches, pass after pass, until there is nothing left to train.

        A loader that is in `keep` goes on where it was; any other begins anew after a restart. Its data set and sampler
        are told the number of each pass, where they have `set_epoch`.
        """
        self._check_call("until_done")
        self._try_evaluation()
        self._loops += 1
        if self._is_done and self._loops == 2:
            log.warning("until_done yields nothing more: it takes the place of the loop over epochs as well")
        unstepped = 0
        while not self._is_done:
            _set_epoch(batches, self._passes)
            iterator, before, is_empty = iter(batches), self._steps, True
            resumed, self._resumed_random = self._resumed_random, None
            if not self._steps and batches not in self._kept:
                # It draws its seed for the first time, as it did then. One that is kept had done so for its state.
                resumed = None
            if resumed is not None:
                # A loader draws a seed when it begins; the script that went on without a crash did not.
                self._random.set(resumed)
            for batch in iterator:
                is_empty, steps = False, self._steps
                yield batch
                self._pass_by(Peer.until_done)
                if self._is_done:
                    return
                unstepped = unstepped + 1 if self._steps == steps else 0
            self._passes += 1
            if is_empty and resumed is not None:
                # It was saved behind the last batch of a pass. The next pass draws a seed, as it would have then.
                self._random.set(resumed)
            elif is_empty:
                raise UsageError(
                    "the loader gave no batch: it is empty, or an iterator that can be read only once (give the"
                    " loader itself)"
                )
            elif self._steps == before and (unstepped > _MOST_ACCUMULATED or self._unheard >= _UNHEARD):
                raise UsageError(
                    f"{unstepped} batches, and a whole pass, went by and no step was counted, so nothing is exchanged:"
                    f" the loop lacks {_COUNTS[self._gradients]}"
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as it is now to a safetensors file, with frozen parameters and buffers."""
        self.tell_replaced()
        save_model(self._parameters.model, Path(path), metadata={"rounds": str(self._round)})

    def tell_replaced(self, by: str | None = None) -> None:
        """Warn once if the parameters have changed since the run ended, to those of a model that only this device has.
        `by`: what may have done it; None: something in the script."""
        name = None if self._is_replacement_told else self._parameters.replaced()
        if name is None:
            return
        self._is_replacement_told = True
        log.warning(
            "%s has replaced the model that the run ended with (parameter %s): other devices have other models now. The"
            " run's is in %s. Leave the replacement out, or hold a moving average beside the model, in keep",
            by or "something in the script",
            name,
            self._saved_as,
        )

    def _finite(self, read: Callable[[], Vector], step: int) -> Vector:
        """Return what is read of the model after so many steps of the run. The error of one that is not finite says
        where that is, and which loss was not either, if the script tells each."""
        try:
            return read()
        except DivergenceError as error:
            losses = enumerate(map(float, self._losses), step - self._every + 1)
            told = [
                f" the loss was {loss} at step {number} already;" for number, loss in losses if not math.isfinite(loss)
            ]
            already = told[0] if told and len(self._losses) == self._every else ""
            raise DivergenceError(f"round {self._round}, at step {step}:{already} {error}") from None

    def _exchange(self) -> None:
        base = self._base
        assert base is not None
        self._look_at(has_moved=not self._parameters.is_at(base))
        displacement = self._finite(lambda: self._parameters.displacement(base), self._steps_in_run)
        loss = self._mean_loss()
        repeats, self._repeats = self._repeats, None
        if repeats is not None:
            # The result of this round is in the journal. It counts, to the bit, even if the result differs now.
            if self._overlap:
                self._begin_round(repeats.model)
            if not self._overlap or repeats.t >= self._last_round:
                self._await_model(None)
            return
        if self._overlap:
            if self._request is None:
                self._await_request()
            if self._request is None:
                return  # The peer was stopped.
            if self._has_rejoined:
                self._take_model(self._request.z)
                return
            # The model of the round before, moved by what the script has done since.
            model = self._request.z - displacement
        is_last = self._request is not None and self._request.t >= self._last_round
        if is_behind := not self._loop_steps.all_speak(SNAPSHOT):
            self._start = self._loop_steps.held(self._script_state(model if self._overlap else None))
        self._note_beginning(lambda: model if self._overlap else None)
        self._request, script = None, self._start
        if self._overlap:
            self._begin_round(model)
        self._meeting.answer(ScriptStep(displacement, loss, script, is_behind))
        del displacement, script
        if not self._overlap or is_last:
            self._await_model(None)

    def _look_at(self, *, has_moved: bool) -> None:
        """Look at the optimizers' copies of the weights, and warn of what a crash would lose. Warn once where no
        parameter has moved: of an optimizer that holds those of a copy, nothing else tells."""
        self._copies.look()
        self._kept.groups(self._parameters.model)  # Refuses what could not be noted, if only later.
        if has_moved:
            self._copies.look_at_masters()
            self._parameters.masters = self._copies.masters
        for what in self._loose.changed():
            log.warning(
                "%s changes and is no part of its state_dict, so a crash would lose it: hold it in a buffer, or return"
                " it by get_extra_state",
                what,
            )
        if not self._moves and not has_moved:
            log.warning(
                "no parameter of the model has moved in round %d: does the optimizer hold the parameters of another"
                " model, or is its learning rate 0?",
                self._round,
            )
        self._moves = True

    def _mean_loss(self) -> float | None:
        """Return the mean of the finite losses of this round, NaN if there is none among them, None if `step` was given
        none. A script may skip a step whose loss is not finite, and its model is what it was."""
        losses, self._losses = [float(each) for each in self._losses], []
        finite = [each for each in losses if math.isfinite(each)]
        if len(finite) < len(losses) and finite:
            if not self._losses_not_finite:
                log.warning(
                    "%d of the %d losses of round %d are not finite and count for nothing; further ones are counted in"
                    " peer.losses_not_finite",
                    len(losses) - len(finite),
                    len(losses),
                    self._round,
                )
            self._losses_not_finite += len(losses) - len(finite)
        if not losses:
            return None
        return sum(finite) / len(finite) if finite else math.nan

    def _await_model(self, model: Vector | None) -> None:
        """Wait for the next model and write it into the parameters; `model` instead, if the script had gone on from
        that."""
        self._await_request()
        if self._request is not None:
            self._take_model(self._request.z if model is None or self._has_rejoined else model)

    def _take_model(self, model: Vector) -> None:
        self._begin_round(model)
        if self._has_rejoined:
            self._has_rejoined = False
            self._tell(Rejoined(round=self._round))

    def _begin_round(self, model: Vector) -> None:
        """Let the script go on from a model."""
        self._move_to(model)
        self._base, self._awaits_step, self._start, self._followers = model, True, {}, {}
        # A loop that did not pass by its head in the round before may not do so in this one.
        is_expected = self._passes_head or (bool(self._head) and not self._has_exchanged)
        self._has_exchanged = self._mixes
        if self._mixes and not is_expected:
            self._followers = self._kept.followers()
            self._note_beginning(lambda: model if self._keeps_model else None)
        self._passes_head = False

    def _note_beginning(self, model: Callable[[], Vector | None]) -> None:
        """Note the script's state as that with which the round begins, where it is needed and was not noted."""
        request = None if self._overlap or self._repeats is not None else self._request
        if self._start or not (self._loop_steps.notes_all or (request is not None and request.is_noted)):
            return
        if request is None or not (self._passes_head or request.is_for_state):
            # The state before is needed: by an exchange under way, or to repeat its round once more.
            self._start = self._loop_steps.held(self._script_state(model()))
            return
        self._start = self._loop_steps.begin_with(lambda: self._script_state(model()))
        if request.is_for_state and self._awaits_step:
            self._meeting.answer(None)
            self._await_model(None)

    def _move_to(self, model: Vector) -> None:
        """Write a mixed model into the parameters, and move the optimizers' copies of them by as much."""
        if self._mixes and not self._copies.is_empty:
            self._copies.move_(self._parameters.displacements(model))
        self._parameters.write(model)

    def _try_evaluation(self) -> None:
        """Measure once before the first step, when the loop has its peer: a mistake in `evaluate` would otherwise come
        to light after hours, at the first evaluation."""
        if self._is_untried:
            self._is_untried = False
            self._measure(self._parameters.vector())

    def _pass_by(self, place: object) -> None:
        """Note the script's state at the head of its loop: its work behind the exchange is done."""
        is_script = os.getpid() == self._process and self._state == "training"
        if not is_script or threading.current_thread() is not self._meeting.owner:
            return
        if self._gradients:
            # A step of its optimizer is behind it, wherever the loop reads this.
            place = Peer.until_done
        self._try_evaluation()
        if self._is_stepping:
            self._end_step()
        if not self._awaits_step or self._is_done:
            return
        if self._head is None:
            # Where something was drawn or read before, a script that is started again does so before it comes there.
            is_head = place is Peer.until_done or self._at_entry == digest(self._script_state(self._moved_model()))
            self._head = place if is_head else ""
        # Later it may be in the midst of an accumulation.
        if self._has_exchanged and not self._passes_head and place in (self._head, Peer.until_done):
            self._passes_head, self._start = True, {}
            self._note_beginning(self._moved_model)

    def _look_at_order(self, optimizer: object, *_: object) -> None:
        """Warn once, before an optimizer steps, where the loop has no head and does more behind an exchange, and where
        nothing in it counts steps."""
        if not self._is_heard and optimizer is self._kept.optimizers()[0]:
            self._unheard += 1
            if self._unheard == _UNHEARD:
                what = _COUNTS[self._gradients]
                log.warning("%d steps of the optimizer, and none was counted: the loop lacks %s", _UNHEARD, what)
        is_behind = self._has_exchanged and self._awaits_step and not self._passes_head
        if is_behind and self._followers and not self._said_order:
            now = self._kept.followers()
            changed = next((name for name in now if now[name] != self._followers[name]), None)
            if changed is not None:
                self._said_order = True
                log.warning(
                    "%s has changed between peer.step() and the next step of the optimizer: a crash would lose that."
                    " Call peer.step() last in the loop, or loop with peer.until_done(…) or `while not peer.done`",
                    changed,
                )

    def _moved_model(self) -> Vector | None:
        """Return the parameters' values; None if they are the mixed model, which is known."""
        assert self._base is not None
        return None if not self._keeps_model and self._parameters.is_at(self._base) else self._parameters.vector()

    @property
    def _keeps_model(self) -> bool:
        """Whether the script has a model that the peer does not know, or only later."""
        return self._overlap or self._gradients

    def _await_restored(self) -> None:
        """Return when it is known from which state the script goes on. Raises SottoError where the peer cannot."""
        while True:
            match self._meeting.next():
                case None:
                    events = self._meeting.events()
                    for event in events:
                        self._tell(event)
                    if Restored() in events:
                        return
                case Evaluate(z):
                    self._meeting.answer(self._measure(z))
                case End(error) if error is not None:
                    raise error
                case _:
                    return

    def _await_request(self) -> None:
        """Serve the peer's requests until it asks to train, or has ended."""
        while True:
            match self._meeting.next():
                case None:
                    self._tell_events()
                case Train() as request:
                    self._request, self._round = request, request.t
                    if self._steps_ahead is None:
                        self._steps_ahead = self._steps - request.t * self._every
                    return
                case Apply(mean):
                    self._mean = mean
                    return
                case Evaluate(z):
                    self._meeting.answer(self._measure(z))
                case Finish(z, path):
                    self._move_to(z)
                    self._parameters.note_end()
                    if path is not None:
                        self._saved_as = str(path)
                        save_model(self._parameters.model, path, metadata={"rounds": str(self.rounds)})
                    self._meeting.answer(None)
                    # Behind the answer: after an interrupt in between, the peer would wait for that.
                    self._state, self._round = "completed", self.rounds
                    self._tell_events()
                    return
                case End(begin_again=begin_again) if begin_again is not None:
                    self._take_part_again(begin_again)
                case End(error, reason):
                    if error is not None:
                        raise error
                    self._state, self._stop_reason = "stopped", reason
                    return

    def _take_part_again(self, begin_again: Callable[[], None]) -> None:
        """Join the run once more, with all of the script but its model. Raises SottoError."""
        self._request, self._repeats, self._steps_ahead, self._has_rejoined = None, None, None, True
        self._losses.clear()
        with self._random.kept():
            begin_again()
            self._meeting = self._host.meet()
            # The state that the script goes on with is saved before anything else: another crash costs it no more than
            # its model.
            self._loop_steps = self._loop_steps.anew(self._meeting)
            self._last_round = self._host.open(self._loop_steps, self._config)
            self._loop_steps.begin_with(lambda: self._script_state(None))
            self._host.start()

    def _measure(self, z: Vector) -> Evaluation:
        """Return the figures of the model at z, and leave model and random numbers as they were."""
        if self._evaluate is None:
            return Evaluation(np.zeros(1, np.int64), np.zeros(1, np.int64), None)
        model = self._parameters.model
        modes = [(module, module.training) for module in model.modules()]
        before = self._parameters.vector()
        self._parameters.write(z)
        try:
            with self._random.kept(), torch.no_grad(), buffers_kept(model):
                model.eval()
                found = self._evaluate(model)
        finally:
            for module, mode in modes:
                module.training = mode
            self._parameters.write(before)
        return self._measures.of(found)

    def _tell_events(self) -> None:
        for event in self._meeting.events():
            self._tell(event)

    def _tell(self, event: object) -> None:
        callback = self._callbacks.get(type(event))
        if callback is not None:
            callback(event)

    # -- what survives a crash -----------------------------------------------------------------------------------------

    def _script_state(self, model: Vector | None) -> dict[str, npt.NDArray[Any]]:
        """Return all that the script has beside the mixed model, mostly not copies; `model` where it has another
        one."""
        numbers, parameters = self._random.state(), self._parameters
        state = {"steps": self._steps, "random": numbers, "buffers": parameters.buffers(), "model": model}
        # Earlier releases neither wrote nor read this.
        frozen = parameters.frozen.moved()
        if frozen and not self._frozen_move:
            self._frozen_move = True
            log.info(
                "frozen parameters have changed since the script joined (%s, …): they survive a crash, and are not"
                " mixed with those of other devices",
                next(iter(frozen)),
            )
        state |= {"frozen": frozen, "fleeting": parameters.fleeting(), "extra": parameters.extra_states()}
        state |= {"private": parameters.own(), "copies": self._copies.state(), "passes": self._passes}
        state["groups"] = self._kept.groups(parameters.model)
        with self._random.kept():
            kept = self._kept.pack()
        return {**grouped(script=pack(state, "the script's state")), **kept}

    def _outer_options(self) -> TrainingOptions:
        options = self._config.training
        # There the momentum acts on the average of all displacements, in the algorithm.
        of_mean = algorithm_spec(self._config).acts_on_mean(options.momentum)
        return options.model_copy(update={"momentum": "none"}) if of_mean else options

    def _resume(self, script: Arrays) -> Vector | None:
        """Go on from a result of `_script_state`; return the model that it was given."""
        state = unpack(group(script, "script"))
        self._kept.load(script, state.get("groups", {}), self._parameters.model)
        self._parameters.load_buffers(state["buffers"], state.get("fleeting", ()))
        self._parameters.load_extra_states(state.get("extra", {}))
        self._parameters.load_own(state.get("private", {}))
        self._copies.restore(state.get("copies", ()))
        try:
            self._parameters.frozen.restore_(state.get("frozen", {}))
        except ValueError as error:
            raise StateError(f"the state folder is that of another model: {error}") from None
        self._steps, self._resumed_random = state["steps"], state["random"]
        self._passes = state.get("passes", 0)
        model = state["model"]
        return None if model is None else np.asarray(model, np.float32)

    # -- wrong uses ----------------------------------------------------------------------------------------------------

    def _check_step(self, name: str) -> None:
        self._check_call(name)
        if self._is_done:
            ended = f"was stopped ({self._stop_reason})" if self._stop_reason else "is complete"
            raise UsageError(f"the run {ended}, so there is nothing left to step; end the loop when peer.done is true")

    def _check_call(self, name: str) -> None:
        if self._state == "new":
            raise UsageError(f"{name}() belongs inside the with block of sottovoce.join")
        if os.getpid() != self._process:
            raise UsageError(
                f"{name}() was called in a process that was forked after sottovoce.join; only the process that joined"
                " is a peer (workers of a DataLoader may be forked, if they leave the peer alone)"
            )
        if threading.current_thread() is not self._meeting.owner:
            raise UsageError(f"{name}() was called in another thread than the with block")
        if self._state == "closed":
            raise UsageError(f"{name}() was called after the with block; start the script again to go on")
        if self._is_torn:
            raise UsageError(
                f"{name}() was called after a call of step() or average_gradients() that an error or an interrupt"
                " ended; leave the with block, and start the script again to go on"
            )


def join(
    model: nn.Module,
    config: str | os.PathLike[str] | Place | None = None,
    *,
    every: int,
    steps: int | None = None,
    keep: Sequence[Keepable] = (),
    private: Sequence[str] = (),
    meaning: Mapping[str, Sequence[str]] = MappingProxyType({}),
    outer_momentum: float = 0.0,
    outer_learning_rate: float = 1.0,
    overlap: bool = False,
    average: str = "displacements",
    evaluate: Measure | None = None,
    metrics: Sequence[Metric] = (),
    on_round: Callable[[RoundDone], object] | None = None,
    on_late: Callable[[PeersLate], object] | None = None,
    on_member: Callable[[MemberChange], object] | None = None,
    on_evaluation: Callable[[Evaluated], object] | None = None,
    on_rejoin: Callable[[Rejoined], object] | None = None,
) -> Peer:
    """Return a peer that trains `model` together with others, inside its `with` block.

    - `config`: path of the peer's configuration, with `training.task = "loop"`, or a `Place`. Without one it is what
      `sotto` started the script with, or `peer.toml` in the folder that the script was started in. Without any of
      these, the script trains alone, and the log says so.
    - `every`: number of gradient steps in each round, the same on all peers.
    - `steps`: number of gradient steps of the whole run, the same on all peers, rounded up to whole rounds. It takes
      the place of `run.rounds` in the configuration.
    - `keep`: objects with `state_dict` and `load_state_dict` that are saved with the model, such as optimizer,
      scheduler, gradient scaler, a stateful loader or a moving average of the model, and generators of random numbers
      of the script's own. A script that is started again after a crash goes back to them and repeats its steps since.
    - `private`: names of parameters that are trained and stay on this device, such as a head or norms of its own; `*`
      stands for any text. The same on all peers.
    - `meaning`: what the numbers in the data stand for, in their order, such as `{"classes": dataset.classes}`. Peers
      whose names of a kind differ refuse each other; only digests of the names are told.
    - `outer_momentum`, `outer_learning_rate`: Nesterov momentum on what a peer's rounds move, as in DiLoCo (0.9 and 0.7
      there); the same on all peers.
    - `overlap`: exchange while the next steps are done; a model then takes effect one round late.
    - `average`: "gradients" lets devices average their gradients in each step, by `Peer.average_gradients`, so that
      clipping, weight decay and the optimizer act on the mean. It takes `every=1`, and the algorithm low-rank,
      compressed-allreduce or allreduce. The same on all peers.
    - `evaluate(model)` returns how many test samples the model gets right, and of how many; or, by name, the sum and
      the count of what was measured, such as `{"loss": (sum, count), "accuracy": (right, total)}`. A figure that is no
      mean, such as AUROC, is one number. It is called in evaluation mode and without gradients, every
      `evaluation.every_rounds`.
    - `metrics`: the figures to tell, each computed from what `evaluate` returns, such as `[sottovoce.PERPLEXITY]` from
      the loss, and accuracy where it returns that. Models are compared by the first. Without it, the figures are
      accuracy and test loss. The same on all peers.
    - `on_round`, `on_late`, `on_member`, `on_evaluation` and `on_rejoin` are called with an event, in the thread of the
      script, during `step`.

    Raises UsageError for a model or arguments that cannot work, and ConfigError for such a configuration.
    """
    callbacks: dict[type, Callable[[Any], object] | None] = {
        RoundDone: on_round,
        PeersLate: on_late,
        MemberChange: on_member,
        Evaluated: on_evaluation,
        Rejoined: on_rejoin,
    }
    return Peer(
        model,
        config if isinstance(config, Place) else place(config),
        every=every,
        steps=steps,
        keep=keep,
        private=private,
        meaning=meaning,
        outer_momentum=outer_momentum,
        outer_learning_rate=outer_learning_rate,
        overlap=overlap,
        average=average,
        evaluate=evaluate,
        metrics=metrics,
        callbacks={kind: call for kind, call in callbacks.items() if call is not None},
    )


def _check_numbers(
    every: int, steps: int | None, outer_momentum: float, outer_learning_rate: float, overlap: bool
) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"every is {every!r}; it is the number of gradient steps in a round, 1 or more")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise UsageError(f"steps is {steps!r}; it is the number of gradient steps of the whole run, 1 or more")
    if not 0.0 <= outer_momentum < 1.0:
        raise UsageError(f"outer_momentum is {outer_momentum!r}; it lies between 0 and 1, without 1")
    if not 0.0 < outer_learning_rate <= 2.0:
        raise UsageError(
            f"outer_learning_rate is {outer_learning_rate!r}; it lies above 0, and 1 leaves steps as they are"
        )
    if not isinstance(overlap, bool):
        raise UsageError(f"overlap is {overlap!r}; it is True or False")


def _averages_gradients(average: str, every: int, keep: Sequence[Keepable], others: Mapping[str, object]) -> bool:
    """Whether devices average gradients. Raises UsageError for arguments with which they would not stay with one
    model."""
    if average not in ("displacements", "gradients"):
        raise UsageError(f"average is {average!r}; it is 'displacements' or 'gradients'")
    if average == "displacements":
        return False
    if every != 1:
        raise UsageError(f"every is {every}; with average='gradients' devices exchange in each step, every=1")
    for name, value in others.items():
        if value and not (name == "outer_learning_rate" and value == 1.0):
            raise UsageError(
                f"{name} is {value!r}; with average='gradients' all devices take the same steps of one optimizer, so"
                " leave it out"
            )
    for number, each in enumerate(keep):
        if isinstance(each, torch.amp.GradScaler) and each.is_enabled():
            raise UsageError(
                f"keep[{number}] is a GradScaler, which skips steps on one device alone, so that the models would part;"
                " with average='gradients' compute in bfloat16, which needs none, or GradScaler(enabled=False)"
            )
    return True


def _set_epoch(batches: object, number: int) -> None:
    """Tell a loader, its sampler and its data set which pass comes, as trainers do. Streams of `datasets` go on where
    they were in the pass that their state is of, and begin with their first sample in others: without a number, each
    pass after a restart would begin there."""
    for each in (batches, *(getattr(batches, name, None) for name in ("sampler", "batch_sampler", "dataset"))):
        if callable(set_epoch := getattr(each, "set_epoch", None)):
            set_epoch(number)


def _number(loss: object) -> torch.Tensor | float:
    """Return the loss of a step, where it is a tensor without waiting for it. Raises UsageError if it is no number."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.detach()
    try:
        if not isinstance(loss, torch.Tensor):
            return float(loss)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        pass
    what = f"of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise UsageError(f"the loss given to step() is {what}; give one real number, such as loss.mean(), or nothing")
