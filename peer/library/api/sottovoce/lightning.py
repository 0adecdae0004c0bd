"""Lightning: let a `Trainer` train with others. Needs the extra `sottovoce[lightning]`."""

from peer.library.integrations.lightning import GossipCallback

__all__ = ["GossipCallback"]
