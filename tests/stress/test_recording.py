"""What is recorded of peers is the same each time, and another thing where they do anything else."""

from __future__ import annotations

import pytest

from tests.stress import recording
from tests.stress.recording import Situation, record


@pytest.mark.parametrize(
    "name", ["quant-sgp skip", "moniqua loss", "low-rank end 60", "compressed-allreduce end 60", "ad-psgd end 60"]
)
def test_the_same_code_leaves_the_same_recording(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, what, *at = name.split()
    situation = Situation(algorithm, what, *map(int, at))
    first = record(situation)
    assert record(situation) == first
    assert first[0] == name
    monkeypatch.setattr(recording, "SAVE_EVERY", 5)
    assert record(situation) != first
