"""The native kernels, where they were built: `lib` and `ffi`, or None.

Every kernel has a numpy twin that returns the same bits, so nothing but speed depends on this. Set
`SOTTOVOCE_NATIVE=0` before Python starts to do without.
"""

from __future__ import annotations

import os
from typing import Any

ffi: Any = None
lib: Any = None

if os.environ.get("SOTTOVOCE_NATIVE", "1") != "0":
    try:
        from peer.native._kernels import ffi, lib
    except ImportError:
        # Built without a compiler, or run from a source tree that was never built: numpy serves.
        ffi = lib = None


def available() -> bool:
    """Return whether the native kernels are in use."""
    return lib is not None
