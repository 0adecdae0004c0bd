"""DistilBERT for classification (Sanh et al., 2019): 66.96 million parameters in its published size, 4 classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from peer.errors import DataError
from peer.train.layers import FULL_PRECISION, Layers
from peer.train.model_file import open_tensors, read_like, take_


@dataclass(frozen=True, kw_only=True)
class DistilBertSize:
    """Dimensions of the model; the defaults are those of distilbert-base-uncased."""

    vocabulary: int = 30_522
    positions: int = 512
    """Pieces of the longest sentence."""
    width: int = 768
    blocks: int = 6
    heads: int = 12
    hidden: int = 3072


BASE = DistilBertSize()
HEAD = BASE.width // BASE.heads
"""Width of a head of attention."""


def distilbert(
    num_classes: int = 4,
    size: DistilBertSize = BASE,
    *,
    weights: str | Path | None = None,
    layers: Layers = FULL_PRECISION,
) -> nn.Module:
    """Return the model, drawn at random or with the `weights` of a safetensors file under their published names.

    A file of the plain model, without the classifier's two linear layers, leaves those at random. Dropout is left out:
    8-bit training is noise enough. Raises DataError for a file that does not fit.
    """
    chain: dict[str, nn.Module] = {
        "distilbert": layers.sequential(
            {
                "embeddings": layers.token_embedding(size.vocabulary, size.positions, size.width),
                "transformer": layers.sequential(
                    {
                        "layer": layers.sequential(
                            {
                                str(index): layers.transformer_block(size.width, size.heads, size.hidden)
                                for index in range(size.blocks)
                            }
                        )
                    }
                ),
            }
        ),
        "first": layers.first_token(),
        "pre_classifier": layers.linear(size.width, size.width),
        "relu": layers.relu(),
        "classifier": layers.linear(size.width, num_classes),
    }
    model = layers.network(chain)
    _draw_(model)
    if weights is not None:
        load_published_(model, Path(weights))
    return model


def load_published_(model: nn.Module, path: Path) -> None:
    """Set the parameters of the model to those of a file that names them as the published weights do.

    Other tensors of the file (of heads for other tasks) are left alone. Raises DataError if a parameter of the model is
    missing, but for the classifier's, or has another shape.
    """
    parameters = dict(model.named_parameters())
    with open_tensors(path) as file:
        stored = set(file.keys())
        prefix = "" if "distilbert.embeddings.word_embeddings.weight" in stored else "distilbert."
        read = {}
        for name, parameter in parameters.items():
            key, of_classifier = name.removeprefix(prefix), not name.startswith("distilbert.")
            shape = list(file.get_slice(key).get_shape()) if key in stored else None
            if of_classifier and shape != list(parameter.shape):
                # There is none, or one for another number of classes.
                continue
            if shape is None:
                raise DataError(f"model file {path} lacks {key}")
            read[name] = read_like(file, path, key, parameter)
    take_(parameters, read, path)


def _draw_(model: nn.Module) -> None:
    """Draw all matrices from a normal distribution of width 0.02, as BERT's are; vectors stay at 0 and 1."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
