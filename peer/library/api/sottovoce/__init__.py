"""Train one model from your own training scripts on several devices, with no server.

```python
import sottovoce

with sottovoce.join(model, "peer-0/peer.toml", every=30, keep=[optimizer, scheduler]) as peer:
    for batch in peer.until_done(loader):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        peer.step()  # every 30th call exchanges and mixes
    peer.save("model.safetensors")
```

The names in `__all__` are public. Everything in the package `peer` is private and may change with any release.
"""

from peer.errors import ConfigError, SottoError, StateError, UsageError
from peer.library.background import place
from peer.library.events import Evaluated, MemberChange, PeersLate, Rejoined, RoundDone
from peer.library.peer import Peer, join
from peer.library.place import Place
from peer.library.simulation import Simulation, simulate

__all__ = [
    "ConfigError",
    "Evaluated",
    "MemberChange",
    "Peer",
    "PeersLate",
    "Place",
    "Rejoined",
    "RoundDone",
    "Simulation",
    "SottoError",
    "StateError",
    "UsageError",
    "join",
    "place",
    "simulate",
]
