"""Small files that a peer keeps beside its state, each written and read as a whole."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from peer.config.precision_choice import PrecisionChoice
from peer.errors import StateError, remedy
from peer.foreign_values import parse_json
from peer.records import ACCURACY, Criterion, ModelForm
from peer.state.disk import Disk, replace, writing

T = TypeVar("T")


@dataclass(frozen=True)
class KeptFile(Generic[T]):
    """A file of JSON in a state folder. After a crash it holds either the old or the new content."""

    name: str
    to_json: Callable[[T], Any]
    of_json: Callable[[Any], T]
    """Raises ValueError, TypeError, KeyError or AttributeError for a value that `to_json` never returned."""
    if_damaged: str
    """Remedy for a damaged file, as the rest of a sentence."""
    indent: int | None = None

    def read(self, disk: Disk) -> T | None:
        """Return the value in the file; None if there is no file or no folder. Raises StateError."""
        try:
            return self.of_json(parse_json(disk.read(self.name)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StateError(f"{disk.where(self.name)} cannot be read: {error.strerror}; {remedy(error)}") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self.damaged(disk) from None

    def keep(self, disk: Disk, value: T) -> None:
        """Write the file. Raises StateError."""
        with writing(disk.where(self.name)):
            replace(disk, self.name, [json.dumps(self.to_json(value), indent=self.indent).encode()])

    def damaged(self, disk: Disk) -> StateError:
        """Return the error for a file whose content is not what was written."""
        return StateError(f"{disk.where(self.name)} is damaged; {self.if_damaged}")


def notes_to_json(notes: Mapping[int, bytes]) -> dict[str, str]:
    """Return notes of peers, by number, in the form of a file."""
    return {str(peer): base64.b64encode(note).decode() for peer, note in sorted(notes.items())}


def notes_of_json(tree: Mapping[str, str]) -> dict[int, bytes]:
    """Return the notes given to `notes_to_json`."""
    return {int(peer): base64.b64decode(note, validate=True) for peer, note in tree.items()}


CHOSEN_PRECISION = KeptFile(
    "precision.json",
    PrecisionChoice.document,
    PrecisionChoice.of_document,
    'without it no round can be repeated; restore it, write {"precision": "NAME"} with what the log said when the run'
    " began, or begin a new run",
)
"""A device's choice where `training.precision` is "fastest": it never chooses again."""

CLASS_VOTES = KeptFile[Mapping[int, bytes]](
    "class-votes.json",
    notes_to_json,
    notes_of_json,
    "without it no round can be repeated; restore it from a copy, or wipe the folder and let the device take part"
    " again",
)
"""Votes of a run's devices on the shares of the classes, as they told them: peer → note."""


@dataclass(frozen=True)
class KeptShares:
    """What the members of the last round put into the average of all models, as they told it."""

    rounds: int
    members: tuple[int, ...]
    notes: Mapping[int, bytes]
    """Member → note, of those that are known."""


AVERAGE_SHARES = KeptFile[KeptShares](
    "average.json",
    lambda kept: {"rounds": kept.rounds, "members": [*kept.members], "notes": notes_to_json(kept.notes)},
    lambda tree: KeptShares(int(tree["rounds"]), tuple(map(int, tree["members"])), notes_of_json(tree["notes"])),
    "restore it from a copy, or set run.average = false on all devices",
)
"""Of the average that is formed, or was: the file of the shares is beside it until all members have that."""

AVERAGE_FILE, OWN_FILE = "average.safetensors", "own.safetensors"
"""Names of the files with the average of the exchanged parameters, the same on all devices, and with all else that the
model of this device has."""


def _form_of_json(tree: Mapping[str, Any]) -> ModelForm:
    shapes, entries = tree["trained"], tree["entries"]
    texts = [*shapes, *entries, *entries.values(), *tree["private"], *tree["without"]]
    numbers = [size for shape in shapes.values() for size in shape]
    if {*map(type, texts)} != {str} or not {*map(type, numbers)} <= {int} or min(numbers, default=1) < 1:
        raise ValueError("no names and shapes")
    trained = {name: tuple(shape) for name, shape in shapes.items()}
    return ModelForm(trained=trained, private=tuple(tree["private"]), entries=entries, without=tuple(tree["without"]))


MODEL_FORM = KeptFile[ModelForm](
    "model.json",
    asdict,
    _form_of_json,
    "restore it from a copy, or delete it: the peer writes it again when it starts",
)
"""The form of a peer's model. A model can be exported with it where neither the code of the task nor data is."""

FROZEN_FILE = "frozen.safetensors"
"""Name of the file beside it with what no round changes: frozen parameters. Only models that have such have it."""


@dataclass(frozen=True)
class ScriptSays:
    """What the training script of a peer decides."""

    rounds: int
    criteria: tuple[Criterion, ...] = (ACCURACY,)
    """The figures that it may tell."""


def _script_says_of_json(tree: Mapping[str, Any]) -> ScriptSays:
    if "criteria" not in tree:
        return ScriptSays(int(tree["rounds"]))
    criteria = tuple(Criterion(str(name), better) for name, better in tree["criteria"].items())
    if not criteria or not {criterion.better for criterion in criteria} <= {"higher", "lower"}:
        raise ValueError("no criteria")
    return ScriptSays(int(tree["rounds"]), criteria)


SCRIPT_SAYS = KeptFile[ScriptSays](
    "rounds.json",
    lambda said: {"rounds": said.rounds, "criteria": {each.name: each.better for each in said.criteria}},
    _script_says_of_json,
    "start the peer, which writes it anew",
)
"""For whoever reads the folder; the peer never reads it. Earlier releases wrote the rounds alone."""
