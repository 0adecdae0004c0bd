"""What a script sees of its peer: events, evaluations, stops, and how a block ends."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import inspect
import os
import random
import shutil
import signal
import sqlite3
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import sottovoce
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from peer import library as own_loop
from peer.cli import cli
from peer.daemon import process
from peer.daemon.notes.releases import Releases
from peer.gossip.membership import Change, ChangeKind
from peer.library.background import Messenger
from peer.library.integrations.joining import JoinOptions
from peer.library.meeting import Meeting
from peer.net.address import NotBound
from peer.net.security.authority import CertificateAuthority
from peer.state.disk import Disk
from peer.state.journal import Begun, Stepped, read_journal
from tests.library import scripts
from tests.library.scripts import Samples, descend, digest_of, make_model, vector_of, write_kits

ALONE = ("algorithm.name=local", "graph.kind=complete")


def kit(folder: Path, *settings: str) -> Path:
    """Return the configuration of a run with one peer, which waits for nobody."""
    (file,) = write_kits(folder, 1, "run.rounds=4", *ALONE, *settings)
    return file


def test_a_mistake_in_evaluate_is_told_before_the_first_step(tmp_path: Path) -> None:
    file, calls = kit(tmp_path), list[int]()

    def train(evaluate: Callable[[nn.Module], tuple[int, int]]) -> None:
        with sottovoce.join(make_model(), file, every=2, evaluate=evaluate) as peer:
            while not peer.done:
                calls.append(peer.steps)
                peer.step()

    with pytest.raises(sottovoce.UsageError, match=r"evaluate returned \(5, 4\)"):
        train(lambda model: (5, 4))
    with pytest.raises(ZeroDivisionError):
        train(lambda model: (3, 4 // 0))
    assert calls == []
    train(lambda model: (3, 4))
    assert calls == [*range(8)]


def test_events_come_in_the_thread_of_the_script(tmp_path: Path) -> None:
    seen: list[object] = []

    def note(event: object) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(event)

    def measure(model: nn.Module) -> tuple[int, int]:
        assert not model.training
        assert not torch.is_grad_enabled()
        torch.rand(3)
        return 3, 4

    model = make_model()
    file = kit(tmp_path, "evaluation.every_rounds=2")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with sottovoce.join(model, file, every=2, evaluate=measure, on_round=note, on_evaluation=note) as peer:
        assert (peer.index, peer.num_peers, peer.name, peer.rounds) == (0, 1, "peer-0", 4)
        calls = [peer.step(loss=float(number)) for number in range(8)]
    assert calls == [False, True] * 4
    rounds = [event for event in seen if isinstance(event, sottovoce.RoundDone)]
    assert [(event.round, event.loss, event.push_weight) for event in rounds] == [
        (1, 0.5, 1.0), (2, 2.5, 1.0), (3, 4.5, 1.0), (4, 6.5, 1.0),
    ]  # fmt: skip
    evaluations = [event for event in seen if isinstance(event, sottovoce.Evaluated)]
    assert evaluations == [sottovoce.Evaluated(name="peer-0", round=done, accuracy=0.75) for done in (2, 4)]
    assert model.training
    # Nothing that happens in a call of sottovoce moves the script's random numbers.
    assert torch.equal(torch.rand(3), expected)


def test_the_working_directory_may_change_behind_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hydra changes it: the state of a run would be made anew there, at each start in another folder."""
    folder = kit(tmp_path / "kit", "state.checkpoint_every_rounds=1").parent
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for starts in (1, 2):
        monkeypatch.chdir(folder)
        where = sottovoce.place("peer.toml")
        monkeypatch.chdir(elsewhere)
        with sottovoce.join(make_model(), where, every=1) as peer:
            monkeypatch.chdir(tmp_path)
            assert peer.steps == starts - 1
            for _ in range(2):
                peer.step()
    assert (folder / "state").is_dir()
    assert not [*elsewhere.iterdir()]
    assert {each.name for each in tmp_path.iterdir()} == {"kit", "elsewhere"}


