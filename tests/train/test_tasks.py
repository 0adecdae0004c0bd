"""From a name in the configuration to a task, and the sentence for everything that can be wrong with it."""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from peer.config.options import TrainingOptions
from peer.errors import ConfigError, DataError
from peer.train import listed
from peer.train.local_step import Trainer
from peer.train.models import MODELS
from peer.train.models.resnet import resnet20
from peer.train.own_task import inner_task
from peer.train.task import Task
from peer.train.tasks import TASKS, resolve_task
from tests.train.small_tasks import descend


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Return a function that writes a module into the current folder and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = []

    def write(source: str) -> str:
        name = f"own_module_{abs(hash(request.node.name))}_{len(names)}"
        (tmp_path / f"{name}.py").write_text(source)
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


GOOD = """
import torch
from peer.train.data import Classification, TensorData

def make_task(*, hidden=4, directory=None):
    data = TensorData(torch.randn(6, 2), torch.tensor([0, 1, 0, 1, 0, 1]))
    task = Classification(name="own", num_classes=2, model=lambda: torch.nn.Linear(2, 2), train=data, test=data)
    task.seen = (hidden, directory)
    return task
"""


def test_every_built_in_task_is_described():
    assert set(TASKS) == {
        *("digits", "mnist", "cifar10", "cifar100", "imagenette", "image-folder"),
        *("ag-news", "clusters", "sst2", "senteval-length", "synthetic", "text"),
    }
    assert all(info.summary.endswith(".") and "\n" not in info.summary for info in listed.TASKS.values())
    assert list(listed.MODELS) == list(MODELS)
    arguments = {name: tuple(inspect.signature(make).parameters) for name, make in TASKS.items()}
    of_the_data = ("directory", "class_names")
    assert list(listed.TASKS) == list(TASKS)
    for name, info in listed.TASKS.items():
        assert info.reads_files == ("directory" in arguments[name])
        assert info.options == tuple(each for each in arguments[name] if each not in of_the_data)


def test_digits_are_always_dealt_alike():
    first, second = (resolve_task("digits") for _ in range(2))
    train, test = first.train_data(), first.test_data()
    assert (len(train), len(test)) == (1437, 360)
    assert torch.equal(train.labels, second.train_data().labels)
    everything = torch.arange(1437)
    assert torch.equal(train.batch(everything)[0], second.train_data().batch(everything)[0])
    assert train.batch(everything)[0].max() == 1.0
    assert np.bincount(test.labels).min() > 20


def test_digits_are_those_that_scikit_learn_distributes():
    """The digests were taken of tensors that this task made from `sklearn.datasets.load_digits` of scikit-learn 1.9."""
    task = resolve_task("digits")
    digests = []
    for data in (task.train_data(), task.test_data()):
        images, labels = data.batch(torch.arange(len(data)))
        digests.append(hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest())
    assert digests == [
        "dab5938bd2c0c161300df4adb4c19a14ab67b08dd86a62090338d11b271c2265",
        "8501698e4f99266b160c0351c1eb368074448763e4e43e387acd2275768f1507",
    ]


