"""The `Trainer` of Lightning as the training loop of a peer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from peer.adapters.joining import Joining, JoinOptions
from peer.errors import UsageError
from peer.own_loop.kept_state import Stateful
from peer.own_loop.peer import Peer
from peer.own_loop.place import Place


class GossipCallback(Callback):
    """Trains the module of a `Trainer` together with others:

    ```python
    Trainer(callbacks=[GossipCallback("peer.toml", every=30)], max_epochs=-1).fit(module, loader)
    ```

    A step is a batch after which an optimizer has stepped: with accumulation, one of several; with several optimizers,
    one batch however many of them stepped.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Place,
        *,
        every: int,
        keep: Sequence[Stateful] = (),
        **options: Unpack[JoinOptions],
    ) -> None:
        """Take the arguments of `sottovoce.join`, without the model. The optimizers and learning-rate schedulers of the
        module are kept in any case."""
        self._joining = Joining(config, every, keep, options)
        self._optimizer_steps = 0

    @property
    def peer(self) -> Peer:
        """The peer. Raises UsageError before training has begun."""
        return self._joining.peer

    # What the trainer calls.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run."""
        if trainer.world_size > 1:
            raise UsageError(
                f"the trainer shares its module with {trainer.world_size - 1} more processes, which averages gradients"
                " already; give it devices=1, and start one process for each peer"
            )
        kept: list[Stateful] = [*trainer.optimizers, *(each.scheduler for each in trainer.lr_scheduler_configs)]
        # Several optimizers are stepped by hand, as often as the module likes.
        steps = trainer.estimated_stepping_batches if pl_module.automatic_optimization else float("inf")
        self._joining.begin(pl_module, kept, steps)
        self._optimizer_steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step if an optimizer has stepped, and end the training with the run."""
        if trainer.global_step != self._optimizer_steps and not self.peer.done:
            self._optimizer_steps = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self.peer.step(loss if isinstance(loss, torch.Tensor) else None)
        trainer.should_stop = trainer.should_stop or self.peer.done

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run."""
        self._joining.end(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run, which the next start of the script continues."""
        self._joining.end(exception)
