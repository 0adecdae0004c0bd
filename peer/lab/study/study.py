"""The file that describes a study: job, algorithms, link profiles, seeds; and the cells that follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import Field

from peer.config.options import Config, load
from peer.errors import ConfigError
from peer.lab import description
from peer.lab.description import Table, read_description
from peer.lab.study import rivals
from peer.lab.study.rivals.worker import steps_per_round
from peer.links.profiles import PROFILES

FILES = Path(__file__).with_name("files")
"""The studies that come with the package."""


class Contender(description.Contender):
    """One algorithm with its compressor and graph, or a program of somebody else. The options of a rival are those of
    our job that stands for it where rounds to the target are counted."""

    rival: str | None = None
    """Name of the program that runs instead (see `Rival`); None: one of our algorithms."""
    settings: Mapping[str, float | str] = Field(default_factory=dict)
    """Settings for the program of a rival (`peer.lab.study.rivals.methods`)."""
    training: tuple[str, ...] = ()
    """Overrides of the real job of a race."""
    seeds: tuple[int, ...] = ()
    """Seeds of its curves in a race, if others than the race's."""
    timed_as: str | None = None
    """The contender whose cells count for this one too, because it sends the same."""
    paper: str = ""
    """Its place in the order of finish according to the paper."""


class Rival(Table):
    """A program of somebody else, and the figures that a study needs before it runs."""

    program: Path
    """A Python program as `peer.lab.study.rivals.worker` describes it; a relative path starts at the study file."""
    sent_models: float
    """Float32 models that one worker sends in a round, approximately."""
    settle_rounds: int = 1
    """Rounds left out at the start. DDP rearranges its buckets after the first."""
    settle_models: float = 5.0
    """Float32 models that one worker sends in them, approximately. DDP first broadcasts the model of worker 0."""


_TORCH = Path(rivals.__file__).with_name("torch_program.py")
RIVALS: Mapping[str, Rival] = {
    "ddp": Rival(program=_TORCH, sent_models=1.75),
    "ddp-fp16": Rival(program=_TORCH, sent_models=0.9),
    # PowerSGD begins to compress after two rounds.
    "ddp-powersgd": Rival(program=_TORCH, sent_models=0.1, settle_rounds=3, settle_models=8.5),
    "d-psgd-gloo": Rival(program=_TORCH, sent_models=2.0),
    "local-sgd": Rival(program=_TORCH, sent_models=1.75),
    "diloco": Rival(program=_TORCH, sent_models=1.75),
}
"""Programs that need nothing but torch: DDP over gloo with its communication hooks, D-PSGD over gloo, and averages of
models every few steps, which count as one round.

Gradients of DDP are averages over all workers, as our `allreduce` computes them. Studies count the rounds to a target
with it, for the lossy hooks as well, which favours them.
"""


class Target(Table):
    """A real job in which the rounds to an accuracy are counted, once for each algorithm, unshaped."""

    job: tuple[str, ...] = ()
    """Overrides on top of the contender's."""
    accuracy: float = 0.0
    """Accuracy of the averaged model."""


class Race(Table):
    """Training on real data: accuracy by step of every contender, beside the seconds of its cells."""

    job: tuple[str, ...]
    """Overrides on top of the contender's: data, model, learning rates. The fields below need none."""
    steps: int = Field(ge=1)
    """Gradient steps of a peer."""
    warmup_steps: int = Field(ge=0)
    evaluate_every: int = Field(ge=1)
    """Steps between two evaluations."""
    targets: tuple[float, ...] = Field(min_length=1)
    """Accuracies of the worst peer."""
    skews: tuple[float, ...] = (0.8,)
    seeds: tuple[int, ...] = (0,)


