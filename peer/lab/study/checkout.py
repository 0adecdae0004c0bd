"""The state of this program with which a figure was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

from peer.report.numbers import MISSING

_ROOT = Path(__file__).resolve().parents[3]


def commit() -> str:
    """Return the short commit of the checkout that this runs from, with "+" if files differ from it; "–" outside of
    one."""
    if not (_ROOT / ".git").exists():
        return MISSING  # Installed, perhaps below a repository of somebody else.
    git = ["git", "-C", str(_ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "peer", "tools"], check=False)
    except (OSError, subprocess.CalledProcessError):
        return MISSING
    return name.stdout.strip() + ("+" if changed.returncode else "")