def test_the_working_directory_may_change_in_a_simulated_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_kits(tmp_path / "kit", 2, "run.rounds=2", "algorithm.name=sgp", "graph.kind=complete")
    monkeypatch.chdir(files[0].parent)

    def script(where: sottovoce.Place) -> int:
        monkeypatch.chdir(tmp_path)
        with sottovoce.join(make_model(), where, every=1) as peer:
            while not peer.done:
                peer.step()
        return peer.round

    assert sottovoce.simulate(script, "peer.toml").results == (2, 2)


def test_late_peers_and_members_are_told_of() -> None:
    meeting = Meeting(threading.current_thread())
    messenger = Messenger(meeting)
    messenger.late(3, ["kitchen", "attic"])
    messenger.members_change(Change(ChangeKind.LOST, 2, 0, 9), "cellar")
    assert meeting.events() == [
        sottovoce.PeersLate(round=3, names=("kitchen", "attic")),
        sottovoce.MemberChange(name="cellar", kind="loss", round=9),
    ]


@pytest.mark.parametrize("what", ["address", "certificate"])
def test_a_script_waits_for_what_passes_by_itself_after_a_boot(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `sotto run` does; before, `join` raised what was not there yet."""
    file = kit(tmp_path)
    looks, whole = [], {name: file.with_name(name).read_bytes() for name in ("peer.pem", "peer.key")}
    if what == "certificate":
        authority = CertificateAuthority.load(tmp_path / "ca.pem", tmp_path / "ca.key")
        later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=9)
        issued = authority.issue("peer-0", ["127.0.0.1"], now=later)
        file.with_name("peer.pem").write_bytes(issued.certificate)
        file.with_name("peer.key").write_bytes(issued.key)
    else:
        absent = NotBound("this machine has no address 192.0.2.1", "wait", True)
        monkeypatch.setattr(process, "why_not_bound", lambda *_, **__: absent if len(looks) < 2 else None)

    def look_again(*_: object) -> None:
        looks.append(what)
        if len(looks) == 2 and what == "certificate":
            for name, content in whole.items():
                file.with_name(name).write_bytes(content)

    monkeypatch.setattr(process, "_pause", look_again)
    with sottovoce.join(make_model(), file, every=1) as peer:
        assert looks == [what] * 2
        while not peer.done:
            peer.step()
    said = [record.getMessage() for record in caplog.records]
    assert sum("waits until that has passed" in each for each in said) == 1, "once, however long it takes"


def test_a_script_that_waits_hears_who_is_late_and_can_be_interrupted(tmp_path: Path) -> None:
    files = write_kits(tmp_path, 2, "run.rounds=3", "algorithm.name=sgp", "rounds.late_after_s=0.2")
    late: list[sottovoce.PeersLate] = []

    def interrupt(event: sottovoce.PeersLate) -> None:
        late.append(event)
        # Once the script waits again.
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    def alone() -> None:
        with sottovoce.join(make_model(), files[0], every=1, on_late=interrupt) as peer:
            peer.step()

    with pytest.raises(KeyboardInterrupt):
        alone()
    assert late == [sottovoce.PeersLate(round=0, names=("peer-1",))]
    # It has sent its first displacement, and goes on behind it, together with the peer that was late: it did not know
    # yet which release that one has.
    outcomes: dict[int, int] = {}
    # Here, because threads share the generator that they are drawn from.
    models = [make_model(), make_model()]

    def train(index: int) -> None:
        with sottovoce.join(models[index], files[index], every=1) as peer:
            first = peer.steps
            while not peer.done:
                peer.step()
            outcomes[index] = first

    other = threading.Thread(target=train, args=(1,))
    other.start()
    train(0)
    other.join()
    assert outcomes == {0: 1, 1: 0}


def test_an_interrupt_ends_the_goodbyes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(meeting: Meeting) -> None:
        raise KeyboardInterrupt

    file = kit(tmp_path)
    monkeypatch.setattr(Meeting, "wait_for_end", interrupted)

    def whole_run() -> None:
        with sottovoce.join(make_model(), file, every=4) as peer:
            for _ in range(16):
                peer.step()

    with pytest.raises(KeyboardInterrupt):
        whole_run()
    assert "sotto" not in {thread.name for thread in threading.enumerate()}
    # Nothing is left joined.
    assert sottovoce.join(make_model(), file, every=4).rounds == 4


def test_an_interrupt_anywhere_leaves_nothing_behind(tmp_path: Path) -> None:
    """Whatever the script was in, from `join` to the end of its block: the same process joins again, and comes to the
    bits of a run that nobody interrupted."""

    def whole_run(file: Path, interrupt_at: int = 0) -> tuple[str, int]:
        calls = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += frame.f_code.co_filename.startswith(str(room))
            if calls == interrupt_at:
                calls += 1
                raise KeyboardInterrupt

        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sys.settrace(count)
        try:
            with sottovoce.join(model, file, every=2, keep=[optimizer]) as peer:
                while not peer.done:
                    descend(model, optimizer, Samples(0), peer.steps)
                    peer.step()
                    if peer.done:
                        sys.settrace(None)
        finally:
            sys.settrace(None)
        return digest_of(model), calls

    room = Path(own_loop.__file__).parent
    expected, calls = whole_run(kit(tmp_path / "undisturbed", "run.rounds=3"))
    assert calls > 200
    for interrupt_at in random.Random(0).sample(range(1, calls + 1), 12):
        file = kit(tmp_path / str(interrupt_at), "run.rounds=3")
        with pytest.raises(KeyboardInterrupt):
            whole_run(file, interrupt_at)
        assert whole_run(file)[0] == expected, interrupt_at


def test_a_script_may_join_in_any_thread(tmp_path: Path) -> None:
    """It is killed in none: it leaves in the midst of the run, and goes on in another thread."""

    def part(file: Path, steps: int, found: list[str]) -> None:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with sottovoce.join(model, file, every=2, keep=[optimizer]) as peer:
            while not peer.done and peer.steps < steps:
                descend(model, optimizer, Samples(0), peer.steps)
                peer.step()
        found.append(digest_of(model))

    expected: list[str] = []
    part(kit(tmp_path / "one"), 8, expected)
    file, found = kit(tmp_path / "other"), []
    for steps in (5, 8):
        thread = threading.Thread(target=part, args=(file, steps, found))
        thread.start()
        thread.join()
    assert found[1:] == expected


def test_a_stop_of_the_operator_ends_the_loop(tmp_path: Path) -> None:
    file = kit(tmp_path, "run.rounds=1000")

    def stop(event: sottovoce.RoundDone) -> None:
        if event.round == 3:
            assert CliRunner().invoke(cli, ["stop", "--config", str(file)]).exit_code == 0

    with sottovoce.join(make_model(), file, every=1, on_round=stop) as peer:
        for _ in peer.until_done([1, 2]):
            peer.step()
    assert peer.stopped == "stopped by the operator"
    assert 3 <= peer.steps < 1000
    with sottovoce.join(make_model(), file, every=1) as again:
        assert again.steps == peer.steps, "it was asked for the state with which the next round begins"


def test_a_run_that_is_complete_hands_over_its_model_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, model = kit(tmp_path), make_model()
    with sottovoce.join(model, file, every=1) as peer:
        for _epoch in range(3):
            for _ in peer.until_done([1]):
                with torch.no_grad():
                    model[0].weight.add_(1.0)
                peer.step()
        assert caplog.text.count("until_done yields nothing more: it takes the place of the loop over epochs") == 1
        peer.save(tmp_path / "model.safetensors")
    again = make_model()
    with sottovoce.join(again, file, every=1) as peer:
        assert peer.steps_left == 1
        assert list(map(peer.step, peer.until_done([1.0]))) == [True]
    assert torch.equal(vector_of(again), vector_of(model))


class Stream(torch.utils.data.IterableDataset[tuple[torch.Tensor, int]]):
    """Reads samples as streams of Hugging Face do: another order in each epoch, and the position that was loaded counts
    whenever its epoch is read."""

    def __init__(self) -> None:
        self._samples, self._epoch, self._position, self._start = Samples(0), 0, 0, {"epoch": 0, "position": 0}

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        self._position = self._start["position"] if self._start["epoch"] == self._epoch else 0
        order = torch.randperm(len(self._samples), generator=torch.Generator().manual_seed(self._epoch))
        for index in order[self._position :].tolist():
            self._position += 1
            yield self._samples[index]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state


@pytest.mark.parametrize("leave_after", [1, 2, 4, 5, 7, 10])
@pytest.mark.parametrize(
    "load",
    [lambda: StatefulDataLoader(Samples(0), batch_size=8, shuffle=True), lambda: StatefulDataLoader(Stream(), 8)],
    ids=["samples", "stream"],
)
def test_a_pass_may_end_where_a_script_is_started_again(
    tmp_path: Path, leave_after: int, load: Callable[[], StatefulDataLoader[Any]]
) -> None:
    """Five batches are a pass, and two are accumulated for a step: a restart falls on all places of a pass, with none
    or one of its batches left. Data, order and dropout are those of a script that was never stopped."""
    file = kit(tmp_path, "run.rounds=12", "state.checkpoint_every_rounds=1")

    def train(where: Path, stop_after: int | None) -> list[float]:
        seen: list[float] = []
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = load()
        torch.manual_seed(5)
        with sottovoce.join(model, where, every=1, keep=[optimizer, loader]) as peer:
            for number, (points, labels) in enumerate(peer.until_done(loader), 1):
                loss = nn.functional.cross_entropy(model(points), labels)
                loss.backward()
                seen.append(loss.item())
                if not number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    peer.step()
                if number // 2 == stop_after:
                    break
        return seen

    first, second = train(file, leave_after), train(file, None)
    # The last round that was journaled is trained again.
    assert second[:2] == first[-2:]
    assert first + second[2:] == train(kit(tmp_path / "whole", "run.rounds=12"), None)


def test_a_loader_that_is_not_kept_begins_a_new_pass(tmp_path: Path) -> None:
    file, seen = kit(tmp_path, "run.rounds=6", "state.checkpoint_every_rounds=1"), []
    for leave_after in (2, 6):
        with sottovoce.join(make_model(), file, every=1) as peer:
            for batch in peer.until_done(["first", "second", "third"]):
                seen.append(batch)
                peer.step()
                if peer.steps == leave_after:
                    break
    assert seen == ["first", "second", "first", "second", "third", "first", "second"]


def test_steps_whose_round_was_not_journaled_are_done_again(tmp_path: Path) -> None:
    """A kill in the midst of a write to the journal leaves the local step and nothing of the round that it began."""
    file, killed = kit(tmp_path / "whole", "run.rounds=12"), tmp_path / "killed"

    def cut_short(event: sottovoce.RoundDone) -> None:
        if event.round == 7:
            shutil.copytree(file.parent, killed, ignore=shutil.ignore_patterns("*.sock"))
            journal = killed / "state" / "journal-00000000.log"
            data = journal.read_bytes()
            ends = ends_of_records(data)
            begun = max(number for number, (kind, _) in enumerate(ends) if kind == Begun.kind)
            assert ends[begun - 1][0] == Stepped.kind
            journal.write_bytes(data[: ends[begun - 1][1]])

    expected = scripts.adamw(sottovoce.place(file), on_round=cut_short)
    assert scripts.adamw(sottovoce.place(killed / file.name)) == expected


def killed_after(file: Path, rounds: Sequence[int], *, begun: int = 0) -> Callable[[nn.Module], tuple[int, int]]:
    """Return an evaluation that leaves a copy of the peer's folder beside it, as a kill after so many rounds of this
    process would: the peer waits meanwhile. `begun`: rounds before that; where there are none, it is tried first."""
    calls = 0 if begun else -1

    def evaluate(model: nn.Module) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        if calls in rounds:
            killed = file.parent.with_name(f"killed-{calls}")
            shutil.copytree(file.parent, killed, ignore=shutil.ignore_patterns("*.sock"))
        return 1, 2

    return evaluate


def steps_in(folder: Path) -> list[Stepped]:
    """Return the records of local steps in all journals of a peer."""
    disk = Disk(folder / "state")
    names = sorted(name for name in disk.names() if name.startswith("journal-"))
    return [each for name in names for each in read_journal(disk, name).records if isinstance(each, Stepped)]


@pytest.mark.parametrize(("every", "overlap"), [(1, False), (4, True), (16, False)])
def test_a_killed_script_goes_back_to_its_checkpoint_and_repeats_its_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int, overlap: bool
) -> None:
    settings = ("run.rounds=20", "evaluation.every_rounds=1", f"state.checkpoint_every_rounds={every}")
    file, cuts = kit(tmp_path, *settings), (2, 17, 19)
    evaluated: list[sottovoce.Evaluated] = []
    options: dict[str, Any] = {"overlap": overlap, "on_evaluation": evaluated.append}
    expected = scripts.adamw(sottovoce.place(file), evaluate=killed_after(file, cuts), **options)
    for cut in cuts:
        killed, done, again = tmp_path / f"killed-{cut}", [], []
        assert steps_in(killed)
        assert all(each.is_repeated for each in steps_in(killed)), "nothing of the script is in the journal"
        assert len([*(killed / "state").glob("checkpoint-*")]) <= 2
        options |= {"on_round": done.append, "on_evaluation": again.append}
        # The first one is killed once more: what it recorded itself lies behind steps that are repeated.
        begins = (cut - 1) // every * every
        evaluate = killed_after(killed / file.name, [9] if cut == cuts[0] else [], begun=begins)
        assert scripts.adamw(sottovoce.place(killed / file.name), evaluate=evaluate, **options) == expected
        assert [each.round for each in done] == [*range(begins + 1, 21)]
        assert again == evaluated[begins:]
        with contextlib.closing(sqlite3.connect(killed / "state" / "metrics.sqlite")) as rows:
            found = [round_ for (round_,) in rows.execute("SELECT round FROM rounds ORDER BY round")]
        assert found == [*range(20)]
    where = sottovoce.place(tmp_path / "killed-9" / file.name)
    assert scripts.adamw(where, evaluate=lambda model: (1, 2), overlap=overlap) == expected
    assert "another result" not in caplog.text


def test_steps_that_are_repeated_to_another_result_are_told_of_once_and_recorded_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def part(file: Path, steps: int, noise: float, **options: Any) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        with sottovoce.join(model, file, every=1, **options) as peer:
            while not peer.done and peer.steps < steps:
                with torch.no_grad():
                    model.weight += noise
                peer.step()

    file = kit(tmp_path, "run.rounds=12", "evaluation.every_rounds=1", "state.keep_checkpoints=100")
    part(file, 12, 1.0, evaluate=killed_after(file, [3]))
    killed = tmp_path / "killed-3"
    part(killed / file.name, 6, 7.0)
    part(killed / file.name, 12, 1.0)
    assert [each.is_repeated for each in steps_in(killed)] == [True] * 3 + [False] * 9
    told = [line for line in caplog.messages if "nothing is lost, but the steps of round" in line]
    assert len(told) == 1
    assert "the steps of round 0 are taken once more, and come out otherwise: a DataLoader" in told[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_state_is_that_of_the_release_before_until_all_members_have_the_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """It holds the script as it was behind the exchange. A peer goes on from that, and then in the new way."""
    file = kit(tmp_path / "upgraded", "run.rounds=12")

    def recorded() -> list[set[str]]:
        disk = Disk(file.parent / "state")
        records = read_journal(disk, "journal-00000000.log").records
        return [{name.partition("/")[0] for name in each.arrays} for each in records if isinstance(each, Stepped)]

    def train(where: Path, until: int) -> list[float]:
        model, numbers = make_model(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        begins = []
        with sottovoce.join(model, where, every=2, keep=[optimizer, numbers], overlap=overlap) as peer:
            begins.append(float(peer.steps))
            while not peer.done and peer.steps < until:
                optimizer.zero_grad()
                model(torch.randn(8, 6, generator=numbers)).square().mean().backward()
                optimizer.step()
                peer.step()
        return [*begins, *vector_of(model).tolist()]

    with monkeypatch.context() as patch:
        patch.setattr(Releases, "have_spoken", lambda self, protocol: False)
        train(file, 9)
        assert recorded() == [{"step", "script"}] * 4
    assert train(file, 13)[0] == 8.0
    begins, *found = train(file, 24)
    # In turns, steps are not journaled from then on, and those since are repeated.
    assert begins == (10.0 if overlap else 8.0)
    assert found == train(kit(tmp_path / "whole", "run.rounds=12"), 24)[1:]


@pytest.mark.parametrize(("every", "expected"), [(1, 12), (4, 3), (5, 3)])
def test_the_state_is_asked_for_in_rounds_that_a_checkpoint_follows(tmp_path: Path, every: int, expected: int) -> None:
    class Counter:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def state_dict(self) -> dict[str, int]:
            self.asked.append(peer.steps)
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    counter, options = Counter(), ("run.rounds=12", f"state.checkpoint_every_rounds={every}")
    peer = sottovoce.join(make_model(), kit(tmp_path, *options), every=2, keep=[counter])
    with peer:
        while not peer.done:
            peer.step()
    begins = {(done - 1) * 2 for done in range(1, 13) if done % every == 0 or done == 12}
    assert {*counter.asked} == {0, *begins}
    assert len(begins) == expected


def test_a_script_whose_state_cannot_be_noted_repeats_its_steps(tmp_path: Path) -> None:
    """The state before was let go by then, so that the journal alone has the rounds since."""

    class Counter:
        def __init__(self, *, until: int) -> None:
            self.count, self.until = 0, until

        def state_dict(self) -> dict[str, int]:
            if self.count >= self.until:
                raise RuntimeError("not now")
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    def train(file: Path, until: int) -> list[float]:
        model, counter = make_model(), Counter(until=until)
        with sottovoce.join(model, file, every=2, keep=[counter]) as peer:
            begins = float(peer.steps)
            while not peer.done:
                with torch.no_grad():
                    model[0].weight += 0.1 * counter.count
                counter.count += 1
                peer.step()
        return [begins, *vector_of(model).tolist()]

    options = ("run.rounds=12", "state.checkpoint_every_rounds=2")
    file = kit(tmp_path / "ended", *options)
    with pytest.raises(RuntimeError, match="not now"):
        train(file, 10)
    begins, *found = train(file, 1000)
    assert begins == 6.0
    assert found == train(kit(tmp_path / "whole", *options), 1000)[1:]


def ends_of_records(journal: bytes) -> list[tuple[int, int]]:
    """Return the kind of each record of a journal, and where it ends."""
    (header,) = struct.unpack_from("<I", journal, 10)
    ends, position = [], 14 + header + 8
    while position < len(journal):
        length, kind = struct.unpack_from("<IB", journal, position)
        position += 5 + length + 8
        ends.append((kind, position))
    return ends


def test_workers_of_a_loader_may_be_forked(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(Samples(0), batch_size=8, num_workers=1, multiprocessing_context="fork")
    with sottovoce.join(make_model(), kit(tmp_path), every=3) as peer:
        seen = 0
        for points, _ in peer.until_done(loader):
            seen += len(points)
            peer.step()
    assert seen == 12 * 8


def test_a_simulated_script_that_fails_ends_the_simulation(tmp_path: Path) -> None:
    files = write_kits(tmp_path, 3, "run.rounds=9", "algorithm.name=sgp")
    threads = threading.active_count()

    def fails(where: sottovoce.Place) -> None:
        with sottovoce.join(make_model(), where, every=1) as peer:
            while not peer.done:
                if where.index == 1 and peer.steps == 4:
                    raise ZeroDivisionError("of the script")
                peer.step()

    with pytest.raises(ZeroDivisionError, match="of the script"):
        sottovoce.simulate(fails, files[0])
    assert threading.active_count() == threads
    with pytest.raises(sottovoce.UsageError, match="the script of peer-0 ended without joining the run"):
        sottovoce.simulate(lambda where: None, files[0])

    def differs(where: sottovoce.Place) -> None:
        torch.manual_seed(where.index)
        with sottovoce.join(nn.Linear(2, 2), where, every=1):
            pass

    with pytest.raises(sottovoce.UsageError, match="peer-1 joined with another model than peer-0"):
        sottovoce.simulate(differs, files[0])


def test_a_simulation_warns_of_what_separate_processes_would(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (file,) = write_kits(tmp_path, 8, "run.rounds=2", "graph.kind=ring")[:1]
    sottovoce.simulate(lambda where: scripts.adamw(where, every=1), file)
    assert "peers need at least 21 rounds" in caplog.text


def test_an_overlapping_exchange_learns_nearly_as_fast(tmp_path: Path) -> None:
    """One round late is no worse in the end: distance to the model of the same loop without overlap, after few and
    after many rounds."""

    def accuracy(overlap: bool) -> float:
        def script(where: sottovoce.Place) -> float:
            torch.manual_seed(1)
            # Each peer has one class only, which makes mixing necessary.
            model, own, test = nn.Linear(6, 3), Samples(where.index, 120), Samples(99, 300)
            mask = own.labels == where.index
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            with sottovoce.join(model, where, every=4, overlap=overlap) as peer:
                while not peer.done:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(own.points[mask]), own.labels[mask]).backward()
                    optimizer.step()
                    peer.step()
            return float((model(test.points).argmax(1) == test.labels).float().mean())

        files = write_kits(tmp_path / str(overlap), 3, "run.rounds=40", "algorithm.name=sgp", "graph.kind=exponential")
        return min(sottovoce.simulate(script, files[0]).results)

    without, overlapping = accuracy(False), accuracy(True)
    assert without > 0.85
    assert overlapping > without - 0.03


def test_a_script_in_a_notebook_is_called_by_a_loop_of_asyncio(tmp_path: Path) -> None:
    async def cell(model: nn.Module) -> int:
        with sottovoce.join(model, kit(tmp_path), every=1) as peer:
            for _ in peer.until_done([1]):
                peer.step()
        return peer.round

    assert asyncio.run(cell(make_model())) == 4


def test_tied_weights_are_saved_under_both_names(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
        model["head"].weight = model["embed"].weight
        return model

    model = tied()
    with sottovoce.join(torch.compile(model), kit(tmp_path), every=1) as peer:
        peer.step()
        peer.save(tmp_path / "model.safetensors")
    tied().load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["head.weight"], model["embed"].weight)


def test_pairs_train_scripts_too(tmp_path: Path) -> None:
    files = write_kits(tmp_path, 3, "run.rounds=12", "algorithm.name=ad-psgd", "graph.kind=complete")
    found = sottovoce.simulate(scripts.adamw, files[0], step_s=1.0, latency_s=0.1)
    assert {outcome.steps for outcome in found.results} == {36}
    assert found.virtual_s >= 12.0


def halve(model: nn.Module) -> None:
    model[0].weight.data.mul_(0.5)


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        (halve, True),
        (lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros_like(model[0].weight))), True),
        (lambda model: model.eval(), False),
        (lambda model: model.requires_grad_(False), False),
        (lambda model: model.half(), False),
        (lambda model: model[1].running_mean.zero_(), False),
    ],
    ids=["values", "another tensor", "mode", "frozen", "type", "buffer"],
)
@pytest.mark.parametrize("saves", [False, True])
def test_a_model_that_is_replaced_after_the_last_exchange_is_told_once(
    change: Callable[[nn.Module], object], is_told: bool, saves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, file = make_model(), kit(tmp_path)
    with sottovoce.join(model, file, every=1) as peer:
        while not peer.done:
            halve(model)
            peer.step()
        change(model)
        if saves:
            peer.save(tmp_path / "own.safetensors")
    told = [line for line in caplog.messages if "has replaced the model that the run ended with" in line]
    assert len(told) == is_told
    of_the_run = file.parent / "state" / "model.safetensors"
    assert all("(parameter 0.weight)" in line and str(of_the_run) in line for line in told)
    assert not load_file(of_the_run)["0.weight"].eq(0).all()


def test_a_run_that_goes_on_has_no_last_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    with sottovoce.join(model, kit(tmp_path), every=1) as peer:
        peer.step()
        halve(model)
    assert "has replaced" not in caplog.text


def test_callbacks_of_frameworks_take_every_argument_of_join() -> None:
    named = {"model", "config", "every", "keep"}
    assert JoinOptions.__annotations__.keys() == inspect.signature(sottovoce.join).parameters.keys() - named
