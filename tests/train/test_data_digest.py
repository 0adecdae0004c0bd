"""What two data sets have in common for their digests to be equal."""

from __future__ import annotations

import torch

from peer.daemon.notes.data_check import DIGEST_BYTES, data_digest
from peer.train.data import TensorData

POINTS = torch.randn(100, 3, generator=torch.Generator().manual_seed(1)) + 5
LABELS = torch.arange(100) % 4


def test_the_same_data_rounded_in_another_way_has_the_same_digest() -> None:
    own = data_digest(TensorData(POINTS, LABELS))
    assert len(own) == DIGEST_BYTES
    assert data_digest(TensorData(POINTS * (1 + 1e-7), LABELS)) == own


def test_other_labels_another_order_and_other_content_have_others() -> None:
    own = data_digest(TensorData(POINTS, LABELS))
    others = (
        TensorData(POINTS, 3 - LABELS),
        TensorData(POINTS[:99], LABELS[:99]),
        TensorData(POINTS.flip(0), LABELS),
        TensorData(POINTS * 2, LABELS),
    )
    for other in others:
        assert data_digest(other) != own


def test_one_sample_is_enough() -> None:
    assert len(data_digest(TensorData(POINTS[:1], LABELS[:1]))) == DIGEST_BYTES
