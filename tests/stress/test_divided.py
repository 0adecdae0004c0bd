"""Clusters that fall apart: see `tests/stress/faults/divided.py`. `make chaos` runs many more seeds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from peer.gossip.membership import Change, ChangeKind
from peer.node.loss_votes import Quorum
from tests.stress.faults.divided import DividedScenario, DividedWorld, Observer, simulate_divided
from tests.stress.faults.invariants import InvariantBroken


@pytest.mark.slow
@pytest.mark.parametrize("lies", [False, True])
def test_no_two_parts_go_on_as_the_whole(lies: bool) -> None:
    faults: Counter[str] = Counter()
    lost = 0
    for seed in range(24):
        outcome = simulate_divided(seed, 60, lies=lies)
        faults += outcome.faults
        lost += outcome.changes["was lost"]
    divisions = {name for name in faults if name.startswith("divided")}
    assert divisions >= {"divided 2–2", "divided 3–1"}
    assert any(name.count("–") == 2 for name in divisions)
    assert lost > 3


@pytest.mark.slow
def test_a_liar_does_not_hear_its_own_words_from_others() -> None:
    """With this seed it repeats a loss that a majority has decided, and keeps nothing of having said so."""
    assert simulate_divided(1022, 100).rounds == 100


@pytest.mark.slow
def test_whom_nobody_but_a_lost_peer_let_in_may_be_refused() -> None:
    """With this seed a member that is cut off lets a device in, and is declared lost before another one hears of it."""
    assert simulate_divided(665, 100, lies=True).rounds == 100


@pytest.mark.slow
def test_a_run_ends_without_a_device_that_nobody_knew_and_that_lost_its_disk() -> None:
    """With this seed it comes anew when nobody may be let in any more, and nobody has declared it lost."""
    assert simulate_divided(249, 100, lies=True).rounds == 100


@pytest.mark.slow
def test_members_hear_of_a_loss_and_of_what_the_lost_peer_did_not_pass_on() -> None:
    """With this seed a member lets a device in, and all its neighbours that could tell the fourth one are lost."""
    assert simulate_divided(478, 100, lies=True).rounds == 100


@pytest.mark.slow
def test_a_newcomer_whom_nobody_but_a_lost_peer_let_in_is_passed_on_by_nobody() -> None:
    """With this seed it meets one member for which its first round is to come, and others for which it is past."""
    assert simulate_divided(1368, 100, lies=True).rounds == 100


@pytest.mark.slow
def test_a_newcomer_may_hear_of_losses_in_any_order() -> None:
    """With this seed it hears of a loss by two votes of three, and only then that the fourth member was lost before."""
    assert simulate_divided(1383, 100).rounds == 100


def test_a_minority_that_decided_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the simulator: peers that believe any loss are told apart from those that keep to the rules."""
    monkeypatch.setattr(Quorum, "is_majority", lambda self, peers: True)
    monkeypatch.setattr("peer.node.membership_checks._check_grounds", lambda known, change: None)
    broken = 0
    for seed in range(12):
        world = DividedWorld(DividedScenario(seed, 60))
        try:
            world.run_to_the_end()
        except InvariantBroken as error:
            broken += "declared peer" in str(error) or "completed round" in str(error)
    assert broken > 0


def test_two_peers_that_complete_a_round_with_other_members_are_noticed() -> None:
    scenario = DividedScenario(0, 60)
    observer = Observer(scenario, set())
    world = DividedWorld(scenario)
    for me in (0, 1):
        world.start_process(me)
    one, other = (world.processes[me] for me in (0, 1))
    assert one is not None
    assert other is not None
    one.participant.session.round = other.participant.session.round = 9
    observer.round_done(one.participant)
    views = other.participant.algorithm.node.schedule
    change = replace(_loss(scenario), effective=5)
    views.membership.add(change)  # type: ignore[union-attr]
    with pytest.raises(InvariantBroken, match="completed round 8"):
        observer.round_done(other.participant)


def _loss(scenario: DividedScenario) -> Change:
    return Change(ChangeKind.LOST, scenario.num_first - 1, 0, 1)
