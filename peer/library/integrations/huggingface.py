"""The `Trainer` of Hugging Face transformers as the training loop of a peer."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from peer.errors import UsageError
from peer.library.integrations.joining import JoiningCallback
from peer.library.kept_state import Stateful


class GossipCallback(JoiningCallback, TrainerCallback):
    """Trains the model of a `Trainer` together with others. Begin the `with` block before `Trainer.train`:

    ```python
    with GossipCallback("peer.toml", every=30) as callback:
        Trainer(model, arguments, train_dataset=samples, callbacks=[callback]).train()
    ```
    """

    _is_open = False
    """Whether a trainer may begin."""

    def __enter__(self) -> GossipCallback:
        """Allow a trainer to begin."""
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave, if the trainer has not come to its end."""
        self._is_open = False
        self._end(error)
        if error is None:
            # Other callbacks come after this one.
            self._tell_replaced()

    # Called by the trainer.

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
        if self._gradients:
            raise UsageError(
                "average='gradients' needs a loop of your own, or Lightning: this trainer clips gradients before a"
                " callback could average them"
            )
        if args.load_best_model_at_end:
            self._replaced_by = ["load_best_model_at_end of the trainer's arguments"]
        self._begin(model, [optimizer, lr_scheduler], state.max_steps - state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Count an optimizer step, and end the training with the run."""
        if not self.peer.done:
            self.peer.step()
        control.should_training_stop = control.should_training_stop or self.peer.done

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Leave the run."""
        self._end(None)
