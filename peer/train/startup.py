"""Fast imports of a peer's libraries: modules that take time at every start and serve no peer are left out.

Torch imports packages that a peer never asks for, above all the modules that describe every operator to tensors without
data (the device "meta", torch.compile): a quarter of its import and 18 MB. Here they stay empty until something in them
is asked for, and so do the layers of 8-bit training. `load_postponed` executes all before a user's code runs. Nobody
asks by name for the registrations that torch's modules make when executed, and a module of an empty package, if it is
the first that is imported, would execute its package while it is itself half done.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_POSTPONED = (
    "peer.train.eight_bit",
    "torch._meta_registrations",
    "torch.distributed._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
)
_LOADING = threading.RLock()


@contextmanager
def quick_imports() -> Iterator[None]:
    """Within this context imports are quicker: parts of torch, unless it is there already, are postponed, and nothing
    looks for garbage, neither meanwhile nor later in what the imports leave."""
    finder = _Finder()
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, finder)
    gc.disable()
    try:
        yield
    finally:
        # The collector does not write to what is frozen, so forked processes go on to share its pages.
        gc.freeze()
        gc.enable()
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


def load_postponed() -> None:
    """Load the modules that `quick_imports` has postponed."""
    for name in _POSTPONED:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and isinstance(spec.loader, _Later):
            spec.loader.load()


class _Finder(MetaPathFinder):
    """Finds the postponed modules where they are."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in _POSTPONED else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Later(Loader):
    """Leaves a module empty until something in it is asked for.

    `importlib.util.LazyLoader` would load it for a look at `__file__`, with which torch searches all modules.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._module: ModuleType | None = None
        """Module to be executed; None once that has begun."""
        self._loaded: ModuleType | None = None

    def exec_module(self, module: ModuleType) -> None:
        self._module = module
        vars(module)["__getattr__"] = self._get

    def load(self) -> None:
        """Execute the module, unless that was done."""
        # Another thread that asks meanwhile waits here.
        with _LOADING:
            module, self._module = self._module, None
            if module is not None:
                self._loader.exec_module(module)
                if vars(module).get("__getattr__") == self._get:
                    del vars(module)["__getattr__"]
                self._loaded = module

    def _get(self, name: str) -> object:
        if not name.startswith("__"):
            self.load()
            if self._loaded is not None:
                return getattr(self._loaded, name)
        raise AttributeError(name)
