"""DistilBERT: padding is not seen, and weights under their published names find their places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from peer.errors import DataError
from peer.train.models.distilbert import DistilBertSize, distilbert, load_published_

SMALL = DistilBertSize(vocabulary=50, positions=12, width=16, blocks=2, heads=4, hidden=24)
PIECES = torch.tensor([[3, 7, 9, 4, 0, 0], [3, 8, 11, 12, 13, 4]])


def model(num_classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return distilbert(num_classes, SMALL)


def wide(network: nn.Module) -> nn.Module:
    """Draw the matrices so large that everything depends on everything."""
    torch.manual_seed(1)
    for parameter in network.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.5)
    return network


def test_parameters_have_the_published_names():
    names = list(dict(model().named_parameters()))
    assert names[:4] == [
        "distilbert.embeddings.word_embeddings.weight",
        "distilbert.embeddings.position_embeddings.weight",
        "distilbert.embeddings.LayerNorm.weight",
        "distilbert.embeddings.LayerNorm.bias",
    ]
    block = [name.removeprefix("distilbert.transformer.layer.1.") for name in names if ".layer.1." in name]
    assert block[::2] == [
        *("attention.q_lin.weight", "attention.k_lin.weight", "attention.v_lin.weight", "attention.out_lin.weight"),
        *("sa_layer_norm.weight", "ffn.lin1.weight", "ffn.lin2.weight", "output_layer_norm.weight"),
    ]
    assert names[-4:] == ["pre_classifier.weight", "pre_classifier.bias", "classifier.weight", "classifier.bias"]


def test_padding_is_not_seen():
    network = wide(model())
    alone = network(PIECES[:1, :4])
    assert torch.allclose(network(PIECES)[:1], alone, atol=1e-5)
    other = PIECES.clone()
    other[0, 2] = 20
    assert not torch.allclose(network(other)[:1], alone, atol=1e-3)


def test_a_block_is_the_formula_of_its_paper():
    """Softmax(Q Kᵀ / √d) V by hand for the first sentence, then the two linear layers and both norms."""
    network = wide(model()).double()
    inside = dict(network.named_modules())
    block = inside["distilbert.transformer.layer.0"]
    x, padding = inside["distilbert.embeddings"](PIECES)
    attention = block.get_submodule("attention")
    sentence = x[0, :4]
    heads = []
    for head in range(4):
        part = slice(4 * head, 4 * head + 4)
        query, key, value = (attention.get_submodule(name)(sentence)[:, part] for name in ("q_lin", "k_lin", "v_lin"))
        heads.append(torch.softmax(query @ key.T / 2, dim=1) @ value)
    mixed = attention.get_submodule("out_lin")(torch.cat(heads, dim=1))
    middle = block.get_submodule("sa_layer_norm")(sentence + mixed)
    broad = functional.gelu(block.get_submodule("ffn.lin1")(middle))
    expected = block.get_submodule("output_layer_norm")(middle + block.get_submodule("ffn.lin2")(broad))
    assert torch.allclose(block((x, padding))[0][0, :4], expected, atol=1e-10)


def test_every_parameter_gets_a_gradient():
    network = model()
    gradients = torch.autograd.grad(network(PIECES).square().sum(), list(network.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    # The softmax does not see what is added to all keys alike.
    names = [name for name, _ in network.named_parameters()]
    still = [name for name, gradient in zip(names, gradients, strict=True) if gradient.abs().max() < 1e-9]
    assert all(name.endswith("k_lin.bias") for name in still)


@pytest.mark.parametrize("prefix", ["distilbert.", ""])
def test_published_weights_are_loaded(tmp_path: Path, prefix: str):
    """From a file of a classifier, and from one of the plain model, whose names lack the first word."""
    torch.manual_seed(5)
    tensors = {
        prefix + name.removeprefix("distilbert."): torch.randn(parameter.shape)
        for name, parameter in model().named_parameters()
        if name.startswith("distilbert.")
    }
    save_file({**tensors, "vocab_projector.bias": torch.zeros(50)}, tmp_path / "weights.safetensors")
    torch.manual_seed(0)
    loaded = distilbert(3, SMALL, weights=tmp_path / "weights.safetensors")
    drawn = dict(model().named_parameters())
    for name, parameter in loaded.named_parameters():
        if name.startswith("distilbert."):
            assert torch.equal(parameter, tensors[prefix + name.removeprefix("distilbert.")])
        else:
            assert torch.equal(parameter, drawn[name])


def test_a_classifier_of_as_many_classes_is_taken_too(tmp_path: Path):
    torch.manual_seed(5)
    tensors = {name: torch.randn(parameter.shape) for name, parameter in model().named_parameters()}
    save_file(tensors, tmp_path / "w.safetensors")
    same, fewer = model(), model(2)
    load_published_(same, tmp_path / "w.safetensors")
    load_published_(fewer, tmp_path / "w.safetensors")
    assert torch.equal(same.get_parameter("classifier.weight"), tensors["classifier.weight"])
    assert torch.equal(fewer.get_parameter("pre_classifier.weight"), tensors["pre_classifier.weight"])
    assert torch.equal(fewer.get_parameter("classifier.weight"), model(2).get_parameter("classifier.weight"))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(DataError, match=r"model file .* does not exist"):
        load_published_(model(), path)
    path.write_bytes(b"\x08" + bytes(20))
    with pytest.raises(DataError, match="not a valid safetensors file"):
        load_published_(model(), path)
    tensors = {name: parameter.detach().clone() for name, parameter in model().named_parameters()}
    word = "distilbert.embeddings.word_embeddings.weight"
    save_file({**tensors, word: torch.zeros(51, 16)}, path)
    with pytest.raises(DataError, match=r"word_embeddings\.weight has shape \[51, 16\], but .* needs \[50, 16\]"):
        load_published_(model(), path)
    save_file({**tensors, word: torch.full((50, 16), torch.nan)}, path)
    with pytest.raises(DataError, match="not finite"):
        load_published_(model(), path)
    del tensors["distilbert.transformer.layer.1.ffn.lin1.weight"]
    save_file(tensors, path)
    with pytest.raises(DataError, match=r"lacks distilbert\.transformer\.layer\.1\.ffn\.lin1\.weight"):
        load_published_(model(), path)
