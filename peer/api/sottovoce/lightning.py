"""Lightning: let a `Trainer` train with others. Needs the extra `sottovoce[lightning]`."""

from peer.adapters.lightning import GossipCallback

__all__ = ["GossipCallback"]
