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

from peer.errors import ConfigError, SottoError, StateError, UsageError
from peer.library.events import Evaluated, MemberChange, PeersLate, Rejoined, RoundDone
from peer.library.here import place
from peer.library.peer import Peer, join
from peer.library.place import Place
from peer.library.shares import local
from peer.library.simulation import Simulation, simulate
from peer.train.metrics import F1, PERPLEXITY, RMSE, TEST_LOSS, Metric

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
