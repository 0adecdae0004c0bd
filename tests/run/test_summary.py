"""Averages and distances of models, whether they lie in memory or in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peer.run import summary
from peer.run.summary import PeerState, average, consensus
from peer.state.checkpoints import Checkpoint, StateFolder, StoredArrays


def test_models_in_files_are_averaged_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
    weights = [1.0, 0.75, 1.25]
    in_memory: list[PeerState] = list(zip(vectors, weights, strict=True))
    expected = (vectors.astype(np.float64).sum(0) / sum(weights)).astype(np.float32)
    assert average(in_memory).tobytes() == expected.tobytes()
    in_files: list[PeerState] = []
    for index, (x, u) in enumerate(in_memory):
        checkpoints = StateFolder(tmp_path / str(index)).checkpoints
        checkpoints.save(Checkpoint(1, {}, {"x": np.asarray(x)}))
        arrays = checkpoints.load(1).arrays
        assert isinstance(arrays, StoredArrays)
        in_files.append((arrays.vector("x"), u))
    z = vectors / np.array(weights, np.float32)[:, None]
    mean = z.astype(np.float64).mean(0)
    distance = np.mean([np.linalg.norm(each - mean) for each in z])
    for block in (1 << 20, 77):
        monkeypatch.setattr(summary, "_BLOCK", block)
        assert average(in_files).tobytes() == expected.tobytes()
        found = consensus(4, in_files)
        assert found == consensus(4, in_memory)
        assert found.consensus_distance == pytest.approx(distance, rel=1e-12)
        assert found.model_norm == pytest.approx(float(np.linalg.norm(mean)), rel=1e-12)