class Study(Table):
    """The content of a study file."""

    name: str
    title: str
    peers: int = Field(ge=2)
    step_s: float
    """Duration to which a local step is stretched: all trainers share one machine."""
    seeds: tuple[int, ...] = Field(min_length=1)
    profiles: tuple[str, ...]
    contenders: tuple[Contender, ...]
    model: str | None = None
    """The model whose parameters rivals send (`sotto lab list models`); by default that of the job."""
    job: tuple[str, ...]
    """Overrides that all contenders share."""
    cell_s: float
    """A cell has as many rounds as are predicted to take this long, within the limits below."""
    least_rounds: int = Field(ge=1)
    most_rounds: int
    target: Target = Target()
    predicted_peers: tuple[int, ...] = ()
    """Further numbers of peers to predict for."""
    rivals: Mapping[str, Rival] = Field(default_factory=dict)
    """Programs in addition to those of `RIVALS`."""
    race: Race | None = None

    def rival(self, contender: Contender) -> Rival | None:
        """Return the program of a contender; None for one of ours."""
        if contender.rival is None:
            return None
        found = {**RIVALS, **self.rivals}[contender.rival]
        # As they are above: float32, and factors of rank 2.
        size = float(contender.settings.get("bits", 32)) / 32 * float(contender.settings.get("rank", 2)) / 2
        return found.model_copy(update={"sent_models": found.sent_models * size})

    def steps_per_round(self, contender: Contender) -> int:
        """Return the local steps of a contender per communication. Raises ConfigError."""
        if contender.rival is not None:
            return steps_per_round(contender.settings)
        return load(environment={}, overrides=[*self.job, *contender.options]).training.local_steps

    def cells(self, only: Sequence[str] = ()) -> Iterator[tuple[Contender, str, int]]:
        """Yield all (contender, profile, seed), the fast profiles first, as the file orders them.

        `only` names contenders, profiles or both; a kind of which it names none is meant whole. Raises ConfigError.
        """
        names = [contender.name for contender in self.contenders]
        for name in only:
            if name not in names and name not in self.profiles:
                valid = ", ".join([*names, *self.profiles])
                problem = "is neither a contender nor a profile of the study"
                raise ConfigError(problem, key="--only", value=name, valid=valid)
        profiles = [each for each in self.profiles if each in only or not {*self.profiles} & {*only}]
        contenders = [each for each in self._chosen(only) if each.timed_as is None]
        for profile, seed, contender in itertools.product(profiles, self.seeds, contenders):
            yield contender, profile, seed

    def config(self, contender: Contender, seed: int, rounds: int) -> Config:
        """Return the job of one of our contenders. Raises ConfigError."""
        own = (
            f"run.seed={seed}",
            f"run.rounds={rounds}",
            f"peer.min_step_s={self.step_s * self.steps_per_round(contender)}",
            "evaluation.every_rounds=0",
        )
        return load(environment={}, overrides=[*self.job, *contender.options, *own])

    def target_config(self, contender: Contender, seed: int) -> Config:
        """Return the job in which its rounds to the target are counted. Raises ConfigError."""
        overrides = [*self.job, *contender.options, *self.target.job, f"run.seed={seed}"]
        return load(environment={}, overrides=overrides)

    def curves(self, only: Sequence[str] = ()) -> Iterator[tuple[Contender, float, int]]:
        """Yield (contender, skew, seed) of all curves of the race, seed by seed; `only` as in `cells`."""
        if self.race is None:
            return
        contenders = self._chosen(only)
        seeds = sorted({seed for each in contenders for seed in each.seeds or self.race.seeds})
        for skew, seed, contender in itertools.product(self.race.skews, seeds, contenders):
            if seed in (contender.seeds or self.race.seeds):
                yield contender, skew, seed

    def _chosen(self, only: Sequence[str]) -> Sequence[Contender]:
        return [each for each in self.contenders if each.name in only] or self.contenders

    def race_settings(self, contender: Contender, skew: float, seed: int, data: Path | None) -> list[str]:
        """Return the overrides of the real job that one curve trains; `data`: the folder of its data."""
        assert self.race is not None
        race, local = self.race, 1 if contender.rival is not None else self.steps_per_round(contender)
        own = [
            f"run.rounds={race.steps // local}",
            f"training.warmup_rounds={race.warmup_steps // local}",
            f"evaluation.every_rounds={race.evaluate_every // local}",
            f"run.seed={seed}",
            "data.partition=skew",
            f"data.skew={skew}",
            *([] if data is None else [f"data.directory={data.resolve()}"]),
        ]
        return [*self.job, *contender.options, *race.job, *contender.training, *own]


def find_study(name: str) -> Path:
    """Return the file of a study: one of the package by its name, or any other by its path. Raises ConfigError."""
    path = FILES / f"{name}.toml"
    if path.is_file():
        return path
    if not Path(name).is_file():
        valid = f"{', '.join(sorted(file.stem for file in FILES.glob('*.toml')))}, or the path of a file"
        raise ConfigError("unknown study", value=name, valid=valid)
    return Path(name)


def read_plan(path: Path) -> Study:
    """Return the study that a file describes. Raises ConfigError that names the fault."""
    file = str(path)
    study = read_description(Study, path)
    names = [each.name for each in study.contenders]
    if len({*names}) != len(names):
        raise ConfigError("two contenders have the same name", key="contenders", file=file)
    for profile in study.profiles:
        if profile not in PROFILES:
            problem = "unknown link profile"
            raise ConfigError(problem, key="profiles", value=profile, valid=", ".join(PROFILES), file=file)
    known = {*RIVALS, *study.rivals}
    for contender in study.contenders:
        if contender.rival is not None and contender.rival not in known:
            problem = "unknown rival"
            raise ConfigError(
                problem, key=contender.name, value=contender.rival, valid=", ".join(sorted(known)), file=file
            )
        if contender.timed_as is not None and contender.timed_as not in names:
            problem = "is no contender of the study"
            raise ConfigError(problem, key=f"{contender.name}.timed_as", value=contender.timed_as, file=file)
        if study.race is not None:
            period = study.steps_per_round(contender)
            if study.race.steps % period or study.race.evaluate_every % period:
                problem = f"{contender.name} communicates every {period} steps; they must be multiples of that"
                raise ConfigError(problem, key="race.steps and race.evaluate_every", file=file)
    folder = path.resolve().parent
    own = {name: each.model_copy(update={"program": folder / each.program}) for name, each in study.rivals.items()}
    return study.model_copy(update={"rivals": own})
