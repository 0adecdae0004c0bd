"""The trained model of a run or of one peer, as safetensors under the names of the model's state_dict.

What a push-sum algorithm keeps is x and its weight u; the model is z = x / u. The average of all peers is Σ x / Σ u,
taken at the newest round of which every peer has a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peer import config as configuration
from peer.config import Config
from peer.errors import ConfigError, StateError
from peer.store import Checkpoint, find_checkpoints, load_checkpoint


@dataclass(frozen=True)
class Exported:
    """What was written."""

    round: int | None
    """Rounds that the model has seen; None where the folder does not say."""
    peers: tuple[int, ...]
    """Whose models went into it; empty where the folder does not say."""
    description: str


@dataclass(frozen=True)
class _PeerFolder:
    """Configuration and checkpoints of one peer."""

    config: Config
    base: Path
    checkpoints: Mapping[int, Path]
    """Round → file."""


def export_model(source: Path, output: Path, *, peer_index: int | None = None, force: bool = False) -> Exported:
    """Write the model that `source` holds to `output`; return what it is.

    `source` is the folder of a run (all peers, or one with `peer_index`), the folder of a peer, or its state folder.
    Raises StateError if it holds no model, ConfigError if `output` exists (unless `force`) or cannot be written.
    """
    if output.exists() and not force:
        raise ConfigError("exists already; --force overwrites it", file=str(output))
    if not source.exists():
        raise StateError(f"{source}: no such folder")
    folders = _find_peers(source)
    if peer_index is None and not find_checkpoints(source) and (source / "model.safetensors").exists():
        return _copy(source / "model.safetensors", output)
    if not folders:
        hint = "a simulation keeps the averaged model only; leave out --peer" if peer_index is not None else ""
        raise StateError(f"{source}: holds no peer.toml and no model.safetensors" + (f" ({hint})" if hint else ""))
    if peer_index is not None and len(folders) > 1:
        if peer_index >= len(folders):
            raise ConfigError("no such peer", key="--peer", value=peer_index, valid=f"0 to {len(folders) - 1}")
        folders = [folders[peer_index]]
    done = _newest_common_round(source, folders)
    checkpoints = [load_checkpoint(folder.checkpoints[done]) for folder in folders]
    _save(folders[0], checkpoints, output)
    peers = tuple(folder.config.peer.index for folder in folders)
    whose = f"the average of {len(peers)} peers" if len(peers) > 1 else f"the model of peer {peers[0]}"
    return Exported(done, peers, f"{whose} after {done} rounds")


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
            raise StateError(f"{where}: holds no checkpoint yet; checkpoints are written now and then, and at the end")
    common = set.intersection(*(set(folder.checkpoints) for folder in folders))
    if not common:
        rounds = ", ".join(str(max(folder.checkpoints)) for folder in folders)
        raise StateError(
            f"{source}: the peers have no checkpoint of the same round (newest: {rounds}); export one with --peer"
        )
    return max(common)


def _save(folder: _PeerFolder, checkpoints: Sequence[Checkpoint], output: Path) -> None:
    from peer.job import Job

    job = Job.open(folder.config, folder.base)
    trainer = job.trainer(folder.config.peer.index)
    total, weight = np.zeros(trainer.layout.size), 0.0
    for checkpoint in checkpoints:
        if checkpoint.state.get("layout") != trainer.layout.digest:
            raise StateError(f"{folder.base}: the checkpoint holds a model of another shape than training.task makes")
        total += _array(folder, checkpoint, "algorithm/x")
        weight += float(_array(folder, checkpoint, "algorithm/u")[0])
    # The statistics of norms are local to a peer; an average gets its own.
    prefix = "training/"
    local = {name: array for name, array in checkpoints[0].arrays.items() if name.startswith(prefix)}
    try:
        trainer.restore({name.removeprefix(prefix): array for name, array in local.items()})
    except (KeyError, ValueError) as error:
        raise StateError(f"{folder.base}: the checkpoint does not fit the configuration: {error}") from None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        trainer.save_model((total / weight).astype(np.float32), output, averaged=len(checkpoints) > 1)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", file=str(output)) from None


def _array(folder: _PeerFolder, checkpoint: Checkpoint, name: str) -> npt.NDArray[Any]:
    if name not in checkpoint.arrays:
        raise StateError(f"{folder.base}: the checkpoint holds no {name}")
    return checkpoint.arrays[name]


def _copy(model: Path, output: Path) -> Exported:
    from peer.init import write_bytes

    try:
        write_bytes(output, model.read_bytes())
    except OSError as error:
        raise StateError(f"{model}: cannot be read: {error.strerror}") from None
    return Exported(None, (), "the averaged model of the run")


def _round_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
