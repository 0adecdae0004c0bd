"""What messages weigh and algorithms keep, by their own code."""

from __future__ import annotations

import pytest

from peer.planning import messages

TOP = ("graph.kind=directed-ring", "compressor.fraction=0.05")


def test_a_large_model_weighs_what_a_smaller_one_does_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [400_000, 90_000, 10_000, 64]
    whole = messages.frame_bytes(TOP, sizes)
    monkeypatch.setattr(messages, "LARGEST", 125_000)
    assert messages.frame_bytes(TOP, sizes) == pytest.approx(whole, rel=0.04)


def test_more_that_is_kept_weighs_more() -> None:
    sizes = messages.even_sizes(50_000)
    kept = [messages.frame_bytes((f"compressor.fraction={part:g}",), sizes) for part in (0.01, 0.05, 0.2)]
    assert kept == sorted(kept)
    assert 50_000 * 0.05 * 4 / 8 < kept[1] < 50_000 * 0.05 * 16 / 8


def test_layers_of_any_sizes_are_weighed() -> None:
    assert messages.even_sizes(7, 20) == [1] * 7
    assert sum(messages.even_sizes(273_258)) == 273_258
    # Nothing but headers: of 40 layers with three numbers, each sends at least one.
    assert messages.frame_bytes(TOP, [3] * 40) > 40


def test_parts_of_sums_weigh_what_their_codes_weigh() -> None:
    settings = ("algorithm.name=low-rank", "graph.kind=complete", "compressor.kind=none")
    shapes = [(64, 64, 3, 3), (64,)]
    for rank in (2, 8):
        numbers = rank * (64 + 576) / 2 + 64
        part = messages.part_bytes((*settings, f"algorithm.rank={rank}"), shapes, 4)
        # Up to eight bits for each number, and what a frame takes beside them.
        assert 0.7 * numbers / 4 < part < numbers / 4 + 60


def test_memory_is_that_of_the_copies_that_an_algorithm_keeps() -> None:
    """A directed ring has one neighbour whose model is copied; the exponential graph of 8 has three."""
    plain = messages.state_models(("algorithm.name=sgp", "compressor.kind=none"), 8)
    ring = messages.state_models(TOP, 8)
    exponential = messages.state_models((*TOP, "graph.kind=exponential"), 8)
    assert plain == pytest.approx(0, abs=0.6)
    assert ring > plain + 1.5
    assert exponential == pytest.approx(ring + 2, abs=0.7)
