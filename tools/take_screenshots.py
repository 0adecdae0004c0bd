"""Takes the screenshots of the documentation: table and report of a real run, the latter in a real browser.

    sotto up --name screenshots && python tools/take_screenshots.py runs/screenshots

It needs playwright (the extra "dev") and Debian's chromium.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console

from peer.report.html import write_report
from peer.report.summary_table import summary_table
from peer.state.metrics import Summary

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH, HEIGHT = 1280, 1664
"""Of the page; the image is smaller."""
SCALE = 1000 / 1280


def take(page_file: Path, image: Path) -> None:
    """Write the top of a page as an image, with as many colours as a palette holds."""
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(page_file.resolve().as_uri())
        page.screenshot(path=image)
        browser.close()
    taken = Image.open(image).convert("RGB")
    small = taken.resize((round(WIDTH * SCALE), round(HEIGHT * SCALE)), Image.Resampling.LANCZOS)
    small.quantize(256).save(image, optimize=True)


def take_table(run: Path, image: Path) -> None:
    """Write the table at the end of a run as it looks in a terminal."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(summary_table(Summary.load(run / "summary.json")))
    console.save_svg(str(image), title="sotto up")


def main() -> int:
    """Take the screenshots of the run whose folder the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    run: Path = parser.parse_args().run
    take(write_report(run), IMAGES / "report.png")
    take_table(run, IMAGES / "run.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
