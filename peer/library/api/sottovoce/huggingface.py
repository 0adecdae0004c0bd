"""Hugging Face transformers: let a `Trainer` train with others. Needs the extra `sottovoce[huggingface]`."""

from peer.library.integrations.huggingface import GossipCallback

__all__ = ["GossipCallback"]
