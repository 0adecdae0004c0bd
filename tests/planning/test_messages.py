"""What messages weigh and algorithms keep, by their own code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from peer.planning import messages

TOP = ("graph.kind=directed-ring", "compressor.fraction=0.05")


def weight_of(settings: Sequence[str], sizes: Sequence[int]) -> float:
    return messages.weigh(settings, sizes).frame_bytes


def test_a_large_model_weighs_what_a_smaller_one_does_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [400_000, 90_000, 10_000, 64]
    whole = weight_of(TOP, sizes)
    monkeypatch.setattr(messages, "LARGEST", 125_000)
    assert weight_of(TOP, sizes) == pytest.approx(whole, rel=0.04)


def test_more_that_is_kept_weighs_more() -> None:
    sizes = messages.even_sizes(50_000)
    kept = [weight_of((f"compressor.fraction={part:g}",), sizes) for part in (0.01, 0.05, 0.2)]
    assert kept == sorted(kept)
    assert 50_000 * 0.05 * 4 / 8 < kept[1] < 50_000 * 0.05 * 16 / 8


def test_layers_of_any_sizes_are_weighed() -> None:
    assert messages.even_sizes(7, 20) == [1] * 7
    assert sum(messages.even_sizes(273_258)) == 273_258
    # Nothing but headers: of 40 layers with three numbers, each sends at least one.
    assert weight_of(TOP, [3] * 40) > 40


def test_parts_of_sums_weigh_what_their_codes_weigh() -> None:
    settings = ("algorithm.name=low-rank", "graph.kind=complete", "compressor.kind=none")
    shapes = [(64, 64, 3, 3), (64,)]
    for rank in (2, 8):
        numbers = rank * (64 + 576) / 2 + 64
        part = messages.weigh_parts((*settings, f"algorithm.rank={rank}"), shapes, 4).frame_bytes
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


def test_more_numbers_are_more_work() -> None:
    small, large = (messages.weigh(TOP, messages.even_sizes(n)).gossip_s for n in (20_000, 2_000_000))
    assert 0 < small < large


def test_a_scalar_is_a_layer_of_its_own() -> None:
    task = messages.shaped_task(shapes="4x3 1 5")
    assert [tuple(each.shape) for each in task.make_model().parameters()] == [(4, 3), (1,), (5,)]
    factors = ("algorithm.name=low-rank", "graph.kind=complete", "compressor.kind=none")
    assert messages.weigh_parts(factors, [(8, 8), ()], 4).frame_bytes > 0
