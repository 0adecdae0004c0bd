"""Keeps the live page open for a while: how long an update takes in the browser, and whether anything grows.

    python -m tests.stress.watch_soak --peers 1000 --minutes 20
    python -m tests.stress.watch_soak --run runs/digits --minutes 20

Without --run, a folder is filled as a simulation fills it, a round of all peers a second, with rows made from formulas.
Growth is measured from a fifth of the time on. The tool ends with 1 if the server or the page has grown since by more
than `--tolerance-mbytes`, or if the page has more elements than its full lists of events and log lines explain.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from peer.config.options import load
from peer.config.writer import write_resolved
from peer.state.metrics import ConsensusRecord, MetricsStore
from peer.watch.feed import MOST_EVENTS
from peer.watch.observer import MOST_LINES
from tests.report.sample_run import evaluation, round_record
from tests.stress.soak import resident_mbytes

_WARM_SHARE = 0.2
_EVERY_S = 10.0
_ROUNDS = 100_000
_EVALUATED_EVERY = 5
_MOST_EVALUATED = 64
_LISTED = 2 * (MOST_EVENTS + MOST_LINES)
"""Elements of the lists of events and log lines when they are full: two for each line."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What server and page hold at one time, in units of 1000² bytes."""

    seconds: float
    server_mbytes: float
    page_mbytes: float
    """Objects of its script, after garbage was collected."""
    elements: int
    update_ms: float
    """The last update of the page: script, without layout and painting."""


def run(arguments: argparse.Namespace, directory: Path) -> list[Sample]:
    """Serve a run folder, keep its page open, and return the samples."""
    command = [sys.executable, "-m", "peer", "watch", str(directory), "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        with _browser() as page:
            page.goto(json.loads(server.stdout.readline())["address"])
            page.wait_for_selector("#peers-rows tr", timeout=120_000)
            return list(_samples(arguments, directory, server.pid, page))
    finally:
        server.terminate()
        server.wait()


def _samples(arguments: argparse.Namespace, directory: Path, pid: int, page: Page) -> Iterator[Sample]:
    store = None if arguments.run is not None else MetricsStore(directory / "metrics.sqlite")
    began = time.monotonic()
    sampled, round_ = 0.0, 1
    while (seconds := time.monotonic() - began) < 60 * arguments.minutes:
        if store is not None:
            _write_round(store, arguments.peers, round_)
            round_ += 1
        if seconds - sampled >= _EVERY_S:
            sampled = seconds
            taken = _sample(seconds, pid, page)
            print(json.dumps(asdict(taken)), flush=True)
            yield taken
        page.wait_for_timeout(max(0.0, 1000 * (1.0 - (time.monotonic() - began - seconds))))
    if store is not None:
        store.close()


def _sample(seconds: float, pid: int, page: Page) -> Sample:
    heap, elements, update = page.evaluate(
        "() => { gc(); return [performance.memory.usedJSHeapSize, document.querySelectorAll('*').length, "
        "Number(document.body.dataset.updateMs)]; }"
    )
    return Sample(
        seconds=round(seconds, 1),
        server_mbytes=resident_mbytes(pid),
        page_mbytes=heap / 1e6,
        elements=elements,
        update_ms=update,
    )


def _write_round(store: MetricsStore, peers: int, round_: int) -> None:
    store.put(*(round_record(peer, round_, _ROUNDS) for peer in range(peers)))
    if round_ and round_ % _EVALUATED_EVERY == 0:
        step = -(-peers // _MOST_EVALUATED)
        store.put(*(evaluation(peer, round_, "test", offset=peer % 7) for peer in range(0, peers, step)))
        store.put(evaluation(-1, round_, "test", offset=-1))
        store.put(ConsensusRecord(round=round_, consensus_distance=1 / round_, model_norm=1.0))
    store.flush()


@contextmanager
def _browser() -> Iterator[Page]:
    flags = ["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info", "--js-flags=--expose-gc"]
    with sync_playwright() as running:
        opened = running.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        try:
            yield opened.new_page(viewport={"width": 1280, "height": 900})
        finally:
            opened.close()


def main() -> int:
    """Run the soak that the command line describes; 1 means that something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=1000, help="Peers of the simulation that is made.")
    parser.add_argument("--run", type=Path, help="A run folder, in place of one that is made.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--tolerance-mbytes", type=float, default=8.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = arguments.run or Path(made)
        if arguments.run is None:
            config = load(environment={}, overrides=[f"run.rounds={_ROUNDS}"])
            write_resolved(config, directory / "config.toml", directory)
            with_first = MetricsStore(directory / "metrics.sqlite")
            _write_round(with_first, arguments.peers, 0)
            with_first.close()
        samples = run(arguments, directory)
    warm = samples[int(_WARM_SHARE * len(samples))]
    last = samples[-1]
    updates = sorted(sample.update_ms for sample in samples)
    grown = {
        "server_mbytes": last.server_mbytes - warm.server_mbytes,
        "page_mbytes": last.page_mbytes - warm.page_mbytes,
        "elements": last.elements - warm.elements,
    }
    print(json.dumps({"grown": grown, "update_ms": {"median": statistics.median(updates), "worst": updates[-1]}}))
    too_much = max(grown["server_mbytes"], grown["page_mbytes"]) > arguments.tolerance_mbytes
    return int(too_much or last.elements > warm.elements + _LISTED)


if __name__ == "__main__":
    sys.exit(main())
