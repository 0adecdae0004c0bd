"""Takes the screenshots of the documentation: table and report of a real run, and the live page of peers that run, both
pages in a real browser.

    sotto up --name screenshots && python tools/take_screenshots.py runs/screenshots
    python tools/take_screenshots.py --live kits     # while the peers of kits run; kill one to see it in red

It needs playwright (the extra "dev") and Debian's chromium.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console

from peer.report.run_page import write_report
from peer.report.summary_table import summary_table
from peer.state.metrics import Summary

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH, HEIGHT = 1280, 1664
"""Size of the page; the image is smaller."""
SCALE = 1000 / 1280
WATCHED_S = 20.0
"""Seconds for which the live page is open before its screenshot."""


def take(address: str, image: Path, *, live: bool = False) -> None:
    """Write the top of a page as an image, with as many colours as a palette holds. `live`: after a while, with rates
    and times."""
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(address)
        if live:
            page.wait_for_selector("#figure svg.plot", timeout=60_000)
            page.wait_for_timeout(1000 * WATCHED_S)
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


def take_live_page(place: Path, image: Path) -> None:
    """Write the top of the page of `sotto watch`."""
    command = [sys.executable, "-m", "peer", "watch", str(place), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            take(json.loads(server.stdout.readline())["address"], image, live=True)
        finally:
            server.terminate()


def main() -> int:
    """Take the screenshots of the run whose folder the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="DIR", help="a run folder; with --live, what `sotto watch` takes")
    parser.add_argument("--live", action="store_true", help="take the live page, and nothing else")
    arguments = parser.parse_args()
    run: Path = arguments.run
    if arguments.live:
        take_live_page(run, IMAGES / "watch.png")
    else:
        take(write_report(run).resolve().as_uri(), IMAGES / "report.png")
        take_table(run, IMAGES / "run.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
