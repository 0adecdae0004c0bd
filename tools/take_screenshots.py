"""Takes the pictures of real runs in the documentation: a report and the live page of peers that run, both in a real
browser, and the curves of three peers of which one is killed.

    sotto up --name screenshots && python -m tools.take_screenshots report runs/screenshots
    python -m tools.take_screenshots live kits     # while the peers of kits run; kill one to see it in red
    python -m tools.take_screenshots kill

The first two need playwright (the extra "dev") and Debian's chromium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from peer.config.options import load
from peer.ops.local_cluster import Cluster
from peer.report.run_page import write_report
from tools.draw_concepts import COLORS, INK, Picture

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH, HEIGHT = 1280, 1664
"""Size of the page; the image is smaller."""
SCALE = 1000 / 1280
WATCHED_S = 20.0
"""Seconds for which the live page is open before its screenshot."""
KILLED_AT = 50
"""The round in which a peer is killed."""
DOWN_S = 3.0
"""Seconds for which it is down."""
WAITED_S = 0.5
"""A model that stays the same for longer waits: its curve is level."""


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


def take_kill(image: Path) -> None:
    """Write the accuracy of three peers against seconds. The last is killed by SIGKILL, and started again later."""
    settings = ["run.rounds=160", "evaluation.every_rounds=2", "peer.min_step_s=0.06", "training.learning_rate=0.03"]
    curves: list[list[tuple[float, float]]] = [[], [], []]
    at: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        config = load(environment={}, overrides=settings)
        cluster = Cluster(config, Path(), num_peers=3, directory=Path(directory, "run"))
        cluster.start()
        began = None
        while not cluster.finished():
            peers, now = cluster.poll(), time.monotonic()
            if began is None and all(peer.round for peer in peers):
                began = now
            for curve, peer in zip(curves, peers, strict=True):
                if began is not None and peer.figure is not None and (not curve or curve[-1][1] != peer.figure):
                    if curve and now - began > curve[-1][0] + WAITED_S:
                        curve.append((now - began - WAITED_S / 2, curve[-1][1]))
                    curve.append((now - began, peer.figure))
            if began is not None and not at and peers[2].round >= KILLED_AT:
                cluster.processes[2].send_signal(signal.SIGKILL)
                cluster.processes[2].wait()
                at.append(now - began)
            elif began is not None and len(at) == 1 and now - began > at[0] + DOWN_S:
                cluster.start_peer(2)
                at.append(now - began)
            time.sleep(0.02)
        cluster.close()
    image.write_text(_kill_picture(curves, at), encoding="utf-8")


def _kill_picture(curves: list[list[tuple[float, float]]], at: list[float]) -> str:
    left, right, top, bottom = 60.0, 690.0, 40.0, 210.0
    seconds = max(curve[-1][0] for curve in curves)
    picture = Picture(
        720,
        260,
        f"Accuracy of three devices. Device 2 is killed after {at[0]:.0f} s and started again {at[1] - at[0]:.0f} s "
        "later: the others wait, then all go on.",
    )

    def place(second: float, accuracy: float) -> tuple[float, float]:
        return left + (right - left) * second / seconds, bottom - (bottom - top) * accuracy

    for share in (0.0, 0.5, 1.0):
        picture.line([place(0.0, share), place(seconds, share)], "#d8dce2")
        picture.text(left - 8, place(0.0, share)[1] + 4, f"{share:.0%}", anchor="end", size=12)
    for mark in range(0, int(seconds) + 1, 5):
        picture.text(place(mark, 0.0)[0], bottom + 18, f"{mark} s", size=12)
    for second, words, anchor in zip(at, ("kill -9", "started again"), ("end", "start"), strict=True):
        x = place(second, 0.0)[0]
        picture.line([(x, top), (x, bottom)], INK, dashed=True)
        picture.text(x + (-6 if anchor == "end" else 6), bottom - 8, words, anchor=anchor, size=12)
    for index, (curve, color) in enumerate(zip(curves, COLORS, strict=True)):
        picture.line([place(*point) for point in curve], color)
        picture.text(left + 110 + 190 * index, bottom + 42, f"device {index}", color=color)
    picture.text(left, 22, "accuracy of each device's model", anchor="start")
    return picture.svg()


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
    """Take the picture that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("report").add_argument("place", type=Path, help="a run folder")
    kinds.add_parser("live").add_argument("place", type=Path, help="what `sotto watch` takes")
    kinds.add_parser("kill")
    arguments = parser.parse_args()
    if arguments.kind == "live":
        take_live_page(arguments.place, IMAGES / "watch.png")
    elif arguments.kind == "report":
        take(write_report(arguments.place).resolve().as_uri(), IMAGES / "report.png")
    else:
        take_kill(IMAGES / "kill.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
