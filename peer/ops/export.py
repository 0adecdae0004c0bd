"""The trained model of a run or of one peer, as safetensors under the names of the model's state_dict; beside it, if
wanted, forms that need neither this package nor the code of the task, and a card that describes its training.

A push-sum algorithm keeps x and its weight u; the model is z = x / u. The average of all peers is Σ x / Σ u, taken at
the newest round of which every peer that was a member then has a checkpoint. Peers that had left or were lost have no
part in it. Where single folders are named, the average is that of these; of one device's folder it is the average that
all members formed after the last round, where they did.

The safetensors file is made of the folders alone. Code and data of the task are read for the other forms, for 8 bits,
for statistics of its samples, and for folders of release 0.2.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from peer.config import options as configuration
from peer.config.options import OWN_LOOP, Config
from peer.config.writer import write_bytes
from peer.errors import ConfigError, SottoError, StateError
from peer.gossip.incarnations import Numbering
from peer.gossip.membership import ChangeKind, Membership
from peer.ops.hub_folder import HUB_CONFIG, auto_class, card_heading, hub_files
from peer.ops.model_card import CardFacts, model_card
from peer.ops.standing import from_folder, with_length
from peer.ops.whole_models import MEAN, averaged, differ, formed_after, formed_average, read_form, read_model
from peer.records import ACCURACY, ModelForm
from peer.run.setup import RunSetup
from peer.state.checkpoints import Checkpoint, find_checkpoints, load_checkpoint, read_description
from peer.state.kept_file import FROZEN_FILE, MODEL_FORM
from peer.state.metrics import Summary
from peer.terminal import command
from peer.train.int8_file import load_int8, save_int8
from peer.train.local_step import Trainer
from peer.train.model_file import (
    INDEX,
    InParts,
    Tensors,
    load_model_,
    open_tensors,
    shards_of,
    state_tensors,
    whole_model,
    write_shards,
)
from peer.train.portable import (
    OnnxModel,
    check_onnx,
    example_of,
    require_onnx,
    save_onnx,
    save_onnx_int8,
    save_program,
    trace,
)

_DATA = "data"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Files to write beside the model, under its name with another ending."""

    program: bool = False
    """.pt2, for `torch.export.load`."""
    onnx: bool = False
    """.onnx, in float32."""
    onnx_int8: bool = False
    """.int8.onnx."""
    card: bool = False
    """.card.md: how the model was trained."""
    hub: bool = False
    """config.json, and the card as README.md: a folder as the Hugging Face Hub has them."""

    def files(self, output: Path) -> list[Path]:
        """Return the model and the files beside it, the card last."""
        wanted = ((self.program, ".pt2"), (self.onnx, ".onnx"), (self.onnx_int8, ".int8.onnx"))
        files = [output, *(output.with_suffix(ending) for is_wanted, ending in wanted if is_wanted)]
        if self.hub:
            files.append(output.with_name(HUB_CONFIG))
        if self.card:
            files.append(output.with_name("README.md") if self.hub else output.with_suffix(".card.md"))
        return files


@dataclass(frozen=True)
class Exported:
    """The written files, and their contents."""

    round: int | None
    """Rounds that the model has seen; None where the folder does not say."""
    peers: tuple[int, ...]
    """Peers whose models went into it; empty where the folder does not say."""
    description: str
    files: tuple[Path, ...] = ()
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """For an export in 8 bits: "float32", "int8" or "onnx-int8" → criterion → figure on the test set; float32 is that
    of the same weights in full precision."""
    rounds_to_come: int | None = None
    """Rounds that the run has after this one; None where the folder does not say."""
    hub: Mapping[str, str] = field(default_factory=dict)
    """Name → content of what a Hub folder has beside the weights, its card aside."""

    @property
    def output(self) -> Path:
        """The file that the model was to be written to."""
        return self.files[0].with_name(self.files[0].name.removesuffix(INDEX))

    @property
    def weights(self) -> list[Path]:
        """The files with the tensors of the model."""
        return [file for file in self.files if file.suffix == ".safetensors"] or [self.files[0]]

    @property
    def accuracy(self) -> dict[str, float]:
        """Fraction of the test set that each measured model gets right."""
        name = ACCURACY.name
        return {precision: figures[name] for precision, figures in self.figures.items() if name in figures}


