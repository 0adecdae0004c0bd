"""The parts of DistilBERT in 8 bits; parameters and their names are those of `full_precision.text_layers`."""

from __future__ import annotations

import torch
from torch import nn

from peer.train.eight_bit import kernels, linear_kernels, row_kernels
from peer.train.eight_bit.attention import Attention
from peer.train.eight_bit.attention_kernels import Attended
from peer.train.eight_bit.layer import Layer, masked
from peer.train.eight_bit.linear import Linear
from peer.train.eight_bit.ranges import ANY_GRID, Grid, RunningRange, grid_over, symmetric_grid_over
from peer.train.eight_bit.row_kernels import GELU_LEAST, LayerNormOperands
from peer.train.eight_bit.stored import rows_of
from peer.train.eight_bit.tensors import Gradient, Quantized, Tape, as_rows
from peer.train.full_precision.text_layers import EPSILON


class LayerNorm(nn.Module):
    """y = (x − mean) / deviation · γ + β over rows; parameters as of `nn.LayerNorm`. A part of other layers, which hand
    it the summands of x, so that the sum itself is never stored."""

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.normal, self.output = RunningRange(), RunningRange()

    def forward_rows(self, x: LayerNormOperands, tape: Tape) -> tuple[Quantized, Quantized, torch.Tensor]:
        """Return y in codes, int8[m, n], and the values to keep for `backward_rows`: codes of
        n = (x − mean) / deviation, and 1 / deviation of each row, float32[m]."""
        gamma, beta = self.weight.detach(), self.bias.detach()
        normal_grid, grid = self.normal.grid(symmetric_grid_over), self.output.grid()
        if normal_grid is None or grid is None:
            _, normal_ends, _, ends, _ = row_kernels.layer_norm(x, gamma, beta, self.epsilon, ANY_GRID, ANY_GRID)
            normal_grid, grid = normal_grid or symmetric_grid_over(*normal_ends), grid or grid_over(*ends)
        normal, normal_ends, codes, ends, deviations = row_kernels.layer_norm(
            x, gamma, beta, self.epsilon, normal_grid, grid
        )
        if tape.training:
            self.normal.observe_(*normal_ends)
            self.output.observe_(*ends)
        y = Quantized(codes, grid.scale, grid.zero_point)
        return y, Quantized(normal, normal_grid.scale, 0), deviations

    def backward_rows(self, rows: torch.Tensor, normal: Quantized, deviations: torch.Tensor, tape: Tape) -> Gradient:
        """Return the gradient with regard to x for `rows: bfloat16[m, n]`, and count those of γ and β."""
        data, largest, gamma_gradient = row_kernels.layer_norm_backward(
            rows, normal.data, normal.scale, deviations, self.weight.detach()
        )
        if self.weight.requires_grad:
            tape.add_gradient(self.weight, gamma_gradient)
        if self.bias.requires_grad:
            tape.add_gradient(self.bias, kernels.column_sums(rows))
        return Gradient(data, largest)


class TokenEmbedding(Layer):
    """Pieces int64[b, n] to the sum of a vector for each piece and one for its position, normalised.

    The vectors are looked up in float32, where the sum and its norm are taken; the norm returns and keeps int8. The
    mask of the padding goes on the tape.
    """

    def __init__(self, vocabulary: int, positions: int, width: int, *, padding: int = 0) -> None:
        super().__init__()
        self.padding = padding
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.LayerNorm = LayerNorm(width, epsilon=EPSILON)

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        pieces = x.data
        tape.padding = pieces == self.padding
        b, n = pieces.shape
        vectors = rows_of(self.word_embeddings, pieces) + rows_of(self.position_embeddings, slice(n))
        y, *kept = self.LayerNorm.forward_rows(LayerNormOperands(floats=vectors.view(b * n, -1)), tape)
        tape.save(pieces, *kept)
        return y.with_data(y.data.view(b, n, -1))

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        pieces, normal, deviations = tape.take()
        b, n = pieces.shape
        of_sum = self.LayerNorm.backward_rows(gradient.data.reshape(b * n, -1), normal, deviations, tape)
        rows = of_sum.data.to(torch.float32)
        words, positions = self.word_embeddings.weight, self.position_embeddings.weight
        if words.requires_grad:
            tape.add_gradient(words, torch.zeros_like(words).index_add_(0, pieces.view(-1), rows))
        if positions.requires_grad:
            total = torch.zeros_like(positions)
            total[:n] = rows.view(b, n, -1).sum(dim=0)
            tape.add_gradient(positions, total)
        return None


