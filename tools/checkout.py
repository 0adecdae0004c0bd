"""Which state of this program a figure was measured with."""

from __future__ import annotations

import subprocess
from pathlib import Path

from peer.report.numbers import MISSING


def commit() -> str:
    """Return the short commit of this checkout, with "+" if files differ from it; "–" outside of one."""
    root = Path(__file__).resolve().parents[1]
    git = ["git", "-C", str(root)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "peer", "tools"], check=False)
    except (OSError, subprocess.CalledProcessError):
        return MISSING
    return name.stdout.strip() + ("+" if changed.returncode else "")
