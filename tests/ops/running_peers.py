"""Processes of peers that a test has started."""

from __future__ import annotations

from pathlib import Path


def peers_below(folder: Path) -> list[int]:
    """Return the processes that run a configuration below the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--config" in words and str(folder).encode() in words[words.index(b"--config") + 1]:
            found.append(int(entry.name))
    return found
