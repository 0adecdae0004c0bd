"""Adapters of PEFT in which the peers' mean is the mean of their trained matrices.

LoRA adds s B A to a frozen matrix W. Peers average parameters, and the mean of the Bs times the mean of the As is not
the mean of the products:

    mean(B) mean(A) = mean(B A) − cov(B, A)

With A the same on all peers and frozen, s B A is linear in the exchanged factor, so that every mixing of peers mixes
their matrices. Half of the bytes remain. (Sun et al., Improving LoRA in privacy-preserving federated learning, ICLR
2024.)
"""

from __future__ import annotations

from peft.tuners.adalora import AdaLoraLayer
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peer.errors import UsageError


def freeze_a(model: nn.Module) -> None:
    """Freeze A of every LoRA adapter of the model, so that only B is trained and exchanged. Call it before the
    optimizer is made, and before `sottovoce.join`.

    All peers need the same A: set the same seed before the adapters are made. Peers whose A differs refuse each other,
    as with any part of a model. Raises UsageError for adapters in which the mean of what is trained means nothing, and
    for a model without LoRA.
    """
    layers: list[LoraLayer] = []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            if not isinstance(module, LoraLayer) or isinstance(module, AdaLoraLayer):
                raise _refusal(name, type(module).__name__)
            for variant in module.lora_variant.values():
                raise _refusal(name, type(variant).__name__)
            layers.append(module)
    if not layers:
        raise UsageError(f"the model, a {type(model).__name__}, has no LoRA layers; peft.get_peft_model makes them")
    for layer in layers:
        for factors in (layer.lora_A, layer.lora_embedding_A):
            factors.requires_grad_(False)


def _refusal(name: str, kind: str) -> UsageError:
    return UsageError(
        f"{name} is adapted by {kind}, whose effect is not linear in what it trains: the mean of what peers trained is"
        " not the mean of its effects; use plain LoRA, a peft.LoraConfig without variants"
    )
