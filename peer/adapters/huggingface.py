"""The `Trainer` of Hugging Face transformers as the training loop of a peer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Unpack

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from peer.adapters.joining import Joining, JoinOptions
from peer.errors import UsageError
from peer.own_loop.kept_state import Stateful
from peer.own_loop.peer import Peer
from peer.own_loop.place import Place


class GossipCallback(TrainerCallback):
    """Trains the model of a `Trainer` together with others. Begin the `with` block before `Trainer.train`:

    ```python
    with GossipCallback("peer.toml", every=30) as callback:
        Trainer(model, arguments, train_dataset=samples, callbacks=[callback]).train()
    ```
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Place,
        *,
        every: int,
        keep: Sequence[Stateful] = (),
        **options: Unpack[JoinOptions],
    ) -> None:
        """Take the arguments of `sottovoce.join`, without the model. The trainer's optimizer and learning-rate
        scheduler are kept in any case."""
        self._joining = Joining(config, every, keep, options)
        self._is_open = False

    @property
    def peer(self) -> Peer:
        """The peer. Raises UsageError before training has begun."""
        return self._joining.peer

    def __enter__(self) -> GossipCallback:
        """Allow a trainer to begin."""
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave, if the trainer has not come to its end."""
        self._is_open = False
        self._joining.end(error)

    # What the trainer calls.

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Stateful,
        lr_scheduler: Stateful,
        **others: Any,
    ) -> None:
        """Join the run."""
        if not self._is_open:
            raise UsageError(
                "the trainer began outside of the callback's with block, which ends the peer if the trainer fails:"
                " with GossipCallback(…) as callback: Trainer(…, callbacks=[callback]).train()"
            )
        if args.world_size > 1:
            raise UsageError(
                f"the trainer shares its model with {args.world_size - 1} more processes, which averages gradients"
                " already; start one process for each peer, without torchrun or accelerate launch"
            )
        self._joining.begin(model, [optimizer, lr_scheduler], state.max_steps - state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Count an optimizer step, and end the training with the run."""
        if not self.peer.done:
            self.peer.step()
        control.should_training_stop = control.should_training_stop or self.peer.done

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Leave the run."""
        self._joining.end(None)
