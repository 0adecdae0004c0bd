"""The page beside an exported model: what it is, how it was trained, how well it does, how to load it.

Made for others to read, so it names no folder of this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    parts = [
        f"# {config.run.name}",
        f"{facts.description[:1].upper()}{facts.description[1:]}, trained with Sottovoce.",
        "## How it was trained",
        _table(("setting", "value"), _settings(config, facts)),
    ]
    figures = _figures(facts)
    parts += ["## Figures", _table(("model", *(name for name in figures[0][1])), _rows(figures))] if figures else []
    return "\n\n".join([*parts, "## Files", _files(config, files, facts)]) + "\n"


def _settings(config: Config, facts: CardFacts) -> list[tuple[str, str]]:
    training, data = config.training, config.data
    options = ", ".join(f"{key} = {without_folders(value)}" for key, value in training.task_options.items())
    momentum = training.momentum if training.momentum == "none" else f"{training.momentum}, β {training.beta:g}"
    momentum += f", β₂ {training.beta2:g}" if training.momentum in ADAPTIVE else ""
    momentum += f", weight decay {training.weight_decay:g}" if training.weight_decay else ""
    momentum += f", gradients clipped at {training.clip_norm:g}" if training.clip_norm else ""
    graph = config.graph.kind if isinstance(config.graph.kind, str) else ", ".join(config.graph.kind)
    rate = f"{training.learning_rate:g}, {training.schedule}, {training.warmup_rounds} rounds of warm-up"
    rate += f", outer rate {config.algorithm.outer_rate:g}" if config.algorithm.outer_rate != 1.0 else ""
    rate += f", outer momentum {config.algorithm.outer_momentum:g}" if config.algorithm.outer_momentum else ""
    # A script says itself how many rounds there are.
    planned = "" if training.task == OWN_LOOP or facts.round is None else f" of {config.run.rounds}"
    rows = [
        ("task", f"{training.task}" + (f" ({options})" if options else "")),
        ("peers", f"{facts.num_peers}, graph {graph}"),
        ("rounds", f"{config.run.rounds if facts.round is None else facts.round}{planned}"),
        ("algorithm", config.algorithm.name),
        ("messages", describe_messages(config)),
    ]
    if training.task != OWN_LOOP:  # A script decides these, whatever stands in its configuration.
        rows += [
            ("local step", f"{training.batch_size} samples; steps a round: {training.local_steps}"),
            ("learning rate", rate),
            ("momentum", momentum),
            ("precision", facts.summary.precision if facts.summary is not None else training.precision),
            ("data", _partition(config)),
        ]
    rows += [("seed", str(config.run.seed)), ("Sottovoce", facts.summary.version if facts.summary else __version__)]
    if training.warm_start is not None:
        rows.append(("started from", Path(training.warm_start).name))
    if training.only:
        rows.append(("trained parameters", ", ".join(training.only)))
    if data.holdout_fraction:
        rows.append(("held out by each peer", f"{100 * data.holdout_fraction:g} %"))
    if facts.summary is not None:
        rows.append(("parameters", f"{facts.summary.parameters:,}"))
        machine = facts.summary.machine
        rows += [(name, machine[name]) for name in ("torch", "processor") if name in machine]
    return rows


def _partition(config: Config) -> str:
    data = config.data
    return {
        "skew": f"{100 * data.skew:g} % sorted by label, the rest at random",
        "dirichlet": f"Dirichlet({data.alpha:g}) shares of each class",
        "shards": f"{data.labels_per_peer} labels per peer",
        "by-label": "each peer has labels, or subfolders, of its own",
        "iid": "dealt at random",
        "own": "each device's own",
    }[data.partition]


def _figures(facts: CardFacts) -> list[tuple[str, dict[str, str]]]:
    """Return the figures of each model: those of the run, and those of files that were measured."""
    summary, rows = facts.summary, []
    if summary is not None:
        for name, of in (
            ("worst peer", summary.worst),
            ("averaged model", summary.averaged),
            ("one process on all data", summary.single_process),
        ):
            values = {criterion.name: of(criterion) for criterion in summary.all_criteria}
            if any(value is not None for value in values.values()):
                rows.append((name, {key: _written(key, value) for key, value in values.items()}))
    for name, measured in facts.measured.items():
        rows.append((f"`{name}`", {key: _written(key, value) for key, value in measured.items()}))
    return rows


def _rows(figures: Sequence[tuple[str, Mapping[str, str]]]) -> list[tuple[str, ...]]:
    names = list(figures[0][1])
    return [(name, *(values.get(each, "") for each in names)) for name, values in figures]


def _written(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if Criterion(name) == ACCURACY else f"{value:.4g}"


def _files(config: Config, files: Sequence[Path], facts: CardFacts) -> str:
    first, *others = files
    if facts.is_int8:
        text = [f"`{first.name}` holds int8 weights for `sottovoce.load_int8`."]
    elif facts.auto_class:
        load = f'model = {facts.auto_class}.from_pretrained("FOLDER")'
        text = [
            "To load the model from the folder of this card:",
            f"```python\nfrom transformers import {facts.auto_class}\n\n{load}\n```",
        ]
    else:
        shards = [file for file in others if file.suffix == ".safetensors"]
        of_each = "".join(f"    **load_file({_quoted(file)}),\n" for file in shards)
        state = f"{{\n{of_each}}}" if shards else f"load_file({_quoted(first)})"
        imports, made = "from safetensors.torch import load_file\n", "...  # as the script makes it"
        if config.training.task != OWN_LOOP:
            task = [repr(config.training.task)]
            options = {
                key: without_folders(value) if isinstance(value, str) else value
                for key, value in config.training.task_options.items()
            }
            task += [repr(options)] if options else []
            task += ['directory="FOLDER"'] if config.data.directory is not None else []
            imports, made = f"import sottovoce\n{imports}", f"sottovoce.resolve_task({', '.join(task)}).make_model()"
        load = f"model = {made}\nmodel.load_state_dict({state})"
        holds = "names the files that hold" if shards else "holds"
        text = [
            f"`{first.name}` {holds} the state_dict of the model. To load it, for example to train it further:",
            f"```python\n{imports}\n{load}\n```",
        ]
    for file in others:
        if file.suffix == ".pt2":
            load = f"model = torch.export.load({_quoted(file)}).module()"
            text += [f"`{file.name}` is the model as a program:", f"```python\nimport torch\n\n{load}\n```"]
        elif file.suffix == ".onnx":
            given = ", ".join(f'"{name}": {name}' for name in facts.inputs)
            what = "with int8 weights and activations" if file.name.endswith(".int8.onnx") else "in float32"
            text += [
                f"`{file.name}` is the model in ONNX, {what}:",
                f"```python\nimport onnxruntime\n\nsession = onnxruntime.InferenceSession({_quoted(file)})\n"
                f"(outputs,) = session.run(None, {{{given}}})\n```",
            ]
    return "\n\n".join(text)


def _quoted(file: Path) -> str:
    """Return the name of a file as a string of Python."""
    return json.dumps(file.name, ensure_ascii=False)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in lines
    )


def without_folders(value: object) -> str:
    """Return an option of a task as text, of a path its last part only."""
    text = str(value)
    return Path(text).name if os.sep in text else text
