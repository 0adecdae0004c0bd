"""What a peer consists of, as one digest: equal digests mean that a call changed nothing.

Every object that can be reached is walked through, private fields too, so that a field which is added to a class
tomorrow is compared tomorrow. Left out is what says nothing of the run: counters for reports, clocks, scratch memory,
caches, and the budgets which exist to be used up by what is refused.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import enum
import threading
from collections.abc import Collection, Mapping, Set
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import xxhash

from peer.node.frame_account import FrameAccount

T = TypeVar("T")

_LOCK = type(threading.Lock())
# `copy.deepcopy` asks this table: a copied lock is a free one.
copyreg.pickle(_LOCK, lambda lock: (threading.Lock, ()))

_LEFT_OUT = frozenset(
    {
        *("duplicates", "refused_frames", "theirs", "ours", "scratch", "spare", "matrices", "stopwatch", "cpu_clock"),
        "known_shares",
    }
)
"""Names of fields, without the underscore in front."""
_ATOMS = (int, float, bool, bytes, str, type(None), enum.Enum, bytearray)
_BUDGETS = frozenset({"Allowance", "Allowances", "RepairBudget"})
"""Names of classes."""
_OPAQUE = (FrameAccount, _LOCK, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)


def copied(value: T, shared: Collection[object]) -> T:
    """Return a deep copy that has the objects of `shared`, which nobody changes, in common with the original."""
    return copy.deepcopy(value, {id(each): each for each in shared})


def fingerprint(value: object, shared: Collection[object] = ()) -> tuple[int, int]:
    """Return (digest, bytes that were digested) of everything that can be reached but what is in `shared`."""
    digest = xxhash.xxh3_64()
    size = 0
    seen: dict[int, int] = {id(each): -1 - number for number, each in enumerate(shared)}
    # Kept to the end: an object that is freed on the way would leave its number to another one.
    alive: list[object] = []
    waiting: list[object] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _ATOMS):
            text = repr(item).encode()
            digest.update(text)
            size += len(text)
            continue
        if isinstance(item, _OPAQUE) or type(item).__name__ in _BUDGETS:
            continue
        known = seen.get(id(item))
        if known is not None:
            digest.update(b"@%d" % known)
            continue
        seen[id(item)] = len(seen)
        alive.append(item)
        digest.update(type(item).__name__.encode())
        if isinstance(item, np.ndarray):
            data = np.ascontiguousarray(item).tobytes()
            digest.update(f"{item.dtype} {item.shape}".encode())
            digest.update(data)
            size += len(data)
        elif isinstance(item, np.generic):
            digest.update(item.tobytes())
            size += item.nbytes
        elif isinstance(item, (dict, MappingProxyType)):
            size += 16 * len(item)
            for key, entry in item.items():
                waiting += (entry, key)
        elif isinstance(item, Set):
            size += 16 * len(item)
            waiting += sorted(item, key=repr)
        elif isinstance(item, (list, tuple)) or type(item).__name__ == "deque":
            assert isinstance(item, Collection)
            size += 8 * len(item)
            digest.update(b"%d" % len(item))
            waiting += item
        else:
            for name, entry in _fields(item):
                if name.lstrip("_") not in _LEFT_OUT:
                    digest.update(name.encode())
                    waiting.append(entry)
    return digest.intdigest(), size


def _fields(item: object) -> list[tuple[str, object]]:
    value: Any = item
    if getattr(getattr(value, "__dataclass_params__", None), "frozen", False):
        # What else such a value has is computed from these, and kept.
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    found: list[tuple[str, object]] = []
    for cls in type(item).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(item, name):
                found.append((name, getattr(item, name)))
    attributes: Mapping[str, object] = getattr(item, "__dict__", {})
    found += attributes.items()
    return sorted(found, key=lambda pair: pair[0])