def test_digits_takes_the_width_of_its_hidden_layer():
    model = resolve_task("digits", {"hidden": 16}).make_model()
    assert sum(p.numel() for p in model.parameters()) == 64 * 16 + 16 + 160 + 10


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("mnits", {}, r"training\.task: unknown task \(got 'mnits'\); valid: digits, mnist, .*make_task"),
        ("digits", {"width": 3}, r"training\.task_options\.width: task digits has no such option; valid: hidden"),
        ("digits", {"directory": "x"}, r"task_options\.directory: task digits has no such option; valid: hidden"),
        ("digits", {"hidden": 0}, r"task_options\.hidden: .*\(got 0\); valid: 1 to 65536"),
        ("digits", {"hidden": "many"}, r"task_options\.hidden: is not a whole number in range \(got 'many'\)"),
        ("digits", {"hidden": True}, r"task_options\.hidden: is not a whole number"),
        ("mnist", {"model": "cnn"}, r"task_options\.model: .*\(got 'cnn'\); valid: logistic, mlp"),
        (
            "cifar10",
            {"norm": "layer"},
            r"task_options\.norm: .*\(got 'layer'\); valid: evonorm, range-evonorm, group, batch, ",
        ),
        ("cifar10", {"augmentation": 1}, r"task_options\.augmentation: is neither true nor false \(got 1\)"),
        ("cifar10", {"size": 24}, r"task_options\.size: is not one of the choices \(got 24\); valid: 32, 16, 8"),
        ("cifar10", {"test_images": 0}, r"task_options\.test_images: .*valid: 1 to 10000"),
        ("synthetic", {"parameters": 0}, r"task_options\.parameters: .*valid: 1 to 2147483648"),
        ("synthetic", {"model": "mlp"}, r"task_options\.model: .*\(got 'mlp'\); valid: .*resnet20"),
        (":make_task", {}, r'training\.task: name your own task as "package\.module:make_task"'),
        ("module:", {}, r'training\.task: name your own task as "package\.module:make_task"'),
    ],
)
def test_wrong_names_and_options_are_refused(tmp_path: Path, name: str, options: dict, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        resolve_task(name, options, directory=tmp_path)


# Own tasks


def test_an_own_task_is_found_in_the_current_folder(module):
    task = resolve_task(f"{module(GOOD)}:make_task", {"hidden": 9}, directory="/data")
    assert isinstance(task, Task)
    assert inner_task(task).seen == (9, "/data")


def test_the_current_folder_never_hides_an_installed_package(module, tmp_path: Path):
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    resolve_task(f"{module(GOOD)}:make_task")
    assert sys.path[-1] == str(tmp_path)


def test_a_folder_goes_only_to_tasks_that_take_one(module):
    name = module(GOOD.replace(", directory=None", "").replace("directory)", "None)"))
    assert inner_task(resolve_task(f"{name}:make_task", directory="/data")).seen == (4, None)


def test_a_list_of_classes_goes_only_to_tasks_that_take_one(module):
    source = GOOD.replace("directory=None", "class_names=()").replace("directory)", "class_names)")
    name = module(source.replace("train=data,", 'train=data, meaning={"classes": class_names},'))
    task = resolve_task(f"{name}:make_task", class_names=("cat", "dog"))
    assert inner_task(task).seen == (4, ("cat", "dog"))
    assert task.meaning == {"classes": ("cat", "dog")}
    with pytest.raises(ConfigError, match=r"data\.classes: task digits reads no class folders that could be listed"):
        resolve_task("digits", class_names=("cat", "dog"))


def test_a_task_may_take_any_options(module):
    name = module(GOOD.replace("*, hidden=4, directory=None", "**options").replace("(hidden, directory)", "options"))
    assert inner_task(resolve_task(f"{name}:make_task", {"a": 1}, directory="/d")).seen == {"a": 1, "directory": "/d"}


@pytest.mark.parametrize(
    ("source", "attribute", "error", "sentence"),
    [
        (GOOD, "make_taks", ConfigError, r"has no make_taks .*valid: own_module_\w+:make_task"),
        ("x = 3", "x", ConfigError, "x is not a function that makes a task"),
        ("import nowhere_to_be_found", "make", DataError, "needs nowhere_to_be_found, which is not installed"),
        ("1 / 0", "make", DataError, r"ZeroDivisionError: division by zero \(.*own_module_\w+\.py:1, in "),
        ("def make(:", "make", DataError, r"SyntaxError: .* \(.*own_module_\w+\.py:1\)"),
        (
            "def make(): raise OSError('no disk')",
            "make",
            DataError,
            r"your task: OSError: no disk \(.*\.py:1, in make\)",
        ),
        ("def make(): return None", "make", DataError, r"a NoneType that lacks name, num_classes, make_model\(\)"),
        (
            "class T:\n name, num_classes = 'n', 2\n make_model = loss = train_data = correct = lambda s: 0\n"
            "def make(): return T()",
            "make",
            DataError,
            r"returned a T that lacks test_data\(\), augment\(\)$",
        ),
        (GOOD.replace("num_classes=2", "num_classes=-1"), "make_task", DataError, "num_classes of .* whole number"),
        (GOOD.replace("num_classes=2", "num_classes='2'"), "make_task", DataError, "num_classes of .* whole number"),
        (GOOD.replace("train=data,", "train=data, meaning=7,"), "make_task", DataError, "meaning of .* has no list of"),
        (GOOD.replace("torch.tensor([0, 1, 0, 1, 0, 1])", "torch.zeros(6)"), "make_task", DataError, "integer label"),
    ],
)
def test_own_tasks_that_do_not_work_are_refused_with_the_reason(module, source, attribute, error, sentence):
    with pytest.raises(error, match=sentence) as caught:
        resolve_task(f"{module(source)}:{attribute}")
    assert str(caught.value).startswith(("training.task", "in your task: ")) or "integer label" in sentence


@pytest.mark.parametrize("name", ["no_such_module_anywhere:make", "peer.no_such_part:make", "no.such.package:make"])
def test_a_module_that_does_not_exist_is_named(name: str):
    with pytest.raises(
        ConfigError, match=r"training\.task: module .* was not found; start in the folder that contains it"
    ):
        resolve_task(name)


def test_options_of_own_tasks_are_checked_by_name(module):
    with pytest.raises(ConfigError, match=r"task_options\.width: .* has no such option; valid: hidden"):
        resolve_task(f"{module(GOOD)}:make_task", {"width": 2})


# Synthetic


@pytest.mark.parametrize(("parameters", "layers"), [(1, 1), (1000, 4), (4096, 4), (10_000, 3), (100_000, 20)])
def test_synthetic_has_as_many_parameters_as_asked_for(parameters: int, layers: int):
    task = resolve_task("synthetic", {"parameters": parameters, "layers": layers, "samples": 64})
    trainer = make_synthetic_trainer(task)
    assert trainer.layout.size == parameters
    assert trainer.layout.num_layers <= layers + 1


def test_synthetic_has_the_shapes_of_a_model():
    task = resolve_task("synthetic", {"model": "resnet20", "samples": 64})
    trainer = make_synthetic_trainer(task)
    expected = [tuple(parameter.shape) for parameter in resnet20().parameters()]
    assert [tuple(parameter.shape) for parameter in trainer.model.parameters()] == expected
    first = trainer.gradient(trainer.initial_vector(), 0, 0.1, 0.1)
    assert len(np.unique(np.abs(first.gradient))) > 200_000
    assert 0.1 < first.loss < 10


def test_synthetic_descends_and_gives_every_number_its_own_gradient():
    trainer = make_synthetic_trainer(resolve_task("synthetic", {"parameters": 5000, "samples": 64}))
    z = trainer.initial_vector()
    first = trainer.gradient(z, 0, 0.1, 0.1)
    assert len(np.unique(np.abs(first.gradient))) > 4900
    assert 0.1 < first.loss < 10
    after = descend(trainer, z, range(40))
    assert trainer.evaluate(after).loss < trainer.evaluate(z).loss
    assert trainer.evaluate(after).total.tolist() == [64]


@pytest.mark.parametrize("noise", [False, True])
def test_synthetic_with_noise_pushes_another_way_in_each_batch(noise: bool):
    task = resolve_task("synthetic", {"parameters": 5000, "samples": 64, "noise": noise})

    def pushes() -> np.ndarray:
        trainer = make_synthetic_trainer(task)
        origin = np.zeros_like(trainer.initial_vector())  # Where all that remains of the gradient is the push.
        return np.stack([trainer.gradient(origin, round_, 0.1, 0.1).gradient.copy() for round_ in range(4)])

    first = pushes()
    alike = np.abs(np.corrcoef(first))[np.triu_indices(4, 1)]
    assert alike.max() < 0.1 if noise else alike.min() > 0.999
    assert np.array_equal(first, pushes())


def make_synthetic_trainer(task: Task) -> Trainer:
    return Trainer(
        task,
        TrainingOptions(batch_size=8, momentum="none", warmup_rounds=0),
        rounds=40,
        seed=0,
        peer=0,
        train_indices=np.arange(64, dtype=np.int64),
    )
