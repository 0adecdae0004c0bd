"""Exports for those who have neither this package nor, in part, PyTorch: programs, ONNX in float32 and int8, cards."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file

from peer.config.options import Config, load
from peer.ops.model_card import CardFacts, model_card
from peer.simulate import run as simulator
from peer.train.int8_file import quantized
from peer.train.tasks import resolve_task
from tests.cli.runner import sotto

GUIDE = Path(__file__).parents[2] / "docs" / "own-task.md"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of digits, which trains in 8 bits."""
    folder = tmp_path_factory.mktemp("run")
    overrides = ["run.rounds=80", "data.skew=0", "algorithm.name=sgp", "training.task_options.hidden=32"]
    config = load(overrides=overrides, environment={})
    simulator.run(config, folder, num_peers=2, directory=folder, stacked=True, baseline=False)
    return folder


@pytest.fixture(scope="module")
def exported(simulated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with everything that can be exported of it."""
    folder = tmp_path_factory.mktemp("exported")
    options = ("--torch-export", "--onnx", "--onnx-int8", "--json", "-o", str(folder / "digits.safetensors"))
    result = sotto("export", str(simulated), *options)
    assert result.exit_code == 0, result.output
    (folder / "answer.json").write_text(result.stdout)
    return folder


def digits() -> torch.nn.Module:
    return resolve_task("digits", {"hidden": 32}).make_model()


def pixels(count: int) -> torch.Tensor:
    return resolve_task("digits").test_data().batch(torch.arange(count))[0]


def outputs(folder: Path, count: int) -> torch.Tensor:
    model = digits()
    model.load_state_dict(load_file(folder / "digits.safetensors"), strict=True)
    with torch.no_grad():
        result: torch.Tensor = model.eval()(pixels(count))
    return result


def test_everything_asked_for_is_there_and_named(exported: Path) -> None:
    answer = json.loads((exported / "answer.json").read_text())
    names = ["digits.safetensors", "digits.pt2", "digits.onnx", "digits.int8.onnx", "digits.card.md"]
    assert [Path(file).name for file in answer["files"]] == names
    assert {path.name for path in exported.iterdir()} == {*names, "answer.json"}, "nothing half written is left"


@pytest.mark.parametrize("count", [1, 7])
def test_the_program_computes_what_the_model_does_for_any_number_of_samples(exported: Path, count: int) -> None:
    program = torch.export.load(exported / "digits.pt2")
    with torch.no_grad():
        torch.testing.assert_close(program.module()(pixels(count)), outputs(exported, count))


def test_onnx_runs_where_neither_torch_nor_this_package_is(exported: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "pixels.npy", pixels(7).numpy())
    program = """
import sys, numpy as np, onnxruntime
for name in ("digits.onnx", "digits.int8.onnx"):
    session = onnxruntime.InferenceSession(name, providers=["CPUExecutionProvider"])
    (input,) = session.get_inputs()
    (logits,) = session.run(None, {input.name: np.load(sys.argv[1])})
    np.save(sys.argv[2] + name, logits)
assert not {"torch", "peer"} & sys.modules.keys()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "pixels.npy"), f"{tmp_path}/"]
    done = subprocess.run(command, cwd=exported, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = outputs(exported, 7).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "digits.onnx.npy"), expected, rtol=1e-4, atol=1e-4)
    eight = np.load(tmp_path / "digits.int8.onnx.npy")
    assert np.array_equal(eight.argmax(1), expected.argmax(1))
    assert 0 < np.abs(eight - expected).max() < 0.2 * np.abs(expected).max()


def test_int8_in_onnx_has_the_codes_of_our_own_file_and_its_accuracy_is_told(exported: Path) -> None:
    model = onnx.load(exported / "digits.int8.onnx")
    weights = load_file(exported / "digits.safetensors")
    codes = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    matrices = [array for array in codes.values() if array.dtype == np.int8 and array.ndim == 2]
    for name in ("linear1.weight", "linear2.weight"):
        ours = quantized(weights[name])[0].numpy()
        assert any(
            np.abs(array.reshape(shape.shape).astype(int) - shape).max() <= 1
            for array in matrices
            for shape in (ours, ours.T)
            if array.shape == shape.shape
        ), name
    figures = json.loads((exported / "answer.json").read_text())["figures"]
    assert figures["float32"]["accuracy"] > 0.8
    assert figures["onnx-int8"]["accuracy"] == pytest.approx(figures["float32"]["accuracy"], abs=0.02)


