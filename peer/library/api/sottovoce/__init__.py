"""Train one model from your own training scripts on several devices, with no server.

```python
import sottovoce

with sottovoce.join(model, every=30, steps=9000, keep=[optimizer, scheduler]) as peer:
    for batch in peer.until_done(loader):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        peer.step()  # every 30th call exchanges and mixes
    peer.save(f"{peer.name}.safetensors")
```

`sotto up SCRIPT --peers 3` runs such a script with three peers on this machine, `sotto run SCRIPT` as one device.

The names in `__all__` are public. Everything in the package `peer` is private and may change with any release.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from peer.errors import ConfigError, SottoError, StateError, UsageError
from peer.train.metrics import F1, PERPLEXITY, RMSE, TEST_LOSS, Metric

if TYPE_CHECKING:
    from peer.library.events import Evaluated, MemberChange, PeersLate, Rejoined, RoundDone
    from peer.library.here import place
    from peer.library.peer import Peer, join
    from peer.library.place import Place
    from peer.library.shares import local
    from peer.library.simulation import Simulation, simulate
else:
    _LATER = {
        "peer.library.events": ("Evaluated", "MemberChange", "PeersLate", "Rejoined", "RoundDone"),
        "peer.library.here": ("place",),
        "peer.library.peer": ("Peer", "join"),
        "peer.library.place": ("Place",),
        "peer.library.shares": ("local",),
        "peer.library.simulation": ("Simulation", "simulate"),
    }

    def __getattr__(name: str) -> object:
        """Import what no task needs when it is asked for: a peer whose task imports this package does without."""
        for module, names in _LATER.items():
            if name in names:
                return globals().setdefault(name, getattr(import_module(module), name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "F1",
    "PERPLEXITY",
    "RMSE",
    "TEST_LOSS",
    "ConfigError",
    "Evaluated",
    "MemberChange",
    "Metric",
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
    "local",
    "place",
    "simulate",
]
