"""The native kernels, where they were built: `lib` (or None) and `ffi`, which makes the pointers that they take.

Every kernel has a numpy twin that returns the same bits, so nothing but speed depends on this, with two exceptions: the
norm of `evonorm.h` and the weight gradients of 8-bit linear layers (`peer/train/eight_bit/linear_kernels.py`) are added
in another order by the torch operators that stand in for them. Set `SOTTOVOCE_NATIVE=0` before Python starts to do
without, or to a tier that `tier` names, such as `AVX2`, to run its kernels on a processor that has wider ones.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt
from _cffi_backend import FFI

from peer.errors import ConfigError

if TYPE_CHECKING:
    from peer.native._kernels import Kernels

CData: TypeAlias = FFI.CData
"""A pointer to what C reads or writes."""

ffi = FFI()
lib: Kernels | None = None

_VARIABLE = "SOTTOVOCE_NATIVE"
_WANTED = os.environ.get(_VARIABLE, "1")
_IS_WANTED = _WANTED != "0"

_TIERS = (
    "portable", "AVX2", "AVX-512", "AVX-512 with VNNI", "AMX", "AVX-VNNI", "NEON with dot product", "NEON with i8mm"
)  # fmt: skip
"""As `processor_tier` numbers them."""
_LIMITS = {
    "portable": (0, 0),
    "AVX2": (256, 0),
    "AVX-VNNI": (256, 2),
    "AVX-512": (512, 0),
    "AVX-512 with VNNI": (512, 2),
    "AMX": (8192, 2),
    "NEON with dot product": (8192, 1),
    "NEON with i8mm": (8192, 2),
}
"""`widest_registers` and `byte_instructions` with which a processor that has a tier runs it."""

if _IS_WANTED:
    try:
        from peer.native import _kernels
    except ImportError:
        # Built without a compiler, or run from a source tree that was never built: numpy serves.
        pass
    else:
        ffi, lib = _kernels.ffi, _kernels.lib


def pointer(memory: npt.NDArray[Any] | memoryview | None, kind: str) -> CData:
    """Return where a contiguous array or buffer lies, which C reads as `kind`, such as "float[]"; NULL for None."""
    if memory is None:
        return ffi.NULL
    # An array has the buffer protocol, whatever the types of numpy say before Python 3.12; a view of it costs as much.
    buffer: Any = memory
    return ffi.from_buffer(kind, buffer)


def use_tier(name: str) -> None:
    """Run the kernels of this tier from now on. Raises ConfigError if there is none of that name, or if this
    processor does not have its instructions."""
    assert lib is not None, "without the kernels there are no tiers"
    if name not in _LIMITS:
        valid = f"0 (without the kernels), 1 (the best), {', '.join(_LIMITS)}"
        raise ConfigError("there are no such kernels", key=_VARIABLE, value=name, valid=valid)
    before = lib.widest_registers, lib.byte_instructions
    lib.widest_registers, lib.byte_instructions = _LIMITS[name]
    if tier() != name:
        lib.widest_registers, lib.byte_instructions = before
        raise ConfigError(
            f"this processor cannot run these kernels; its best are those for {tier()}", key=_VARIABLE, value=name
        )


def bfloat16_is_emulated() -> bool:
    """Return whether this processor is known to have no instructions for products in bfloat16."""
    return lib is not None and lib.processor_bfloat16() == 0


def tier() -> str:
    """Return for which instructions the kernels in use were compiled."""
    if lib is None:
        return "none, numpy instead"
    return _TIERS[lib.processor_tier()]


def missing() -> bool:
    """Return whether there are no kernels where nobody switched them off."""
    return lib is None and _IS_WANTED


def available() -> bool:
    """Return whether the native kernels are in use."""
    return lib is not None


if lib is not None and _WANTED != "1":
    use_tier(_WANTED)
