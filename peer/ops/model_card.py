"""The page beside an exported model: what it is, how it was trained, how well it does, how to load it.

Made for others to read, so it names no folder of this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jinja2

from peer import __version__
from peer.config.options import OWN_LOOP, Config
from peer.records import ACCURACY, ADAPTIVE, Criterion
from peer.run.plan import describe_messages
from peer.state.metrics import Summary


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Facts on a card beyond the configuration."""

    description: str
    """The origin of the model."""
    round: int | None
    num_peers: int
    summary: Summary | None = None
    """Summary of the run, where it belongs to the model."""
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Name of a file → criterion → its figure, where it was measured anew."""
    inputs: Sequence[str] = ()
    """Inputs of the ONNX model."""
    is_int8: bool = False
    """Whether the safetensors file has int8 weights."""
    auto_class: str = ""
    """Class of `transformers` that loads the folder; empty where none does."""


def model_card(config: Config, facts: CardFacts, files: Sequence[Path]) -> str:
    """Return the card of a model in these files, the safetensors file first, as Markdown."""
    training = config.training
    options = {name: without_folders(value) for name, value in training.task_options.items()}
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("peer", "ops"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"quoted": partial(json.dumps, ensure_ascii=False), "file_name": lambda path: Path(path).name}
    templates.tests["endswith"] = str.endswith
    return templates.get_template("model_card.md").render(
        config=config,
        facts=facts,
        files=[file.name for file in files],
        figures=_figures(facts),
        is_script=training.task == OWN_LOOP,
        is_int8=facts.is_int8,
        made=_made(config),
        messages=describe_messages(config),
        options=[f"{name} = {value}" for name, value in options.items()],
        adaptive=ADAPTIVE,
        version=__version__,
        row=_row,
    )


def _row(*cells: object) -> str:
    """Return a line of a table."""
    plain = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(plain)} |"


def _made(config: Config) -> str:
    """Return the expression of Python that makes the model."""
    training = config.training
    if training.task == OWN_LOOP:
        return "...  # as the script makes it"
    options = {
        key: without_folders(value) if isinstance(value, str) else value for key, value in training.task_options.items()
    }
    words = [repr(training.task), *([repr(options)] if options else [])]
    words += ['directory="FOLDER"'] if config.data.directory is not None else []
    return f"sottovoce.resolve_task({', '.join(words)}).make_model()"


def _figures(facts: CardFacts) -> list[Sequence[str]]:
    """Return the table of the figures of each model, heads first: those of the run, and those of files that were
    measured."""
    summary, found = facts.summary, dict[str, Mapping[str, float | None]]()
    if summary is not None:
        for name, of in (
            ("worst peer", summary.worst),
            ("averaged model", summary.averaged),
            ("one process on all data", summary.single_process),
        ):
            found[name] = {criterion.name: of(criterion) for criterion in summary.all_criteria}
    found |= {f"`{name}`": measured for name, measured in facts.measured.items()}
    found = {name: values for name, values in found.items() if any(value is not None for value in values.values())}
    heads = list(next(iter(found.values()), ()))
    rows = [[name, *(_written(head, values.get(head)) for head in heads)] for name, values in found.items()]
    return [["model", *heads], ["---", *("---" for _ in heads)], *rows] if rows else []


def _written(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if Criterion(name) == ACCURACY else f"{value:.4g}"


def without_folders(value: object) -> str:
    """Return an option of a task as text, of a path its last part only."""
    text = str(value)
    return Path(text).name if os.sep in text else text
