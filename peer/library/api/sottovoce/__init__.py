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

What a task of your own is made of is here as well. The names in `__all__` are public. Everything in the package `peer`
is private and may change with any release.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from peer.errors import ConfigError, DataError, SottoError, StateError, UsageError
from peer.train.data import Classification, ImageData, TensorData, crop_and_flip
from peer.train.datasets.image_folder import FolderData, ImageList, list_splits
from peer.train.datasets.text_files import Sentences
from peer.train.datasets.tokens import TextData, make_tokenizer, read_vocabulary
from peer.train.full_precision.norms import make_norm
from peer.train.layers import FULL_PRECISION, Layers
from peer.train.metrics import F1, PERPLEXITY, RMSE, TEST_LOSS, Metric
from peer.train.models.distilbert import DistilBertSize, distilbert
from peer.train.models.mlp import mlp
from peer.train.models.mobilenet import mobilenetv2
from peer.train.models.resnet import resnet18, resnet20, resnet54, resnet110
from peer.train.models.vgg import vgg11, vgg16
from peer.train.task import Data, Task
from peer.train.tasks import resolve_task

if TYPE_CHECKING:
    from peer.library.events import Evaluated, MemberChange, PeersLate, Rejoined, RoundDone
    from peer.library.here import place
    from peer.library.peer import Peer, join
    from peer.library.place import Place
    from peer.library.shares import local
    from peer.library.simulation import Simulation, simulate
    from peer.train.int8_file import load_int8
else:
    _LATER = {
        "peer.library.events": ("Evaluated", "MemberChange", "PeersLate", "Rejoined", "RoundDone"),
        "peer.library.here": ("place",),
        "peer.library.peer": ("Peer", "join"),
        "peer.library.place": ("Place",),
        "peer.library.shares": ("local",),
        "peer.library.simulation": ("Simulation", "simulate"),
        "peer.train.int8_file": ("load_int8",),
    }

    def __getattr__(name: str) -> object:
        """Import what no task needs when it is asked for: a peer whose task imports this package does without."""
        for module, names in _LATER.items():
            if name in names:
                return globals().setdefault(name, getattr(import_module(module), name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "F1", "FULL_PRECISION", "PERPLEXITY", "RMSE", "TEST_LOSS", "Classification", "ConfigError", "Data", "DataError",
    "DistilBertSize", "Evaluated", "FolderData", "ImageData", "ImageList", "Layers", "MemberChange", "Metric", "Peer",
    "PeersLate", "Place", "Rejoined", "RoundDone", "Sentences", "Simulation", "SottoError", "StateError", "Task",
    "TensorData", "TextData", "UsageError", "crop_and_flip", "distilbert", "join", "list_splits", "load_int8", "local",
    "make_norm", "make_tokenizer", "mlp", "mobilenetv2", "place", "read_vocabulary", "resnet18", "resnet20", "resnet54",
    "resnet110", "resolve_task", "simulate", "vgg11", "vgg16",
]  # fmt: skip


def __dir__() -> list[str]:
    """Return what is here, names that are not imported yet among it: completion in a notebook asks for it."""
    return sorted({*globals(), *__all__})
