"""The trained model of a run or of one peer, as safetensors under the names of the model's state_dict.

What a push-sum algorithm keeps is x and its weight u; the model is z = x / u. The average of all peers is Σ x / Σ u,
taken at the newest round of which every peer has a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peer import config as configuration
from peer.config import Config
from peer.config_writer import write_bytes
from peer.errors import ConfigError, StateError
from peer.run_setup import RunSetup
from peer.state.checkpoints import Checkpoint, find_checkpoints, load_checkpoint
from peer.train.int8_file import load_int8, save_int8
from peer.train.local_step import Trainer
from peer.train.model_file import load_model_
from peer.train.statistics import has_statistics


@dataclass(frozen=True)
class Exported:
    """What was written."""

    round: int | None
    """Rounds that the model has seen; None where the folder does not say."""
    peers: tuple[int, ...]
    """Whose models went into it; empty where the folder does not say."""
    description: str
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """Of an export in 8 bits: precision → fraction of the test set that the model gets right; float32 is that of the
    same weights in full precision."""


@dataclass(frozen=True)
class _PeerFolder:
    """Configuration and checkpoints of one peer."""

    config: Config
    base: Path
    checkpoints: Mapping[int, Path]
    """Round → file."""


def export_model(
    source: Path, output: Path, *, peer_index: int | None = None, int8: bool = False, force: bool = False
) -> Exported:
    """Write the model that `source` holds to `output`, with `int8` as `peer.train.int8_file` does; return what it is.

    `source` is the folder of a run (all peers, or one with `peer_index`), the folder of a peer, or its state folder.
    Raises StateError if it holds no model, ConfigError if `output` exists (unless `force`), cannot be written, or the
    task cannot compute in 8 bits.
    """
    if output.exists() and not force:
        raise ConfigError("already exists; --force overwrites it", file=str(output))
    if not source.exists():
        raise StateError(f"{source}: no such folder")
    folders = _find_peers(source)
    if peer_index is None and not find_checkpoints(source) and (source / "model.safetensors").exists():
        return _quantize(source, output) if int8 else _copy(source / "model.safetensors", output)
    if not folders:
        hint = "a simulation keeps only the averaged model; omit --peer" if peer_index is not None else ""
        raise StateError(f"{source}: contains neither peer.toml nor model.safetensors" + (f" ({hint})" if hint else ""))
    if peer_index is not None and len(folders) > 1:
        if peer_index >= len(folders):
            raise ConfigError("no such peer", key="--peer", value=peer_index, valid=f"0 to {len(folders) - 1}")
        folders = [folders[peer_index]]
    done = _newest_common_round(source, folders)
    checkpoints = [load_checkpoint(folder.checkpoints[done]) for folder in folders]
    accuracy = _save(folders[0], checkpoints, output, int8=int8)
    peers = tuple(folder.config.peer.index for folder in folders)
    whose = f"the average of {len(peers)} peers" if len(peers) > 1 else f"the model of peer {peers[0]}"
    how = ", weights in 8 bits" if int8 else ""
    return Exported(done, peers, f"{whose} after {done} rounds{how}", accuracy)


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


def _newest_common_round(source: Path, folders: Sequence[_PeerFolder]) -> int:
    for folder in folders:
        if not folder.checkpoints:
            where = folder.base / folder.config.state.directory
            raise StateError(f"{where}: contains no checkpoint yet; peers write one at intervals and at the end")
    common = set.intersection(*(set(folder.checkpoints) for folder in folders))
    if not common:
        rounds = ", ".join(str(max(folder.checkpoints)) for folder in folders)
        raise StateError(
            f"{source}: the peers have no checkpoint of a common round (newest: {rounds}); export one peer with --peer"
        )
    return max(common)


def _save(folder: _PeerFolder, checkpoints: Sequence[Checkpoint], output: Path, *, int8: bool) -> Mapping[str, float]:
    """Write the model; return its accuracy in both precisions where that was asked for."""
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
    z = (total / weight).astype(np.float32)
    if int8:
        return _save_int8(trainer, z, output)
    with _written(output):
        trainer.save_model(z, output, averaged=len(checkpoints) > 1)
    return {}


def _quantize(source: Path, output: Path) -> Exported:
    """Write the averaged model of a run folder in 8 bits."""
    if not (source / "config.toml").exists():
        raise StateError(f"{source}: contains no config.toml, which is needed to build the model")
    config = configuration.load(source / "config.toml", environment={})
    trainer = RunSetup.open(config, source, config.num_peers or 1).trainer(0)
    load_model_(trainer.model, source / "model.safetensors")
    accuracy = _save_int8(trainer, trainer.vector(), output)
    return Exported(None, (), "the averaged model of the run, weights in 8 bits", accuracy)


def _save_int8(trainer: Trainer, z: npt.NDArray[np.float32], output: Path) -> Mapping[str, float]:
    """Write the model at z in 8 bits, and return the accuracy of what was written, and of the same in float32."""
    with _written(output):
        metadata = {"task": trainer.task.name, "layout": trainer.layout.digest}
        save_int8(trainer.in_precision(z, "int8"), output, metadata=metadata)
    models = {"float32": trainer.in_precision(z, "float32"), "int8": load_int8(trainer.task, output).to(trainer.device)}
    return {precision: trainer.judge(model).accuracy for precision, model in models.items()}


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


def _copy(model: Path, output: Path) -> Exported:
    try:
        write_bytes(output, model.read_bytes())
    except OSError as error:
        raise StateError(f"{model}: cannot be read: {error.strerror}") from None
    return Exported(None, (), "the averaged model of the run")


def _round_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
