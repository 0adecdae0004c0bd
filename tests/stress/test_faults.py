"""The simulator finds nothing in the peer that is shipped, and does find what is broken on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from peer.gossip import session
from peer.gossip.base import Algorithm, Exchange
from peer.gossip.boundary import Boundary
from peer.gossip.effects import Effects
from peer.gossip.error_feedback import SparsePush
from peer.gossip.exact import Sgp
from peer.gossip.judge import Judge
from peer.gossip.lost_peers import LostPeers
from peer.gossip.membership import Change, ChangeKind
from peer.gossip.views import ViewSchedule
from peer.node.durable import DurablePeer
from peer.state.journal import Journal, Record
from peer.wire.message import Message
from tests.stress.faults import Scenario, SimulationFailed, World, simulate
from tests.stress.faults.invariants import Auditor
from tests.stress.faults.scenario import CASES

MEMBERS = (1, 16, 17, 26, 34, 39, 59, 73, 80, 83, 86, 88, 99, 355)
"""Seeds in which somebody joins, leaves or is lost."""

RESTARTED = (355, 1043)
"""Seeds in which a peer is lost soon after an heir has sent it its replica whole again."""

MEMBERS_AND_A_LIAR = (17, 27, 34, 64, 72, 88)
"""Seeds in which members change around one that lies: a loss of the past, and a loss of the liar itself, among them."""

INSISTING = (80, 308, 823, 1017, 1107, 1272)
"""Seeds whose liar is to be lost and stays linked: messages that all refuse come again and again."""

STUCK = (2058, 2067, 3096)
"""Seeds that were stuck: two peers are lost before they join, and the third cuts off one that is about to leave."""


@pytest.mark.parametrize("seed", range(2 * len(CASES)))
def test_nothing_that_goes_wrong_changes_what_must_not_change(seed: int) -> None:
    """Twice every algorithm; `make chaos` runs a thousand seeds."""
    assert simulate(seed, rounds=30).rounds == 30


@pytest.mark.parametrize("name", ["low-rank", "compressed-allreduce", "sums in bfloat16"])
@pytest.mark.parametrize("seed", range(24))
def test_nothing_that_goes_wrong_parts_models_that_sums_move(seed: int, name: str) -> None:
    """With members that come, go and are lost in half of the seeds, and a liar in a quarter."""
    assert simulate(seed, rounds=30, lies=seed % 4 == 3, name=name).rounds == 30


@pytest.mark.parametrize("name", ["drift", "bfloat16"])
@pytest.mark.parametrize("seed", range(24))
def test_nothing_that_goes_wrong_takes_mass_from_peers_that_keep_more_or_less(seed: int, name: str) -> None:
    """With corrections of drift, copies in bfloat16, members that come, go and are lost, and a liar in a quarter."""
    assert simulate(seed, rounds=30, lies=seed % 4 == 3, name=name).rounds == 30


@pytest.mark.parametrize("seed", STUCK)
def test_nobody_waits_for_ever_for_a_peer_that_is_lost_as_others_come_and_go(seed: int) -> None:
    assert simulate(seed, rounds=100).rounds == 100


@pytest.mark.parametrize("seed", RESTARTED)
def test_what_was_sent_before_a_replica_restarted_comes_back(seed: int) -> None:
    assert simulate(seed, rounds=100).rounds == 100


@pytest.mark.parametrize("seed", MEMBERS)
def test_members_come_and_go_while_all_else_goes_wrong(seed: int) -> None:
    assert simulate(seed, rounds=60).rounds == 60


@pytest.mark.parametrize("seed", range(len(CASES)))
def test_honest_peers_live_on_beside_one_that_lies(seed: int) -> None:
    """Once every algorithm; `make chaos` has a liar in half of its seeds."""
    outcome = simulate(seed, rounds=40, lies=True)
    assert outcome.rounds == 40
    assert outcome.lies


@pytest.mark.parametrize("seed", MEMBERS_AND_A_LIAR)
def test_members_come_and_go_beside_one_that_lies(seed: int) -> None:
    outcome = simulate(seed, rounds=60, lies=True)
    assert outcome.rounds == 60
    assert outcome.changes
    assert outcome.lies


@pytest.mark.parametrize("seed", INSISTING)
def test_a_run_that_waits_for_a_refused_liar_goes_on_once_that_is_removed(seed: int) -> None:
    outcome = simulate(seed, rounds=100, lies=True)
    assert outcome.rounds == 100
    assert outcome.changes["insisted on what was refused"] == 1


def test_the_seeds_of_this_suite_have_liars_of_both_kinds() -> None:
    faces = {Scenario(seed, 40, lies=True).is_two_faced for seed in range(len(CASES))}
    assert faces == {False, True}


def test_the_seeds_of_this_suite_have_every_change_of_members() -> None:
    happenings = [each for seed in MEMBERS for each in Scenario(seed, 60).happenings]
    assert {(each.kind, each.is_alive) for each in happenings} == {
        (ChangeKind.JOIN, False),
        (ChangeKind.LEAVE, False),
        (ChangeKind.LOST, False),
        (ChangeKind.LOST, True),
    }


def test_the_seeds_of_this_suite_have_every_kind_of_fault() -> None:
    kinds = {kind for seed in range(2 * len(CASES)) for kind in World(Scenario(seed, 1)).plan.kinds()}
    assert kinds == {
        "kills", "kills in a write", "power cuts", "broken streams", "cuts", "partitions", "full disks", "slow disks",
        "slow peers", "clock jumps", "damaged checkpoints", "delays", "thin links",
    }  # fmt: skip


def test_one_number_is_enough_to_see_a_run_again() -> None:
    one, other = (World(Scenario(seed=15, rounds=20)) for _ in range(2))
    assert one.run() == other.run()
    assert one.trace == other.trace


def caught(seeds: Sequence[int], rounds: int = 30, *, lies: bool = False) -> str:
    """Return what the first seed that fails says."""
    for seed in seeds:
        try:
            simulate(seed, rounds, lies=lies)
        except SimulationFailed as error:
            return str(error)
    raise AssertionError("nobody noticed")


def of(algorithm: str, *, late: bool) -> list[int]:
    """Return seeds of one algorithm with the same members throughout."""
    first = next(i for i, case in enumerate(CASES) if (case.algorithm, case.late) == (algorithm, late))
    seeds = range(first, first + 16 * len(CASES), len(CASES))
    return [seed for seed in seeds if not Scenario(seed, 30).happenings]


def test_a_peer_that_sends_before_it_journals_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Journal.append
    held: dict[Journal, list[Record]] = {}

    def too_late(self: Journal, *records: Record) -> None:
        # Each write holds what belongs to the call before.
        before = held.get(self, [])
        held[self] = list(records)
        append(self, *before)

    monkeypatch.setattr(Journal, "append", too_late)
    assert "seed" in caught(of("quant-sgp", late=True))


def test_a_peer_that_forgets_its_error_memory_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = SparsePush.restore

    def forget(self: SparsePush, state: Mapping[str, Any]) -> None:
        restore(self, state)
        self.error_memory[:] = 0

    monkeypatch.setattr(SparsePush, "restore", forget)
    # Its own journal says so first, where it holds what was made after the checkpoint.
    assert any(words in caught(of("sparse-push", late=False)) for words in ("undisturbed", "gives other messages"))


def test_a_late_message_that_is_applied_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    absorb_late = Sgp.absorb_late

    def twice(self: Sgp, message: Message) -> None:
        absorb_late(self, message)
        absorb_late(self, message)

    monkeypatch.setattr(Sgp, "absorb_late", twice)
    # Its neighbours may be the first to say so: nobody can have such a weight.
    assert any(words in caught(of("sgp", late=True)) for words in ("Σu is", "which nobody can have"))


def test_a_receipt_for_what_may_still_be_lost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = DurablePeer.receive

    def boast(self: DurablePeer, peer: int, seq: int, frame: bytes, now: float) -> Effects:
        effects = receive(self, peer, seq, frame, now)
        effects.receipts[peer] = self.links.incoming[peer].last_seq
        return effects

    monkeypatch.setattr(DurablePeer, "receive", boast)
    assert "seed" in caught(of("choco-sgd", late=False))


def test_a_peer_that_waits_for_ever_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = DurablePeer.connected

    def say_nothing_again(self: DurablePeer, peer: int, remote_has: int) -> list[tuple[int, bytes]]:
        connected(self, peer, remote_has)
        return []

    monkeypatch.setattr(DurablePeer, "connected", say_nothing_again)
    assert "stuck though all is well" in caught(of("d2", late=False), rounds=15)


def test_a_lie_that_is_believed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judge, "judge", lambda self, message: None)
    assert "lies" in caught(range(len(CASES)), lies=True)


def test_a_lie_about_members_that_is_believed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.node.participant.check_notice", lambda known, change, sender: None)
    assert "lies" in caught(range(len(CASES)), lies=True)


def test_what_a_liar_brings_its_neighbours_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Auditor, "told_otherwise", lambda self, *what: None)
    assert "two-faced" in caught(range(len(CASES)), lies=True)


def test_a_share_that_is_given_and_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept(Boundary):
        def __init__(self, algorithm: Algorithm, views: ViewSchedule, t: int) -> None:
            super().__init__(algorithm, views, t)
            self.giver = algorithm

        def begin(self) -> Exchange | None:
            x, u = self.giver.x.copy(), self.giver.u
            exchange = super().begin()
            self.giver.x, self.giver.u = x, u
            return exchange

    monkeypatch.setattr(session, "Boundary", Kept)
    assert "Σu is" in caught([97], rounds=60)


def test_what_returns_twice_from_a_lost_peer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take_back = Sgp.take_back

    def twice(self: Sgp, unreceived: Sequence[Message]) -> None:
        take_back(self, unreceived)
        take_back(self, unreceived)

    monkeypatch.setattr(Sgp, "take_back", twice)
    assert "Σu is" in caught([16], rounds=60)


def test_what_returns_though_others_have_heard_of_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = LostPeers.reports

    def heard_nothing(self: LostPeers, peer: int) -> list[Change]:
        return [replace(report, heard_round=0) for report in reports(self, peer)]

    monkeypatch.setattr(LostPeers, "reports", heard_nothing)
    assert "holds it" in caught([16], rounds=60)


def test_a_late_message_that_is_dropped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    absorb_late = SparsePush.absorb_late
    rounds = set()

    def lose_all_but_the_first(self: SparsePush, message: Message) -> None:
        if message.round not in rounds:
            absorb_late(self, message)
        rounds.add(message.round)

    monkeypatch.setattr(SparsePush, "absorb_late", lose_all_but_the_first)
    assert "Σu is" in caught(of("sparse-push", late=True))