@dataclass(frozen=True)
class _Opened:
    """A model with everything needed to compute it."""

    setup: RunSetup
    trainer: Trainer
    z: InParts
    averaged: bool
    """Whether its statistics are to be those of the training samples."""


@dataclass(frozen=True)
class _Whole:
    """A model with all that is to be written of it."""

    tensors: Tensors
    metadata: Mapping[str, str]
    description: str
    opened: _Opened | None
    config: Config | None
    base: Path
    """Where relative paths of `config` start."""
    round: int | None = None
    peers: tuple[int, ...] = ()
    rounds_to_come: int | None = None


@dataclass(frozen=True)
class _PeerFolder:
    """Configuration and checkpoints of one peer."""

    config: Config
    base: Path
    checkpoints: Mapping[int, Path]
    """Round → file."""

    @property
    def name(self) -> str:
        """Name of the peer."""
        return self.config.own.name

    @property
    def state(self) -> Path:
        """The state folder."""
        return self.base / self.config.state.directory


def export_model(
    source: Path | Sequence[Path],
    output: Path,
    *,
    peer_index: int | None = None,
    statistics: str | None = None,
    int8: bool = False,
    beside: Beside | None = None,
    force: bool = False,
) -> Exported:
    """Write the model that `source` holds to `output`, with `int8` as `peer.train.int8_file` does; return what it is.

    `source` is the folder of a run (all peers, or one with `peer_index`), the folder of a peer, or its state folder; or
    several of them, whose peers are averaged. `statistics` as for `whole_models.averaged`, or "data": those of the
    training samples here. Raises StateError if it holds no model, ConfigError if a file exists (unless `force`), cannot
    be written, or the task cannot compute in 8 bits, DataError if the model has no such form.
    """
    beside = beside or Beside()
    sources = [source] if isinstance(source, Path) else source
    source = sources[0]
    files = beside.files(output)
    if not force:
        _refuse_existing([*files, *shards_of(output)])
    if beside.onnx or beside.onnx_int8:
        require_onnx()
    needs_task = int8 or beside.program or beside.onnx or beside.onnx_int8
    is_whole = len(sources) == 1 and peer_index is None and statistics is None
    if is_whole and not find_checkpoints(source) and (source / "model.safetensors").exists():
        model = _simulated(source, needs_task=needs_task)
    else:
        peers = _chosen_peers(sources, peer_index)
        done, members, gone = _exported_round(source, peers, is_choice=len(sources) > 1)
        is_one = len(members) == 1 and peer_index is None
        model = _read(members, done, gone, statistics, needs_task=needs_task, needs_data=int8, takes_formed=is_one)
    hub: Mapping[str, str] = {}
    if beside.hub and model.config is not None:
        hub = hub_files(model.config, model.base, {name: each.shape for name, each in model.tensors.items()})
        if not force:
            _refuse_existing(map(output.with_name, hub))
    description, figures = model.description, dict[str, Mapping[str, float]]()
    if int8:
        assert model.opened is not None
        description, figures = f"{description}, weights in 8 bits", _save_int8(model.opened, output)
    else:
        files[:1] = _save(model.tensors, output, model.metadata)
    exported = Exported(model.round, model.peers, description, tuple(files), figures, model.rounds_to_come, hub)
    if model.config is None:
        return exported
    return _write_beside(exported, beside, model.config, model.opened, _summary(source, exported))


def _refuse_existing(files: Iterable[Path]) -> None:
    for file in files:
        if file.exists():
            raise ConfigError(
                "already exists; name another with --output, or overwrite it with --force", file=str(file)
            )


def _simulated(source: Path, *, needs_task: bool) -> _Whole:
    """Return the averaged model of the folder of a simulation."""
    config = configuration.load(source / "config.toml", environment={}) if (source / "config.toml").exists() else None
    opened = None
    if needs_task:
        if config is None:
            raise StateError(f"{source}: contains no config.toml, which is needed to build the model")
        setup = RunSetup.open(config, source, config.num_peers or 1)
        trainer = setup.trainer(0)
        load_model_(trainer.model, source / "model.safetensors")
        opened = _Opened(setup, trainer, trainer.vector(), True)
    with open_tensors(source / "model.safetensors") as file:
        tensors = {name: file.get_tensor(name) for name in [*file.keys()]}
        return _Whole(tensors, file.metadata() or {}, "the averaged model of the run", opened, config, source)


