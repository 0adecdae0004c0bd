"""Scripts that average gradients: one model on all devices, which is that of one process with all data."""

from __future__ import annotations

import math
import os
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sottovoce
import torch
from sottovoce import ConfigError, UsageError
from torch import nn

from peer.errors import DivergenceError
from tests.library import scripts
from tests.library.processes import finish, kill_now_and_then, start, starts_of
from tests.library.scripts import CLASSES, Samples, vector_of, write_kits
from tests.library.test_peer import killed_after

SEED = int(os.environ.get("SOTTO_TEST_SEED", "1"))
"""Of the times at which processes are killed."""
PEERS, STEPS = 3, 10
ALLREDUCE = ("algorithm.name=allreduce", "graph.kind=complete")
SERVER = ("algorithm.name=parameter-server", "graph.kind=star", "compressor.kind=none")
LOW_RANK = ("algorithm.name=low-rank", "graph.kind=complete", "algorithm.rank=2")
COMPRESSED = ("algorithm.name=compressed-allreduce", "graph.kind=complete", "compressor.fraction=0.1")


def _begin() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _batch(index: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of a device, which has more samples the higher its index is."""
    chosen = slice(5 * step, 5 * step + 4 + index)
    samples = Samples(index, 80)
    return samples.points[chosen], samples.labels[chosen]


def _alone() -> np.ndarray:
    """Return how far one process moves the model with the batches of all devices."""
    model, optimizer = _begin()
    before = vector_of(model)
    for step in range(STEPS):
        points, labels = map(torch.cat, zip(*(_batch(index, step) for index in range(PEERS)), strict=True))
        nn.functional.cross_entropy(model(points), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return (vector_of(model) - before).numpy()


def _together(where: sottovoce.Place) -> np.ndarray:
    """Do the same with the others. A device with more samples in a batch has more weight."""
    model, optimizer = _begin()
    before = vector_of(model)
    with sottovoce.join(model, where, every=1, steps=STEPS, average="gradients", keep=[optimizer]) as peer:
        assert not peer.done
        torch.rand(1)
        while not peer.done:
            points, labels = _batch(where.index, peer.steps)
            loss = nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            peer.average_gradients(loss, weight=len(labels) / 5)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert (peer.steps, peer.round, peer.stopped) == (STEPS, STEPS, None)
    return (vector_of(model) - before).numpy()


def test_devices_take_the_steps_of_one_process_with_all_data(tmp_path: Path) -> None:
    file = write_kits(tmp_path, PEERS, *ALLREDUCE)[0]
    found, expected = sottovoce.simulate(_together, file).results, _alone()
    assert all(np.array_equal(each, found[0]) for each in found)
    assert np.linalg.norm(found[0] - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("settings", [ALLREDUCE, LOW_RANK, COMPRESSED], ids=["allreduce", "low-rank", "compressed"])
def test_killed_scripts_go_on_with_the_same_bits(tmp_path: Path, settings: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"pause_s": 0.04}
    files = write_kits(tmp_path, 2, "run.rounds=150", "state.checkpoint_every_rounds=7", *settings)
    processes = [start("by_gradients", file, **options) for file in files]
    kill_now_and_then("by_gradients", files, processes, kills=4, seed=SEED, **options)
    real = finish(files, processes)
    assert all(len(starts) == 3 and starts[-1] > 0 for starts in map(starts_of, files))
    assert real == list(sottovoce.simulate(scripts.by_gradients, files[0]).results)
    assert len({outcome.digest for outcome in real}) == 2  # Their statistics of the norm are their own.
    assert {(outcome.steps, outcome.round) for outcome in real} == {(150, 150)}


def _steps(where: sottovoce.Place, rate: float = 0.01, **options: Any) -> None:
    model, optimizer = _begin()
    for group in optimizer.param_groups:
        group["lr"] = rate
    arguments = {"every": 1, "average": "gradients", "keep": [optimizer], **options}
    with sottovoce.join(model, where, **arguments) as peer:
        while not peer.done:
            points, labels = _batch(where.index, peer.steps % STEPS)
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            peer.average_gradients(loss)
            optimizer.step()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"every": 2}, "every is 2; with average='gradients' devices exchange in each step, every=1"),
        ({"overlap": True}, "overlap is True; with average='gradients' all devices take the same steps"),
        ({"outer_momentum": 0.9}, "outer_momentum is 0.9; with average='gradients'"),
        ({"outer_learning_rate": 0.7}, "outer_learning_rate is 0.7; with average='gradients'"),
        ({"private": ["0.bias"]}, "private is ['0.bias']; with average='gradients'"),
        ({"average": "models"}, "average is 'models'; it is 'displacements' or 'gradients'"),
        ({"keep": [torch.amp.GradScaler("cpu")]}, "keep[0] is a GradScaler, which skips steps on one device alone"),
        (
            {"average": "displacements"},
            'average_gradients() belongs to sottovoce.join(…, every=1, average="gradients")',
        ),
    ],
)
def test_what_would_leave_devices_with_several_models_is_refused(
    tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    file = write_kits(tmp_path, 2, "run.rounds=2", *ALLREDUCE)[0]
    with pytest.raises(UsageError, match=re.escape(sentence)):
        sottovoce.simulate(partial(_steps, **options), file)


@pytest.mark.parametrize("settings", [("algorithm.name=sgp",), SERVER])
def test_algorithms_without_the_mean_of_all_gradients_are_refused(tmp_path: Path, settings: tuple[str, ...]) -> None:
    file = write_kits(tmp_path, 2, "run.rounds=2", *settings)[0]
    with pytest.raises(ConfigError, match="hands no device the mean of all gradients"):
        sottovoce.simulate(_steps, file)


def _wrongly(where: sottovoce.Place, how: str) -> None:
    model, optimizer = _begin()
    with sottovoce.join(model, where, every=1, steps=3, average="gradients") as peer:
        for _ in range(3):
            loss = model(torch.zeros(2, 6)).sum()
            loss.backward()
            if how == "step":
                peer.step(loss)
            if how == "infinite":
                model[2].bias.grad[0] = math.inf
            if how == "order":
                optimizer.step()
            peer.average_gradients(loss, weight=-1.0 if how == "weight" else 1.0)
            optimizer.step()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("headless", "average_gradients() was called again before the loop came to its head"),
        ("step", "call peer.average_gradients(loss) before optimizer.step(), and no step()"),
        ("infinite", "round 0, at step 1: the gradient of parameter 2.bias holds values that are not finite"),
        ("order", "call average_gradients() before optimizer.step(), and read peer.done behind that"),
        ("weight", "weight is -1.0; it is a number, 0 or more"),
    ],
)
def test_wrong_loops_are_told_what_to_do(tmp_path: Path, how: str, sentence: str) -> None:
    file = write_kits(tmp_path, 2, *ALLREDUCE)[0]
    with pytest.raises(DivergenceError if how == "infinite" else UsageError, match=re.escape(sentence)):
        sottovoce.simulate(partial(_wrongly, how=how), file)


def _with_break(where: sottovoce.Place) -> tuple[int, str | None]:
    model, optimizer = _begin()
    with sottovoce.join(model, where, every=1, steps=3, average="gradients") as peer:
        for points, labels in peer.until_done([_batch(where.index, 0)]):
            nn.functional.cross_entropy(model(points), labels).backward()
            peer.average_gradients()
            optimizer.step()
            if peer.steps_left == 1:
                break
    return peer.round, peer.stopped


def test_a_loop_may_be_left_behind_its_last_step(tmp_path: Path) -> None:
    file = write_kits(tmp_path, 2, *ALLREDUCE)[0]
    assert sottovoce.simulate(_with_break, file).results == ((3, None), (3, None))


def _with_a_step_that_cannot_end(model: nn.Module, file: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sottovoce.join(model, file, every=1, average="gradients", keep=[optimizer]) as peer:
        for points in peer.until_done([torch.ones(2, 4)]):
            model(points).sum().backward()
            peer.average_gradients()
            for parameter in model.parameters():
                nn.init.constant_(parameter, math.nan)
            break


def test_a_step_that_cannot_end_behind_the_loop_ends_the_peer(tmp_path: Path) -> None:
    (file,) = write_kits(tmp_path, 1, "run.rounds=5", *ALLREDUCE)
    model = nn.Linear(4, 4, bias=False)
    for _ in range(2):  # The model is free for another peer afterwards.
        nn.init.ones_(model.weight)
        with pytest.raises(DivergenceError, match="not finite"):
            _with_a_step_that_cannot_end(model, file)
    assert "sotto" not in [thread.name for thread in threading.enumerate()]


def _forgetful(where: sottovoce.Place, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with sottovoce.join(model, where, every=1, average="gradients", **options) as peer:
        for points in peer.until_done([torch.ones(2, 4)]):
            optimizer.zero_grad()
            model(points).square().sum().backward()
            peer.average_gradients()
            optimizer.step()


def test_steps_that_are_repeated_to_another_model_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer is not in keep, so that a killed script takes other steps by the same means."""
    settings = ("run.rounds=12", "evaluation.every_rounds=1", "state.checkpoint_every_rounds=5", *ALLREDUCE)
    (file,) = write_kits(tmp_path, 1, *settings)
    _forgetful(sottovoce.place(file), evaluate=killed_after(file, [8]))
    killed = file.parent.with_name("killed-8") / file.name
    _forgetful(sottovoce.place(killed))
    assert "nothing is lost, but the steps of round" in caplog.text


def test_a_script_alone_takes_its_own_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone the mean is the script's own gradient, unchanged."""
    monkeypatch.setattr("peer.library.here._STARTED_IN", tmp_path)
    models = []
    for average in (True, False):
        model, optimizer = _begin()
        with sottovoce.join(model, every=1, steps=5, average="gradients" if average else "displacements") as peer:
            while not peer.done:
                points, labels = _batch(0, peer.steps)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(points), labels).backward()
                if average:
                    peer.average_gradients()
                optimizer.step()
                if not average:
                    peer.step()
        models.append(vector_of(model))
    assert torch.allclose(*models, rtol=0, atol=1e-6)


