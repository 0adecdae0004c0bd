"""What the lists show of built-in tasks and models. It imports no torch: a list is there at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peer.config.precision_choice import Precision
from peer.errors import ConfigError


@dataclass(frozen=True)
class TaskInfo:
    """A task as the lists show it."""

    summary: str
    options: tuple[str, ...]
    """Names of `training.task_options`."""
    reads_files: bool = True
    """Whether its data are in `data.directory`."""
    precision: Precision = "float32"
    """That of `training.precision = "auto"`."""


_IMAGES = ("model", "norm", "size", "augmentation")
_TEXT = ("length", "vocabulary", "weights", "blocks", "width")

TASKS: Mapping[str, TaskInfo] = {
    "digits": TaskInfo(
        "Handwritten digits, 8×8 pixels, which are part of the package: no download.", ("hidden",), False, "int8"
    ),
    "mnist": TaskInfo("MNIST: handwritten digits, 28×28 pixels, from its four IDX files.", ("model", "hidden")),
    "cifar10": TaskInfo(
        "CIFAR-10: colour images in 10 classes, from its batches or their archive.", (*_IMAGES, "test_images")
    ),
    "cifar100": TaskInfo("CIFAR-100: colour images in 100 classes, from its files or their archive.", _IMAGES),
    "imagenette": TaskInfo("Imagenette: photographs in 10 classes, from its folder.", _IMAGES),
    "image-folder": TaskInfo("Any folder of images, a folder for each class in train/ and val/.", _IMAGES),
    "ag-news": TaskInfo("AG News: titles and first sentences in 4 classes, from its CSV files.", _TEXT),
    "sst2": TaskInfo("SST-2: positive and negative sentences of film reviews, as SentEval or GLUE has them.", _TEXT),
    "senteval-length": TaskInfo("SentEval: how long a sentence is, in 6 classes.", _TEXT),
    "text": TaskInfo(
        "The next byte or token of texts: .txt and .jsonl files of any folder.",
        ("model", "context", "width", "blocks", "mask_documents", "tokenizer"),
    ),
    "clusters": TaskInfo(
        "Points around centres, any number of samples: to simulate very many peers.",
        ("features", "hidden", "classes", "samples", "spread"),
        reads_files=False,
    ),
    "synthetic": TaskInfo(
        "Any number of parameters and a cheap gradient: to measure everything but training.",
        ("parameters", "layers", "samples", "noise", "model"),
        reads_files=False,
    ),
}


def task_info(name: str) -> TaskInfo:
    """Return the built-in task of that name. Raises ConfigError."""
    if name not in TASKS:
        valid = f'{", ".join(TASKS)}, or your own as "package.module:make_task"'
        raise ConfigError("unknown task", key="training.task", value=name, valid=valid)
    return TASKS[name]


MODELS: Mapping[str, str] = {
    "logistic": "Logistic regression: one linear layer that starts at zero.",
    "mlp": "Multi-layer perceptron: linear layers with ReLU between them.",
    "resnet20": "ResNet-20 for 32×32 images, with any of the norms.",
    "resnet54": "The low-precision paper's ResNet-54 for 32×32 images, with any of the norms.",
    "resnet110": "ResNet-110 for 32×32 images, with any of the norms.",
    "resnet18": "ResNet-18 for images of any size, with any of the norms.",
    "vgg11": "VGG-11 for images of any size, without normalization.",
    "vgg16": "VGG-16 for images of any size, without normalization.",
    "mobilenetv2": "MobileNetV2 for images of any size, with any of the norms.",
    "distilbert": "DistilBERT for classes of sentences, from weights in a file or drawn.",
    "gpt-1m": "GPT-2's layout for bytes: 128 wide, 5 blocks.",
    "gpt-3m": "GPT-2's layout for bytes: 256 wide, 4 blocks.",
    "gpt-10m": "GPT-2's layout for bytes: 384 wide, 6 blocks.",
    "gpt-124m": "The smallest GPT-2: 768 wide, 12 blocks. Its vocabulary makes up 38 million, which bytes do not need.",
    "quadratic": "Any number of parameters and a cheap gradient, for benchmarks.",
}
