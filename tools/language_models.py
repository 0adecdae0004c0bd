"""Screens how peers that train a language model may exchange few, rich rounds, each contender at its own best settings.

    python -m tools.language_models corpus CORPUS
    python -m tools.language_models screen CORPUS --rows FILE [--every 16] [--seeds 0,1] [--contenders mean,diloco]
        [--width 128] [--layers 5] [--device cuda]

The protocol is in docs/studies/language-models.md. `corpus` reads the texts of `DOMAINS` where Debian's packages have
put them and writes a folder with two files of bytes for each, `DOMAIN.train` and `DOMAIN.held`: documents in an order
drawn by their hash, without paragraphs that have been there before, and split between documents.

`screen` trains a GPT on bytes for each of eight peers, one domain each. All models of a stage (contenders, settings,
seeds, peers) are computed as one batch, on a GPU as one CUDA graph. This trainer shares no code with the product, so
that what it says of an algorithm is a second opinion. Rows are kept in FILE, and those that are there stay.

Each contender is tuned on seed 9 at half the length: four inner rates, then its two settings at the best of them, then
rates beyond the grid while the best one lies at its edge. Afterwards it runs at full length on the seeds.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import math
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tools.grid import Lines, Row


class Domain(NamedTuple):
    packages: tuple[str, ...]
    pattern: str
    """What the path of a document matches."""
    licence: str


DOMAINS = {
    "python": Domain(("libpython3.11-stdlib",), r"\.py$", "PSF-2.0"),
    "c": Domain(("linux-libc-dev", "libc6-dev"), r"\.h$", "GPL-2.0 with the syscall note, LGPL-2.1"),
    "perl-guides": Domain(("perl-doc",), r"\.pod$", "Artistic or GPL-1.0+"),
    "manual": Domain(("manpages-dev",), r"/man/man.*\.gz$", "GPL-2.0+, BSD, Linux-man-pages"),
    "manual-german": Domain(("manpages-de",), r"/man/de/.*\.gz$", "GPL-3.0+"),
    "dictionary": Domain(("dict-gcide",), r"gcide\.dict\.dz$", "GPL-3.0+"),
    "changes": Domain((), r"/usr/share/doc/[^/]*/changelog\.(Debian\.)?gz$", "that of each package"),
    "database": Domain(("postgresql-doc-15",), r"\.html$", "PostgreSQL"),
}
"""Texts by domain. Without packages, files of all that are installed."""

CONTEXT, SEQUENCES = 256, 2
"""A step of a peer has 512 tokens, which are bytes."""
CHUNK = 4096
VOCABULARY = 256
HELD = 2**18
"""Bytes of each domain on which the loss is measured."""
TRAINED = 4_800 * CONTEXT * SEQUENCES
TUNING_SEED = 9
STEPS = {16: 2_000, 64: 4_800}
"""Length of a run by the local steps between two rounds."""
RATES = {False: (0.7e-3, 1.4e-3, 2.8e-3, 5.6e-3), True: (4e-3, 8e-3, 16e-3, 32e-3)}
"""Inner rates with AdamW and with Muon."""


# -- the corpus --------------------------------------------------------------------------------------------------------


def _documents(domain: Domain) -> Iterator[str]:
    if domain.packages:
        listed = subprocess.run(
            ["dpkg-query", "-L", *domain.packages], capture_output=True, text=True, check=True
        ).stdout
        paths: Iterable[Path] = map(Path, listed.splitlines())
    else:
        paths = Path("/usr/share/doc").glob("*/changelog*.gz")
    files = (
        path for path in paths if re.search(domain.pattern, str(path)) and path.is_file() and not path.is_symlink()
    )
    for path in files:
        content = path.read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8", errors="replace")
        if path.suffix == ".html":
            text = html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"(?is)<(head|script|style).*?</\1>", "", text)))
        if len(text) > 200_000:  # A dictionary is one file.
            yield from (text[start : start + 20_000] for start in range(0, len(text), 20_000))
        else:
            yield text


def write_corpus(folder: Path) -> None:
    """Write the texts of all domains; a domain with too little text is an error that names its packages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, domain in DOMAINS.items():
        by_hash = sorted((hashlib.sha256(text.encode()).digest(), text) for text in _documents(domain))
        seen: set[bytes] = set()
        parts: list[bytes] = []
        for _, text in by_hash:
            kept = []
            for paragraph in re.split(r"\n\s*\n", text):
                words = hashlib.sha256(" ".join(paragraph.split()).encode()).digest()
                if len(paragraph) < 80 or words not in seen:
                    kept.append(paragraph)
                seen.add(words)
            if sum(map(len, kept)) > 200:
                parts.append("\n\n".join(kept).encode())
        held: list[bytes] = []
        trained: list[bytes] = []
        for part in parts:
            is_held = sum(len(each) for each in held) < HELD + 1
            (held if is_held else trained).append(part)
        for suffix, documents, least in (("held", held, HELD + 1), ("train", trained, TRAINED + 1)):
            content = b"\n\n".join(documents)
            if len(content) < least:
                raise SystemExit(
                    f"{name}: {len(content):,} bytes of {least:,} for {suffix}: "
                    f"apt-get install {' '.join(domain.packages) or 'some more packages'}"
                )
            (folder / f"{name}.{suffix}").write_bytes(content[:least])
        size = sum(map(len, parts))
        print(f"{name:14} {len(parts):6} documents, {size:12,} bytes, {domain.licence}", flush=True)


