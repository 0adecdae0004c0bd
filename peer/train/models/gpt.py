"""GPT-2's layout (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019) with the names and the
arithmetic of `GPT2LMHeadModel` of Transformers, which loads its weights as they are."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

GPT_SIZES = {"gpt-1m": (128, 5), "gpt-3m": (256, 4), "gpt-10m": (384, 6), "gpt-124m": (768, 12)}
"""Name → width and number of blocks."""
HEAD = 64
"""Width of a head; a narrower model has one head."""
EPSILON = 1e-5
"""ε of the layer norms, as in the published configuration."""


def heads_of(width: int) -> int:
    """Return the number of attention heads of a model of that width: the largest that divides it."""
    return max((heads for heads in range(1, width // HEAD + 1) if width % heads == 0), default=1)


def gpt(width: int, blocks: int, *, vocabulary: int = 256, context: int = 256, end: int | None = None) -> nn.Module:
    """Return a GPT from tokens int64[b, n], n at most `context`, to logits float32[b, n, vocabulary] of the tokens that
    follow each, drawn as GPT-2 is. The embedding of tokens is also the last layer (tied). `end`: the last token of a
    document, beyond which no other sees it; None: all see all before them."""
    return Gpt(width, blocks, vocabulary, context, end)


class Gpt(nn.Module):
    """A whole model; see `gpt`."""

    def __init__(self, width: int, blocks: int, vocabulary: int, context: int, end: int | None) -> None:
        """See `gpt`."""
        super().__init__()
        self.transformer = _Transformer(width, blocks, vocabulary, context, end)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds twice to the residual stream, whose width is to stay that of its start.
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * blocks) if ".c_proj." in name else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `gpt`."""
        return functional.linear(self.transformer(tokens), self.transformer.wte.weight)


class _Transformer(nn.Module):
    """All but the last layer."""

    def __init__(self, width: int, blocks: int, vocabulary: int, context: int, end: int | None) -> None:
        super().__init__()
        self.end = end
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.ln_f = nn.LayerNorm(width, eps=EPSILON)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seen, x = None, self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        if self.end is not None:
            is_end = (tokens == self.end).long()
            documents = is_end.cumsum(1) - is_end
            seen = (documents[:, :, None] == documents[:, None]).tril()[:, None]
        for block in self.h:
            x = block(x, seen)
        normed: torch.Tensor = self.ln_f(x)
        return normed


class _Block(nn.Module):
    """Attention of every token to those before it that `seen: bool[b, 1, n, n]` names, and two linear layers, each
    behind a norm and added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = heads_of(width)
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps=EPSILON), nn.LayerNorm(width, eps=EPSILON)
        self.attn = nn.ModuleDict({"c_attn": _Linear(width, 3 * width), "c_proj": _Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": _Linear(width, 4 * width), "c_proj": _Linear(4 * width, width)})

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        b, n, d = x.shape
        parts = self.attn["c_attn"](self.ln_1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, seen, is_causal=seen is None)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).reshape(b, n, d))
        wide = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        added: torch.Tensor = self.mlp["c_proj"](wide)
        return x + added


class _Linear(nn.Module):
    """A linear layer whose weight is stored as float32[inputs, outputs], as in GPT-2's published weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.t(), self.bias)
