"""Files of a Hugging Face Hub folder beside the weights: config.json, a tokenizer's, the heading of the model card.

DistilBERT and GPT have the names and the arithmetic of `transformers`, which loads such a folder by itself. Others need
the code of their task: their config.json says which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from peer import __version__
from peer.config.options import OWN_LOOP, Config
from peer.errors import ConfigError
from peer.ops.model_card import without_folders
from peer.train.datasets.documents import BYTES
from peer.train.datasets.tokens import ENDS, read_encoding
from peer.train.models.distilbert import BASE
from peer.train.models.gpt import heads_of

HUB_CONFIG = "config.json"
_WORDS = "distilbert.embeddings.word_embeddings.weight"
_NEEDED = (_WORDS, "distilbert.embeddings.position_embeddings.weight", "pre_classifier.weight", "classifier.weight")
_LOADED_BY = {
    "distilbert": ("AutoModelForSequenceClassification", "text-classification"),
    "gpt2": ("AutoModelForCausalLM", "text-generation"),
}
"""model_type → class that loads it, and its use."""
_HIDDEN = "distilbert.transformer.layer.{}.ffn.lin1.weight"


def hub_files(config: Config, base: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return config.json for a model with tensors of these shapes, and where its task reads texts by a tokenizer the
    files of that, as texts. Relative paths of `config` start from `base`. Raises ConfigError where only a training
    script knows the model, DataError where the tokenizer cannot be read."""
    files, end, tokenizer = {}, BYTES.end, config.training.task_options.get("tokenizer")
    is_text = config.training.task == "text"
    if is_text and tokenizer:
        path = base / Path(str(config.data.directory)).expanduser() / str(tokenizer)
        encoding = read_encoding(path)
        end, name = encoding.end, next(each for each in ENDS if each in encoding.names)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": name, "eos_token": name}
        files = {"tokenizer.json": path.read_bytes().decode(), "tokenizer_config.json": json.dumps(settings, indent=2)}
    fields = _gpt(shapes, end) if is_text else _distilbert(shapes)
    if fields is None and config.training.task == OWN_LOOP:
        raise ConfigError(
            "cannot describe the model of a training script; let the script write its config.json into a folder"
            " (model.config.save_pretrained), and the weights beside it: sotto export … -o FOLDER/model.safetensors",
            key="--format huggingface",
        )
    fields = fields or {
        "model_type": "sottovoce",
        "task": config.training.task,
        "task_options": {key: without_folders(value) for key, value in config.training.task_options.items()},
        "sottovoce_version": __version__,
    }
    return {HUB_CONFIG: json.dumps(fields, indent=2) + "\n", **files}


def auto_class(text: str) -> str:
    """Return the class of `transformers` that loads a model with this config.json; "" where none does."""
    return _LOADED_BY.get(json.loads(text)["model_type"], ("", ""))[0]


def card_heading(text: str) -> str:
    """Return the heading of a model card that tells the Hub about a model with this config.json."""
    _, use = _LOADED_BY.get(json.loads(text)["model_type"], ("", ""))
    library = ["library_name: transformers", f"pipeline_tag: {use}"] if use else ["library_name: sottovoce"]
    return "\n".join(["---", *library, "tags:", "- sottovoce", "---", "", ""])


def _gpt(shapes: Mapping[str, Sequence[int]], end: int) -> dict[str, object]:
    """Return the configuration of a GPT with tensors of these shapes, and the token that ends a document."""
    vocabulary, width = shapes["transformer.wte.weight"]
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocabulary,
        "n_positions": shapes["transformer.wpe.weight"][0],
        "n_embd": width,
        "n_layer": sum(name.endswith(".ln_1.weight") for name in shapes),
        "n_head": heads_of(width),
        "tie_word_embeddings": True,
        # Training never left out anything.
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    }


def _distilbert(shapes: Mapping[str, Sequence[int]]) -> dict[str, object] | None:
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
