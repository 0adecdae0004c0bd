"""The built-in tasks, and how a name in the configuration becomes a task."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from peer.config.options import OWN_LOOP, Config
from peer.errors import ConfigError, DataError
from peer.files import missing_module
from peer.random import SHARED, Purpose, stream
from peer.train import listed
from peer.train.data import Batch, Classification, ImageData, TensorData, crop_and_flip
from peer.train.datasets.clusters import clusters as make_clusters
from peer.train.datasets.documents import BYTES, WindowData, find_texts
from peer.train.datasets.image_files import (
    CIFAR10,
    CIFAR100,
    CIFAR_SIZES,
    CifarLayout,
    averaged_down,
    find_idx,
    read_cifar,
    read_idx_images,
    read_idx_labels,
)
from peer.train.datasets.image_folder import FolderData, former_classes, list_splits, require_pillow
from peer.train.datasets.text_files import Sentences, read_ag_news, read_sentence_lengths, read_sst2
from peer.train.datasets.tokens import PADDING, TextData, make_tokenizer, read_encoding, read_vocabulary
from peer.train.full_precision.norms import NORMS
from peer.train.layers import FULL_PRECISION
from peer.train.metrics import why_no_metrics
from peer.train.models import MODELS, ready_models
from peer.train.models.distilbert import BASE, HEAD, DistilBertSize, distilbert
from peer.train.models.gpt import GPT_SIZES, gpt
from peer.train.models.mlp import logistic, mlp
from peer.train.models.synthetic import Quadratic
from peer.train.next_token import NextToken
from peer.train.own_task import OwnTask, UserCode
from peer.train.startup import load_postponed
from peer.train.task import Data, Task
from peer.train.threads import GENERATOR
from peer.wire.data_meaning import CLASSES, meanings_of

OptionValue = str | int | float | bool


_OF_THE_DATA = ("directory", "class_names")
"""Arguments of tasks that [data] has."""


_MOST_CLASSES = 20
"""Most classes whose samples are counted in a sentence."""
_DIGITS = Path(__file__).parent / "datasets" / "digits"


def digits(*, hidden: int = 256) -> Task:
    """Return the 8×8 handwritten digits of Alpaydin and Kaynak, 1,437 to train and 360 to test, always the same, for
    an MLP 64-hidden-10."""
    _whole("hidden", hidden, 1, 65536)
    images = read_idx_images(_DIGITS / "images-idx3-ubyte.gz", height=8, width=8)
    labels = read_idx_labels(_DIGITS / "labels-idx1-ubyte.gz")
    order = torch.from_numpy(stream(0, SHARED, Purpose.HOLD_OUT).permutation(len(labels)))
    pixels, labels = images.flatten(1).to(torch.float32).div_(16)[order], labels[order]
    num_train = len(labels) * 4 // 5
    return Classification(
        name="digits",
        num_classes=10,
        precision=listed.TASKS["digits"].precision,
        model=partial(mlp, (64, hidden, 10)),
        train=TensorData(pixels[:num_train].clone(), labels[:num_train].clone()),
        test=TensorData(pixels[num_train:].clone(), labels[num_train:].clone()),
    )


def mnist(*, model: str = "logistic", hidden: int = 256, directory: str | None = None) -> Task:
    """Return MNIST, 60,000 and 10,000 digits of 28×28 pixels, for logistic regression or an MLP 784-hidden-10."""
    _choice("model", model, ("logistic", "mlp"))
    _whole("hidden", hidden, 1, 65536)
    folder = _required(directory, "the four files of MNIST (train-images-idx3-ubyte.gz, …)")

    def read(split: str) -> ImageData:
        images = read_idx_images(find_idx(folder, f"{split}-images-idx3-ubyte"))
        labels = read_idx_labels(find_idx(folder, f"{split}-labels-idx1-ubyte"))
        if len(images) != len(labels):
            raise DataError(f"{folder}: the files {split}-… contain {len(images)} images but {len(labels)} labels")
        return ImageData(images, labels, mean=(0.1307,), std=(0.3081,))

    return Classification(
        name="mnist",
        num_classes=10,
        model=partial(logistic, 784, 10) if model == "logistic" else partial(mlp, (784, hidden, 10)),
        train=lambda: read("train"),
        test=lambda: read("t10k"),
    )


def cifar10(
    *,
    model: str = "resnet20",
    norm: str = "evonorm",
    size: int = 32,
    augmentation: bool = True,
    test_images: int = 10_000,
    directory: str | None = None,
) -> Task:
    """Return CIFAR-10, 50,000 and 10,000 colour images in 10 classes; models are judged by the first `test_images`."""
    _whole("test_images", test_images, 1, 10_000)
    layout = replace(CIFAR10, test_images=test_images)
    content = "cifar-10-batches-bin, cifar-10-batches-py or an archive of one"
    return cifar(layout, content, model=model, norm=norm, size=size, augmentation=augmentation, directory=directory)


def cifar(
    layout: CifarLayout,
    content: str,
    /,
    *,
    model: str = "resnet20",
    norm: str = "evonorm",
    size: int = 32,
    augmentation: bool = True,
    directory: str | None = None,
) -> Task:
    """Return a CIFAR data set. `size`: height and width of an image, 32, or 16 or 8 where blocks of pixels become their
    mean."""
    folder = _required(directory, content)
    _truth("augmentation", augmentation)
    _choice("size", size, CIFAR_SIZES)

    @cache
    def splits() -> tuple[ImageData, ImageData]:
        # Both at once, for an archive has to be read to its end anyway.
        batches = read_cifar(folder, layout)

        def joined(names: Sequence[str], most: int | None = None) -> ImageData:
            images, labels = zip(*[batches.pop(name) for name in names], strict=True)
            small = torch.cat([averaged_down(part, size) for part in images])
            return ImageData(small[:most], torch.cat(labels)[:most], mean=layout.mean, std=layout.std)

        return joined(layout.train), joined(layout.test, layout.test_images)

    return Classification(
        name=layout.task,
        num_classes=layout.num_classes,
        model=_image_model(model, norm, layout.num_classes, size),
        train=lambda: splits()[0],
        test=lambda: splits()[1],
        augmentation=_crop_and_flip(size) if augmentation else None,
    )


def image_folder(
    name: str,
    /,
    *,
    model: str = "resnet18",
    norm: str = "evonorm",
    size: int = 224,
    augmentation: bool = True,
    directory: str | None = None,
    class_names: Sequence[str] = (),
) -> Task:
    """Return the images of any folder with a folder for each class in train/ and val/ (or test/), scaled to
    size × size."""
    _truth("augmentation", augmentation)
    _whole("size", size, 32, 1024)
    require_pillow()
    classes, train, test = list_splits(
        _required(directory, "train and val, a folder for each class in them"), class_names
    )
    return Classification(
        name=name,
        num_classes=len(classes),
        model=_image_model(model, norm, len(classes), size),
        train=lambda: FolderData(train, size=size),
        test=lambda: FolderData(test, size=size),
        augmentation=_crop_and_flip(size) if augmentation else None,
        meaning={CLASSES: classes},
    )


def sentences(
    name: str,
    num_classes: int,
    content: str,
    readers: Callable[[str], tuple[Callable[[], Sentences], Callable[[], Sentences]]],
    /,
    *,
    length: int,
    vocabulary: str = "vocab.txt",
    weights: str = "",
    blocks: int = 6,
    width: int = 768,
    directory: str | None = None,
) -> Task:
    """Return sentences in some classes, for DistilBERT. `content`: the files of the folder; `readers(folder)` returns
    the functions that read the sentences to train and to test."""
    folder = Path(_required(directory, content)).expanduser()
    _file("vocabulary", vocabulary)
    _file("weights", weights)
    _whole("length", length, 3, BASE.positions)
    _whole("blocks", blocks, 1, BASE.blocks)
    _whole("width", width, HEAD, BASE.width)
    if width % HEAD:
        raise ConfigError(
            f"is no number of heads, which are {HEAD} wide",
            key="training.task_options.width",
            value=width,
            valid=f"multiples of {HEAD}",
        )
    pieces = read_vocabulary(folder / vocabulary)
    tokenizer = make_tokenizer(pieces, length=length)
    size = DistilBertSize(vocabulary=len(pieces), blocks=blocks, width=width, heads=width // HEAD, hidden=4 * width)
    start = folder / weights if weights else None
    train, test = readers(str(directory))
    return Classification(
        name=name,
        num_classes=num_classes,
        model=lambda layers=FULL_PRECISION: distilbert(num_classes, size, weights=start, layers=layers),
        train=lambda: TextData(train(), tokenizer, padding=pieces[PADDING]),
        test=lambda: TextData(test(), tokenizer, padding=pieces[PADDING]),
        meaning={"tokens": tuple(pieces)},
    )


def _ag_news(folder: str) -> tuple[Callable[[], Sentences], Callable[[], Sentences]]:
    return partial(read_ag_news, folder, "train"), partial(read_ag_news, folder, "test")


def _sst2(folder: str) -> tuple[Callable[[], Sentences], Callable[[], Sentences]]:
    return partial(read_sst2, folder, "train"), partial(read_sst2, folder, "dev")


def _senteval_length(folder: str) -> tuple[Callable[[], Sentences], Callable[[], Sentences]]:
    # One file holds all splits; that of validation tests.
    splits = cache(lambda: read_sentence_lengths(folder))
    return lambda: splits()["tr"], lambda: splits()["va"]


def text(
    *,
    model: str = "gpt-1m",
    context: int = 256,
    width: int = 0,
    blocks: int = 0,
    mask_documents: bool = False,
    tokenizer: str = "",
    directory: str | None = None,
) -> Task:
    """Return the texts of a folder, to train a GPT on windows of `context` tokens. `width` and `blocks`: in place of
    the model's, unless 0. `mask_documents`: no token sees those of the documents before its own. `tokenizer`: a file of
    the folder, as Hugging Face's tokenizers write it; without one, tokens are bytes."""
    _choice("model", model, tuple(GPT_SIZES))
    _whole("context", context, 2, 65536)
    _whole("width", width, 0, 8192)
    _whole("blocks", blocks, 0, 1000)
    _truth("mask_documents", mask_documents)
    _file("tokenizer", tokenizer)
    own_width, own_blocks = GPT_SIZES[model]
    folder = Path(_required(directory, "texts, as .txt or .jsonl files")).expanduser()
    encoding = read_encoding(folder / tokenizer) if tokenizer else BYTES
    make = partial(
        gpt,
        width or own_width,
        blocks or own_blocks,
        vocabulary=encoding.size,
        context=context,
        end=encoding.end if mask_documents else None,
    )
    return NextToken("text", make, find_texts(folder), context, encoding)


