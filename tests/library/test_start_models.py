"""What scripts may differ in when they begin: buffers and how models are computed, but no parameter.

Nor in what the numbers of their data stand for, where they say that.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sottovoce
import torch
from torch import nn

from peer.config.options import TrainingOptions
from peer.daemon import neighbors
from peer.errors import HandshakeRefused
from peer.library.loop_steps import LoopSteps
from peer.library.meeting import Meeting
from peer.library.parameters import ExchangedParameters
from peer.library.random_state import RandomNumbers, draw_alike, draw_apart
from peer.net.hello import HelloInfo, check_run, read_terms
from peer.proto.sottovoce.v1 import exchange_pb2 as pb
from peer.protocol import BASED, NEWEST
from peer.wire.start_model import StartModel
from tests.library.processes import finish, start
from tests.library.scripts import own_buffers, write_kits


def leave_out_the_base(module: nn.Module, state: dict[str, torch.Tensor], *others: object) -> None:
    for name in [name for name in state if "base" in name]:
        del state[name]


class Adapted(nn.Module):
    """An adapter over a frozen base, which scripts with large ones leave out of what they save."""

    def __init__(self, base: float, *, saved: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        nn.init.constant_(self.base.weight, base)
        self.base.to(dtype)
        self.adapter = nn.Linear(4, 4)
        if not saved:
            self.register_state_dict_post_hook(leave_out_the_base)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Conv2d(1, 1, 2), nn.Linear(4, 4))


def with_buffer(value: torch.Tensor | None, *, persistent: bool = True) -> nn.Module:
    model = net()
    model.register_buffer("shares", value, persistent=persistent)
    return model


def with_criterion(weight: float) -> nn.Module:
    return nn.ModuleDict({"net": net(), "criterion": nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight]))})


def compiled_part() -> nn.Module:
    model = net()
    model[0] = torch.compile(model[0], backend="eager")
    return model


def moved_bias() -> nn.Module:
    model = net()
    nn.init.ones_(model[2].bias)
    return model


def tied() -> nn.Module:
    model = net()
    model[2].weight = model[0].weight
    return model


SAME: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "compiled part": (compiled_part, net),
    "compiled whole": (net, lambda: torch.compile(net(), backend="eager")),
    "layout in memory": (net, lambda: net().to(memory_format=torch.channels_last)),
    "buffer that is not saved": (net, lambda: with_buffer(torch.ones(2), persistent=False)),
}
OTHER_BUFFERS = {
    "class weights": (lambda: with_criterion(1.0), lambda: with_criterion(2.0), "criterion.weight has other values"),
    "another shape": (
        lambda: with_buffer(torch.ones(2)),
        lambda: with_buffer(torch.ones(3)),
        "shares has another name, type or shape there",
    ),
    "one more": (net, lambda: with_buffer(torch.ones(3)), "there are more of them there"),
}
OTHER_PARAMETERS = {
    "seed": (net, moved_bias, "2.bias has other values there"),
    "frozen base": (lambda: Adapted(1.0), lambda: Adapted(2.0), "base.weight has other values there"),
    "frozen base that is not saved": (
        lambda: Adapted(1.0, saved=False),
        lambda: Adapted(2.0, saved=False),
        "base.weight has other values there",
    ),
    "type of the base": (
        lambda: Adapted(1.0),
        lambda: Adapted(1.0, dtype=torch.bfloat16),
        "base.weight has another name, type or shape there",
    ),
    "tied": (net, tied, "2.weight has another name, type or shape there"),
}
PAIRS = [
    *(pytest.param(*makes, None, None, id=name) for name, makes in SAME.items()),
    *(pytest.param(one, two, None, words, id=name) for name, (one, two, words) in OTHER_BUFFERS.items()),
    *(pytest.param(one, two, words, None, id=name) for name, (one, two, words) in OTHER_PARAMETERS.items()),
]
"""Two models, where their parameters differ, and where their buffers do."""


@pytest.mark.parametrize(("one", "other", "parameters", "buffers"), PAIRS)
def test_simulated_scripts_may_differ_in_buffers_alone(
    one: Callable[[], nn.Module],
    other: Callable[[], nn.Module],
    parameters: str | None,
    buffers: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = write_kits(tmp_path, 2, "run.rounds=2", "algorithm.name=sgp", "graph.kind=complete")[0]

    def script(where: sottovoce.Place) -> None:
        torch.manual_seed(0)
        model = (other if where.index else one)()
        with sottovoce.join(model, where, every=1) as peer:
            while not peer.done:
                peer.step()

    if parameters is None:
        sottovoce.simulate(script, file)
    else:
        with pytest.raises(sottovoce.UsageError) as refusal:
            sottovoce.simulate(script, file)
        assert f"peer-1 joined with another model than peer-0 ({parameters}" in str(refusal.value)
    named = [line for line in caplog.messages if "starts with other buffers" in line]
    assert len(named) == (buffers is not None)
    assert all(f"({buffers}" in line for line in named)


@pytest.mark.parametrize(("one", "other", "parameters", "buffers"), PAIRS)
def test_so_do_hellos(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module], parameters: str | None, buffers: str | None
) -> None:
    models = []
    for make in (one, other):
        torch.manual_seed(0)
        models.append(ExchangedParameters(make()).start_model())
    ours, theirs = info(models[0]), told(models[1])
    if parameters is not None:
        with pytest.raises(HandshakeRefused) as refusal:
            check_run(ours, theirs)
        assert f"the initial model of 'ben' differs from ours ({parameters}" in str(refusal.value)
        remedy = "put torch.manual_seed(0)" if "values" in parameters else "build the same model on all devices"
        assert f"there); {remedy}" in str(refusal.value)
        return
    assert check_run(ours, theirs) == NEWEST
    found = read_terms(ours, theirs, NEWEST).other_buffers
    assert found is None if buffers is None else buffers in found


def test_the_arguments_of_join_that_differ_are_looked_for_in_the_scripts() -> None:
    start = StartModel("one")
    ours = replace(info(start), run_digest="a", settings={"training.task": '"loop"', "run.rounds": "57"})
    theirs = told(start)
    theirs.run_digest = "b"
    theirs.settings.update({"training.task": '"loop"', "run.rounds": "180"})
    with pytest.raises(HandshakeRefused, match=r"what the scripts give `join` \(steps, every\), on both devices"):
        check_run(ours, theirs)


def info(start: StartModel) -> HelloInfo:
    return HelloInfo(run="r", algorithm="a", run_digest="", graph_digest="", num_peers=2, name="ben", start=start)


def told(start: StartModel, protocol: int = NEWEST, **changes: bytes) -> pb.Hello:
    parts = {"digest": start.digest, "parameters": start.parameters.entries, "buffers": start.buffers.entries}
    return pb.Hello(
        protocol_min=3,
        protocol_max=protocol,
        run="r",
        algorithm="a",
        num_peers=2,
        name="ben",
        window_bytes=1 << 20,
        chunk_bytes=1 << 16,
        heartbeat_ms=1000,
        model_digest=start.whole,
        start=pb.StartModel(**(parts | changes)) if protocol >= BASED else None,
    )


def test_releases_that_compare_the_whole_model_are_met_by_their_rule() -> None:
    one, other = (ExchangedParameters(with_buffer(torch.full((2,), value))).start_model() for value in (1.0, 2.0))
    ours = info(one)
    assert check_run(ours, told(one, BASED - 1)) == BASED - 1
    with pytest.raises(HandshakeRefused, match="the initial model of 'ben' differs from ours; put"):
        check_run(ours, told(other, BASED - 1))
    # As does a peer that only knows the digest of the model that its run began with.
    with pytest.raises(HandshakeRefused, match="differs from ours; compare the task"):
        check_run(info(StartModel(one.whole)), told(other))


@pytest.mark.parametrize("field", ["parameters", "buffers"])
def test_lists_of_digests_that_are_none_are_refused(field: str) -> None:
    start = ExchangedParameters(net()).start_model()
    with pytest.raises(HandshakeRefused, match=r"the initial model of 'ben' cannot be compared with ours: 9 bytes"):
        check_run(info(start), told(start, **{field: b"123456789"}))


def steps_of(weight: float) -> LoopSteps:
    torch.manual_seed(0)
    model, meeting = with_criterion(weight), Meeting(threading.current_thread())
    return LoopSteps(ExchangedParameters(model), meeting, TrainingOptions(), 3)


def test_what_a_run_began_with_survives_a_crash() -> None:
    """Also of a script that begins with another model after it: the run goes on with its own."""
    first, again, another = steps_of(1.0), steps_of(1.0), steps_of(2.0)
    state = dict(first.state())
    for each in (again, another):
        each.restore(state)
        assert each.start_model() == first.start_model()
    # What release 0.2 wrote of it.
    former = {name: value for name, value in state.items() if name not in ("start/parameters", "start/buffers")}
    again, another = steps_of(1.0), steps_of(2.0)
    for each in (again, another):
        each.restore(former)
    assert again.start_model() == first.start_model()
    assert another.start_model() == StartModel(first.start_model().whole)


@pytest.fixture
def generators() -> Iterator[None]:
    with RandomNumbers().kept():
        yield


@pytest.mark.usefixtures("generators")
def test_a_script_without_a_seed_builds_one_model_everywhere_and_goes_on_with_numbers_of_its_own() -> None:
    weights, behind = set(), []
    for peer in (0, 1, 1):
        torch.manual_seed(100 + len(behind))
        draw_alike(7)
        weights.add(bytes(nn.Linear(3, 3).weight.detach().numpy()))
        draw_apart(7, peer)
        behind.append(torch.rand(1).item())
    draw_alike(8)
    weights.add(bytes(nn.Linear(3, 3).weight.detach().numpy()))
    assert len(weights) == 2
    assert behind[0] != behind[1] == behind[2]


@pytest.mark.usefixtures("generators")
def test_a_seed_that_the_script_sets_counts() -> None:
    draw_alike(7)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = torch.rand(2)
    draw_apart(7, 1)
    assert torch.equal(torch.cat([first, torch.rand(2)]), expected)


def test_devices_with_buffers_of_their_own_train_together(tmp_path: Path) -> None:
    files = write_kits(tmp_path, 2, "run.rounds=6", "algorithm.name=allreduce", "graph.kind=complete")
    real = finish(files, [start("own_buffers", file) for file in files])
    assert real == list(sottovoce.simulate(own_buffers, files[0]).results)
    log = (files[0].parent / "log.txt").read_text()
    assert log.count("starts with other buffers (criterion.weight has other values there)") == 1


def classes_of(where: sottovoce.Place) -> dict[str, list[str]]:
    """Return the classes of a device as its own folders have them: a dog is another number on each."""
    return {"classes": ["dog", "fox"] if where.index else ["cat", "dog"]}


def named_classes(where: sottovoce.Place) -> None:
    torch.manual_seed(0)
    with sottovoce.join(nn.Linear(2, 2), where, every=1, meaning=classes_of(where)) as peer:
        while not peer.done:
            peer.step()


def test_simulated_scripts_whose_classes_differ_are_refused(tmp_path: Path) -> None:
    file = write_kits(tmp_path, 2, "run.rounds=2", "algorithm.name=sgp", "graph.kind=complete")[0]
    words = "the classes of peer-1 are not those of peer-0: number 0 is 'cat' at peer-0, and another one at peer-1"
    with pytest.raises(sottovoce.UsageError, match=words):
        sottovoce.simulate(named_classes, file)


def test_scripts_whose_classes_differ_refuse_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "_REFUSED_S", 0.3)
    files = write_kits(tmp_path, 2, "run.rounds=2", "algorithm.name=sgp", "graph.kind=complete")
    said: dict[str, str] = {}

    def run(file: Path) -> None:
        with pytest.raises(HandshakeRefused) as refusal:
            named_classes(sottovoce.place(file))
        said[file.parent.name] = str(refusal.value)

    threads = [threading.Thread(target=run, args=(file,)) for file in files]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60.0)
    assert sorted(said) == ["peer-0", "peer-1"]
    for sentence in said.values():
        # Whoever looks first says its own name of the class to both.
        found = re.search(r"number 0 is '(cat|dog)' at '(peer-[01])', and another one at 'peer-[01]'", sentence)
        assert found is not None, sentence
        assert found.groups() in (("cat", "peer-0"), ("dog", "peer-1"))
