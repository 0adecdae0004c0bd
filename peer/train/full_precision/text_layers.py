"""The parts of DistilBERT in full precision, as ordinary modules with the names of the published weights (Sanh et al.,
"DistilBERT", 2019; a block is that of Vaswani et al., 2017, with GELU and the norm after each sum).

Between the parts go pairs of activations float32[b, n, d] and which pieces are padding, bool[b, n].
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

Tokens: TypeAlias = tuple[torch.Tensor, torch.Tensor]

EPSILON = 1e-12
"""ε of the layer norms, as in the published configuration."""


class TokenEmbedding(nn.Module):
    """Pieces int64[b, n] to the sum of a vector for each piece and one for its position, normalised."""

    def __init__(self, vocabulary: int, positions: int, width: int, *, padding: int = 0) -> None:
        super().__init__()
        self.padding = padding
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.LayerNorm = nn.LayerNorm(width, eps=EPSILON)

    def forward(self, pieces: torch.Tensor) -> Tokens:
        x = self.word_embeddings(pieces) + self.position_embeddings.weight[: pieces.shape[1]]
        return self.LayerNorm(x), pieces == self.padding


class TransformerBlock(nn.Module):
    """Attention of every piece to all that are no padding, two linear layers, and a norm after each."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.sa_layer_norm = nn.LayerNorm(width, eps=EPSILON)
        self.ffn = nn.ModuleDict({"lin1": nn.Linear(width, hidden), "lin2": nn.Linear(hidden, width)})
        self.output_layer_norm = nn.LayerNorm(width, eps=EPSILON)

    def forward(self, tokens: Tokens) -> Tokens:
        x, padding = tokens
        x = self.sa_layer_norm(x + self.attention(x, padding))
        return self.output_layer_norm(x + self.ffn["lin2"](functional.gelu(self.ffn["lin1"](x)))), padding


class Attention(nn.Module):
    """Multi-head attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads do not share {width} numbers evenly")
        self.heads = heads
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        query, key, value = (
            linear(x).view(b, n, self.heads, d // self.heads).transpose(1, 2)
            for linear in (self.q_lin, self.k_lin, self.v_lin)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=~padding[:, None, None, :])
        result: torch.Tensor = self.out_lin(mixed.transpose(1, 2).reshape(b, n, d))
        return result


class FirstToken(nn.Module):
    """The vector of the first piece, [CLS], which stands for the sentence."""

    def forward(self, tokens: Tokens) -> torch.Tensor:
        """Return float32[b, d]."""
        return tokens[0][:, 0]