def test_the_card_says_how_the_model_was_trained_and_names_no_folder(exported: Path, simulated: Path) -> None:
    card = (exported / "digits.card.md").read_text()
    for text in (
        "| task | digits (hidden = 32) |", "| peers | 2, graph directed-ring |", "| algorithm | sgp |", "| seed | 0 |",
        "| rounds | 80 |", "| precision | int8 |", "averaged model", "`onnx-int8`", 'load_file("digits.safetensors")',
        'InferenceSession("digits.int8.onnx")', 'torch.export.load("digits.pt2")', "The averaged model of the run",
    ):  # fmt: skip
        assert text in card, text
    assert str(simulated) not in card
    assert str(exported) not in card


def test_no_file_names_a_folder_of_this_machine_or_quotes_code(exported: Path) -> None:
    # Models of layers of torch run no other code.
    folder = str(Path(torch.__file__).parent).encode()
    for name in ("digits.safetensors", "digits.onnx", "digits.int8.onnx"):
        assert folder not in (exported / name).read_bytes(), name
    with zipfile.ZipFile(exported / "digits.pt2") as archive:
        for member in archive.namelist():
            assert folder not in archive.read(member), member


def test_the_card_of_a_script_says_nothing_of_its_steps_and_data() -> None:
    """The section `training` says nothing of them, whatever stands there."""
    facts = CardFacts(description="the averaged model of the run", round=30, num_peers=3)
    card, script = (
        model_card(Config.model_validate({"training": {"task": task}}), facts, [Path("m.safetensors")])
        for task in ("digits", "loop")
    )
    rows = {line for line in card.splitlines() if line.startswith("| ")} - {*script.splitlines()}
    of_tasks = {"task", "rounds", "local step", "learning rate", "momentum", "precision", "data"}
    assert {row.split(" | ")[0].removeprefix("| ") for row in rows} == of_tasks
    assert "| task | loop |" in script
    assert "| rounds | 30 |" in script, "it says itself how many there are"


def test_the_lines_of_the_card_load_the_model(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported)
    card = (exported / "digits.card.md").read_text()
    lines = card.split("```python\n")[1].split("```")[0]
    scope = {"make_model": digits}
    exec(lines, scope)  # type: ignore[arg-type]
    torch.testing.assert_close(scope["model"].eval()(pixels(3)), outputs(exported, 3))  # type: ignore[attr-defined]


def test_the_guide_says_in_three_lines_how_to_train_on(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported)
    section = GUIDE.read_text().split("## Train an exported model further")[1]
    lines = section.split("```python\n")[1].split("```")[0].strip().splitlines()
    assert len(lines) == 3
    scope = {"make_model": digits}
    exec("\n".join(lines), scope)  # type: ignore[arg-type]
    model: torch.nn.Module = scope["model"]  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, targets = resolve_task("digits").train_data().batch(torch.arange(200))
    before = float(torch.nn.functional.cross_entropy(model(images), targets).detach())
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
    assert float(torch.nn.functional.cross_entropy(model(images), targets).detach()) < before


def test_a_run_starts_from_an_export(exported: Path, tmp_path: Path) -> None:
    settings = ["run.rounds=1", "training.task_options.hidden=32", "training.warm_start=digits.safetensors"]
    config = load(overrides=[*settings, "training.learning_rate=1e-9"], environment={})
    again = simulator.run(config, exported, num_peers=2, baseline=False)
    assert again.summary.averaged_accuracy is not None
    assert again.summary.averaged_accuracy > 0.8


def test_without_the_packages_the_extra_is_named(
    simulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    result = sotto("export", str(simulated), "--onnx", "-o", str(tmp_path / "m.safetensors"))
    assert result.exit_code == 2
    assert "needs the package onnxscript: pip install 'sottovoce[onnx]'" in result.stderr
    assert not any(tmp_path.iterdir())


def test_a_file_that_exists_is_kept(simulated: Path, tmp_path: Path) -> None:
    (tmp_path / "m.card.md").write_text("mine")
    result = sotto("export", str(simulated), "-o", str(tmp_path / "m.safetensors"))
    assert result.exit_code == 2
    assert "m.card.md: already exists" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.card.md"]
    assert sotto("export", str(simulated), "-o", str(tmp_path / "m.safetensors"), "--no-card").exit_code == 0
    assert (tmp_path / "m.card.md").read_text() == "mine"


def test_onnx_reads_back_in_float32(exported: Path) -> None:
    session = onnxruntime.InferenceSession(str(exported / "digits.onnx"), providers=["CPUExecutionProvider"])
    (shape,) = (each.shape for each in session.get_inputs())
    assert isinstance(shape[0], str), "the number of samples is free"
    assert shape[1] == 64
