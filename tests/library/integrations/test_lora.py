"""Only adapters travel, and the mean that peers take is the mean of the matrices that they trained."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import sottovoce
import torch
from torch import nn

from tests.library.integrations.kits import PEERS, ROUNDS, digits, kit
from tests.library.scripts import vector_of

peft = pytest.importorskip("peft", reason="needs peft: the extra huggingface installs it")

from sottovoce.lora import freeze_a  # noqa: E402

RANK = 2


class Network(nn.Module):
    """A linear layer, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6)
        self.body = nn.Linear(6, 12)
        self.head = nn.Linear(12, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        words = self.words(inputs.abs().sum(1).long() % 10)
        logits: torch.Tensor = self.head(torch.relu(self.body(inputs + words)))
        return logits


def adapted(seed: int = 0, **options: Any) -> Any:
    """Return a model with LoRA on its layer and its embedding, and with a head that is trained in full."""
    torch.manual_seed(0)
    base = Network()
    torch.manual_seed(seed)
    settings = {"r": RANK, "lora_alpha": 4, "target_modules": ["body", "words"], "modules_to_save": ["head"], **options}
    return peft.get_peft_model(base, peft.LoraConfig(**settings))


def train(model: Any, peer: int, steps: int) -> None:
    inputs, labels = digits(peer)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def merged(model: Any) -> torch.Tensor:
    """Return all matrices with their adapters added to them, in float64."""
    return vector_of(copy.deepcopy(model).double().merge_and_unload())


def mean_after_one_round(folder: Path, *, frozen: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return what two peers have after an exchange, the mean of what they had before, and how far these were apart."""
    before: dict[int, torch.Tensor] = {}

    def script(where: sottovoce.Place) -> torch.Tensor:
        torch.set_num_threads(1)
        model = adapted()
        if frozen:
            freeze_a(model)
        with sottovoce.join(model, where, every=1) as peer:
            train(model, where.index, 10)
            before[where.index] = merged(model)
            peer.step()
        return merged(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error" if frozen else "ignore")
        simulated = sottovoce.simulate(script, kit(folder, "run.rounds=1"))
    assert torch.equal(*simulated.results)
    return simulated.results[0], (before[0] + before[1]) / 2, float((before[0] - before[1]).abs().max())


def test_the_mean_is_that_of_the_matrices(tmp_path: Path) -> None:
    found, expected, apart = mean_after_one_round(tmp_path, frozen=True)
    assert apart > 0.1
    assert float((found - expected).abs().max()) < 1e-6 * apart


def test_with_both_factors_it_is_not(tmp_path: Path) -> None:
    found, expected, apart = mean_after_one_round(tmp_path, frozen=False)
    assert float((found - expected).abs().max()) > 0.01 * apart


def test_only_adapters_and_the_head_travel(tmp_path: Path) -> None:
    model = adapted()
    freeze_a(model)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert {name.split(".")[2] for name in trained} == {"words", "body", "head"}
    assert not any("lora_A" in name or "embedding_A" in name for name in trained)
    values = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert values == RANK * (6 + 12) + 12 * 6 + 6

    def script(where: sottovoce.Place) -> dict[str, torch.Tensor]:
        own = adapted()
        freeze_a(own)
        with sottovoce.join(own, where, every=1) as peer:
            while not peer.done:
                train(own, where.index, 2)
                peer.step()
        return {name: each.detach().clone() for name, each in own.named_parameters() if not each.requires_grad}

    file = kit(tmp_path, "algorithm.name=d-psgd", "compressor.kind=none")
    simulated = sottovoce.simulate(script, file)
    # Each message has at most four bytes for each value, and a header.
    assert 0 < simulated.sent_bytes <= ROUNDS * PEERS * (4 * values + 100)
    first = adapted()
    freeze_a(first)
    for result in simulated.results:
        assert all(torch.equal(result[name], each) for name, each in first.named_parameters() if not each.requires_grad)


def test_peers_with_another_a_refuse_each_other(tmp_path: Path) -> None:
    def script(where: sottovoce.Place) -> None:
        model = adapted(seed=where.index)
        freeze_a(model)
        with sottovoce.join(model, where, every=1) as peer:
            peer.step()

    with pytest.raises(sottovoce.UsageError, match="joined with another model"):
        sottovoce.simulate(script, kit(tmp_path))


def test_both_factors_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"base_model.model.words trains both factors .* sottovoce.lora.freeze_a"):
        sottovoce.join(adapted(), kit(tmp_path), every=1)


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"use_dora": True, "target_modules": ["body"]}, "DoraLinearVariant"), (None, "Linear"), ("adalora", "SVDLinear")],
)
def test_adapters_without_a_meaningful_mean_are_refused(options: Any, kind: str) -> None:
    if options is None:
        config = peft.LoHaConfig(r=2, target_modules=["body"])
    elif options == "adalora":
        config = peft.AdaLoraConfig(init_r=2, target_r=2, total_step=10, target_modules=["body"])
    else:
        config = peft.LoraConfig(r=2, **options)
    with pytest.raises(sottovoce.UsageError, match=f"body is adapted by {kind}, whose effect is not linear"):
        freeze_a(peft.get_peft_model(Network(), config))


def test_a_model_without_adapters_is_refused() -> None:
    with pytest.raises(sottovoce.UsageError, match=r"Network, has no LoRA layers"):
        freeze_a(Network())
