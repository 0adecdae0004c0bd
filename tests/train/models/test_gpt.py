"""GPT has the names and the arithmetic of Transformers' GPT-2."""

from __future__ import annotations

import pytest
import torch

from peer.train.models import MODELS
from peer.train.models.gpt import gpt, heads_of


@pytest.mark.parametrize("width", [16, 128])
def test_its_logits_are_those_of_transformers(width: int) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: the extra huggingface installs it")
    torch.manual_seed(0)
    own = gpt(width, 2, vocabulary=50, context=12)
    with torch.no_grad():
        for parameter in own.parameters():
            # Norms and biases as training leaves them.
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    config = transformers.GPT2Config(
        n_positions=12, n_embd=width, n_layer=2, n_head=heads_of(width), vocab_size=50, bos_token_id=0, eos_token_id=0
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    tied = {"lm_head.weight": own.get_parameter("transformer.wte.weight")}
    theirs.load_state_dict({**own.state_dict(), **tied})
    tokens = torch.randint(50, (3, 12))
    with torch.no_grad():
        torch.testing.assert_close(own(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own(tokens)[:, :7], own(tokens[:, :7]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "bytes_alone", "with_pieces"),
    [
        ("gpt-1m", 1_057_152, None),
        ("gpt-3m", 3_290_624, None),
        ("gpt-10m", 10_844_160, None),
        ("gpt-124m", None, 124_439_808),
    ],
)
def test_names_say_the_sizes(name: str, bytes_alone: int | None, with_pieces: int | None) -> None:
    settings = {} if with_pieces is None else {"vocabulary": 50_257, "context": 1024}
    with torch.device("meta"):
        model = MODELS[name](**settings)
    assert sum(parameter.numel() for parameter in model.parameters()) == (bytes_alone or with_pieces)


def test_what_adds_to_the_residual_stream_starts_smaller() -> None:
    torch.manual_seed(0)
    model = gpt(128, 8)
    stds = {
        name: float(parameter.detach().std()) for name, parameter in model.named_parameters() if parameter.ndim == 2
    }
    for name, std in stds.items():
        assert std == pytest.approx(0.005 if "c_proj" in name else 0.02, rel=0.05), name
