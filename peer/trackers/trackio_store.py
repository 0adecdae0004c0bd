"""trackio: a run in an SQLite file of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping

from peer.trackers.tracker import Run


def open_tracker(run: Run) -> TrackioTracker:
    """Begin a run of the project "sottovoce"."""
    # It looks at its environment when it is imported, and so do the packages that it takes along.
    os.environ |= {
        "TRACKIO_DIR": str(run.folder),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import trackio

    trackio.init(
        project="sottovoce",
        name=run.name,
        config=dict(run.settings),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioTracker()


class TrackioTracker:
    """One run. Peers are in different rounds, and it takes the steps of a run in any order."""

    def log(self, whose: str, done: int, at: float, figures: Mapping[str, float]) -> None:
        """Log figures as NAME/PEER."""
        import trackio

        own = {f"{name}/{whose}": value for name, value in figures.items()}
        trackio.log({**own, "seconds": at}, step=done)

    def flush(self) -> None:
        """Do nothing: it writes by itself."""

    def close(self) -> None:
        """End the run."""
        import trackio

        trackio.finish()
