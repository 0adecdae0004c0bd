"""Whole models out of checkpoints, without data and without the code that made them.

A checkpoint holds x and u, and what its peer has beside the exchanged parameters: buffers such as the running
statistics of norms, private parameters, frozen ones that its code has moved. The form of the model and its frozen
parameters lie in files beside it, or come of the task where a release before 0.3 wrote the folder.

The average is Σ x / Σ u. What peers have beside it is each peer's own, so that somebody has to say whose an average
takes: that of one peer, or the mean of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from peer.compress.layout import Layout
from peer.errors import ConfigError, StateError
from peer.library.parameters import kept_beside as kept_by_script
from peer.records import ModelForm
from peer.run.summary import Average
from peer.state.checkpoints import Checkpoint, StoredArrays, StoredVector, stored_arrays
from peer.state.disk import Disk
from peer.state.kept_file import AVERAGE_FILE, FROZEN_FILE, MODEL_FORM
from peer.train.local_step import kept_beside as kept_by_task
from peer.train.model_file import InParts, open_tensors

Tensors = Mapping[str, torch.Tensor]

MEAN = "mean"
_BESIDE = ("training/buffer.", "training/frozen.", "training/script/script/")
"""Prefixes of the arrays of a checkpoint that hold what a peer has beside the exchanged parameters."""


@dataclass(frozen=True)
class PeerModel:
    """The model of one peer in its parts."""

    name: str
    form: ModelForm
    frozen: Tensors
    """What no round changes."""
    beside: Tensors
    """What the peer has beside the exchanged parameters, as far as that changes."""
    x: StoredVector
    u: float


def read_form(state: Path) -> tuple[ModelForm, Tensors] | None:
    """Return the form of a peer's model, and its frozen parameters, from its state folder; None where an earlier
    release wrote it. Raises StateError."""
    form = MODEL_FORM.read(Disk(state))
    return None if form is None else (form, _tensors(state / FROZEN_FILE))


def read_model(
    name: str, state: Path, checkpoint: Checkpoint, parts: tuple[ModelForm, Tensors], *, is_script: bool
) -> PeerModel:
    """Return the model in a checkpoint of the folder `state`. Raises StateError where they do not belong together."""
    form, frozen = parts
    layout = Layout.of_shapes([*form.trained.values()], [*form.trained])
    if checkpoint.state.get("layout") != layout.digest:
        raise StateError(
            f"{state}: the checkpoint holds a model that differs in shape from the one that {MODEL_FORM.name}, or the"
            " task, describes"
        )
    arrays = checkpoint.arrays
    assert isinstance(arrays, StoredArrays)
    training = {each.removeprefix("training/"): arrays[each] for each in arrays if each.startswith(_BESIDE)}
    for each in ("algorithm/x", "algorithm/u"):
        if each not in arrays:
            raise StateError(f"{state}: the checkpoint contains no {each}")
    beside = kept_by_script(training) if is_script else kept_by_task(training)
    if is_script:
        # The checkpoint has what the script had when the last round began. What it ended with is in its model.
        ended = _tensors(state / "model.safetensors", rounds=checkpoint.round)
        beside |= {form.entries.get(entry, entry): each for entry, each in ended.items()}
    return PeerModel(name, form, frozen, beside, arrays.vector("algorithm/x"), float(arrays["algorithm/u"][0]))


def formed_after(state: Path) -> int | None:
    """Return after how many rounds the members formed the average in a state folder; None where there is none."""
    path = state / AVERAGE_FILE
    if not path.exists():
        return None
    with open_tensors(path) as file:
        rounds = (file.metadata() or {}).get("rounds", "")
    return int(rounds) if rounds.isdecimal() else None


class _Joined:
    """Some arrays one after the other as a vector, float32[n], of which slices are read when they are asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, parts: Sequence[StoredVector]) -> None:
        self._parts, self._ends = parts, [*accumulate(part.size for part in parts)]
        self.size = self._ends[-1]

    def __getitem__(self, part: slice) -> npt.NDArray[np.float32]:
        """Return consecutive numbers, in memory of their own."""
        begin, end, _ = part.indices(self.size)
        starts = (stop - each.size for each, stop in zip(self._parts, self._ends, strict=True))
        pairs = [*zip(self._parts, starts, strict=True)]
        return np.concatenate([each[max(0, begin - at) : max(0, end - at)] for each, at in pairs])