def _find_peers(source: Path) -> list[_PeerFolder]:
    """Return the peers below a run folder in their order, or the one of a peer's own folder, file or state folder."""
    if source.is_file():
        files = [source]
    elif (source / "peer.toml").is_file():
        files = [source / "peer.toml"]
    elif find_checkpoints(source) and (source.parent / "peer.toml").is_file():
        files = [source.parent / "peer.toml"]
    else:
        files = [*source.glob("peers/peer-*/peer.toml"), *source.glob("peer-*/peer.toml")]
    folders = []
    for file in files:
        # The environment speaks for peers that run, not for what one of them wrote.
        config = configuration.load_device(file, environment={})
        found = find_checkpoints(file.parent / config.state.directory)
        rounds = {int(path.stem.rpartition("-")[2]): path for path in found}
        folders.append(_PeerFolder(config, file.parent, rounds))
    return sorted(folders, key=lambda folder: folder.config.peer.index)


def _chosen_peers(sources: Sequence[Path], peer_index: int | None) -> Sequence[_PeerFolder]:
    """Return the peers of some folders, or one of them, in their order."""
    folders: dict[Path, _PeerFolder] = {}
    for source in sources:
        found = _find_peers(source)
        if not found:
            hint = " (a simulation keeps only the averaged model; omit --peer)" if peer_index is not None else ""
            raise StateError(f"{source}: contains neither peer.toml nor model.safetensors{hint}")
        folders |= {folder.base.resolve(): folder for folder in found}
    peers = sorted(folders.values(), key=lambda folder: folder.config.peer.index)
    indices = [folder.config.peer.index for folder in peers]
    if len({*indices}) < len(peers) or len({folder.config.run.name for folder in peers}) > 1:
        raise ConfigError("name folders of one run, each of another peer", key="FOLDER")
    if peer_index is None or len(peers) == 1:
        return peers
    if peer_index not in indices:
        raise ConfigError("no such peer", key="--peer", value=peer_index, valid=", ".join(map(str, indices)))
    return [peers[indices.index(peer_index)]]


def _exported_round(
    source: Path, peers: Sequence[_PeerFolder], *, is_choice: bool
) -> tuple[int, Sequence[_PeerFolder], Sequence[str]]:
    """Return what `_newest_common_round` does, or, where members keep their states elsewhere, one average."""
    try:
        return _newest_common_round(source, peers, is_choice=is_choice)
    except StateError:
        # The states of invited devices stay there. Any one device has the average of all.
        has_average = (peer for peer in peers if peer.checkpoints and formed_after(peer.state) == max(peer.checkpoints))
        if is_choice or (peer := next(has_average, None)) is None:
            raise
        return max(peer.checkpoints), [peer], ()


def _newest_common_round(
    source: Path, folders: Sequence[_PeerFolder], *, is_choice: bool
) -> tuple[int, Sequence[_PeerFolder], Sequence[str]]:
    """Return the newest round of which all its members have a checkpoint here, the folders of these, and clauses about
    the peers that had left or were lost by then. `is_choice`: only members count whose folders are here; the others are
    named, too."""
    if len(folders) == 1:
        return max(_rounds(folders[0])), folders, ()
    config = folders[0].config
    membership, numbering = _membership(folders), Numbering(config.num_listed)
    by_index = {folder.config.peer.index: folder for folder in folders}
    names = {numbering.device(number): newcomer.name for number, newcomer in membership.newcomers.items()}
    names |= {index: peer.name for index, peer in enumerate(config.peers)}
    for done in sorted({done for folder in folders for done in folder.checkpoints}, reverse=True):
        # A device that came back is a member under another number. Its earlier state is set aside.
        members = [numbering.device(number) for number in membership.members(done)]
        away = [peer for peer in members if is_choice and peer not in by_index]
        members = [peer for peer in members if peer not in away]
        if members and all(peer in by_index and done in by_index[peer].checkpoints for peer in members):
            ended = {
                numbering.device(change.subject): change for change in membership.changes if change.effective <= done
            }
            gone = [
                f"{names.get(peer, f'peer {peer}')}, which "
                + ("had left" if change.kind is ChangeKind.LEAVE else "was lost")
                for peer, change in sorted(ended.items())
                if peer not in members and peer not in away
            ]
            gone += [f"{names.get(peer, f'peer {peer}')}, whose folder is not named" for peer in away]
            return done, [by_index[peer] for peer in members], gone
    last = [numbering.device(number) for number in membership.members(config.run.rounds)]
    last = [peer for peer in last if peer in by_index or not is_choice]
    for peer in last:
        if peer in by_index:
            _rounds(by_index[peer])
        else:
            name = names.get(peer, f"peer {peer}")
            raise StateError(
                f"{source}: {name} has no folder here; copy it back, name the folders to average, or export one peer"
                " with --peer"
            )
    rounds = ", ".join(str(max(by_index[peer].checkpoints)) for peer in last)
    raise StateError(
        f"{source}: the peers have no checkpoint of a common round (newest: {rounds}); export one peer with --peer"
    )


