"""The form of a peer's model, and what of it never changes, kept beside its state for `sotto export`."""

from __future__ import annotations

from peer.run.setup import PeerTrainer
from peer.state.disk import Disk, replace, writing
from peer.state.kept_file import FROZEN_FILE, MODEL_FORM
from peer.state.recovery import begun_round


def keep_model_form(trainer: PeerTrainer, disk: Disk) -> None:
    """Keep the form of the model that a run trains, and its frozen parameters as they were when it began. Raises
    StateError."""
    # Before that, the code may have been that of another model, which the neighbours refused.
    if MODEL_FORM.name in disk.names() and begun_round(disk) is not None:
        return
    parts = trainer.model_parts()
    if parts is None:
        return
    form, frozen = parts
    if frozen:
        with writing(disk.where(FROZEN_FILE)):
            replace(disk, FROZEN_FILE, [frozen])
    MODEL_FORM.keep(disk, form)
