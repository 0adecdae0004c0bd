"""Writes docs/wire-format.md, the specification of the wire format, from the docstring of `peer.wire`.

python tools/render_wire_docs.py [--check]
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

import peer.wire

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "wire-format.md"
HEADING = "# The wire format\n\n<!-- Rendered from the docstring of peer/wire/__init__.py; change that instead. -->\n\n"


def rendered() -> str:
    """Return the text of the document."""
    text = inspect.cleandoc(peer.wire.__doc__ or "")
    lines = [f"#{line}" if line.startswith("#") else line for line in text.splitlines()]
    return HEADING + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the document is up to date")
    if not parser.parse_args().check:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(rendered(), encoding="utf-8")
    elif not TARGET.exists() or TARGET.read_text(encoding="utf-8") != rendered():
        sys.exit(f"{TARGET.relative_to(ROOT)} is out of date; run python tools/render_wire_docs.py")


if __name__ == "__main__":
    main()