def test_members_that_take_other_steps_are_named(tmp_path: Path) -> None:
    files = write_kits(tmp_path, 3, "run.rounds=130", *LOW_RANK)
    processes = [start("by_gradients", file, rate=0.02 if index == 2 else 0.01) for index, file in enumerate(files)]
    finish(files, processes)
    logs = [(file.parent / "log.txt").read_text() for file in files]
    named = [sorted(set(re.findall(r"the model of (\S+) is away from this one after", log))) for log in logs]
    assert named == [["peer-2"], ["peer-2"], ["peer-0", "peer-1"]]


@pytest.mark.parametrize("how", ["killed", "fails"])
@pytest.mark.parametrize("place", ["before the mean", "before the step", "behind the step"])
def test_an_end_at_any_place_of_a_step_costs_no_bit(tmp_path: Path, how: str, place: str) -> None:
    files = write_kits(tmp_path, 2, "run.rounds=12", *(ALLREDUCE if how == "killed" else LOW_RANK))
    other = start("by_gradients", files[1])
    ended = start("by_gradients", files[0], ends=f"{how} {place}")
    ended.join()
    log = (files[0].parent / "log.txt").read_text()
    assert ended.exitcode
    assert ("RuntimeError" in log) == (how == "fails")
    assert "this is a bug" not in log
    real = finish(files, [start("by_gradients", files[0]), other])
    assert real == list(sottovoce.simulate(scripts.by_gradients, files[0]).results)
    # A run that is complete takes its last step once more.
    assert finish(files, [start("by_gradients", file) for file in files]) == real