def configured(config: Config, base: Path, *, former_order: bool = False) -> Task:
    """Return the task of a configuration, whose relative paths start from `base`. With `former_order`, class folders
    have the numbers that releases before 0.3 gave them, for runs that those began. Raises ConfigError and DataError."""
    directory = None if config.data.directory is None else base / config.data.directory
    name, classes = config.training.task, config.data.classes
    if not classes and former_order and directory is not None and name in _OF_FOLDERS:
        classes = former_classes(directory)
    task = resolve_task(name, dict(config.training.task_options), directory=directory, class_names=classes)
    is_own = config.data.partition == "own"
    return task.with_one_folder() if is_own and isinstance(task, NextToken) else task


def read_all_data(config: Config, base: Path) -> dict[str, tuple[str, ...]]:
    """Read the data of a run's task to its last file; return split → findings there, as sentences. Raises ConfigError
    for a run without a task, and DataError for files that cannot be read."""
    if config.training.task == OWN_LOOP:
        raise ConfigError("has no data that `sotto` reads: the script reads its own", key="training.task")
    task = configured(config, base)
    found = {}
    for split, data in (("training", task.train_data()), ("test", task.test_data())):
        if isinstance(data, FolderData):
            data.read_all()
        found[split] = found_in(task, data)
    return found


