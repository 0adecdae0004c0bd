"""Members of the last round form the average of their models, whatever happens to them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from peer.daemon import final_average
from peer.daemon.final_average import FinalAverage
from peer.daemon.notes import notes
from peer.daemon.notes.evaluations import Models
from peer.errors import PeerUnreachable, StateError
from peer.state import shares
from peer.state.kept_file import AVERAGE_FILE, AVERAGE_SHARES, OWN_FILE
from peer.train.threads import use_one_thread
from tests.daemon.averaging import COMPLETE, LINE, RING, ROUNDS, Graph, Net, run, vector
from tests.daemon.test_members import Devices

GRAPHS = pytest.mark.parametrize("graph", [RING, COMPLETE, LINE], ids=["ring", "complete", "line"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the share of 330 numbers in four."""
    monkeypatch.setattr(shares, "CHUNK_NUMBERS", 100)


def files(net: Net) -> list[bytes]:
    return [(net.state(peer) / AVERAGE_FILE).read_bytes() for peer in net.members]


@GRAPHS
def test_all_have_the_same_file_which_is_the_sum_over_the_weights(tmp_path: Path, graph: Graph) -> None:
    net = Net(tmp_path, graph, weights={0: 0.25, 1: 1.5, 2: 1.0, 3: 1.25})
    found = run(net)
    assert found == {peer: net.state(peer) / AVERAGE_FILE for peer in range(4)}
    assert len({*files(net)}) == 1
    assert np.array_equal(vector(net.state(0) / AVERAGE_FILE), net.by_hand())
    for peer in range(4):
        assert {*load_file(net.state(peer) / OWN_FILE)} == {"norm.running_mean"}
        assert not (net.state(peer) / "average.part").exists()


@GRAPHS
def test_a_kill_at_any_instant_changes_no_bit(tmp_path: Path, graph: Graph) -> None:
    undisturbed = Net(tmp_path / "undisturbed", graph)
    undisturbed.folder.mkdir()
    run(undisturbed)
    wanted = {*files(undisturbed)}
    assert len(wanted) == 1
    for at in range(1, undisturbed.events, max(1, undisturbed.events // 12)):
        net = Net(tmp_path / f"killed-{at}", graph)
        net.folder.mkdir()

        def kill(number: int, net: Net = net, at: int = at) -> None:
            if number == at:
                victim = at % 4
                net.kill(victim)
                net.start(victim)

        net.on_event = kill
        found = run(net)
        assert all(isinstance(each, Path) for each in found.values()), (at, found)
        assert {*files(net)} == wanted, at


def test_what_is_equal_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(tmp_path, COMPLETE)
    one, sent = net.model(0).x, []

    def model(peer: int) -> Models:
        x = one.copy()
        x[150] += peer == 2  # In the second of four chunks.
        return Models(x, x, 1.0)

    def count(source: int, peer: int, topic: str, data: bytes) -> bool:
        if topic == "" and (chunk := notes.decode_chunk(data)).data:
            sent.append((chunk.owner, chunk.index, peer))
        return False

    monkeypatch.setattr(net, "model", model)
    net.is_lost = count
    run(net)
    assert len({*files(net)}) == 1
    assert np.array_equal(vector(net.state(1) / AVERAGE_FILE), net.by_hand())
    # One of another content, to each of the others, and theirs to the one that has it.
    assert sorted(sent) == sorted([*((2, 1, peer) for peer in (0, 1, 3)), *((owner, 1, 2) for owner in (0, 1, 3))])


@pytest.mark.parametrize("graph", [COMPLETE, LINE], ids=["complete", "line"])
def test_a_share_of_equal_numbers_is_judged_before_anybody_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: Graph
) -> None:
    net = Net(tmp_path, graph, weights={0: 1.0, 1: 1.0, 2: 1.0, 3: 0.25}, give_up_after_s=1.0)
    one = net.model(0).x
    monkeypatch.setattr(net, "model", lambda peer: Models(one / np.float32(net.u(peer)), one, net.u(peer)))
    # The same numbers reach four times as far under the weight that the last one tells, and one peer lets less by.
    monkeypatch.setattr(Net, "allowed_by", lambda net, peer: 50.0 if peer == 0 else 1e3)
    run(net)
    assert not any((net.state(peer) / AVERAGE_FILE).exists() for peer in net.members)


def test_one_that_left_has_no_part_in_it(tmp_path: Path) -> None:
    net = Net(tmp_path, COMPLETE, members=(0, 2, 3))
    run(net, (0, 2, 3))
    assert len({*files(net)}) == 1
    assert np.array_equal(vector(net.state(2) / AVERAGE_FILE), net.by_hand())


def test_a_missing_member_is_named_and_the_next_start_goes_on(tmp_path: Path) -> None:
    net = Net(tmp_path, RING, give_up_after_s=0.3)
    found = run(net, (0, 1, 3))
    for peer in (0, 1, 3):
        error = found[peer]
        assert isinstance(error, PeerUnreachable)
        assert error.exit_code == 6
        assert "peer-2 told no model after the last round" in str(error)
        assert not (net.state(peer) / AVERAGE_FILE).exists()
    net = Net(tmp_path, RING)
    run(net)
    assert len({*files(net)}) == 1
    assert np.array_equal(vector(net.state(2) / AVERAGE_FILE), net.by_hand())


def test_the_log_says_whose_model_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(final_average, "_AGAIN_S", 0.05)
    with caplog.at_level("INFO"):
        run(Net(tmp_path, RING, give_up_after_s=1.0), (0, 1, 3))
    waits = [record.getMessage() for record in caplog.records if "waits with" in record.getMessage()]
    assert {*waits[-3:]} == {"waits with the average: peer-2 told no model after the last round"}


def test_a_late_message_changes_nothing_once_the_share_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Net(tmp_path, RING, give_up_after_s=0.3), (0, 1, 3))
    net = Net(tmp_path, RING)
    model = net.model
    wanted = net.by_hand()
    monkeypatch.setattr(net, "model", lambda peer: model(2 if peer == 0 else peer))
    run(net)
    assert np.array_equal(vector(net.state(3) / AVERAGE_FILE), wanted)