def formed_average(state: Path, form: ModelForm, rounds: int) -> tuple[InParts, list[int]] | None:
    """Return the average that all members formed after so many rounds, float32[n], and who they were, from a state
    folder; None where there is none. Raises StateError where it is of another model, and DataError."""
    if formed_after(state) != rounds:
        return None
    path = state / AVERAGE_FILE
    with open_tensors(path) as file:
        facts = file.metadata() or {}
        slices = {name: file.get_slice(name) for name in [*file.keys()]}
        forms = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    entry_of = {source: entry.replace("_orig_mod.", "") for entry, source in form.entries.items()}
    names = {name: entry_of.get(name, name) for name in form.trained}
    if any(forms.get(names[name]) != ("F32", shape) for name, shape in form.trained.items()):
        raise StateError(f"{path} holds another model than the one that {MODEL_FORM.name}, or the task, describes")
    members = [int(member) for member in facts.get("members", "").split(", ") if member.isdigit()]
    arrays = stored_arrays(path)
    return _Joined([arrays.vector(name) for name in names.values()]), members


def averaged(models: Sequence[PeerModel], statistics: str | None) -> tuple[InParts, Tensors, str]:
    """Return z = Σ x / Σ u of some peers, float32[n], what the average has beside it, by name, and whose that is.

    `statistics`: the name of one of the peers, or "mean". None: the mean, but private parameters are nobody's mean
    unless somebody says so. Raises StateError for models that do not belong together, ConfigError for `statistics`.
    """
    first = models[0]
    other = next((each.name for each in models if each.form.trained != first.form.trained), None)
    if other is not None:
        raise StateError(f"the models of {first.name} and {other} have parameters of other names or shapes")
    names = [model.name for model in models]
    if statistics not in (None, MEAN, *names):
        raise ConfigError("no such peer here", key="--statistics", value=statistics, valid=f"mean, {', '.join(names)}")
    z = Average([(model.x, model.u) for model in models])
    if len(models) == 1 or statistics in names:
        chosen = first if statistics in (None, MEAN) else models[names.index(statistics)]
        return z, {**chosen.frozen, **_typed(chosen)}, chosen.name
    if statistics is None and first.form.private:
        raise ConfigError(
            f"private parameters ({', '.join(first.form.private)}) are each device's own; say whose the average takes"
            " with --statistics PEER, or take their mean, too, with --statistics mean",
            key="--statistics",
        )
    return z, {**first.frozen, **_mean_of([{**model.frozen, **_typed(model)} for model in models], first.form)}, MEAN


def differ(models: Sequence[PeerModel]) -> bool:
    """Whether what is saved of some peers differs beside the exchanged parameters."""
    own = [{**model.frozen, **_typed(model)} for model in models]
    return any(
        not torch.equal(each[name], own[0][name])
        for each in own[1:]
        for name in {*models[0].form.entries.values()} & each.keys() & own[0].keys()
    )


def _typed(model: PeerModel) -> Tensors:
    """Return what a peer has of its own, in the types of the model: checkpoints hold bfloat16 as float32."""
    types = {name: each.dtype for name, each in model.frozen.items()}
    return {name: each.to(types.get(name, each.dtype)) for name, each in model.beside.items()}


def _mean_of(own: Sequence[Tensors], form: ModelForm) -> Tensors:
    """Return the mean, over the peers, of what each has of its own; of whole numbers, and of what is in no file, the
    first's. Raises StateError for tensors of which there is no mean."""
    found = {name: each for one in reversed(own) for name, each in one.items()}
    held = [name for name in {*form.entries.values()} & found.keys() if found[name].is_floating_point()]
    for name in held:
        values = [each[name] for each in own if name in each]
        if len(values) < len(own) or any(each.shape != values[0].shape for each in values):
            raise StateError(f"{name} is not the same kind of tensor on all peers; name one with --statistics PEER")
        if not name.endswith("running_var") and all(torch.equal(each, values[0]) for each in values):
            continue
        mean = _mean(values)
        norm = name.removesuffix("running_var")
        if norm != name and f"{norm}running_mean" in held:
            # The variance of all peers' batches together: what lies between their means is in none of their variances.
            means = [each[f"{norm}running_mean"].double() for each in own]
            mean += _mean([(each - _mean(means)) ** 2 for each in means])
        found[name] = mean.to(values[0].dtype)
    return found


def _mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([each.double() for each in values]).sum(0) / len(values)


def _tensors(path: Path, *, rounds: int | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; none where there is no file, or it holds the model after other rounds. Raises
    DataError."""
    if not path.exists():
        return {}
    with open_tensors(path) as file:
        if rounds is not None and (file.metadata() or {}).get("rounds") != str(rounds):
            return {}
        return {name: file.get_tensor(name) for name in [*file.keys()]}
