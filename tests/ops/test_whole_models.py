"""One model out of the folders of peers, where neither data nor the code of the task or script is: to the bit what one
computes by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from peer.config.options import PeerAddress, load
from peer.daemon.device.kept import keep_model_form
from peer.daemon.local_peer import LocalPeer
from peer.errors import ConfigError, StateError
from peer.gossip.membership import Change, ChangeKind, Membership
from peer.library.kept_state import unpack
from peer.node.checkpoint_arrays import group
from peer.ops.cluster_files import place_peers, write_cluster
from peer.ops.export import Beside, export_model
from peer.ops.whole_models import formed_average
from peer.records import ModelForm
from peer.state.checkpoints import Checkpoint, find_checkpoints, load_checkpoint
from peer.state.disk import Disk
from peer.state.kept_file import AVERAGE_FILE, FROZEN_FILE, MODEL_FORM
from peer.train.local_step import Trainer
from peer.train.model_file import model_parts
from tests.daemon.test_state_of_release_0_2 import unpacked
from tests.library.processes import start_file
from tests.library.scripts import write_kits
from tests.state.folders import begin

pytestmark = pytest.mark.usefixtures("warm_python")

TASK = '''
import torch
from torch import nn

from peer.train.data import TensorData


class Net(nn.Module):
    """A frozen base, tied weights, a norm with statistics, a buffer that no file has, an encoder that follows."""

    def __init__(self):
        super().__init__()
        self.base, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.tied, self.follower = nn.Linear(6, 3, bias=False), nn.Linear(6, 3)
        self.tied.weight = self.head.weight
        self.base.requires_grad_(False)
        self.follower.requires_grad_(False).bfloat16()
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("fleeting", torch.ones(1), persistent=False)

    def forward(self, inputs):
        hidden = self.norm(self.base(inputs))
        if self.training:
            with torch.no_grad():
                for moved, own in zip(self.follower.parameters(), self.head.parameters(), strict=True):
                    moved.lerp_(own.to(moved.dtype), 0.5)
        return self.head(hidden) + self.tied(hidden)


class Own:
    name, num_classes = "own", 3

    def augment(self, batch, uniforms):
        return batch

    def make_model(self):
        return Net()

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def correct(self, model, batch):
        return model(batch[0]).argmax(1) == batch[1]

    def train_data(self):
        return TensorData(torch.randn(90, 4, generator=torch.Generator().manual_seed(1)), torch.arange(90) % 3)

    def test_data(self):
        return TensorData(torch.randn(9, 4, generator=torch.Generator().manual_seed(2)), torch.arange(9) % 3)


def make_task():
    return Own()
'''
SCRIPT = """
import sys

import sottovoce, torch
from torch import nn


def make_model():
    torch.manual_seed(0)
    model = nn.ModuleDict({
        "base": nn.Linear(4, 6), "norm": nn.BatchNorm1d(6), "head": nn.Linear(6, 3),
        "tied": nn.Linear(6, 3, bias=False), "follower": nn.Linear(6, 3), "own": nn.Linear(3, 3),
    })
    model["tied"].weight = model["head"].weight
    model["base"].requires_grad_(False)
    model["follower"].requires_grad_(False)
    model.register_buffer("fleeting", torch.ones(1), persistent=False)
    return model