def test_a_chunk_that_the_disk_lost_is_asked_for_again(tmp_path: Path) -> None:
    run(Net(tmp_path, RING, give_up_after_s=0.3), (0, 1, 3))
    parts = tmp_path / "peer-0" / "average.part"
    content = bytearray(parts.read_bytes())
    assert len(content) == 4 * 4 * 330
    content[4 * 330 : 8 * 330] = bytes(4 * 330)
    parts.write_bytes(content)
    net = Net(tmp_path, RING)
    run(net)
    assert len({*files(net)}) == 1


def test_whoever_lost_the_own_share_says_so(tmp_path: Path) -> None:
    run(Net(tmp_path, RING, give_up_after_s=0.3), (0, 1, 3))
    (tmp_path / "peer-0" / "average.part").write_bytes(b"")
    error = run(Net(tmp_path, RING, give_up_after_s=0.3))[0]
    assert isinstance(error, StateError)
    assert "does not hold the model that this peer has told" in str(error)


def test_a_peer_whose_last_round_is_to_come_once_more_begins_anew(tmp_path: Path) -> None:
    run(net := Net(tmp_path, RING))
    Net(tmp_path, RING).open(0, is_last_round_done=False)
    assert not (net.state(0) / AVERAGE_FILE).exists()
    assert not (net.state(0) / OWN_FILE).exists()
    assert (net.state(1) / AVERAGE_FILE).exists()


def test_whoever_deletes_the_file_gets_it_from_another_device(tmp_path: Path) -> None:
    run(net := Net(tmp_path, RING))
    content = (net.state(2) / AVERAGE_FILE).read_bytes()
    (net.state(2) / AVERAGE_FILE).unlink()
    error = run(Net(tmp_path, RING), (2,))[2]
    assert isinstance(error, StateError)
    assert "copy it from another device" in str(error)
    (net.state(2) / AVERAGE_FILE).write_bytes(content)
    assert run(Net(tmp_path, RING), (2,)) == {2: net.state(2) / AVERAGE_FILE}


def test_one_that_is_done_needs_nobody(tmp_path: Path) -> None:
    run(net := Net(tmp_path, RING))
    assert run(Net(tmp_path, RING), (2,)) == {2: net.state(2) / AVERAGE_FILE}


def test_a_member_of_an_earlier_release_leaves_all_without_an_average(tmp_path: Path) -> None:
    net = Net(tmp_path, RING, older=(2,))
    assert run(net, (0, 1, 3)) == {0: None, 1: None, 3: None}
    assert not (net.state(0) / AVERAGE_FILE).exists()
    assert not (net.state(0) / AVERAGE_SHARES.name).exists()


def test_one_that_has_it_and_is_left_alone_keeps_what_others_may_need(tmp_path: Path) -> None:
    net = Net(tmp_path, LINE, give_up_after_s=0.5)

    def is_lost(source: int, peer: int, topic: str, data: bytes) -> bool:
        says_it_has_it = topic == notes.AVERAGE and notes.decode_averaged(data, ROUNDS).file
        return {source, peer} == {2, 3} and bool(says_it_has_it)

    net.is_lost = is_lost
    found = run(net)
    assert all(isinstance(each, Path) for each in found.values()), found
    assert len({*files(net)}) == 1
    assert all((net.state(peer) / "average.part").exists() for peer in range(4))
    run(Net(tmp_path, LINE))
    assert not any((net.state(peer) / "average.part").exists() for peer in range(4))


def test_who_missed_that_all_have_it_hears_it_at_the_next_start(tmp_path: Path) -> None:
    net, copy = Net(tmp_path, RING), tmp_path / "copy"
    first: list[Path] = []

    def keep(number: int) -> None:
        # The first that has the file waits for the others; the last one waits for nobody.
        done = [net.state(peer) for peer in range(len(RING)) if (net.state(peer) / AVERAGE_FILE).exists()]
        if done and not first:
            first.append(done[0])
            shutil.copytree(done[0], copy)

    net.on_event = keep
    run(net)
    (state,) = first
    shutil.rmtree(state)
    copy.rename(state)
    assert (state / "average.part").exists()
    run(Net(tmp_path, RING))
    assert not (state / "average.part").exists()


def test_a_peer_that_forms_the_average_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_thread()
    form, states = FinalAverage.form, []

    async def story(devices: Devices) -> None:
        async def look(average: FinalAverage, *parts: Any) -> Path | None:
            states.append([daemon.operator.status()["state"] for daemon in devices.daemons.values()])
            return await form(average, *parts)

        monkeypatch.setattr(FinalAverage, "form", look)
        devices.start(0)
        devices.start(1)
        assert await devices.tasks[0] == await devices.tasks[1] == 0
        assert [each.count("averaging") for each in states] == [1, 2]
        for daemon in devices.daemons.values():
            assert daemon.operator.state == "completed"
            daemon.close()

    Devices(tmp_path / "kits", rounds=3, num_peers=2).run(story)
