"""ε: that of the library, an upper bound on the way, and noise that keeps to a limit."""

from __future__ import annotations

import pytest

from peer.config.options import check
from peer.errors import ConfigError
from peer.run.privacy_budget import Budget, epsilon, noise_for, plan_budget

pytest.importorskip("dp_accounting")


def test_it_agrees_with_the_analytic_gaussian_mechanism() -> None:
    """Without sampling T steps of noise σ are one of σ / √T, whose δ(ε) has a closed form (Balle and Wang 2018)."""
    from math import erf, exp, sqrt

    def delta(eps: float, sigma: float) -> float:
        def below(x: float) -> float:
            return 0.5 * (1 + erf(x / sqrt(2)))

        return below(0.5 / sigma - eps * sigma) - exp(eps) * below(-0.5 / sigma - eps * sigma)

    found = epsilon(20.0, 1.0, 100, 1e-5)
    assert delta(found, 2.0) <= 1e-5 < delta(found - 0.01, 2.0)


def test_a_published_setting_of_mnist() -> None:
    """60 epochs of batches of 256 among 60,000 with σ = 1.1 spend 2.6 by Rényi divergences (the tutorials of TensorFlow
    Privacy), and a little less when counted exactly."""
    assert 2.2 < epsilon(1.1, 256 / 60_000, 60 * 234, 1e-5) < 2.6


def test_what_is_spent_grows_and_is_never_told_too_low() -> None:
    budget = Budget(1.2, 0.05, 1e-5, 100, 2)
    told = [budget.spent(done) for done in (0, 1, 33, 99, 100)]
    assert told[0] == 0
    assert told == sorted(told)
    for done, value in zip((1, 33, 99, 100), told[1:], strict=True):
        assert value >= epsilon(1.2, 0.05, 2 * done, 1e-5)
    assert told[-1] == epsilon(1.2, 0.05, 200, 1e-5)


@pytest.mark.parametrize(("limit", "rate", "steps"), [(3.0, 0.02, 200), (0.5, 0.01, 500)])
def test_the_noise_is_the_least_that_keeps_to_the_limit(limit: float, rate: float, steps: int) -> None:
    """Halves of what is left would have ε computed 11 and 12 times, which takes seconds."""
    epsilon.cache_clear()
    noise = noise_for(limit, rate, steps, 1e-5)
    assert epsilon.cache_info().misses <= 8
    assert epsilon(noise, rate, steps, 1e-5) <= limit < epsilon(noise - 0.001, rate, steps, 1e-5)


def test_noise_is_found_where_next_to_nothing_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a noise everything is spent, and above it nothing: no curve leads from one end to the other."""
    monkeypatch.setattr("peer.run.privacy_budget.epsilon", lambda noise, *job: 1e9 if noise < 1.2345 else 1e-9)
    assert noise_for(1.0, 0.0123, 7, 1e-5) == pytest.approx(1.235)


def test_a_run_that_would_spend_more_is_refused_before_it_begins() -> None:
    tree = {"run": {"rounds": 500}, "training": {"batch_size": 50}, "privacy": {"noise_multiplier": 0.8, "epsilon": 1}}
    with pytest.raises(ConfigError, match="not enough for 500 rounds") as error:
        plan_budget(check(tree), 1000)
    assert error.value.key == "privacy.epsilon"
    assert plan_budget(check({**tree, "privacy": {"noise_multiplier": 0.8}}), 1000).noise_multiplier == 0.8


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="training samples"):
        plan_budget(check({"training": {"batch_size": 50}, "privacy": {"epsilon": 1}}), 49)
