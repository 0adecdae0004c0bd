"""The trained model of a run or of one peer, as safetensors under the names of the model's state_dict; beside it, if
wanted, forms that need neither this package nor the code of the task, and a card that describes its training.

A push-sum algorithm keeps x and its weight u; the model is z = x / u. The average of all peers is Σ x / Σ u, taken at
the newest round of which every peer that was a member then has a checkpoint. Peers that had left or were lost have no
part in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from peer.config import options as configuration
from peer.config.options import Config
from peer.config.writer import write_bytes
from peer.errors import ConfigError, StateError
from peer.gossip.incarnations import Numbering
from peer.gossip.membership import ChangeKind, Membership
from peer.ops.hub_folder import card_heading, hub_config, is_of_transformers
from peer.ops.model_card import CardFacts, model_card
from peer.records import ACCURACY
from peer.run.setup import RunSetup
from peer.state.checkpoints import Checkpoint, find_checkpoints, load_checkpoint, read_description
from peer.state.metrics import Summary
from peer.train.int8_file import load_int8, save_int8
from peer.train.local_step import Trainer
from peer.train.model_file import load_model_
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
from peer.train.statistics import has_statistics

_HUB_CONFIG = "config.json"


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
            files.append(output.with_name(_HUB_CONFIG))
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
    z: npt.NDArray[np.float32]
    averaged: bool


@dataclass(frozen=True)
class _PeerFolder:
    """Configuration and checkpoints of one peer."""

    config: Config
    base: Path
    checkpoints: Mapping[int, Path]
    """Round → file."""


def export_model(
    source: Path,
    output: Path,
    *,
    peer_index: int | None = None,
    int8: bool = False,
    beside: Beside | None = None,
    force: bool = False,
) -> Exported:
    """Write the model that `source` holds to `output`, with `int8` as `peer.train.int8_file` does; return what it is.

    `source` is the folder of a run (all peers, or one with `peer_index`), the folder of a peer, or its state folder.
    Raises StateError if it holds no model, ConfigError if a file exists (unless `force`), cannot be written, or the
    task cannot compute in 8 bits, DataError if the model has no such form.
    """
    beside = beside or Beside()
    files = beside.files(output)
    for file in files:
        if file.exists() and not force:
            raise ConfigError(
                "already exists; name another with --output, or overwrite it with --force", file=str(file)
            )
    if beside.onnx or beside.onnx_int8:
        require_onnx()
    if not source.exists():
        raise StateError(f"{source}: no such folder")
    folders = _find_peers(source)
    if peer_index is None and not find_checkpoints(source) and (source / "model.safetensors").exists():
        return _export_simulated(source, files, beside, int8=int8)
    if not folders:
        hint = "a simulation keeps only the averaged model; omit --peer" if peer_index is not None else ""
        raise StateError(f"{source}: contains neither peer.toml nor model.safetensors" + (f" ({hint})" if hint else ""))
    if peer_index is not None and len(folders) > 1:
        own = [folder for folder in folders if folder.config.peer.index == peer_index]
        if not own:
            known = ", ".join(str(folder.config.peer.index) for folder in folders)
            raise ConfigError("no such peer", key="--peer", value=peer_index, valid=known)
        folders = own
    done, members, gone = _newest_common_round(source, folders)
    opened = _open(members[0], [load_checkpoint(folder.checkpoints[done]) for folder in members], int8=int8)
    peers = tuple(folder.config.peer.index for folder in members)
    whose = f"the average of {len(peers)} peers" if len(peers) > 1 else f"the model of peer {peers[0]}"
    without = f", without {', '.join(gone)}" if gone else ""
    description = f"{whose} after {done} rounds{without}" + (", weights in 8 bits" if int8 else "")
    if int8:
        figures = _save_int8(opened, output)
    else:
        figures = {}
        with _written(output):
            opened.trainer.save_model(opened.z, output, averaged=opened.averaged)
    exported = Exported(done, peers, description, tuple(files), figures)
    return _write_beside(exported, beside, members[0].config, opened, _summary(source, exported))


def _export_simulated(source: Path, files: Sequence[Path], beside: Beside, *, int8: bool) -> Exported:
    """Write the averaged model of the folder of a simulation."""
    config = configuration.load(source / "config.toml", environment={}) if (source / "config.toml").exists() else None
    opened = None
    if int8 or beside.program or beside.onnx or beside.onnx_int8:
        if config is None:
            raise StateError(f"{source}: contains no config.toml, which is needed to build the model")
        setup = RunSetup.open(config, source, config.num_peers or 1)
        trainer = setup.trainer(0)
        load_model_(trainer.model, source / "model.safetensors")
        opened = _Opened(setup, trainer, trainer.vector(), True)
    description, figures = "the averaged model of the run", {}
    if int8:
        assert opened is not None
        description, figures = f"{description}, weights in 8 bits", _save_int8(opened, files[0])
    else:
        _copy(source / "model.safetensors", files[0])
    exported = Exported(None, (), description, tuple(files), figures)
    return exported if config is None else _write_beside(exported, beside, config, opened, _summary(source, exported))


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
        config = configuration.load(file, environment={})
        found = find_checkpoints(file.parent / config.state.directory)
        folders.append(_PeerFolder(config, file.parent, {_round_of(path): path for path in found}))
    return sorted(folders, key=lambda folder: folder.config.peer.index)


def _newest_common_round(
    source: Path, folders: Sequence[_PeerFolder]
) -> tuple[int, Sequence[_PeerFolder], Sequence[str]]:
    """Return the newest round of which all its members have a checkpoint here, the folders of these, and sentences
    about the peers that had left or were lost by then."""
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
        if all(peer in by_index and done in by_index[peer].checkpoints for peer in members):
            ended = {
                numbering.device(change.subject): change for change in membership.changes if change.effective <= done
            }
            gone = [
                f"{names.get(peer, f'peer {peer}')}, which "
                + ("had left" if change.kind is ChangeKind.LEAVE else "was lost")
                for peer, change in sorted(ended.items())
                if peer not in members
            ]
            return done, [by_index[peer] for peer in members], gone
    last = [numbering.device(number) for number in membership.members(config.run.rounds)]
    for peer in last:
        if peer in by_index:
            _rounds(by_index[peer])
        else:
            name = names.get(peer, f"peer {peer}")
            raise StateError(f"{source}: {name} has no folder here; copy it back, or export one peer with --peer")
    rounds = ", ".join(str(max(by_index[peer].checkpoints)) for peer in last)
    raise StateError(
        f"{source}: the peers have no checkpoint of a common round (newest: {rounds}); export one peer with --peer"
    )


def _rounds(folder: _PeerFolder) -> Mapping[int, Path]:
    """Return the checkpoints of a peer. Raises StateError if there is none."""
    if not folder.checkpoints:
        where = folder.base / folder.config.state.directory
        raise StateError(
            f"{where}: contains no checkpoint yet; peers write one at intervals and at the end. Is it on its device?"
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


def _open(folder: _PeerFolder, checkpoints: Sequence[Checkpoint], *, int8: bool) -> _Opened:
    """Return the model of one checkpoint, or the average of several."""
    setup = RunSetup.open(folder.config, folder.base)
    trainer = setup.trainer(folder.config.peer.index)
    total, weight = np.zeros(trainer.layout.size), 0.0
    for checkpoint in checkpoints:
        if checkpoint.state.get("layout") != trainer.layout.digest:
            raise StateError(
                f"{folder.base}: the checkpoint holds a model that differs in shape from that of training.task"
            )
        total += _array(folder, checkpoint, "algorithm/x")
        weight += float(_array(folder, checkpoint, "algorithm/u")[0])
    # The statistics of norms are local to a peer; an average gets its own.
    prefix = "training/"
    local = {name: array for name, array in checkpoints[0].arrays.items() if name.startswith(prefix)}
    try:
        trainer.restore({name.removeprefix(prefix): array for name, array in local.items()})
    except (KeyError, ValueError) as error:
        raise StateError(f"{folder.base}: the checkpoint does not fit the configuration: {error}") from None
    if folder.config.data.partition == "own" and len(checkpoints) > 1 and (int8 or has_statistics(trainer.model)):
        raise ConfigError(
            "the average needs statistics of norms, or ranges, over the data of all devices, and none has it all;"
            " export one peer with --peer, or train a model with norms that keep none",
            key="data.partition",
            value="own",
        )
    return _Opened(setup, trainer, (total / weight).astype(np.float32), len(checkpoints) > 1)


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
    output, figures = exported.files[0], dict(exported.figures)
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
                full = output.with_suffix(".onnx") if beside.onnx else output.with_suffix(f".part-{os.getpid()}.onnx")
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
    heading, of_transformers = "", False
    if beside.hub:
        text = hub_config(config, output)
        heading, of_transformers = card_heading(text), is_of_transformers(text)
        write_bytes(output.with_name(_HUB_CONFIG), text.encode())
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
            of_transformers=of_transformers,
        )
        write_bytes(card, (heading + model_card(config, facts, others)).encode())
    return replace(exported, figures=figures)


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


def _array(folder: _PeerFolder, checkpoint: Checkpoint, name: str) -> npt.NDArray[Any]:
    if name not in checkpoint.arrays:
        raise StateError(f"{folder.base}: the checkpoint contains no {name}")
    return checkpoint.arrays[name]


def _copy(model: Path, output: Path) -> None:
    try:
        write_bytes(output, model.read_bytes())
    except OSError as error:
        raise StateError(f"{model}: cannot be read: {error.strerror}") from None


def _round_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