def _to_come(folder: _PeerFolder, done: int) -> int | None:
    """Return how many rounds a peer takes part in after so many; None where its folder does not say."""
    with suppress(StateError):
        config = with_length(folder.config, folder.base)
        if config is not folder.config or config.training.task != OWN_LOOP:
            standing = from_folder(config, folder.base)
            return 0 if standing and standing.state == "left" else max(0, config.run.rounds - done)
    return None


def _rounds(folder: _PeerFolder) -> Mapping[int, Path]:
    """Return the checkpoints of a peer. Raises StateError if there is none."""
    if not folder.checkpoints:
        words = ["run", *["SCRIPT"] * (folder.config.training.task == OWN_LOOP), "--config", folder.base / "peer.toml"]
        raise StateError(
            f"{folder.state}: contains no checkpoint yet, so {folder.name} has not trained here; start it with"
            f" {command(*words)}, or export on the device where it trains"
        )
    return folder.checkpoints


def _membership(folders: Sequence[_PeerFolder]) -> Membership:
    """Return the members of every round, from the newest checkpoints of all peers."""
    first = [index for index, peer in enumerate(folders[0].config.peers) if peer.is_first]
    membership = Membership(tuple(first or (folder.config.peer.index for folder in folders)))
    for folder in folders:
        if folder.checkpoints:
            _, state = read_description(folder.checkpoints[max(folder.checkpoints)])
            membership.restore(state.get("members", ()))
    return membership