# -- the models --------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    width: int
    layers: int

    def parameters(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """Name, shape and standard deviation at the start of each parameter, in GPT-2's layout with tied embeddings."""
        width, deep = self.width, 0.02 / math.sqrt(2 * self.layers)
        yield "tokens", (VOCABULARY, width), 0.02
        yield "positions", (CONTEXT, width), 0.02
        for layer in range(self.layers):
            yield f"{layer}.norm1", (2, width), -1
            yield f"{layer}.qkv", (width, 3 * width), 0.02
            yield f"{layer}.qkv bias", (3 * width,), 0
            yield f"{layer}.out", (width, width), deep
            yield f"{layer}.out bias", (width,), 0
            yield f"{layer}.norm2", (2, width), -1
            yield f"{layer}.up", (width, 4 * width), 0.02
            yield f"{layer}.up bias", (4 * width,), 0
            yield f"{layer}.down", (4 * width, width), deep
            yield f"{layer}.down bias", (width,), 0
        yield "norm", (2, width), -1

    def size(self) -> int:
        return sum(math.prod(shape) for _, shape, _ in self.parameters())

    def start(self, seed: int) -> Tensor:
        """Return the parameters of one model, float32[n], n a multiple of `CHUNK`; the rest is 0."""
        generator = torch.Generator().manual_seed(seed)
        flat = []
        for _, shape, deviation in self.parameters():
            norm = torch.stack([torch.ones(shape[-1]), torch.zeros(shape[-1])]) if deviation < 0 else None
            drawn = torch.randn(shape, generator=generator) * max(deviation, 0)
            flat.append((drawn if norm is None else norm).flatten())
        whole = torch.cat(flat)
        return functional.pad(whole, (0, -len(whole) % CHUNK))


class Models:
    """Equally shaped models side by side: parameters, gradients and moments are float32[models, n]."""

    def __init__(self, shape: Shape, values: Tensor) -> None:
        self.shape, self.values, self.gradients = shape, values, torch.zeros_like(values)
        self.layers: dict[str, Tensor] = {}
        self.slices: dict[str, tuple[int, tuple[int, ...]]] = {}
        start = 0
        for name, sizes, _ in shape.parameters():
            stop = start + math.prod(sizes)
            layer = values[:, start:stop].view(-1, *sizes).detach().requires_grad_()
            layer.grad = self.gradients[:, start:stop].view(-1, *sizes)
            self.layers[name], self.slices[name] = layer, (start, sizes)
            start = stop

    def losses(self, tokens: Tensor) -> Tensor:
        """Return each model's mean loss, nats a byte, float32[models]; tokens int64[models, sequences, CONTEXT + 1].

        On a GPU, products are computed in bfloat16.
        """
        with torch.autocast(self.values.device.type, torch.bfloat16, enabled=self.values.is_cuda, cache_enabled=False):
            return self._losses(tokens)

    def _losses(self, tokens: Tensor) -> Tensor:
        models, sequences = tokens.shape[:2]
        width, layer = self.shape.width, self.layers
        flat = tokens[:, :, :-1].reshape(models, -1)
        one_hot = flat[:, :, None] == torch.arange(VOCABULARY, device=flat.device)
        x = torch.bmm(one_hot.to(self.values.dtype), layer["tokens"]).float()
        x = (x.view(models, sequences, CONTEXT, width) + layer["positions"][:, None]).view(models, -1, width)
        heads = max(width // 32, 1)
        for index in range(self.shape.layers):
            y = self._normed(x, layer[f"{index}.norm1"])
            qkv = torch.baddbmm(layer[f"{index}.qkv bias"][:, None], y, layer[f"{index}.qkv"])
            qkv = qkv.view(models * sequences, CONTEXT, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
            y = y.transpose(1, 2).reshape(models, -1, width)
            x = x + torch.baddbmm(layer[f"{index}.out bias"][:, None], y, layer[f"{index}.out"])
            y = self._normed(x, layer[f"{index}.norm2"])
            y = functional.gelu(torch.baddbmm(layer[f"{index}.up bias"][:, None], y, layer[f"{index}.up"]))
            x = x + torch.baddbmm(layer[f"{index}.down bias"][:, None], y, layer[f"{index}.down"])
        logits = torch.bmm(self._normed(x, layer["norm"]), layer["tokens"].transpose(1, 2))
        targets = tokens[:, :, 1:].reshape(-1)
        return functional.cross_entropy(logits.view(-1, VOCABULARY), targets, reduction="none").view(models, -1).mean(1)

    def _normed(self, x: Tensor, norm: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:]) * norm[:, :1] + norm[:, 1:]


# -- local steps -------------------------------------------------------------------------------------------------------


def _adamw(
    x: Tensor, gradient: Tensor, first: Tensor, second: Tensor, decay: Tensor, scale: Tensor, rate: Tensor, step: Tensor
) -> None:
    """Take a step of AdamW (0.9, 0.95, weight decay 0.1) with gradients scaled by `scale`; all but `step` by model."""
    gradient = gradient * scale
    first.lerp_(gradient, 0.1)
    second.lerp_(gradient.square(), 0.05)
    update = first / (1 - 0.9**step) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
    x.sub_(rate * (update + decay * x))


def _orthogonal(x: Tensor) -> Tensor:
    """Return x[models, a, b] with singular values near 1, by five steps of Newton and Schulz (Muon's polynomial)."""
    tall = x.shape[1] > x.shape[2]
    y = x.transpose(1, 2) if tall else x
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = torch.bmm(y, y.transpose(1, 2))
        y = 3.4445 * y + torch.bmm(-4.7750 * square + 2.0315 * torch.bmm(square, square), y)
    orthogonal: Tensor = y.transpose(1, 2) if tall else y
    return orthogonal


class LocalSteps:
    """One step of all models: forward, backward, clipping to norm 1, AdamW, or Muon for the matrices of the layers."""

    def __init__(self, models: Models, peers: int, synchronous: slice, is_muon: bool) -> None:
        """Trials in `synchronous` average their gradients over the peers in each step."""
        self._models, self._peers, self._synchronous, self._is_muon = models, peers, synchronous, is_muon
        x = models.values
        self._first, self._second = torch.zeros_like(x), torch.zeros_like(x)
        self._decay = torch.zeros(x.shape[1], device=x.device)
        for start, sizes in models.slices.values():
            if len(sizes) == 2 and sizes[0] > 2:
                self._decay[start : start + math.prod(sizes)] = 0.1
        self.tokens = torch.zeros((len(x), SEQUENCES, CONTEXT + 1), dtype=torch.long, device=x.device)
        self.rates, self.step = torch.zeros((len(x), 1), device=x.device), torch.zeros((), device=x.device)
        self._adamw = torch.compile(_adamw) if x.is_cuda else _adamw
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self.tokens.is_cuda:
            self._take()
        elif self._graph is None:
            kept = [each.clone() for each in (self._models.values, self._first, self._second)]
            new_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
            with torch.cuda.stream(new_stream()):
                for _ in range(3):
                    self._take()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._take()
            for each, values in zip((self._models.values, self._first, self._second), kept, strict=True):
                each.copy_(values)
            self._graph.replay()
        else:
            self._graph.replay()

    def _take(self) -> None:
        models = self._models
        models.gradients.zero_()
        torch.autograd.backward(models.losses(self.tokens).sum())
        gradients = models.gradients
        of_trials = gradients.view(-1, self._peers, gradients.shape[1])[self._synchronous]
        if len(of_trials):
            of_trials.copy_(of_trials.mean(1, keepdim=True).expand_as(of_trials))
        scale = 1 / gradients.norm(dim=1, keepdim=True).clamp_min(1)
        before = [self._matrix(models.values, name).clone() for name in self._hidden()]
        self._adamw(models.values, gradients, self._first, self._second, self._decay, scale, self.rates, self.step)
        for name, matrix in zip(self._hidden(), before, strict=True):
            # The first moment of AdamW is Muon's momentum, but for its factor; the update's size is that of AdamW.
            momentum = self._matrix(self._first, name) * 0.9 + self._matrix(gradients, name) * 0.1 * scale[:, :, None]
            update = _orthogonal(momentum) * 0.2 * math.sqrt(max(matrix.shape[1:]))
            self._matrix(models.values, name).copy_(matrix - self.rates[:, :, None] * (update + 0.1 * matrix))

    def _hidden(self) -> list[str]:
        return (
            [name for name in self._models.slices if name.endswith(("qkv", "out", "up", "down"))]
            if self._is_muon
            else []
        )

    def _matrix(self, whole: Tensor, name: str) -> Tensor:
        start, sizes = self._models.slices[name]
        return whole[:, start : start + math.prod(sizes)].view(-1, *sizes)


# -- exchanges ---------------------------------------------------------------------------------------------------------


def _entropy(fraction: float) -> float:
    return -sum(part * math.log2(part) for part in (fraction, 1 - fraction) if part)


def sparse_bits(fraction: float, bits: int) -> float:
    """Bits a parameter of a sparse message: indices at their entropy, values, and two sizes a chunk in 16 bits."""
    return _entropy(fraction) + fraction * bits + 32 / CHUNK


def compressed(x: Tensor, fractions: Tensor, bits: int) -> Tensor:
    """Return what a receiver decodes of x[trials, peers, n]: of each chunk the largest `fractions`[trials], quantized.

    With 2 bits a value is a sign and one of two sizes, cut at the mean magnitude, each the mean of what it stands for;
    with more, a sign and 2**(bits - 1) levels between the smallest and the largest.
    """
    chunks = x.view(*x.shape[:2], -1, CHUNK)
    magnitudes = chunks.abs()
    places = (fractions * CHUNK).round().long().view(-1, 1, 1, 1).expand(*chunks.shape[:3], 1) - 1
    threshold = magnitudes.topk(int(places.max()) + 1).values.gather(-1, places)
    is_kept = magnitudes >= threshold.clamp_min(1e-30)
    kept = magnitudes * is_kept

    def mean(mask: Tensor) -> Tensor:
        return (magnitudes * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)

    if bits == 2:
        is_large = kept > mean(is_kept)
        sizes = torch.where(is_large, mean(is_large), mean(is_kept & ~is_large))
    else:
        levels = 2 ** (bits - 1)
        largest = kept.amax(-1, keepdim=True)
        step = ((largest - threshold) / levels).clamp_min(1e-30)
        sizes = threshold + (((kept - threshold) / step).floor().clamp(0, levels - 1) + 0.5) * step
    return (sizes.bfloat16().float() * chunks.sign() * is_kept).view_as(x)


def _in_8_bits(x: Tensor) -> Tensor:
    chunks = x.view(*x.shape[:2], -1, CHUNK)
    step = chunks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((chunks / step).round() * step).view_as(x)


class Exchange:
    """What a contender does after the local steps of a round: `x[trials, peers, n]` in place."""

    def __init__(self, x: Tensor, settings: Mapping[str, Tensor]) -> None:
        """`settings` are float32[trials, 1, 1] each."""
        self.settings = settings

    def __call__(self, x: Tensor, round: int) -> None:
        """Exchange; without a change this is training alone, or what averages its gradients."""

    @classmethod
    def bits(cls, peers: int, settings: Mapping[str, float]) -> float:
        """Bits a parameter that leave a peer in a round, to all receivers together."""
        return 0.0


class Synchronous(Exchange):
    @classmethod
    def bits(cls, peers: int, settings: Mapping[str, float]) -> float:
        return 64 * (peers - 1) / peers  # A ring, in each step.


class Mean(Exchange):
    def __call__(self, x: Tensor, round: int) -> None:
        x.copy_(x.mean(1, keepdim=True).expand_as(x))

    @classmethod
    def bits(cls, peers: int, settings: Mapping[str, float]) -> float:
        return 64 * (peers - 1) / peers


class Outer(Exchange):
    """DiLoCo: Nesterov's momentum on the mean of the displacements (arXiv 2311.08105)."""

    def __init__(self, x: Tensor, settings: Mapping[str, Tensor]) -> None:
        super().__init__(x, settings)
        self.anchor = x[:, :1].clone()
        self._velocity = torch.zeros_like(self.anchor)

    def __call__(self, x: Tensor, round: int) -> None:
        mean = self.heard(x - self.anchor).mean(1, keepdim=True)
        momentum = self.settings["momentum"]
        self._velocity.mul_(momentum).add_(mean)
        self.anchor += self.settings["rate"] * (mean + momentum * self._velocity)
        x.copy_(self.anchor.expand_as(x))

    def heard(self, displacements: Tensor) -> Tensor:
        return displacements

    @classmethod
    def bits(cls, peers: int, settings: Mapping[str, float]) -> float:
        return 64 * (peers - 1) / peers


class Outer8(Outer):
    def heard(self, displacements: Tensor) -> Tensor:
        return _in_8_bits(displacements)

    @classmethod
    def bits(cls, peers: int, settings: Mapping[str, float]) -> float:
        return 16 * (peers - 1) / peers


class Sparse(Outer):
    """SparseLoCo (arXiv 2508.15706): an error memory that decays, top-k in chunks, two bits, gathered by all."""

    BITS = 2

    def __init__(self, x: Tensor, settings: Mapping[str, Tensor]) -> None:
        super().__init__(x, settings)
        self._error = torch.zeros_like(x)

    def heard(self, displacements: Tensor) -> Tensor:
        self._error.mul_(self.settings["decay"]).add_(displacements)
        sent = compressed(self._error, self.settings["fraction"].flatten(), self.BITS)
        self._error -= sent
        return sent

    @classmethod
    def bits(cls, peers: int, settings: Mapping[str, float]) -> float:
        return (peers - 1) * sparse_bits(settings["fraction"], cls.BITS)


class Shared(Sparse):
    """A reduction in which each peer owns a part: sparse to the owner, and sparse from it, with a memory at both ends.

    The form of 1-bit Adam's reduction (arXiv 2102.02888), on displacements.
    """

    def __init__(self, x: Tensor, settings: Mapping[str, Tensor]) -> None:
        super().__init__(x, settings)
        self._left = torch.zeros_like(self.anchor)

    def heard(self, displacements: Tensor) -> Tensor:
        self._left += super().heard(displacements).mean(1, keepdim=True)
        told = compressed(self._left, self.settings["fraction"].flatten(), self.BITS)
        self._left -= told
        return told

    @classmethod
    def bits(cls, peers: int, settings: Mapping[str, float]) -> float:
        return 2 * (peers - 1) / peers * sparse_bits(settings["fraction"], cls.BITS)


class SharedIn4Bits(Shared):
    BITS = 4


class Pairs(Exchange):
    """NoLoCo (arXiv 2506.10911): in each round a random partner, momentum, and a pull towards the partner's model."""

    def __init__(self, x: Tensor, settings: Mapping[str, Tensor]) -> None:
        super().__init__(x, settings)
        self._slow, self._velocity = x.clone(), torch.zeros_like(x)

    def __call__(self, x: Tensor, round: int) -> None:
        peers = x.shape[1]
        order = torch.randperm(peers, generator=torch.Generator().manual_seed(round)).view(-1, 2)
        partner = torch.empty(peers, dtype=torch.long)
        partner[order[:, 0]], partner[order[:, 1]] = order[:, 1], order[:, 0]
        partner = partner.to(x.device)
        displacement = x - self._slow
        mean = (displacement + displacement[:, partner]) / 2
        apart = (self._slow - self._slow[:, partner]) / 2
        self._velocity.mul_(self.settings["momentum"]).add_(
            self.settings["rate"] * mean - self.settings["pull"] * apart
        )
        self._slow += self._velocity
        x.copy_(self._slow)

    @classmethod
    def bits(cls, peers: int, settings: Mapping[str, float]) -> float:
        return 64.0


class Replicas(Exchange):
    """quant-sgp on a fixed graph of hops: compressed differences to replicas, averaged with the averaging rate.

    Displacements are scaled by `outer` and carry `momentum` before they are mixed; 1 and 0 is the product's.
    """

    HOPS: tuple[int, ...] = (1, 2, 4)
    BITS = 2

    def __init__(self, x: Tensor, settings: Mapping[str, Tensor]) -> None:
        super().__init__(x, settings)
        self._before, self._replicas, self._velocity = x.clone(), x.clone(), torch.zeros_like(x)

    def __call__(self, x: Tensor, round: int) -> None:
        displacement = x - self._before
        self._velocity.mul_(self.settings["momentum"]).add_(displacement)
        x.copy_(self._before + self.settings["outer"] * (displacement + self.settings["momentum"] * self._velocity))
        self._replicas += compressed(x - self._replicas, self.settings["fraction"].flatten(), self.BITS)
        mixed = sum((self._replicas.roll(hop, 1) for hop in self.HOPS), self._replicas) / (len(self.HOPS) + 1)
        x += self.settings["averaging"] * (mixed - self._replicas)
        self._before.copy_(x)

    @classmethod
    def bits(cls, peers: int, settings: Mapping[str, float]) -> float:
        return len(cls.HOPS) * sparse_bits(settings["fraction"], cls.BITS)


# -- contenders --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    exchange: type[Exchange]
    settings: Mapping[str, float] = field(default_factory=dict)
    tried: Sequence[Mapping[str, float]] = ()
    """Four further settings, of two kinds."""
    is_muon: bool = False


_DILOCO = {"momentum": 0.8, "rate": 0.7}
_OUTER = (
    {"momentum": 0.5, "rate": 1.0},
    {"momentum": 0.9, "rate": 0.5},
    {"momentum": 0.7, "rate": 0.7},
    {"momentum": 0.9, "rate": 0.8},
)
_SPARSE = {"momentum": 0.0, "rate": 1.5, "decay": 0.95, "fraction": 1 / 64}
_SPARSES = ({"rate": 1.0}, {"rate": 2.2}, {"decay": 0.9}, {"decay": 1.0})
_MOMENTUM = {"momentum": 0.8, "rate": 0.7}
_MOMENTA = ({"rate": 0.5}, {"rate": 1.0}, {"momentum": 0.6}, {"momentum": 0.9})
_SHARED = _SPARSE | _MOMENTUM | {"fraction": 0.1, "decay": 1.0}
_SHARES = ({"rate": 0.5}, {"momentum": 0.6}, {"momentum": 0.5, "rate": 1.0}, {"decay": 0.95})
_REPLICAS = {"momentum": 0.0, "outer": 1.0, "averaging": 0.25, "fraction": 0.05}
_AVERAGING = ({"averaging": 0.15}, {"averaging": 0.4}, {"fraction": 0.035}, {"outer": 1.5})

CONTENDERS = {
    "ddp": Contender(Synchronous),
    "mean": Contender(Mean),
    "diloco": Contender(Outer, _DILOCO, _OUTER),
    "diloco-8": Contender(Outer8, _DILOCO, _OUTER),
    "sparseloco": Contender(Sparse, _SPARSE, _SPARSES),
    "sparseloco-nesterov": Contender(Sparse, _SPARSE | _MOMENTUM, _MOMENTA),
    "shared": Contender(Shared, _SHARED, _SHARES),
    "noloco": Contender(
        Pairs,
        {"momentum": 0.5, "rate": 0.7, "pull": 0.6},
        ({"momentum": 0.7, "rate": 0.7}, {"rate": 1.0}, {"pull": 0.4}, {"pull": 0.9}),
    ),
    "quant-sgp": Contender(Replicas, _REPLICAS, _AVERAGING),
    "muon-ddp": Contender(Synchronous, is_muon=True),
    "muon-mean": Contender(Mean, is_muon=True),
    "muon-diloco": Contender(Outer, _DILOCO, _OUTER, is_muon=True),
    "muon-diloco-8": Contender(Outer8, _DILOCO, _OUTER, is_muon=True),
    "muon-sparseloco": Contender(Sparse, _SPARSE | _MOMENTUM, _MOMENTA, is_muon=True),
    "muon-shared": Contender(Shared, _SHARED, _SHARES, is_muon=True),
    "muon-dense": Contender(Shared, _SHARED | {"fraction": 1.0}, _OUTER, is_muon=True),
    "muon-dense-4": Contender(SharedIn4Bits, _SHARED | {"fraction": 1.0}, _OUTER, is_muon=True),
}


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    contender: str
    every: int
    seed: int
    steps: int
    rate: float
    settings: tuple[tuple[str, float], ...]
    shape: Shape

    def key(self) -> str:
        return json.dumps([*self.__dict__.values()])


class Corpus:
    def __init__(self, folder: Path, device: torch.device) -> None:
        def read(suffix: str, size: int) -> Tensor:
            parts = [np.fromfile(folder / f"{name}.{suffix}", np.uint8)[: size + 1] for name in DOMAINS]
            windows = [np.lib.stride_tricks.sliding_window_view(part, CONTEXT + 1)[::CONTEXT] for part in parts]
            return torch.from_numpy(np.stack(windows)).to(device)

        self.held = read("held", HELD)
        """uint8[peers, sequences, CONTEXT + 1]"""
        self._train = read("train", TRAINED)

    def batches(self, seed: int, steps: int) -> Tensor:
        """Return uint8[steps, peers, SEQUENCES, CONTEXT + 1], no sequence twice."""
        generator = torch.Generator().manual_seed(1_000 + seed)
        drawn = []
        for windows in self._train:
            order = torch.randperm(len(windows), generator=generator)[: steps * SEQUENCES].to(windows.device)
            drawn.append(windows[order].view(steps, SEQUENCES, CONTEXT + 1))
        return torch.stack(drawn, 1)


def run_trials(
    trials: Sequence[Trial], corpus: Corpus, is_brief: bool, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Run trials of equal length, those of a contender side by side, and give a row for each."""
    peers, first = len(DOMAINS), trials[0]
    seeds = sorted({trial.seed for trial in trials})
    of_seed = torch.tensor([seeds.index(trial.seed) for trial in trials], device=device)
    starts = torch.stack([first.shape.start(seed) for seed in seeds]).to(device)
    values = starts[of_seed].repeat_interleave(peers, 0)
    models = Models(first.shape, values)
    of_trials = values.view(len(trials), peers, -1)
    batches = torch.stack([corpus.batches(seed, first.steps) for seed in seeds])
    exchanges: list[tuple[slice, Exchange]] = []
    synchronous = slice(0, 0)
    begin = 0
    for name, group in groupby(trials, key=lambda trial: trial.contender):
        members = list(group)
        contender, part = CONTENDERS[name], slice(begin, begin + len(members))
        keys = contender.settings
        settings = {
            key: torch.tensor([dict(each.settings)[key] for each in members], device=device).view(-1, 1, 1)
            for key in keys
        }
        exchanges.append((part, contender.exchange(of_trials[part], settings)))
        synchronous = part if contender.exchange is Synchronous else synchronous
        begin = part.stop
    take = LocalSteps(models, peers, synchronous, CONTENDERS[first.contender].is_muon)
    rates = torch.tensor([trial.rate for trial in trials], device=device).repeat_interleave(peers)[:, None]
    since, warm = time.perf_counter(), max(first.steps // 20, 1)
    for step in range(first.steps):
        fraction = min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * max(step - warm, 0) / (first.steps - warm)))
        take.rates.copy_(rates * fraction)
        take.step.fill_(step + 1)
        take.tokens.copy_(batches[:, step][of_seed].view(len(values), SEQUENCES, CONTEXT + 1))
        take()
        if (step + 1) % first.every == 0:
            for part, exchange in exchanges:
                exchange(of_trials[part], step // first.every)
    losses = held_losses(models, corpus, is_brief).view(len(trials), peers, peers)
    averaged = held_losses(Models(first.shape, of_trials.mean(1)), corpus, is_brief)
    seconds = time.perf_counter() - since
    for index, trial in enumerate(trials):
        settings_of = dict(trial.settings)
        yield {
            "key": trial.key(),
            "contender": trial.contender,
            "every": trial.every,
            "seed": trial.seed,
            "steps": trial.steps,
            "rate": trial.rate,
            "settings": settings_of,
            "parameters": trial.shape.size(),
            "bits": round(CONTENDERS[trial.contender].exchange.bits(peers, settings_of), 4),
            "worst": round(losses[index].mean(1).max().item(), 5),
            "averaged": round(averaged[index].mean().item(), 5),
            "domains": [round(loss, 4) for loss in averaged[index].tolist()],
            "seconds": round(seconds / len(trials), 2),
        }


@torch.no_grad()
def held_losses(models: Models, corpus: Corpus, is_brief: bool) -> Tensor:
    """Return nats a byte of each model on each domain, float32[models, peers]; briefly on a part of the text."""
    count, together = len(models.values), 8
    losses = []
    for windows in corpus.held:
        parts = windows[: len(windows) // 16 if is_brief else None].split(together)
        sums = [models.losses(part.long().expand(count, *part.shape)) * len(part) for part in parts]
        losses.append(torch.stack(sums).sum(0) / sum(map(len, parts)))
    return torch.stack(losses, 1)


def screen(options: argparse.Namespace) -> None:
    """Tune every contender and run it on the seeds; print a table."""
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    corpus, shape = Corpus(options.corpus, device), Shape(options.width, options.layers)
    length = options.steps or STEPS[options.every]
    names = options.contenders.split(",") if options.contenders else list(CONTENDERS)
    lines = Lines[Trial]([], options.rows, key=Trial.key, key_of=lambda row: row["key"])

    def trial(name: str, rate: float, steps: int, seed: int = TUNING_SEED, **settings: float) -> Trial:
        chosen = dict(CONTENDERS[name].settings) | settings
        return Trial(name, options.every, seed, steps, rate, tuple(sorted(chosen.items())), shape)

    def rows_of(trials: Iterable[Trial], is_brief: bool) -> dict[Trial, Row]:
        wanted = list(dict.fromkeys(trials))
        for is_muon in (False, True):
            missing = [
                each for each in wanted if CONTENDERS[each.contender].is_muon is is_muon and lines.get(each) is None
            ]
            missing.sort(key=lambda each: names.index(each.contender))
            while missing:
                part, missing = missing[: options.together], missing[options.together :]
                since = time.perf_counter()
                for each, row in zip(part, run_trials(part, corpus, is_brief, device), strict=True):
                    lines.put(each, row)
                print(f"{len(part)} trials of {part[0].steps} steps in {time.perf_counter() - since:.0f} s", flush=True)
        found = ((each, lines.get(each)) for each in wanted)
        return {each: row for each, row in found if row is not None}

    def best(rows: Mapping[Trial, Row], name: str) -> Trial:
        own = {each: row["worst"] for each, row in rows.items() if each.contender == name}
        return min(own, key=lambda each: own[each] if math.isfinite(own[each]) else math.inf)

    half = length // 2 // options.every * options.every
    tuned = rows_of((trial(name, rate, half) for name in names for rate in RATES[CONTENDERS[name].is_muon]), True)
    further = [
        replace(best(tuned, name), settings=tuple(sorted((dict(CONTENDERS[name].settings) | dict(settings)).items())))
        for name in names
        for settings in CONTENDERS[name].tried
    ]
    tuned |= rows_of(further, True)
    finer = [replace(chosen := best(tuned, name), rate=chosen.rate * by) for name in names for by in (2**-0.5, 2**0.5)]
    tuned |= rows_of(finer, True)
    for _ in range(4):
        edges = []
        for name in names:
            rate = best(tuned, name).rate
            tried = sorted(each.rate for each in tuned if each.contender == name)
            if rate in (tried[0], tried[-1]):
                edges.append(replace(best(tuned, name), rate=rate * (0.5 if rate == tried[0] else 2)))
        tuned |= rows_of(edges, True)
    seeds = [int(seed) for seed in options.seeds.split(",") if seed]
    final = rows_of((replace(best(tuned, name), seed=seed, steps=length) for name in names for seed in seeds), False)
    for name in names:
        own = [row for each, row in final.items() if each.contender == name]
        worst, averaged = (" ".join(f"{row[what]:.4f}" for row in own) for what in ("worst", "averaged"))
        chosen = best(tuned, name)
        bits, settings = f"{own[0]['bits']:8.3f} bits" if own else "", dict(chosen.settings)
        print(f"{name:20} {bits}  {worst}  averaged {averaged}  rate {chosen.rate:g} {settings}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("corpus").add_argument("corpus", type=Path)
    screening = commands.add_parser("screen")
    screening.add_argument("corpus", type=Path)
    screening.add_argument("--rows", type=Path, required=True, metavar="FILE")
    screening.add_argument("--every", type=int, default=16, help="local steps between two rounds (default: 16)")
    screening.add_argument("--steps", type=int, help="length of a run (default: 2000 at 16, 4800 at 64)")
    screening.add_argument("--seeds", default="0,1")
    screening.add_argument("--contenders")
    screening.add_argument("--width", type=int, default=128)
    screening.add_argument("--layers", type=int, default=5)
    screening.add_argument("--device", default="cpu")
    screening.add_argument("--together", type=int, default=64, help="trials in one batch (default: 64)")
    options = parser.parse_args()
    write_corpus(options.corpus) if options.command == "corpus" else screen(options)


if __name__ == "__main__":
    main()
