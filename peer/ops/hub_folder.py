"""Files of a Hugging Face Hub folder beside the weights: config.json, and the heading of the model card.

DistilBERT has the names and the arithmetic of `transformers`, which loads such a folder by itself. Other models need
the code of their task: their config.json says which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from peer import __version__
from peer.config.options import Config
from peer.ops.model_card import without_folders
from peer.train.model_file import open_tensors
from peer.train.models.distilbert import BASE

_WORDS = "distilbert.embeddings.word_embeddings.weight"
_NEEDED = (_WORDS, "distilbert.embeddings.position_embeddings.weight", "pre_classifier.weight", "classifier.weight")
_HIDDEN = "distilbert.transformer.layer.{}.ffn.lin1.weight"


def hub_config(config: Config, weights: Sequence[Path]) -> str:
    """Return config.json for the model in safetensors files, as text. Raises DataError where one cannot be read."""
    shapes: dict[str, list[int]] = {}
    for each in weights:
        with open_tensors(each) as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in [*file.keys()]}
    fields = _distilbert(shapes) or {
        "model_type": "sottovoce",
        "task": config.training.task,
        "task_options": {key: without_folders(value) for key, value in config.training.task_options.items()},
        "sottovoce_version": __version__,
    }
    return json.dumps(fields, indent=2) + "\n"


def is_of_transformers(text: str) -> bool:
    """Whether `transformers` loads a model with this config.json."""
    kind: str = json.loads(text)["model_type"]
    return kind != "sottovoce"


def card_heading(text: str) -> str:
    """Return the heading of a model card that tells the Hub about a model with this config.json."""
    of_transformers = ["library_name: transformers", "pipeline_tag: text-classification"]
    library = of_transformers if is_of_transformers(text) else ["library_name: sottovoce"]
    return "\n".join(["---", *library, "tags:", "- sottovoce", "---", "", ""])


def _distilbert(shapes: Mapping[str, list[int]]) -> dict[str, object] | None:
    """Return the configuration of a DistilBERT with tensors of these shapes; None if it is none."""
    if not all(name in shapes for name in _NEEDED) or shapes[_WORDS][1] != BASE.width:
        return None
    blocks = sum(_HIDDEN.format(index) in shapes for index in range(BASE.blocks))
    classes = shapes["classifier.weight"][0]
    return {
        "model_type": "distilbert",
        "architectures": ["DistilBertForSequenceClassification"],
        "vocab_size": shapes[_WORDS][0],
        "max_position_embeddings": shapes[_NEEDED[1]][0],
        "dim": BASE.width,
        "n_layers": blocks,
        "n_heads": BASE.heads,
        "hidden_dim": shapes[_HIDDEN.format(0)][0],
        "activation": "gelu",
        "id2label": {str(index): f"LABEL_{index}" for index in range(classes)},
        "label2id": {f"LABEL_{index}": index for index in range(classes)},
    }
