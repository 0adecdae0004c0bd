"""The file that describes a sweep, and the cells that follow from it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from peer.config.options import Config, load
from peer.config.precision_choice import FASTEST
from peer.config.writer import spell
from peer.errors import ConfigError
from peer.lab.description import Contender, Table


class Sweep(Table):
    """The content of a sweep file."""

    name: str
    title: str = ""
    peers: int = Field(ge=1)
    stacked: bool = True
    """Whether all peers of a cell train as one batch."""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    job: tuple[str, ...] = ()
    """Overrides that all cells share."""
    contenders: tuple[Contender, ...] = (Contender(name="the job"),)
    axes: Mapping[str, tuple[str | int | float | bool, ...]] = Field(default_factory=dict)
    """Key of the configuration → its values; every combination is a cell of each contender and seed."""


@dataclass(frozen=True)
class Planned:
    """One cell: a contender with a value on each axis, and a seed."""

    contender: str
    values: Mapping[str, str | int | float | bool]
    seed: int
    overrides: tuple[str, ...]
    """The whole configuration, as changes of the defaults."""
    key: str
    """Hash of the resolved configuration, the number of peers and `stacked`: another meaning is another cell."""

    def describe(self) -> str:
        """Return the cell in a few words."""
        return describe(self.contender, self.values, self.seed)


def describe(contender: str, values: Mapping[str, str | int | float | bool], seed: int) -> str:
    """Return a cell in a few words."""
    chosen = [f"{key.rpartition('.')[2]} {value}" for key, value in values.items()]
    return ", ".join([contender, *chosen, f"seed {seed}"])


def cells(sweep: Sweep) -> list[Planned]:
    """Return all cells in the order of the file. Raises ConfigError for a configuration that is not valid."""
    found: dict[str, Planned] = {}
    for seed in sweep.seeds:
        for contender in sweep.contenders:
            for values in itertools.product(*sweep.axes.values()):
                chosen = dict(zip(sweep.axes, values, strict=True))
                overrides = (
                    *sweep.job,
                    *contender.options,
                    *(f"{key}={spell(value)}" for key, value in chosen.items()),
                    f"run.seed={seed}",
                )
                config = load(environment={}, overrides=list(overrides))
                if config.training.precision == FASTEST:
                    raise ConfigError(
                        "would let each cell choose by its own measurement, so that cells could not be compared",
                        key="training.precision",
                        value=FASTEST,
                        valid="auto, float32, bfloat16, int8",
                    )
                key = _key(config, sweep)
                planned = Planned(contender.name, chosen, seed, overrides, key)
                if key in found:
                    raise ConfigError(f"{planned.describe()} is the same run as {found[key].describe()}", key="axes")
                found[key] = planned
    return list(found.values())


def _key(config: Config, sweep: Sweep) -> str:
    described = [sweep.peers, sweep.stacked, config.model_dump(mode="json", exclude_defaults=True)]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
