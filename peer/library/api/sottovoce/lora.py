"""PEFT: exchange adapters instead of whole models. Needs the extra `sottovoce[huggingface]`."""

from peer.library.integrations.lora import freeze_a

__all__ = ["freeze_a"]
