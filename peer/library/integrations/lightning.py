"""The `Trainer` of Lightning as the training loop of a peer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from peer.errors import UsageError
from peer.library.integrations.joining import JoiningCallback
from peer.library.kept_state import Stateful

_REPLACE = ("WeightAveraging", "StochasticWeightAveraging")
"""Callbacks that leave an average of the weights of this device alone."""

_UNFREEZE = "BaseFinetuning"
"""Callbacks that let layers train from some epoch on: what does not require a gradient at first is not exchanged, and a
trainer that is started again begins with epoch 0."""


class GossipCallback(JoiningCallback, Callback):
    """Trains the module of a `Trainer` together with others:

    ```python
    Trainer(callbacks=[GossipCallback("peer.toml", every=30)], max_epochs=-1).fit(module, loader)
    ```

    A step is a batch after which an optimizer has stepped: with accumulation, one of several; with several optimizers,
    one batch however many of them stepped.
    """

    _optimizer_steps = 0
    _loss: torch.Tensor | None = None

    # Called by the trainer.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run."""
        if trainer.world_size > 1:
            raise UsageError(
                f"the trainer shares its module with {trainer.world_size - 1} more processes, which averages gradients"
                " already; give it devices=1, and start one process for each peer"
            )
        kept: list[Stateful] = [*trainer.optimizers, *(each.scheduler for each in trainer.lr_scheduler_configs)]
        for each in trainer.callbacks:
            kinds = {kind.__name__ for kind in type(each).__mro__}
            if _UNFREEZE in kinds:
                raise UsageError(
                    f"the callback {type(each).__name__} unfreezes layers in mid-run, which would not be exchanged, nor"
                    " be unfrozen after a restart; leave it out: let them require a gradient from the beginning, and"
                    " give them to the optimizer by add_param_group once peer.steps has come far enough"
                )
            if not kinds.isdisjoint(_REPLACE):
                self._replaced_by.append(f"the callback {type(each).__name__}")
        # Several optimizers are stepped by hand, as often as the module likes.
        steps = trainer.estimated_stepping_batches if pl_module.automatic_optimization else float("inf")
        self._begin(pl_module, kept, steps)
        self._optimizer_steps = trainer.global_step

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Note the loss, which the trainer has divided among the batches of a step."""
        self._loss = loss.detach() * getattr(trainer, "accumulate_grad_batches", 1)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        """Average the gradients, if they are to be, before the trainer clips them."""
        if self._gradients:
            self.peer.average_gradients(self._loss)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step if an optimizer has stepped, and end the training with the run."""
        if trainer.global_step != self._optimizer_steps and not self.peer.done:
            self._optimizer_steps = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if not self._gradients:
                self.peer.step(loss if isinstance(loss, torch.Tensor) else None)
        trainer.should_stop = trainer.should_stop or self.peer.done

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run."""
        self._end(None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look at the model once more: other callbacks end after this one."""
        self._tell_replaced()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run, which the next start of the script continues."""
        self._end(exception)
