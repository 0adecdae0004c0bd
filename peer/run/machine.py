"""The machine and the packages that a peer computes with. It imports no torch, which takes longer than to say this."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

from peer import __version__, native


def machine_facts() -> dict[str, str]:
    """Return the facts on which bit identity depends: processor, Python, numpy and torch version."""
    return {
        "processor": processor_name(),
        "kernels": native.tier(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "torch": version("torch"),
        "sottovoce": __version__,
    }


def processor_name() -> str:
    """Return the system's name for this processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # Not Linux: the platform module knows a shorter name.
    return platform.processor() or platform.machine()
