"""The file that describes a study: job, algorithms, link profiles, seeds; and the cells that follow from it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from links.profiles import find

from bandwidth.rivals import RIVALS
from peer.config import Config, load
from peer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One algorithm with its compressor and graph, or a program of somebody else."""

    name: str
    options: tuple[str, ...] = ()
    """Overrides of the job, section.key=value; of a rival, the job of ours whose rounds to the target are its own."""
    rival: str | None = None
    """A program of `rivals`; None is one of ours."""
    paper: str = ""
    """What the paper says of its place in the order of finish."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What to run."""

    name: str
    title: str
    peers: int
    step_s: float
    """What a local step is made to last: the trainers share one machine, where a device would be alone."""
    seeds: tuple[int, ...]
    profiles: tuple[str, ...]
    contenders: tuple[Contender, ...]
    model: str
    """The model whose parameters rivals send (`sotto list models`)."""
    job: tuple[str, ...]
    """Overrides that all contenders share."""
    cell_s: float
    """A cell is as many rounds as are predicted to take this long, within the limits below."""
    least_rounds: int
    most_rounds: int
    target_job: tuple[str, ...] = ()
    """Overrides of the job in which the rounds to the target accuracy are counted, unshaped; empty: none are."""
    target_accuracy: float = 0.0
    """Of the averaged model."""
    predicted_peers: tuple[int, ...] = field(default=())
    """Further numbers of peers to predict for."""

    def cells(self, only: Sequence[str] = ()) -> Iterator[tuple[Contender, str, int]]:
        """Yield all (contender, profile, seed), the fast profiles first, as the file orders them.

        `only` names contenders, profiles or both; of a kind that it names none of, all are meant. Raises ConfigError.
        """
        names = [contender.name for contender in self.contenders]
        for name in only:
            if name not in names and name not in self.profiles:
                valid = ", ".join([*names, *self.profiles])
                problem = "is neither a contender nor a profile of the study"
                raise ConfigError(problem, key="--only", value=name, valid=valid)
        contenders = [each for each in self.contenders if each.name in only or not {*names} & {*only}]
        profiles = [each for each in self.profiles if each in only or not {*self.profiles} & {*only}]
        for profile in profiles:
            for seed in self.seeds:
                for contender in contenders:
                    yield contender, profile, seed

    def config(self, contender: Contender, seed: int, rounds: int) -> Config:
        """Return the job of one of our contenders. Raises ConfigError."""
        own = (
            f"run.seed={seed}",
            f"run.rounds={rounds}",
            f"peer.min_step_s={self.step_s}",
            "evaluation.every_rounds=0",
        )
        return load(environment={}, overrides=[*self.job, *contender.options, *own])

    def target_config(self, contender: Contender, seed: int) -> Config:
        """Return the job in which its rounds to the target are counted. Raises ConfigError."""
        overrides = [*self.job, *contender.options, *self.target_job, f"run.seed={seed}"]
        return load(environment={}, overrides=overrides)


_KEYS = {
    "name": str, "title": str, "peers": int, "step_s": float, "seeds": list, "profiles": list, "job": list,
    "model": str, "cell_s": float, "least_rounds": int, "most_rounds": int,
}  # fmt: skip


def read_plan(path: Path) -> Study:
    """Return the study that a file describes. Raises ConfigError that names what is wrong."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot be read as TOML: {error}", file=str(path)) from None
    known = {*_KEYS, "contenders", "target", "predicted_peers"}
    for key in tree.keys() - known:
        raise ConfigError("there is no such key", key=key, valid=", ".join(sorted(known)), file=str(path))
    values = {key: _typed(tree, key, kind, path) for key, kind in _KEYS.items()}
    contenders = [_contender(table, path) for table in _typed(tree, "contenders", list, path)]
    if len({each.name for each in contenders}) != len(contenders):
        raise ConfigError("two have the same name", key="contenders", file=str(path))
    for profile in values["profiles"]:
        try:
            find(profile)
        except ValueError as error:
            raise ConfigError(str(error), key="profiles", file=str(path)) from None
    target = tree.get("target", {})
    return Study(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()},
        contenders=tuple(contenders),
        target_job=tuple(target.get("job", ())),
        target_accuracy=float(target.get("accuracy", 0.0)),
        predicted_peers=tuple(tree.get("predicted_peers", ())),
    )


def _contender(table: Mapping[str, Any], path: Path) -> Contender:
    try:
        options: Sequence[str] = table.get("options", ())
        fields = {key: value for key, value in table.items() if key != "options"}
        contender = Contender(**fields, options=tuple(options))
    except TypeError:
        problem = f"{dict(table)} is no contender"
        raise ConfigError(problem, key="contenders", valid="name, options, rival, paper", file=str(path)) from None
    if contender.rival is not None and contender.rival not in RIVALS:
        raise ConfigError("there is no such rival", key=contender.name, valid=", ".join(RIVALS), file=str(path))
    return contender


def _typed(tree: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    if key not in tree:
        raise ConfigError("is missing", key=key, file=str(path))
    value = tree[key]
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind):
        raise ConfigError("is not valid", key=key, value=value, valid=kind.__name__, file=str(path))
    return value