class TransformerBlock(Layer):
    """Attention of every position to all that are no padding, two linear layers with GELU between them, and a layer
    norm after each; codes [b, n, d].

    GELU is a table of 256 codes, and its slope one of 256 numbers. Sums with the residual happen in float32 within the
    layer norm and are not stored.
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.sa_layer_norm = LayerNorm(width, epsilon=EPSILON)
        self.ffn = nn.ModuleDict({"lin1": Linear(nn.Linear(width, hidden)), "lin2": Linear(nn.Linear(hidden, width))})
        self.output_layer_norm = LayerNorm(width, epsilon=EPSILON)

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        x = x.signed()
        shape = x.data.shape
        mixed, attended = self.attention.mix(x, tape)
        middle, *first = self._add_and_normalize(self.attention.out_lin, mixed, x, self.sa_layer_norm, tape)
        tape.save(
            x, mixed, *first,
            attended.query, attended.key, attended.value, attended.probabilities, attended.weights,
        )  # fmt: skip
        hidden, _ = self._linear("lin1").coded(middle, tape)
        result, *second = self._add_and_normalize(
            self._linear("lin2"), _gelu(hidden)[0], middle, self.output_layer_norm, tape
        )
        tape.save(middle, hidden, *second)
        return result.with_data(result.data.view(shape))

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        # Both forget what they have read before they compute more: a step's memory is at its peak here.
        return self._back_through_attention(self._back_through_ffn(as_rows(gradient.data), tape), tape, wanted=wanted)

    def _back_through_ffn(self, rows: torch.Tensor, tape: Tape) -> torch.Tensor:
        """Return the gradient with regard to the linear layers' input, bfloat16[rows, d]."""
        lin1, lin2 = self._linear("lin1"), self._linear("lin2")
        middle, hidden, normal, deviations = tape.take()
        total = self.output_layer_norm.backward_rows(rows, normal, deviations, tape)
        activated, slopes = _gelu(hidden)
        lin2.count_gradients(total.data, activated, tape)
        del activated, normal
        data, largest = linear_kernels.backward_table(lin2.operands_back(total, tape), hidden.data, slopes)
        del hidden
        lin1.count_gradients(data, middle, tape)
        linear_kernels.add_backward_(total.data, lin1.operands_back(Gradient(data, largest), tape))
        return total.data

    def _back_through_attention(self, rows: torch.Tensor, tape: Tape, *, wanted: bool) -> Gradient | None:
        """Return the gradient with regard to the block's input, of its shape, for `rows: bfloat16[rows, d]`."""
        attention = self.attention
        x, mixed, normal, deviations, *attended = tape.take()
        total = self.sa_layer_norm.backward_rows(rows, normal, deviations, tape)
        del rows, normal
        attention.out_lin.count_gradients(total.data, mixed, tape)
        of_mixed = Gradient(*linear_kernels.backward(attention.out_lin.operands_back(total, tape), None, 0))
        parts = attention.mix_back(of_mixed, Attended(*attended), tape)
        del of_mixed, attended, mixed
        largest = total.largest
        for linear, part in zip((attention.q_lin, attention.k_lin, attention.v_lin), parts, strict=True):
            linear.count_gradients(part.data, x, tape)
            if wanted:
                largest = linear_kernels.add_backward_(total.data, linear.operands_back(part, tape))
        if not wanted:
            return None
        return masked(Gradient(total.data.view(x.data.shape), largest), x)

    def _linear(self, name: str) -> Linear:
        layer = self.ffn[name]
        assert isinstance(layer, Linear)
        return layer

    @staticmethod
    def _add_and_normalize(
        linear: Linear, x: Quantized, residual: Quantized, norm: LayerNorm, tape: Tape
    ) -> tuple[Quantized, Quantized, torch.Tensor]:
        """Return norm(linear(x) + residual), int8[rows, d], and the values that the norm keeps."""
        product = linear.operands(x)
        accumulator, factor = linear_kernels.accumulate(product)
        operands = LayerNormOperands(
            accumulator=accumulator, factor=factor, bias=product.bias,
            residual=residual.data, residual_zero=residual.zero_point, residual_scale=residual.scale,
        )  # fmt: skip
        return norm.forward_rows(operands, tape)


class FirstToken(Layer):
    """The vector of the first position: [b, n, d] → [b, d]."""

    def forward_quantized(self, x: Quantized, tape: Tape) -> Quantized:
        tape.save(x.data.shape)
        return x.with_data(x.data[:, 0].contiguous())

    def backward_quantized(self, gradient: Gradient, tape: Tape, *, wanted: bool = True) -> Gradient | None:
        (shape,) = tape.take()
        whole = torch.zeros(shape, dtype=gradient.data.dtype, device=gradient.data.device)
        whole[:, 0] = gradient.data
        return Gradient(whole, gradient.largest)


def _gelu(x: Quantized) -> tuple[Quantized, torch.Tensor]:
    """Return GELU of x in codes, and the slope of each of the 256 codes of x."""
    high = (127 - x.zero_point) * x.scale
    grid = grid_over(GELU_LEAST, high)
    table, slopes = row_kernels.gelu_tables(Grid(x.scale, x.zero_point), grid)
    return Quantized(row_kernels.look_up(x.data, table), grid.scale, grid.zero_point), slopes
