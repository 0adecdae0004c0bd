"""Peers whose processes end at every single write: they go on where they were, to the same bits."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from peer.errors import RemoteProtocolError, StateBehind, StateError
from peer.gossip.late_neighbors import LatePolicy
from peer.node.durable import DurablePeer
from peer.node.held_frames import EarlyFrames
from peer.protocol import FULL_WIDTH
from peer.records import RoundRecord
from peer.wire import Message
from peer.wire.message import MessageKind
from tests.node.durable_peers import ADAPTIVE, ALGORITHMS, LATE, SILENT, World
from tests.state.failing_disk import ProcessEnds
from tests.wire.comparing import assert_same

pytestmark = pytest.mark.slow

LAG = {"lag": lambda sender, number: 6 if sender == 0 and number % 5 < 2 else 0}


def run_through(world: World, *, victim: int, power: bool = False) -> World:
    """Run to the end, with the process of the victim started again wherever it ends."""
    for _ in range(2):
        try:
            if not world.peers:
                world.start()
            world.run()
            return world
        except ProcessEnds:
            if power:
                world.disks[victim].lose_power()
            world.disks[victim].restart()
            if len(world.peers) == world.n and len(world.queues) == world.n * (world.n - 1):
                world.restart(victim)
            else:
                world.peers.clear()  # It ended before it had met anybody.
    raise AssertionError("it ended twice")


@pytest.mark.parametrize("is_script", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_process_that_ends_at_any_operation_on_the_disk_changes_no_bit(algorithm: str, is_script: bool) -> None:
    short = {"rounds": 6 if algorithm == "quant-sgp" else 4, "save_every": 2, "is_script": is_script}
    undisturbed = World(algorithm, **short)
    undisturbed.start()
    undisturbed.run()
    operations = undisturbed.operations(1)
    kinds = {what.split("-")[0] for what in operations}
    assert {"append journal", "append .checkpoint", "rename .checkpoint", "rename .journal"} <= kinds
    assert algorithm != "quant-sgp" or {"unlink journal", "unlink checkpoint"} <= kinds
    for end_at, what in enumerate(operations):
        world = World(algorithm, **short)
        # In the middle of an append, or right before anything else.
        world.disks[1].end_at, world.disks[1].torn = end_at, (0.0, 0.1, 0.5, 0.9)[end_at % 4]
        run_through(world, victim=1)
        assert world.models() == undisturbed.models(), f"ended at operation {end_at}, {what}"
        assert (world.told_against_last > 0) == (algorithm == "moniqua")


def test_a_process_that_ends_in_recovery_recovers_the_next_time() -> None:
    undisturbed = World("quant-sgp")
    undisturbed.start()
    undisturbed.run()
    # A torn record in the journal, so that recovery has something to write.
    first = [i for i, what in enumerate(undisturbed.operations(1)) if what.startswith("append journal")][-3]
    for further in range(3):
        world = World("quant-sgp")
        world.disks[1].end_at, world.disks[1].torn = first, 0.5
        world.start()
        with pytest.raises(ProcessEnds):
            world.run()
        world.disks[1].end_at = first + 1 + further
        with contextlib.suppress(ProcessEnds):
            world.make(1).open()
        world.restart(1)
        world.run()
        assert world.models() == undisturbed.models()


@pytest.mark.parametrize(
    ("algorithm", "durability", "syncs"),
    [
        ("quant-sgp", "process", True),
        ("quant-sgp", "power", True),
        # With repairs, of which the sender keeps nothing once the next message shows that they are not needed any more.
        ("moniqua", "process", False),
        ("moniqua", "power", False),
    ],
)
def test_a_power_cut_at_any_operation_changes_no_bit_where_nobody_goes_on_without_another(
    algorithm: str, durability: str, syncs: bool
) -> None:
    short = {"rounds": 4, "save_every": 2 if syncs else 9, "durability": durability, "syncs": syncs}
    undisturbed = World(algorithm, **short)
    undisturbed.start()
    undisturbed.run()
    for end_at, what in enumerate(undisturbed.operations(1)):
        world = World(algorithm, **short)
        world.disks[1].end_at = end_at
        run_through(world, victim=1, power=True)
        assert world.models() == undisturbed.models(), f"ended at operation {end_at}, {what}"


@pytest.mark.parametrize(
    ("algorithm", "late", "rounds"),
    [
        ("sparse-push", LATE, 7),
        ("quant-sgp", LATE, 7),
        ("choco-sgd", LATE, 7),
        ("quant-sgp", ADAPTIVE, 24),
        ("sparse-push", SILENT, 16),
        ("quant-sgp", SILENT, 16),
    ],
)
def test_decisions_taken_by_the_clock_are_taken_again(algorithm: str, late: LatePolicy, rounds: int) -> None:
    """Whenever the process ends between two calls, recovery leads to the very state that it had."""
    world = World(algorithm, late=late, rounds=rounds, **LAG)
    world.start()
    skipped = replayed = left_out = 0
    while any(peer.round < world.rounds for peer in world.peers.values()):
        world.now += 1.0
        for i in range(world.n):
            world.turn(i)
        ended, recovered = world.peers[1], world.make(1)
        left_out += len(ended.left_out)
        records: list[RoundRecord] = []
        recovery = recovered.open(lambda effects, records=records: records.append(effects.record))
        assert everything(recovered) == everything(ended)
        assert recovery.effects.wake_at == world.last[1].wake_at
        for other, link in ended.links.out.items():
            assert set(link.unacknowledged(0)) <= set(recovered.links.out[other].unacknowledged(0))
        skipped += sum(record.late for record in records)
        replayed += len(records)
    assert replayed > 5
    assert skipped > 0, "nothing was late, so nothing was tested"
    assert left_out > 0 or late is not SILENT, "nobody was silent, so nothing was tested"


def everything(peer: DurablePeer) -> list[object]:
    """Return what the future of a peer depends on."""
    participant = peer.participant
    arrays = participant.algorithm.state() | dict(participant.local_steps.state())
    return [
        {name: array.tobytes() for name, array in arrays.items()},
        (participant.round, participant.session.in_round, participant.session.waiting_for),
        [(other, link.next_seq) for other, link in peer.links.out.items()],
        None if (deadlines := participant.session.late_neighbors.deadlines) is None else deadlines.state(),
        [(other, link.last_seq) for other, link in peer.links.incoming.items()],
    ]


@pytest.mark.parametrize(("algorithm", "durability"), [("sparse-push", "process"), ("quant-sgp", "process"),
                                                       ("quant-sgp", "power")])  # fmt: skip
def test_mass_and_replicas_survive_an_end_at_any_operation_with_late_messages(algorithm: str, durability: str) -> None:
    more = {"late": SILENT if durability == "process" else LATE, "rounds": 6, "durability": durability, **LAG}
    undisturbed = World(algorithm, **more)
    undisturbed.start()
    undisturbed.run()
    for end_at in range(0, len(undisturbed.operations(1)), 2):
        world = World(algorithm, **more)
        world.disks[1].end_at, world.disks[1].torn = end_at, 0.5
        run_through(world, victim=1, power=durability == "power")
        for peer in world.peers.values():
            peer.save({}, anew=True)  # What comes after the last round has its share too.
        assert sum(peer.participant.algorithm.u for peer in world.peers.values()) == pytest.approx(world.n, abs=1e-12)
        assert_replicas_agree(world)


def assert_replicas_agree(world: World) -> None:
    for peer in world.peers.values():
        replicas = getattr(peer.participant.algorithm, "replicas", None)
        if replicas is None:
            return
        for j in replicas.senders:
            theirs = world.peers[j].participant.algorithm.replicas.own  # type: ignore[attr-defined]
            assert replicas.of[j].tobytes() == theirs.tobytes()


@pytest.mark.parametrize("late", [None, LATE])
def test_a_copy_that_differs_is_mended_within_the_stated_rounds(late: LatePolicy | None) -> None:
    world = turns(World("quant-sgp", rounds=60, save_every=100, late=late, **(LAG if late else {})), 12)
    copy = world.peers[1].participant.algorithm.replicas.of[0]  # type: ignore[attr-defined]
    copy.view(np.uint32)[np.abs(copy).argmax()] ^= 1 << 22
    while not world.sentences:
        world.now += 1.0
        for i in range(world.n):
            world.turn(i)
    assert "copy of peer 0 differed from its own after round 16 in 1 of 2 layers (layer" in world.sentences[0]
    world.run()
    for peer in world.peers.values():
        peer.save({}, anew=True)  # What came late is applied.
    assert_replicas_agree(world)
    assert len(world.sentences) <= 2, "asked again only where the answer came too late"


@pytest.mark.parametrize("is_script", [False, True])
@pytest.mark.parametrize(
    "algorithm", ["quant-sgp", "sparse-push", "d2", "allreduce", "low-rank", "compressed-allreduce"]
)
def test_where_arithmetic_is_not_repeatable_mass_is_conserved_and_replicas_agree(
    algorithm: str, is_script: bool
) -> None:
    draws = np.random.default_rng(5)
    wobble = lambda: float(draws.uniform(-1e-3, 1e-3))  # noqa: E731
    count = 0
    for after in range(25, 60, 5):
        more = {"wobble": wobble, "rounds": 12, "save_every": 20}
        world = turns(World(algorithm, repeatable=is_script, is_script=is_script, **more), after)
        for _ in range(2):  # After the first time a script records its steps, behind those that it repeats.
            recovery = world.restart(1)
            count += recovery.replayed_rounds
            assert len(recovery.notices) == (is_script and recovery.replayed_rounds > 0), "it is told once"
            take_turns(world, 5)
        world.run()
        assert sum(peer.participant.algorithm.u for peer in world.peers.values()) == pytest.approx(world.n, abs=1e-12)
        assert_replicas_agree(world)
        if algorithm in ("allreduce", "low-rank", "compressed-allreduce"):
            assert len(set(world.models())) == 1, "what the others were told is what is added up, whatever was computed"
    assert count > 0


def test_codes_that_the_two_ends_of_a_stream_hold_differently_are_repaired_and_soon_the_same_again() -> None:
    """As after a power cut on a machine that repeats its rounds to other bits."""
    world = turns(World("moniqua", rounds=30, save_every=100), 50)
    assert world.peers[1].round < 19
    before = repairs(world)
    for layer in heard_by_1(world).layers:
        layer.residues[:] ^= 1  # type: ignore[union-attr]
    world.run()
    assert repairs(world) > before
    own = world.peers[0].participant.last_codes
    assert own is not None
    assert own.own is not None
    assert_same(heard_by_1(world), own.own)
    assert repairs(world) <= before + 12


def heard_by_1(world: World) -> Message:
    """Return the last message of peer 0 that peer 1 reads the next one with."""
    codes = world.peers[1].participant.last_codes
    assert codes is not None
    message = codes.of(0)
    assert message is not None
    return message


def repairs(world: World) -> int:
    return sum(peer.participant.algorithm.metrics().repairs for peer in world.peers.values())


def test_a_replay_that_gives_other_bits_stops_the_peer_in_a_sentence() -> None:
    draws = np.random.default_rng(5)
    world = turns(World("quant-sgp", wobble=lambda: float(draws.uniform(-1e-3, 1e-3)), save_every=20), 12)
    with pytest.raises(StateError, match="replaying it gives another model in round 0; the machine"):
        world.make(1).open()


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_journal_holds_own_frames_only_where_they_cannot_be_made_again(repeatable: bool) -> None:
    world = turns(World("quant-sgp", repeatable=repeatable, lag=lambda sender, number: 9), 3)
    under_way = [frame for (sender, _), frames in world.queues.items() if sender == 1 for _, frame, _ in frames]
    journal = world.disks[1].read("journal-00000000.log")
    assert under_way
    assert all((frame in journal) != repeatable for frame in under_way)


def test_rounds_in_full_width_are_repeated_in_full_width() -> None:
    world = turns(World("d-psgd", save_every=20, lag=lambda sender, number: 2), 2)
    for peer in world.peers.values():
        peer.in_full_width = True
    take_turns(world, 6)
    repeated = world.make(1)
    repeated.open()
    assert repeated.participant.algorithm.x.tobytes() == world.models()[1]
    # The release before does not know the number that stands for it.
    assert repeated.disk_state.protocol == FULL_WIDTH


def test_a_state_that_relies_on_repeatable_arithmetic_is_refused_where_there_is_none() -> None:
    draws = np.random.default_rng(5)
    world = turns(World("quant-sgp", save_every=20), 12)
    world.repeatable, world.wobble = False, lambda: float(draws.uniform(-1e-3, 1e-3))
    with pytest.raises(StateError, match="replaying it gives another model in round 0; the machine"):
        world.make(1).open()


def test_a_damaged_checkpoint_costs_nothing_but_the_replay_of_the_journal_before_it() -> None:
    world = World("quant-sgp")
    world.start()
    world.run()
    names = sorted(world.disks[1].names())
    assert names == [
        "checkpoint-00000006.safetensors",
        "checkpoint-00000007.safetensors",
        "journal-00000006.log",
        "journal-00000007.log",
    ]
    world.disks[1].change("checkpoint-00000007.safetensors", -50, 0x10)
    recovered = world.make(1)
    recovery = recovered.open()
    assert recovered.participant.algorithm.x.tobytes() == world.models()[1]
    assert (recovery.checkpoint_round, recovery.replayed_rounds) == (6, 1)
    assert recovery.notices == [
        "checkpoint-00000007.safetensors: cannot be read as a checkpoint: its checksum does not match; the state "
        "before it is used, and the journal since"
    ]
    assert "damaged.safetensors" in world.disks[1].names()
    # Found once, mended once.
    again = world.make(1)
    assert again.open().notices == []
    assert again.participant.algorithm.x.tobytes() == world.models()[1]


def set_back(world: World, *, victim: int, to_round: int) -> World:
    """Cut the power of a peer in its last round but one, after which nothing was synced for long."""
    world.start()
    while world.peers[victim].round < world.rounds - 1:
        world.now += 1.0
        for i in range(world.n):
            world.turn(i)
    world.disks[victim].lose_power()
    world.restart(victim)
    assert world.peers[victim].round == to_round
    return world


def test_what_comes_from_far_ahead_after_a_power_cut_waits_until_it_is_not_far_any_more() -> None:
    long = {"rounds": 12, "save_every": 2 * 12, "max_lead": 2, "syncs": False}
    undisturbed = World("quant-sgp", **long)
    undisturbed.start()
    undisturbed.run()
    world = set_back(World("quant-sgp", **long), victim=1, to_round=0)
    world.run()
    assert world.models() == undisturbed.models()


def test_no_more_than_a_bound_is_kept_of_what_comes_from_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.node.held_frames.EARLY_BYTES_MAX", 300)
    world = World("quant-sgp", rounds=12, save_every=24, max_lead=2, syncs=False)
    set_back(world, victim=1, to_round=0)
    with pytest.raises(RemoteProtocolError, match="more than 2 ahead of our 0"):
        world.run()


def test_codes_never_refer_to_a_message_that_was_kept_and_taken_long_ago() -> None:
    early = EarlyFrames()
    assert early.add(1, 1, b"message", Message(MessageKind.NOTHING, 1, 9, 0))
    early.take(1)
    assert early.add_notice(1, 2, b"notice")
    assert early.newest(1) is None


def test_peers_that_are_put_back_together_go_on_to_the_same_bits() -> None:
    """`guard.action = "rollback"`: what is newer than the checkpoint is set aside, journals too."""
    undisturbed = World("quant-sgp")
    undisturbed.start()
    undisturbed.run()
    world = World("quant-sgp", **LAG)
    world.start()
    while min(peer.round for peer in world.peers.values()) < 5:
        world.now += 1.0
        for i in range(world.n):
            world.turn(i)
    assert [peer.disk_state.go_back(5) for peer in world.peers.values()] == [3] * world.n
    for disk in world.disks.values():
        assert not [name for name in disk.names() if name.startswith("journal-")]
        assert [name for name in disk.names() if name.startswith("set-aside-1-journal-")]
        disk.restart()
    world.start()
    assert [peer.round for peer in world.peers.values()] == [3] * world.n
    world.run()
    assert world.models() == undisturbed.models()


def turns(world: World, count: int) -> World:
    """Start, and let everybody take so many turns."""
    world.start()
    take_turns(world, count)
    return world


def take_turns(world: World, count: int) -> None:
    for _ in range(count):
        world.now += 1.0
        for i in range(world.n):
            world.turn(i)


def test_a_damaged_end_of_the_journal_is_cut_off_and_what_it_held_comes_again() -> None:
    undisturbed = World("quant-sgp")
    undisturbed.start()
    undisturbed.run()
    damaged = 0
    for count in range(4, 24):
        world = turns(World("quant-sgp"), count)
        name = max(name for name in world.disks[1].names() if name.startswith("journal"))
        if not world.operations(1)[-1].startswith("append"):
            continue  # The end of it is synced, and confirmed.
        world.disks[1].change(name, -1, 0x01)
        notices = world.restart(1).notices
        assert [notice.partition(" at byte")[0] for notice in notices] == [
            f"{name}: the checksum of a record does not match"
        ]
        damaged += 1
        world.run()
        assert world.models() == undisturbed.models()
    assert damaged > 3


def test_what_was_confirmed_and_then_lost_is_noticed() -> None:
    world = turns(World("quant-sgp", save_every=20), 20)
    world.disks[1].change("journal-00000000.log", 800, 0x01)
    with pytest.raises(StateBehind, match="up to 2, but had those up to 5 for good before, and they are gone"):
        world.restart(1)


def test_a_full_disk_stops_the_round_and_leaves_the_data() -> None:
    undisturbed = World("quant-sgp")
    undisturbed.start()
    undisturbed.run()
    world = turns(World("quant-sgp"), 20)
    world.disks[1].fill(10)
    with pytest.raises(StateError, match="cannot be written: No space left on device; the saved state is intact"):
        world.run()
    # Not even by chance does anything follow the half record.
    with pytest.raises(StateError):
        world.run()
    world.restart(1)
    world.run()
    assert world.models() == undisturbed.models()


def test_a_neighbour_that_lost_what_it_had_confirmed_is_refused() -> None:
    world = World("quant-sgp")
    world.start()
    world.run()
    with pytest.raises(StateBehind, match="up to 2, but had those up to 7 for good before, and they are gone"):
        world.peers[0].connected(1, 2)


def test_the_state_of_another_peer_is_refused() -> None:
    world = World("quant-sgp")
    world.start()
    world.disks[0] = world.disks[1]
    words = "the journal belongs to peer '1', but this peer has '0'; start again .*=NEW; or, if no other device"
    with pytest.raises(StateError, match=f"{words} has met this one, rename its state folder"):
        world.make(0).open()
    world.run()
    with pytest.raises(
        StateError, match=r"belongs to peer '1', but this peer has '0'; start again .* state\.directory=NEW$"
    ):
        world.make(0).open()