if __name__ == "__main__":
    where = sottovoce.place(sys.argv[1])
    model = make_model()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    torch.manual_seed(where.index)
    with sottovoce.join(model, where, every=2, keep=[optimizer], private=["own.*"]) as peer:
        while not peer.done:
            optimizer.zero_grad()
            hidden = model["norm"](model["base"](torch.randn(8, 4) + where.index))
            model["own"](model["head"](hidden) + model["tied"](hidden)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for moved, source in zip(model["follower"].parameters(), model["head"].parameters(), strict=True):
                    moved.lerp_(source, 0.5)
            peer.step()
    assert peer.stopped is None
"""
NAMES = ("ada", "ben", "cleo")
JOB = load(environment={}, overrides=("training.task=gone_task:make_task", "algorithm.name=sgp")).model_copy(
    update={"peers": tuple(PeerAddress(name=name) for name in NAMES)}
)


def export_elsewhere(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `sotto export` in a process that finds this package, and neither the task's module nor anything else here."""
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-m", "peer", "export", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def statistics(values: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean and variance of a norm over the batches of all peers, by the law of total variance."""
    mean, var = ([each[f"norm.running_{what}"].double() for each in values] for what in ("mean", "var"))
    middle = sum(mean) / len(mean)
    between = sum((each - middle) ** 2 for each in mean) / len(mean)
    return {"norm.running_mean": middle.float(), "norm.running_var": (sum(var) / len(var) + between).float()}


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        found: dict[str, str] = file.metadata()
    return found


# -- a task ------------------------------------------------------------------------------------------------------------


GONE = "gone_task"


def bring_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process alone know the module of the task."""
    module = types.ModuleType(GONE)
    exec(TASK, module.__dict__)
    monkeypatch.setitem(sys.modules, GONE, module)


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[dict[str, np.ndarray[Any, Any]]], Any]:
    """Folders of three peers as their daemons leave them, one of which has left, with push-sum weights that differ; the
    numbers in their newest checkpoints; and the model that the task makes."""
    bring_back(monkeypatch)
    write_cluster(tmp_path / "kits", JOB, place_peers(3, [], 7700))
    left = Membership((0, 1, 2), [Change(ChangeKind.LEAVE, 1, 1, 20)]).state()
    arrays, model = [], None
    for peer, (done, u) in enumerate(((40, 0.7), (20, 1.9), (40, 1.6))):
        file = tmp_path / "kits" / f"peer-{peer}" / "peer.toml"
        local = LocalPeer(load(file, environment={}), file.parent)
        trainer = local.trainer
        assert isinstance(trainer, Trainer)
        model = trainer.model
        participant = local.setup.participant(peer, trainer, trainer.layout, trainer.initial_vector())
        # Two steps, which leave statistics, and move the follower.
        for step in range(2):
            trainer.gradient(trainer.initial_vector() + np.float32(0.1 * peer), step, 0.1, 0.1)
        state, found = participant.to_checkpoint()
        x = np.random.default_rng(peer).standard_normal(trainer.layout.size).astype(np.float32)
        found |= {"algorithm/x": x, "algorithm/u": np.array([u])}
        for kept in (10, done):
            local.folder.checkpoints.save(Checkpoint(kept, {**state, "members": left}, found))
        arrays.append(found)
        local.close()
    monkeypatch.delitem(sys.modules, GONE)
    return tmp_path / "kits", arrays, model


def by_hand(arrays: Sequence[dict[str, np.ndarray[Any, Any]]], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return Σ x / Σ u under the names of the model, with all that is frozen as the model had it at first."""
    total, weight = np.zeros(arrays[0]["algorithm/x"].size), 0.0
    for each in arrays:
        total, weight = total + each["algorithm/x"], weight + float(each["algorithm/u"][0])
    z = torch.from_numpy((total / weight).astype(np.float32))
    found = {name: each.clone() for name, each in model.state_dict().items()}
    for name, each in model.named_parameters():
        if each.requires_grad:
            found[name], z = z[: each.numel()].view(each.shape), z[each.numel() :]
    found["tied.weight"] = found["head.weight"]
    assert not z.numel()
    return found


def beside(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
    """Return the buffers and the follower of a peer."""
    found = {name.partition("/")[2]: torch.from_numpy(np.array(each)) for name, each in arrays.items()}
    buffers = {name.removeprefix("buffer."): each for name, each in found.items() if name.startswith("buffer.")}
    frozen = {name.removeprefix("frozen."): each.bfloat16() for name, each in found.items() if "frozen." in name}
    assert {*frozen} == {"follower.weight", "follower.bias"}
    del buffers["fleeting"]
    return {**buffers, **frozen}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names under which two state_dicts differ in a bit, a type or a shape."""
    return [
        name
        for name in {*found, *expected}
        if name not in found
        or name not in expected
        or found[name].dtype != expected[name].dtype
        or not torch.equal(found[name], expected[name])
    ]


def test_the_average_is_that_of_the_members_to_the_bit(states: Any, tmp_path: Path) -> None:
    kits, arrays, model = states
    members = [arrays[0], arrays[2]]
    own = [beside(each) for each in members]
    assert any(not torch.equal(own[0][name], own[1][name]) for name in own[0]), "nothing differs"
    done = export_elsewhere(tmp_path / "elsewhere", kits, "-o", tmp_path / "m.safetensors")
    assert done.returncode == 0, done.stderr
    assert (
        "the average of 2 peers after 40 rounds, without ben, which had left, with the mean of their stat"
        in " ".join(done.stdout.split())
    )
    expected = {**by_hand(members, model), **own[0], **statistics(own)}
    for name in ("follower.weight", "follower.bias"):
        expected[name] = ((own[0][name].double() + own[1][name].double()) / 2).bfloat16()
    found = load_file(tmp_path / "m.safetensors")
    assert same(found, expected) == []
    model.load_state_dict(found, strict=True)
    facts = metadata(tmp_path / "m.safetensors")
    assert (facts["statistics"], facts["peers"], facts["rounds"]) == ("mean", "ada, cleo", "40")


def test_statistics_are_those_of_the_peer_that_is_named(states: Any, tmp_path: Path) -> None:
    kits, arrays, model = states
    done = export_elsewhere(tmp_path / "elsewhere", kits, "-o", tmp_path / "m.safetensors", "--statistics", "cleo")
    assert done.returncode == 0, done.stderr
    expected = {**by_hand([arrays[0], arrays[2]], model), **beside(arrays[2])}
    assert same(load_file(tmp_path / "m.safetensors"), expected) == []
    assert metadata(tmp_path / "m.safetensors")["statistics"] == "cleo"
    refused = export_elsewhere(tmp_path / "elsewhere", kits, "-o", tmp_path / "n.safetensors", "--statistics", "ben")
    assert refused.returncode == 2
    assert "mean, ada, cleo" in refused.stderr


def test_a_formed_average_of_other_numbers_is_refused(tmp_path: Path) -> None:
    form = ModelForm(trained={"w": (2,)}, private=(), entries={"w": "w"}, without=())
    for dtype in (torch.float32, torch.bfloat16):
        save_file({"w": torch.ones(2, dtype=dtype)}, tmp_path / AVERAGE_FILE, {"rounds": "4", "members": "0, 1"})
        if dtype is torch.float32:
            found = formed_average(tmp_path, form, 4)
            assert found is not None
            assert (found[0][:].tolist(), found[1]) == ([1.0, 1.0], [0, 1])
            continue
        with pytest.raises(StateError, match="holds another model"):
            formed_average(tmp_path, form, 4)


def test_named_folders_are_averaged_without_the_others(states: Any, tmp_path: Path) -> None:
    kits, arrays, model = states
    output = tmp_path / "m.safetensors"
    one = export_model([kits / "peer-2", kits / "peer-1"], output, statistics="cleo")
    assert (one.round, one.peers) == (40, (2,))
    assert "without ben, which had left, ada, whose folder is not named" in one.description
    assert same(load_file(output), {**by_hand([arrays[2]], model), **beside(arrays[2])}) == []
    export_model([kits / "peer-1"], output, force=True)
    assert same(load_file(output), {**by_hand([arrays[1]], model), **beside(arrays[1])}) == []
    shutil.copytree(kits / "peer-2", tmp_path / "copy")
    with pytest.raises(ConfigError, match="of one run, each of another peer"):
        export_model([kits / "peer-2", tmp_path / "copy"], tmp_path / "n")


def test_other_forms_need_the_task_and_say_so(states: Any, tmp_path: Path) -> None:
    kits = states[0]
    for option in ("--int8", "--torch-export"):
        done = export_elsewhere(tmp_path / "elsewhere", kits, "-o", tmp_path / f"{option}.safetensors", option)
        assert done.returncode != 0
        assert "gone_task" in done.stderr
    done = export_elsewhere(tmp_path / "elsewhere", kits, "-o", tmp_path / "d.safetensors", "--statistics", "data")
    assert "gone_task" in done.stderr


def test_with_the_task_the_program_has_the_same_statistics(
    states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kits = states[0]
    bring_back(monkeypatch)
    output = tmp_path / "m.safetensors"
    export_model(kits, output)
    alone = load_file(output)
    export_model(kits, output, beside=Beside(program=True), force=True)
    assert same(load_file(output), alone) == []
    of_data = export_model(kits, output, statistics="data", force=True)
    assert "with statistics of training samples" in of_data.description
    assert {*same(load_file(output), alone)} == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_a_folder_without_names_needs_the_task(states: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As release 0.2 wrote it."""
    kits = states[0]
    export_model(kits, tmp_path / "m.safetensors")
    for peer in range(3):
        (kits / f"peer-{peer}" / "state" / MODEL_FORM.name).unlink()
        (kits / f"peer-{peer}" / "state" / FROZEN_FILE).unlink()
    done = export_elsewhere(tmp_path / "elsewhere", kits, "-o", tmp_path / "n.safetensors")
    assert done.returncode == 5
    assert "contains no model.json" in done.stderr
    assert "gone_task" in done.stderr
    bring_back(monkeypatch)
    export_model(kits, tmp_path / "n.safetensors")
    assert same(load_file(tmp_path / "n.safetensors"), load_file(tmp_path / "m.safetensors")) == []


def test_the_form_follows_the_code_until_the_run_has_begun(tmp_path: Path) -> None:
    class Code:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def model_parts(self) -> Any:
            return model_parts(self.model, {n: p for n, p in self.model.named_parameters() if p.requires_grad})

    disk: Any = Disk(tmp_path)
    frozen = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    frozen[0].requires_grad_(False)
    for model in (nn.Linear(2, 3), frozen):
        code: Any = Code(model)
        keep_model_form(code, disk)
        form = MODEL_FORM.read(disk)
        assert form is not None
        assert [*form.entries] == [*model.state_dict()]
    begin(disk, 20)
    keep_model_form(code, disk)
    other: Any = Code(nn.Linear(5, 5))
    with pytest.raises(StateError, match=r"it has 8 parameters \(1.weight: 2×3\), and this one 30 \(there missing\)"):
        keep_model_form(other, disk)
    assert MODEL_FORM.read(disk) == form
    assert {*load_file(tmp_path / FROZEN_FILE)} == {"0.weight", "0.bias"}


def test_a_state_dict_that_computes_its_tensors_has_no_form() -> None:
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(lambda module, state, *_: state.update(double=2 * module.weight))
    assert model_parts(model, dict(model.named_parameters())) is None


# -- a training script -------------------------------------------------------------------------------------------------


def test_scripts_leave_one_model_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    files = write_kits(tmp_path / "kits", 3, "run.rounds=6", "algorithm.name=sgp", "graph.kind=exponential")
    processes = [start_file(tmp_path / "train.py", file) for file in files]
    for process, file in zip(processes, files, strict=True):
        process.join(120)
        assert process.exitcode == 0, (file.parent / "log.txt").read_text()
    kits, output = tmp_path / "kits", tmp_path / "m.safetensors"
    (tmp_path / "train.py").rename(tmp_path / "hidden")
    ended = [load_file(file.parent / "state" / "model.safetensors") for file in files]
    # One peer: its model, as the script ended.
    done = export_elsewhere(tmp_path / "elsewhere", kits, "--peer", 1, "-o", output)
    assert done.returncode == 0, done.stderr
    assert same(load_file(output), ended[1]) == []
    # All: private parameters are nobody's mean by default.
    done = export_elsewhere(tmp_path / "elsewhere", kits, "-o", output, "--force")
    assert done.returncode == 2
    assert "own.weight, own.bias" in done.stderr
    checkpoints = [load_checkpoint(find_checkpoints(file.parent / "state")[-1]) for file in files]
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(compile(SCRIPT, "train.py", "exec"), namespace)
    model = namespace["make_model"]()
    for name, each in model.named_parameters():
        each.requires_grad_(each.requires_grad and not name.startswith("own"))
    expected = by_hand([dict(each.arrays) for each in checkpoints], model)
    one = [name for name in ended[0] if name.startswith(("own", "follower", "norm.running", "norm.num"))]
    done = export_elsewhere(tmp_path / "elsewhere", kits, "-o", output, "--force", "--statistics", "peer-2")
    assert done.returncode == 0, done.stderr
    assert same(load_file(output), {**expected, **{name: ended[2][name] for name in one}}) == []
    export_model(kits, output, statistics="mean", force=True)
    means = {name: (sum(each[name].double() for each in ended) / 3).float() for name in one if "num" not in name}
    mean = {"norm.num_batches_tracked": ended[0]["norm.num_batches_tracked"], **means, **statistics(ended)}
    assert same(load_file(output), {**expected, **mean}) == []
    model.load_state_dict(load_file(output), strict=True)
    # Before the end, the checkpoint has what the script had beside the exchanged parameters.
    for file in files:
        (file.parent / "state" / "model.safetensors").unlink()
    export_model(kits, output, statistics="peer-0", force=True)
    training = group(checkpoints[0].arrays, "training")
    script = unpack(group(group(training, "script"), "script"))
    kept = {**script["buffers"], **script["private"], **script["frozen"]}
    assert same(load_file(output), {**expected, **{name: kept[name] for name in one}}) == []
    for option in ("--int8", "--onnx"):
        done = export_elsewhere(tmp_path / "elsewhere", kits, "-o", output, "--force", option)
        assert done.returncode == 2
        assert "the model of a training script is in that script" in " ".join(done.stderr.split())
    (files[0].parent / "state" / MODEL_FORM.name).unlink()
    with pytest.raises(StateError, match=r"contains no model.json.*let the peer start once more with this release"):
        export_model(kits, output, statistics="mean", force=True)


# -- folders of release 0.2 --------------------------------------------------------------------------------------------


def test_a_folder_of_release_0_2_is_read_with_the_task(tmp_path: Path) -> None:
    for file in unpacked("quant-sgp", tmp_path):
        state = file.parent / "state"
        checkpoint = load_checkpoint(find_checkpoints(state)[-1])
        export_model(file.parent, tmp_path / "m.safetensors", force=True)
        found = load_file(tmp_path / "m.safetensors")
        z = (checkpoint.arrays["algorithm/x"].astype(np.float64) / checkpoint.arrays["algorithm/u"][0]).astype("f4")
        assert np.array_equal(np.concatenate([found["first"], found["second"]]), z)
        file.write_text(file.read_text().replace("tests.fixtures.release_0_2.points", "gone_points"))
        with pytest.raises(StateError, match=r"contains no model.json.*as under release 0\.2.*gone_points"):
            export_model(file.parent, tmp_path / "n.safetensors")


def test_a_run_of_release_0_2_has_names_once_a_peer_was_started(tmp_path: Path) -> None:
    (file, *_) = unpacked("quant-sgp", tmp_path)
    export_model(file.parent, tmp_path / "m.safetensors")
    LocalPeer(load(file, environment={}), file.parent).close()
    file.write_text(file.read_text().replace("tests.fixtures.release_0_2.points", "gone_points"))
    export_model(file.parent, tmp_path / "n.safetensors")
    assert same(load_file(tmp_path / "n.safetensors"), load_file(tmp_path / "m.safetensors")) == []