def _read(
    folders: Sequence[_PeerFolder],
    done: int,
    gone: Sequence[str],
    statistics: str | None,
    *,
    needs_task: bool,
    needs_data: bool,
    takes_formed: bool,
) -> _Whole:
    """Return the model of one peer after so many rounds, or the average of several; opened where `needs_task`. `gone`:
    clauses about peers that have no part in it. `needs_data`: whether ranges are measured on training samples.
    `takes_formed`: whether it is the average that the members formed, where there is one."""
    first, of_data = folders[0], statistics == _DATA and len(folders) > 1
    is_script = first.config.training.task == OWN_LOOP
    forms = [read_form(folder.state) for folder in folders]
    setup, trainer = None, None
    if needs_task or of_data or None in forms:
        setup = _open(first, is_old=not (needs_task or of_data))
        trainer = setup.trainer(first.config.peer.index)
    checkpoints = [load_checkpoint(folder.checkpoints[done]) for folder in folders]
    models = []
    for folder, checkpoint, form in zip(folders, checkpoints, forms, strict=True):
        parts = _form_by_task(trainer) if trainer is not None else form
        assert parts is not None
        models.append(read_model(folder.name, folder.state, checkpoint, parts, is_script=is_script))
    z, beside, whose = averaged(models, None if statistics == _DATA else statistics)
    formed = formed_average(first.state, models[0].form, done) if takes_formed else None
    z, contributors = (z, None) if formed is None else formed
    opened = None
    if setup is not None and trainer is not None:
        if first.config.data.partition == "own" and len(models) > 1 and (of_data or needs_data):
            raise ConfigError(
                "statistics and ranges of the average would be measured on the data of all devices, and none has all"
                " of it; leave out --int8 and --statistics data, or export one peer with --peer",
                key="data.partition",
                value="own",
            )
        _restore(trainer, first, checkpoints[0], beside)
        opened = _Opened(setup, trainer, z, of_data)
        tensors: Tensors = state_tensors(trainer.portable_model(z, averaged=of_data))
    else:
        try:
            tensors = whole_model(models[0].form, z, beside)
        except KeyError as error:
            raise StateError(f"{first.state}: neither the checkpoint nor {FROZEN_FILE} contains {error}") from None
    said = ""
    if len(models) > 1 and (of_data or differ(models)):
        whose = _DATA if of_data else whose
        of = {MEAN: "the mean of their statistics", _DATA: "statistics of training samples"}
        said = f", with {of.get(whose, f'the statistics of {whose}')}"
    peers = [model.name for model in models] if contributors is None else [*map(str, contributors)]
    metadata = {"format": "pt", "rounds": str(done), "task": first.config.training.task, "peers": ", ".join(peers)}
    alike = {*models[0].form.trained, *models[0].frozen}
    if {models[0].form.entries.get(entry, entry) for entry in tensors} - alike:
        metadata["statistics"] = whose
    indices = tuple(folder.config.peer.index for folder in folders)
    if contributors is not None:
        indices = tuple(map(Numbering(first.config.num_listed).device, contributors))
    without = f", without {', '.join(gone)}" if gone else ""
    description = f"the average of {len(indices)} peers" if len(indices) > 1 else f"the model of peer {indices[0]}"
    description += f" after {done} rounds{without}{said}"
    left = _to_come(first, done)
    return _Whole(tensors, metadata, description, opened, first.config, first.base, done, indices, left)


def _open(folder: _PeerFolder, *, is_old: bool) -> RunSetup:
    """Return the setup of a peer, with the code of its task and the data. `is_old`: only because nothing beside the
    checkpoints says how the model is put together."""
    if folder.config.training.task != OWN_LOOP:
        try:
            return RunSetup.open(folder.config, folder.base)
        except SottoError as error:
            if not is_old:
                raise
            problem = f"the code of its task and its data are needed here ({error}); or let"
    elif is_old:
        problem = "let"
    else:
        raise ConfigError(
            "other forms and statistics of training samples need the code of a task, and the model of a training script"
            " is in that script; export the safetensors file alone, and convert it there",
            key="training.task",
            value=OWN_LOOP,
        )
    raise StateError(
        f"{folder.state}: contains no {MODEL_FORM.name}, which says how the model is put together, as under release"
        f" 0.2: {problem} the peer start once more with this release, which writes it, and export then"
    )


def _form_by_task(trainer: Trainer) -> tuple[ModelForm, dict[str, torch.Tensor]]:
    """Return names and shapes of the task's model, and its frozen parameters."""
    named, layout = dict(trainer.model.named_parameters()), trainer.layout
    names = [*named, *(name for name, _ in trainer.model.named_buffers())]
    form = ModelForm(
        trained=dict(zip(layout.names, layout.shapes, strict=True)),
        private=(),
        entries={name: name for name in names},
        without=(),
    )
    return form, {name: each.detach() for name, each in named.items() if name not in form.trained}


def _restore(trainer: Trainer, folder: _PeerFolder, checkpoint: Checkpoint, beside: Mapping[str, torch.Tensor]) -> None:
    """Give a trainer the state of a checkpoint, with other buffers and frozen parameters."""
    parameters = {name for name, _ in trainer.model.named_parameters()}
    state = {
        name.removeprefix("training/"): checkpoint.arrays[name]
        for name in checkpoint.arrays
        if name.startswith("training/") and not name.startswith(("training/buffer.", "training/frozen."))
    }
    for name, each in beside.items():
        plain = each.float() if each.dtype == torch.bfloat16 else each
        state[f"{'frozen' if name in parameters else 'buffer'}.{name}"] = plain.numpy()
    try:
        trainer.restore(state)
    except (KeyError, ValueError) as error:
        raise StateError(f"{folder.base}: the checkpoint does not fit the configuration: {error}") from None