def found_in(task: Task, data: Data) -> tuple[str, ...]:
    """Return sentences on a data set: samples by class, and the entries of a folder that were left out."""
    if isinstance(data, FolderData | WindowData):
        return data.found
    if not task.num_classes:
        return (f"{len(data):,} samples",)
    counts = torch.bincount(data.labels, minlength=task.num_classes)
    return (f"{len(data):,} samples; by class {', '.join(map(str, counts.tolist()[:_MOST_CLASSES]))}{_more(counts)}",)


def _more(counts: torch.Tensor) -> str:
    return f", and {len(counts) - _MOST_CLASSES} more" if len(counts) > _MOST_CLASSES else ""


def _crop_and_flip(size: int) -> Callable[[Batch, torch.Tensor], Batch]:
    """Return the augmentation of images of that size: shifted as far as CIFAR's four pixels of 32."""
    return crop_and_flip if size == 32 else partial(crop_and_flip, padding=size // 8)


class Synthetic(Classification):
    """A quadratic of any number of parameters on random samples: no learning, all the traffic."""

    def __init__(
        self, parameters: int, layers: int, samples: int, noise: bool, shapes: Sequence[Sequence[int]] = ()
    ) -> None:
        """`shapes`: those of the layers; where they are given, they count instead of the first two."""
        numbers = stream(0, SHARED, Purpose.SIMULATION).normals(2 * samples).reshape(samples, 2)
        inputs = torch.from_numpy(numbers).to(torch.float32)
        # Curvatures of at least ½ keep the descent stable at rates below 1.
        inputs[:, 0] = inputs[:, 0].abs().clamp(max=1.0) * 0.5 + 0.5
        data = TensorData(inputs, labels=torch.arange(samples) % 10)
        make = partial(Quadratic.of_shapes, shapes) if shapes else partial(Quadratic, parameters, layers, noise)
        super().__init__(name="synthetic", num_classes=0, model=make, train=data, test=data)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(batch[0])
        return loss

    def correct(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return torch.zeros(len(batch[0]), dtype=torch.bool)


def synthetic(
    *, parameters: int = 270_000, layers: int = 20, samples: int = 4096, noise: bool = False, model: str = ""
) -> Task:
    """Return a quadratic of that many parameters in that many layers, with a cheap gradient; with `noise`, one whose
    messages entropy coding makes as little smaller as those of a network. `model`: with noise, and with the shapes of
    that model's parameters instead."""
    _whole("parameters", parameters, 1, 2**31)
    _whole("layers", layers, 1, 10_000)
    _whole("samples", samples, 1, 2**24)
    if not model:
        return Synthetic(parameters, layers, samples, noise)
    ready = ready_models()
    _choice("model", model, tuple(ready))
    with GENERATOR, torch.random.fork_rng(devices=[]):
        shapes = [tuple(parameter.shape) for parameter in ready[model]().parameters()]
    return Synthetic(sum(map(math.prod, shapes)), len(shapes), samples, True, shapes)


def clusters(
    *, features: int = 20, hidden: int = 64, classes: int = 10, samples: int = 20_000, spread: float = 1.0
) -> Task:
    """Return points around four centres for each class, `samples` to train and 2,000 to test, for an MLP
    features-hidden-classes."""
    _whole("features", features, 1, 4096)
    _whole("hidden", hidden, 1, 65536)
    _whole("classes", classes, 2, 1000)
    _whole("samples", samples, 1, 2**24)
    if isinstance(spread, bool) or not (math.isfinite(spread) and spread >= 0):
        raise ConfigError("is out of range", key="training.task_options.spread", value=spread, valid="0 or more")

    def draw(split: int, size: int) -> TensorData:
        points, labels = make_clusters(split, size, features=features, classes=classes, spread=spread)
        return TensorData(torch.from_numpy(points), torch.from_numpy(labels))

    return Classification(
        name="clusters",
        num_classes=classes,
        model=partial(mlp, (features, hidden, classes)),
        train=lambda: draw(0, samples),
        test=lambda: draw(1, 2000),
    )


TASKS: Mapping[str, Callable[..., Task]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar10,
    "cifar100": partial(cifar, CIFAR100, "cifar-100-binary, cifar-100-python or an archive of one"),
    "imagenette": partial(image_folder, "imagenette", size=160),
    "image-folder": partial(image_folder, "image-folder"),
    "ag-news": partial(sentences, "ag-news", 4, "train.csv and test.csv of AG News", _ag_news, length=128),
    "sst2": partial(
        sentences, "sst2", 2, "sentiment-train and sentiment-dev, or train.tsv and dev.tsv", _sst2, length=64
    ),
    "senteval-length": partial(sentences, "senteval-length", 6, "sentence_length.txt", _senteval_length, length=40),
    "text": text,
    "clusters": clusters,
    "synthetic": synthetic,
}
"""Name → function whose keyword arguments are `training.task_options`; `directory` among them is where it reads its
data. `peer.train.listed` says more of each."""


def resolve_task(
    name: str,
    options: Mapping[str, OptionValue] | None = None,
    *,
    directory: str | Path | None = None,
    class_names: Sequence[str] = (),
) -> Task:
    """Return the built-in task of that name, or what the function "package.module:make_task" makes.

    A task of the user's own comes in an object whose errors name the line of the user's that was running. `directory`
    is `data.directory` and `class_names` is `data.classes`: they go to tasks that take arguments of these names.
    Modules are looked for where Python looks, and in the current folder. Raises ConfigError for a wrong name or option,
    DataError for data or an own task that does not hold what it should.
    """
    if name == OWN_LOOP:
        raise ConfigError(
            "the loop of this run is in a training script, which joins it with sottovoce.join; name that script: sotto"
            " run SCRIPT",
            key="training.task",
            value=name,
        )
    if ":" not in name:
        listed.task_info(name)
    given: dict[str, Any] = dict(options or {})
    make = _import(name) if ":" in name else TASKS[name]
    accepted = _accepted(make)
    if accepted is not None:
        for option in given:
            if option not in accepted or option in _OF_THE_DATA:
                valid = ", ".join(other for other in accepted if other not in _OF_THE_DATA)
                valid = valid or "none, this task has no options"
                raise ConfigError(f"task {name} has no such option", key=f"training.task_options.{option}", valid=valid)
    if directory is not None and (accepted is None or "directory" in accepted):
        given["directory"] = str(directory)
    if class_names:
        if accepted is not None and "class_names" not in accepted:
            raise ConfigError(
                f"task {name} reads no class folders that could be listed", key="data.classes", valid="not set"
            )
        given["class_names"] = class_names
    module = name.partition(":")[0]
    if ":" not in name or module.partition(".")[0] == "peer":
        task: Task = make(**given)
        _check_task(task, name)
        return task
    code = UserCode(module, make=make)
    with code.runs():
        task = make(**given)
    _check_task(task, name)
    return OwnTask(task, code)


def _import(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError('name your own task as "package.module:make_task"', key="training.task", value=name)
    # Last, so that a file beside the configuration never hides an installed package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    load_postponed()
    with UserCode(module_name).runs():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise DataError(
                    f"training.task: module {module_name} needs {error.name}, which is not installed"
                ) from error
            raise ConfigError(
                f"module {error.name} was not found{missing_module(module_name) or ''}",
                key="training.task",
                value=name,
            ) from None
    make = getattr(module, attribute, None)
    if make is None:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise ConfigError(
            f"module {module_name} has no {attribute}",
            key="training.task",
            value=name,
            valid=", ".join(f"{module_name}:{function}" for function in functions) or "a function of that module",
        )
    if not callable(make):
        raise ConfigError(f"{attribute} is not a function that makes a task", key="training.task", value=name)
    return make  # type: ignore[no-any-return]


def _accepted(make: Callable[..., Any]) -> list[str] | None:
    """Return the keyword arguments that `make` takes; None where it takes any."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in keywords]


_OF_FOLDERS = ("image-folder", "imagenette")


_METHODS = ("make_model", "loss", "train_data", "test_data", "correct", "augment")


def _check_task(task: object, name: str) -> None:
    lacking = [member for member in ("name", "num_classes") if not hasattr(task, member)]
    metrics = getattr(task, "metrics", ())
    if (problem := why_no_metrics(metrics)) is not None:
        raise DataError(f"training.task: the attribute metrics of what {name} returned {problem}")
    try:
        meanings_of(getattr(task, "meaning", {}))
    except (ValueError, TypeError, AttributeError):
        raise DataError(
            f"training.task: the attribute meaning of what {name} returned has no list of names for each of a few kinds"
        ) from None
    # Metrics may stand in the place of an accuracy.
    methods = [method for method in _METHODS if not (method == "correct" and metrics)]
    lacking += [f"{method}()" for method in methods if not callable(getattr(task, method, None))]
    if lacking:
        raise DataError(f"training.task: {name} returned a {type(task).__name__} that lacks {', '.join(lacking)}")
    num_classes = task.num_classes  # type: ignore[attr-defined]
    if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 0:
        raise DataError(f"training.task: num_classes of {name} must be a whole number, or 0 if there are no classes")


def _whole(option: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            "is not a whole number in range",
            key=f"training.task_options.{option}",
            value=value,
            valid=f"{low} to {high}",
        )


def _truth(option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError("is neither true nor false", key=f"training.task_options.{option}", value=value)


def _file(option: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError("is not the name of a file", key=f"training.task_options.{option}", value=value)


def _choice(option: str, value: object, valid: Sequence[OptionValue]) -> None:
    if value not in valid:
        listed = ", ".join(map(str, valid))
        raise ConfigError("is not one of the choices", key=f"training.task_options.{option}", value=value, valid=listed)


def _required(directory: str | None, content: str) -> str:
    if directory is None:
        raise ConfigError(
            f"is missing; name the folder that contains {content}: --set data.directory=FOLDER", key="data.directory"
        )
    return directory


Model: TypeAlias = Callable[..., nn.Module]
"""Makes a new model of `layers`, by default those of full precision."""


_SMALL = ("resnet20", "resnet54", "resnet110")
_WITHOUT_NORM = ("vgg11", "vgg16")


def _image_model(model: str, norm: str, num_classes: int, size: int) -> Model:
    _choice("model", model, (*(_SMALL if size <= 64 else ()), "resnet18", "mobilenetv2", *_WITHOUT_NORM))
    _choice("norm", norm, NORMS)
    settings: dict[str, object] = {} if model in _WITHOUT_NORM else {"norm": norm}
    if model not in _SMALL:
        settings["image_size"] = size
    return partial(MODELS[model], num_classes, **settings)
