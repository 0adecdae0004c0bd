"""One cell of a sweep: a simulated run, from a text to a text, so that it can be computed anywhere."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from peer.config.options import load
from peer.errors import DivergenceError, SottoError
from peer.lab.grid import FileRow
from peer.lab.sweep.sweep import Planned, Sweep, describe
from peer.run.plan import algorithm_spec
from peer.simulate import run as simulator
from peer.state.metrics import Summary

_FIGURES = (
    "completed_rounds", "averaged_accuracy", "worst_accuracy", "averaged_metrics", "worst_metrics",
    "consensus_distance", "payload_bytes", "frame_bytes", "bits_per_parameter",
)  # fmt: skip
"""Figures of a run's summary that depend on the configuration alone, not on the machine."""


@dataclass(frozen=True, kw_only=True)
class Cell(FileRow):
    """The outcome of one cell."""

    contender: str
    values: dict[str, str | int | float | bool]
    seed: int
    result: dict[str, Any]
    """`ended` and the figures of the summary; the same wherever it is computed."""
    seconds: float
    """Duration of the computation."""

    indent = None

    def difference(self, other: Self) -> str | None:
        """Name the figures that depend on the machine, where they must not. The duration may differ."""
        if self.result == other.result:
            return None
        differing = [name for name in other.result if other.result[name] != self.result.get(name)]
        return (
            f"differ in {', '.join(differing)}: {describe(self.contender, self.values, self.seed)} was computed with "
            "different versions or processors; move one of the files away"
        )


def request(planned: Planned, sweep: Sweep) -> tuple[str, int, bool]:
    """Return the arguments for `simulate`."""
    return json.dumps(planned.overrides), sweep.peers, sweep.stacked


def simulate(overrides: str, num_peers: int, stacked: bool) -> str:
    """Return JSON: `result` and `seconds`, or `failed` with a sentence. Relative paths start in the working folder of
    the computing process."""
    started = time.monotonic()
    try:
        result = _result(json.loads(overrides), num_peers, stacked)
    except SottoError as error:
        return json.dumps({"failed": str(error)})
    return json.dumps({"result": result, "seconds": time.monotonic() - started})


def _result(overrides: list[str], num_peers: int, stacked: bool) -> dict[str, Any]:
    config = load(environment={}, overrides=overrides)
    stacked = stacked and not algorithm_spec(config).asynchronous
    try:
        summary = simulator.run(config, Path(), num_peers=num_peers, stacked=stacked, baseline=False).summary
    except DivergenceError as error:
        return {"ended": f"diverged: {error}"}
    return {"ended": summary.ended, **figures(summary)}


def figures(summary: Summary) -> dict[str, Any]:
    """Return the figures of a summary that a sweep keeps."""
    document = summary.document()
    return {name: document[name] for name in _FIGURES}