def _save(tensors: Tensors, output: Path, metadata: Mapping[str, str]) -> list[Path]:
    """Write the model to one file or to shards; return the files, the first the one that leads to the others. Files of
    a model that it replaces are removed: libraries would read them first."""
    with _written(output):
        files = write_shards(tensors, output, metadata=metadata)
        for former in {output, *shards_of(output)} - {*files}:
            former.unlink(missing_ok=True)
    return files


def _save_int8(opened: _Opened, output: Path) -> dict[str, Mapping[str, float]]:
    """Write the model in 8 bits, and return its figures, and those of the same model in float32."""
    trainer, z = opened.trainer, opened.z
    with _written(output):
        metadata = {"task": trainer.task.name, "layout": trainer.layout.digest}
        save_int8(trainer.in_precision(z, "int8"), output, metadata=metadata)
    models = {"float32": trainer.in_precision(z, "float32"), "int8": load_int8(trainer.task, output).to(trainer.device)}
    return {precision: _judged(opened, model) for precision, model in models.items()}


def _judged(opened: _Opened, model: torch.nn.Module) -> dict[str, float]:
    """Return how a model does on the test set, by criterion."""
    found = opened.trainer.judge(model)
    own = {ACCURACY.name: found.accuracy, **found.metrics}
    return {criterion.name: own[criterion.name] for criterion in opened.setup.criteria}


def _write_beside(
    exported: Exported, beside: Beside, config: Config, opened: _Opened | None, summary: Summary | None
) -> Exported:
    """Write the files beside the model; return the written files, with the figures of int8 in ONNX."""
    inputs: Sequence[str] = ()
    output, figures, files = exported.output, dict(exported.figures), exported.files
    if beside.program or beside.onnx or beside.onnx_int8:
        assert opened is not None
        trainer, name = opened.trainer, opened.trainer.task.name
        model = trainer.portable_model(opened.z, averaged=opened.averaged)
        example = example_of(trainer.task, trainer.train_data)
        program = trace(model, example, name)
        with _written(output):
            if beside.program:
                save_program(program, output.with_suffix(".pt2"))
            if beside.onnx or beside.onnx_int8:
                part = f".{output.name}.{os.getpid()}.part"
                full = output.with_suffix(".onnx") if beside.onnx else output.with_name(part)
                try:
                    save_onnx(program, full, name)
                    inputs = check_onnx(model, full, example, name)
                    if beside.onnx_int8:
                        quantized = output.with_suffix(".int8.onnx")
                        save_onnx_int8(full, quantized, trainer.train_data, seed=config.run.seed)
                        figures.setdefault("float32", _judged(opened, model.to(trainer.device)))
                        figures["onnx-int8"] = _judged(opened, OnnxModel(quantized))
                finally:
                    if not beside.onnx:
                        full.unlink(missing_ok=True)
    heading, loaded_by = "", ""
    if exported.hub:
        heading, loaded_by = card_heading(exported.hub[HUB_CONFIG]), auto_class(exported.hub[HUB_CONFIG])
        for name, content in exported.hub.items():
            write_bytes(output.with_name(name), content.encode())
        files = (*files, *(output.with_name(name) for name in exported.hub if name != HUB_CONFIG))
    if beside.card:
        *others, card = exported.files
        facts = CardFacts(
            description=exported.description,
            round=exported.round,
            num_peers=config.num_peers or (summary.num_peers if summary is not None else 1),
            summary=summary,
            measured=figures,
            inputs=inputs,
            is_int8="int8" in exported.figures,
            auto_class=loaded_by,
        )
        write_bytes(card, (heading + model_card(config, facts, others)).encode())
    return replace(exported, figures=figures, files=files)


def _summary(source: Path, exported: Exported) -> Summary | None:
    """Return the summary of the run in a folder if it is about this model: that of all peers after the last round."""
    try:
        summary = Summary.load(source / "summary.json")
    except FileNotFoundError:
        return None  # A kit, or a run that was cut off.
    is_whole = exported.round in (None, summary.rounds) and len(exported.peers) in (0, summary.num_peers)
    return summary if is_whole and summary.ended == "completed" else None


@contextmanager
def _written(output: Path) -> Iterator[None]:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=str(output)) from None
