"""The benchmark of full precision measures what it says."""

from __future__ import annotations

import pytest
import torch

from peer.train.full_precision import norms
from tools.bench_full_precision import WAYS, Step, measure, report


def test_every_way_is_measured_and_told() -> None:
    figures = measure(16, 2, runs=1)
    assert set(figures) == set(WAYS)
    assert all(own["milliseconds"] > 0 for own in figures.values())
    assert figures["composed"]["faster_by"] == 1.0
    table = report({16: figures})
    assert len(table.splitlines()) == 2 + len(WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_ways_differ_in_the_norm_and_in_nothing_else(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    plain = norms.evonorm_s0

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor:
        called.append(x.dtype)
        return plain(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(norms, "evonorm_s0", counted)
    Step(way, 16, 2).seconds()
    expected = {"composed": 0, "float32": 21, "bfloat16": 21}
    assert len(called) == expected[way]
    assert set(called) <= {torch.bfloat16 if way == "bfloat16" else torch.float32}
